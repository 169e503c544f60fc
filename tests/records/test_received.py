"""Results that somebody sends: this repository's own stand; what contradicts itself is found, with its place."""

import csv
import gzip
import io
import re
import subprocess
from importlib import import_module

import pytest

from flashladder.common import console
from flashladder.common.catalog import winners
from flashladder.common.paths import ROOT
from flashladder.common.problem.problem import Problem
from flashladder.common.records import received, records
from flashladder.tools.commands import COMMANDS
from flashladder.tools.commands import received as command

(LADDER,) = (ROOT / "results" / "runs").glob("ladder_h200@20261125-*.csv.gz")


def tool(*words):
    return console.run(command.main, command.parser(), [str(word) for word in words])


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """A copy of the repository may have no history."""
    monkeypatch.setattr(records, "has_commit", lambda name: not name.startswith("dead"))


def test_the_repositorys_own_results_stand(capsys):
    assert tool(LADDER, *sorted(winners.FOLDER.glob("*.yaml"))) == 0
    assert capsys.readouterr().out.count("nothing contradicts itself") == 1 + len(list(winners.FOLDER.glob("*.yaml")))


@pytest.fixture
def rows():
    """Those of two kernels and one of the field, at two lengths of one run."""
    found = list(csv.DictReader(io.StringIO(gzip.decompress(LADDER.read_bytes()).decode())))
    return [
        row
        for row in found
        if row["dtype"] == "bf16"
        and row["seqlen_q"] in ("512", "4096")
        and (row["kind"], row["version"]) in (("own", "02_swizzling"), ("fixed", "02_swizzling"), ("field", "cudnn"))
    ]


def sent(folder, rows, name="ladder_h200.csv"):
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def test_a_part_of_a_run_stands(rows, tmp_path):
    assert len(rows) == 6
    assert received.faults(sent(tmp_path, rows)) == []


def scaled(row, factor, *names):
    return {name: repr(factor * float(row[name])) for name in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"device": "NVIDIA L4"}, "device=NVIDIA L4, but a NVIDIA H200 SXM 141 GB is called NVIDIA H200"),
        (lambda row: {"commit": row["commit"] + "+"}, r"commit=\w+\+: files differed from the commit"),
        (lambda row: {"commit": "none"}, "commit='none' is none of this repository"),
        (lambda row: {"commit": "deadbeef1234"}, "commit=deadbeef1234 is not in this repository"),
        (lambda row: {"time": "2999-01-01T00:00:00+00:00"}, "time=2999.* is still to come"),
        (lambda row: {"time": "2026-01-01"}, "time=2026-01-01 is no time with its zone"),
        (lambda row: {"version": "02_swizzle"}, "no version 02_swizzle; .*did you mean 02_swizzling"),
        (lambda row: {"config": "block_m=63"}, "block_m=63"),
        (lambda row: {"passed": "false"}, "its output was not right"),
        (lambda row: {"max_error": "1.0"}, "max_error=1 is above tolerance="),
        (lambda row: {"lse_error": "inf"}, "lse_error=inf is above lse_tolerance="),
        (lambda row: {"num_heads_k": "3"}, "num_heads_k=3"),
        (lambda row: scaled(row, 0.5, "time_us"), "but its time gives"),
        (lambda row: scaled(row, 0.2, "time_us") | scaled(row, 5, "tflops"), "TFLOP/s is beyond the 989 of a NVIDIA"),
        (lambda row: scaled(row, 1.2, "ratio"), r"ratio=\d.\d+ is not in its interval"),
        (lambda row: scaled(row, 1.01, "ratio_low", "ratio_high"), r"ratio=\d.\d+ is not in its interval"),
        (lambda row: scaled(row, 1.2, "ratio", "ratio_low", "ratio_high"), r"ratio=\d.\d+, but its times give \d.\d+"),
        (lambda row: {"control_low": "1.2", "control_high": "1.3"}, "the baseline differs from itself: 1.200 to 1.300"),
        (lambda row: {"round_us": ""}, "it lacks round_us"),
        (lambda row: {"round_us": row["round_us"].rpartition(" ")[0]}, r"it has the times of \d+ rounds; rounds=\d+"),
        (lambda row: {"round_us": " ".join([row["time_us"]] * int(row["rounds"]))}, "all its rounds take the same"),
        (lambda row: scaled(row, 1.02, "time_us"), r"time_us=\d+.\d+, but its rounds have the median"),
        (lambda row: scaled(row, 1.01, "baseline_us"), "baseline_us is not one for all that were timed together"),
        (lambda row: {"gpu_id": "another"}, "gpu_id is .*another.* in one run"),
        (lambda row: {"time_us": "-3"}, "time_us='-3' should be greater than"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_found(change, words, rows, tmp_path):
    (at,) = [n for n, row in enumerate(rows) if (row["kind"], row["seqlen_q"]) == ("own", "4096")]
    rows[at] = rows[at] | change(rows[at])
    found = received.faults(sent(tmp_path, rows))
    assert any(re.search(words, fault) for fault in found), found
    assert all(f"row {at + 2} " in fault or f":{at + 2}:" in fault or "run " in fault for fault in found), found


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"window_left": "5"}, ", window 5"),
        ({"window_right": "0"}, ", window all,0"),
        ({"softcap": "30.0"}, ", softcap 30"),
    ],
)
def test_a_ladder_has_no_windows_and_no_softcaps(bound, words, rows, tmp_path):
    none = {"window_left": "", "window_right": "", "softcap": "0.0"}
    plain = [row | none for row in rows]
    assert received.faults(sent(tmp_path, plain)) == []
    (fault,) = received.faults(sent(tmp_path, [*plain[:-1], plain[-1] | bound]))
    assert fault.startswith("ladder_h200.csv, row 7 ")
    assert fault.endswith(f"its problem has a bound{words}: a ladder's problems have none")


def test_heat_is_found(rows, tmp_path):
    hot = [row | {"thermal_share": "0.2"} for row in rows]
    (fault,) = received.faults(sent(tmp_path, hot))
    assert fault.endswith("heat slowed it in more than 3% of samples")


def test_a_card_that_is_not_described(rows, tmp_path, capsys):
    path = sent(tmp_path, [row | {"device": "NVIDIA X1"} for row in rows], "ladder_x1-12sm.csv")
    assert tool(path) == 0
    assert "configs/gpus describes no x1-12sm: its name and its limits were not checked" in capsys.readouterr().err


WINNER = """
02_swizzling:
  dtype=bf16,head_dim=128,causal=false:
    config: block_m=64,block_n=128,num_warps=4,q_fragments=0,k_fragments=2,v_fragments=2
    ratio: 0.9351 [0.9342, 0.9358]
    to_default: 1.0952 [1.0940, 1.0962]
    problems:
    - batch=4,num_heads=16,seqlen_q=4096,head_dim=128,dtype=bf16
    times_us: [1705.4]
    baseline_us: [1596.8]
    device: NVIDIA H200
    driver: 580.159.04
    torch: 2.11.0+cu130
    toolkit: '13.0'
    commit: 517f9c644752
    time: '2026-11-21T12:17:09+00:00'
"""


def test_a_winner_stands(tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "h200.yaml").write_text(WINNER)
    assert received.faults(tmp_path / "tuned" / "h200.yaml") == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("02_swizzling:", "02_swizzle:", "no version 02_swizzle"),
        ("block_m=64", "block_m=63", "block_m=63"),
        ("0.9351 [", "9.351 [", r"ratio=9.351 is not in its interval, 0.934 to 0.936"),
        ("0.9351 [0.9342, 0.9358]", "0.9351 [0.9353, 0.9358]", "ratio=0.935 is not in its interval, 0.935 to 0.936"),
        ("0.9351 [0.9342, 0.9358]", "fast", "ratio='fast' should be a ratio with an interval, such as"),
        ("[1596.8]", "[15.96]", "ratio=0.935, but its times give 0.009"),
        ("[1596.8]", "[1, 2]", "it has 1 problems, 1 times and 2 of the baseline"),
        ("[1705.4]", "[170.54]", "TFLOP/s is beyond the 989 of a NVIDIA H200"),
        ("1.0952 [1.0940, 1.0962]", "0.9 [0.8, 0.95]", "it is slower than the rung's default: 0.9"),
        ("seqlen_q=4096,head_dim=128", "seqlen_q=4096,head_dim=64", "it was found with .*, which is of another kind"),
        ("seqlen_q=4096", "seqlen_q=none", "its problems cannot be read: seqlen_q='none'"),
        ("seqlen_q=4096", "operation=none", "its problems cannot be read: operation='?none"),
        ("seqlen_q=4096", "rows=4096", "its problems cannot be read: the operation forward has no option rows"),
        ("NVIDIA H200", "NVIDIA H100", "device=NVIDIA H100, but a NVIDIA H200"),
        ("    driver: 580.159.04\n", "", "it lacks driver"),
    ],
)
def test_a_winner_that_contradicts_itself_is_found(old, new, words, tmp_path):
    (tmp_path / "tuned").mkdir()
    path = tmp_path / "tuned" / "h200.yaml"
    path.write_text(WINNER.replace(old, new))
    found = received.faults(path)
    assert any(re.search(words, fault) for fault in found), found


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ladder_l4.csv", None, "there is no file "),
        ("notes.txt", "12", "is neither ladder_GPU@RUN.csv.gz, as `flashladder ladder` logs, nor GPU.yaml"),
        ("l4.yaml", "{}", "should lie in a folder tuned"),
        ("tuned/l4.yaml", "[3", "is damaged"),
        ("ladder_l4.csv", "a,b\n1,2\n", ""),
    ],
)
def test_files_of_something_else(name, text, words, tmp_path, capsys):
    (tmp_path / "tuned").mkdir()
    if text is not None:
        (tmp_path / name).write_text(text)
    assert tool(tmp_path / name) == console.EXIT_ERROR
    said = capsys.readouterr()
    assert words in said.err + said.out


def test_a_problem_is_found_by_its_name():
    for problem in (
        Problem(batch=4, num_heads=16, seqlen_q=4096),
        Problem(num_heads_k=1, seqlen_k=77, causal=True, lse=False, softcap=3.0, window_left=5, dtype="fp16"),
    ):
        assert received.problem_named(problem.name) == problem


def test_the_page_says_how():
    page = (ROOT / "results" / "SENDING.md").read_text()
    assert "results/SENDING.md" in (ROOT / "README.md").read_text()
    commands = re.findall(r"^ +flashladder (\w+)(.*)", page, re.M)
    assert [name for name, _ in commands] == ["search", "ladder", "received"]
    for name, words in commands:
        import_module(COMMANDS[name].module).parser().parse_args(words.split())


@pytest.mark.git
def test_what_measuring_writes_is_no_change(tmp_path, monkeypatch):
    """A search writes a winner; one behind it is still of that commit. A kernel that differs is told by a +."""
    names = "kernel.cu", "results/runs.csv", "configs/tuned/h100.yaml"

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    for name in names:
        write(name, "before\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    for name in reversed(names):
        write(name, "after\n")
        assert records.commit.__wrapped__().endswith("+") == (name == "kernel.cu"), name
