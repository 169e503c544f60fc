"""Tuning for a program: what it asks for is noted, alike problems are one, winners are exported, used and guarded."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashladder import attention
from flashladder.common import catalog, console
from flashladder.common.api import operator
from flashladder.common.catalog import launches, winners
from flashladder.common.compiler import prebuilt
from flashladder.common.errors import ConfigError, ResultsError
from flashladder.common.measure.entrants import Entrant
from flashladder.common.measure.statistics import paired_ratio
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.runtime import ready, target
from flashladder.tests.support import fake_cuda
from flashladder.tools.commands import adopt
from flashladder.tuner import campaign, job
from flashladder.tuner.adopt import export, gains
from flashladder.tuner.adopt.demand import Demand, least_us, stand_in

pytestmark = pytest.mark.slow

RUNG, H100 = catalog.find("24"), load_gpu("h100")
PROGRAM = """
import sys, threading, torch, torch.nn.functional as F
import flashladder

assert __name__ == "__main__" and sys.argv[1:] == ["--batch", "3"]
q = torch.randn(1, 4, 16, 64).bfloat16()

def generate():
    for keys in range(17, 40):
        F.scaled_dot_product_attention(q[:, :, :1], q[:, :2, :1].expand(-1, -1, keys, -1), q[:, :2, :1].expand(-1, -1, keys, -1), enable_gqa=True)

thread = threading.Thread(target=generate)
thread.start()
thread.join()
compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
for _ in range(3):
    compiled(q)
with torch.autocast("cpu", dtype=torch.bfloat16):
    F.scaled_dot_product_attention(q.float(), q.float(), value=q.float(), is_causal=True)
F.scaled_dot_product_attention(q.float(), q.float(), q.float())
F.scaled_dot_product_attention(q, q, q, torch.ones(16, 16, dtype=torch.bool))
F.scaled_dot_product_attention(q, q, q.clone().requires_grad_())
layer = torch.nn.TransformerEncoderLayer(128, 2, dtype=torch.bfloat16, batch_first=True).eval()
with torch.no_grad():
    layer(torch.randn(3, 16, 128).bfloat16())
x = q.transpose(1, 2)
flashladder.attention(x, x, x, causal=True, return_lse=True)
flashladder.attention(x, x, x, window=(3, None))
ends = torch.tensor([0, 7, 16], dtype=torch.int32)
flashladder.packed_attention(x[0], x[0], x[0], ends, ends, 9, 9)
sys.exit(3)
"""  # noqa: E501


def tool(*words):
    return console.run(adopt.main, adopt.parser(), [str(word) for word in words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The program above, recorded by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    code = tool("--record", "--export", folder / "out", "--", "python", "-u", folder / "program.py", "--batch", "3")
    assert code == 0
    return Demand.load(folder / "out" / export.PROBLEMS)


def test_what_a_program_asks_for_is_noted(recorded):
    plain = {"num_heads": 4, "seqlen_q": 16, "head_dim": 64}
    steps = {Problem(num_heads=4, num_heads_k=2, seqlen_q=1, seqlen_k=k, head_dim=64, lse=False) for k in range(17, 40)}
    assert dict(recorded.calls) == {
        **dict.fromkeys(steps, 1),
        Problem(**plain, causal=True, lse=False): 4,  # compiled ones, and under autocast
        Problem(batch=3, num_heads=2, seqlen_q=16, head_dim=64, lse=False): 1,
        Problem(**plain, causal=True): 1,
        Problem(**plain, window_left=3, lse=False): 1,
        Problem(operation="packed", num_heads=4, head_dim=64, seqlens_q=(7, 9), seqlens_k=(7, 9), lse=False): 1,
    }
    assert dict(recorded.refused) == {
        "q is torch.float32: kernels take torch.bfloat16, torch.float16": 1,
        "attn_mask is a tensor: kernels take causal masks, windows and packed sequences": 1,
        "a gradient is wanted: only forward passes are tuned for a program": 1,
    }
    assert recorded.command[1:] == ("--batch", "3")


def test_nobody_watches_where_nothing_is_recorded():
    assert operator.watch is None


def test_problems_that_are_alike_are_one(recorded):
    alike = recorded.alike(H100)
    assert sum(each.calls for each in alike) == sum(recorded.calls.values())
    steps = {each.problem.seqlen_k: each for each in alike if each.problem.seqlen_q == 1}
    assert {keys: (each.calls, each.different) for keys, each in steps.items()} == {31: (15, 15), 39: (8, 8)}
    for each in steps.values():
        assert each.calls * 0.5 < each.weight < each.calls, "shorter ones count for less"
    times = [each.weight * least_us(each.problem, H100) for each in alike]
    assert times == sorted(times, reverse=True)


def test_the_least_that_a_gpu_takes():
    prefill = Problem(batch=2, num_heads=16, seqlen_q=8192)
    assert least_us(prefill, H100) == pytest.approx(prefill.flops / H100.dense_bf16_tflops / 1e6)
    step = Problem(num_heads=16, num_heads_k=4, seqlen_q=1, seqlen_k=2**20)
    assert least_us(step, H100) == pytest.approx(2 * 2 * 128 * 4 * 2**20 / H100.bandwidth_gb_s / 1e3, rel=1e-3)


def test_the_plain_problem_for_one_that_is_not():
    packed = Problem(operation="packed", num_heads=2, seqlens_q=(100, 20, 8), seqlens_k=(100, 20, 8), softcap=3.0)
    assert stand_in(packed) == Problem(batch=1, num_heads=2, seqlen_q=100)
    assert stand_in(Problem(window_left=7, causal=True, lse=False)) == Problem(causal=True, lse=False)
    assert stand_in(Problem(seqlen_k=99)) == Problem(seqlen_k=99)


def test_a_record_comes_back_whole(recorded, tmp_path):
    recorded.save(tmp_path / "again.json")
    assert Demand.load(tmp_path / "again.json") == recorded


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: "{", "is damaged: "),
        (lambda content: json.dumps({**content, "format": 9}), "has format 9, this program reads 1: record anew"),
        (lambda content: json.dumps({**content, "problems": [{"calls": 1, "heads": 3}]}), "is no record of a program"),
        (lambda content: json.dumps({**content, "problems": [{"calls": -1}]}), "calls=-1 is no number of calls"),
        (lambda content: json.dumps({**content, "problems": [{"calls": 1, "num_heads": 0}]}), "num_heads=0: must be"),
        (lambda content: json.dumps([]), "is no record of a program"),
    ],
)
def test_a_damaged_record_is_named(change, words, recorded, tmp_path, capsys):
    recorded.save(file := tmp_path / "problems.json")
    file.write_text(change(json.loads(file.read_text())))
    assert tool("--problems", file, "--export", tmp_path / "out") == console.EXIT_ERROR
    assert re.search(f"{re.escape(str(file))} .*{re.escape(words)}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "give one of these: a program after --, --problems FILE, or --check"),
        (["--check", "--", "python", "a.py"], "give one of these"),
        (["--", "torchrun", "a.py"], "torchrun is no Python: after -- goes python, and a file or -m MODULE"),
        (["--", "python"], "python names no program"),
        (["--", "python", "-m"], "python -m names no program"),
        (["--", "python", "-c", "print()"], "python -c: a file or -m MODULE can be recorded"),
        (["--", "/no/such/python3", "a.py"], "/no/such/python3 cannot be run: No such file"),
        (
            ["--", "python", "/no/such/file.py"],
            "nothing was recorded: python /no/such/file.py ended with exit code 1",
        ),
        (["--problems", "/no/such/file.json"], "cannot read /no/such/file.json: No such file"),
        (["--check"], "cannot read .*guard.json: No such file"),
        (["--version", "99", "--problems", "x.json"], "no version 99"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_recorded_is_refused(words, refusal, tmp_path, capsys):
    words = ["--export", str(tmp_path / "out"), *words]
    assert tool(*words) == console.EXIT_ERROR
    assert re.search(refusal, capsys.readouterr().err)


def test_a_folder_of_something_else_is_left_alone(recorded, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("Chapter 1")
    recorded.save(file := tmp_path / "problems.json")
    assert tool("--problems", file, "--export", tmp_path) == console.EXIT_ERROR
    assert "holds thesis.tex, which is no export: name a new folder" in capsys.readouterr().err


def test_a_program_that_asks_for_nothing(tmp_path, capsys):
    Demand(("idle.py",), {Problem(head_dim=520): 3}, {}).save(file := tmp_path / "problems.json")
    assert tool("--problems", file, "--export", tmp_path / "out") == console.EXIT_ERROR
    said = capsys.readouterr().err
    assert "3 calls stay as they are: 24_woven_general takes head_dim 64, 96, 128, 192, 256, 512, or" in said
    assert "kernels take none of its calls: there is nothing to tune" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_predicted_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    Demand(("mine.py",), {Problem(num_heads=2, seqlen_q=512, head_dim=64): 5}, {}).save(file := tmp_path / "p.json")
    assert tool("--problems", file, "--export", tmp_path / "out", "--budget-seconds", "1", "--version", "24") == 0
    said = capsys.readouterr()
    assert "mine.py: 5 calls, 1 problems" in said.out
    assert "PREDICTED by the cost model, nothing was measured" in said.out
    assert re.search(r"dtype=bf16,head_dim=64,causal=false,length=short +100.0% +\d+\.\d", said.out)
    assert "no winner is exported" in said.err
    assert [each.name for each in (tmp_path / "out").iterdir()] == [export.PROBLEMS]


PLAIN = Problem(num_heads=2, seqlen_q=512, head_dim=64, causal=True, lse=False)
WINDOW = Problem(num_heads=2, seqlen_q=300, head_dim=64, causal=True, lse=False, window_left=100)
WINNER = {"block_n": 64}


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """As if there were an H100, on which the search finds a winner; `times` says what kernels take."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    here = target.Target(on_gpu=True, arch=H100.arch, gpu=H100)
    monkeypatch.setattr(target, "resolve", lambda *_: here)
    monkeypatch.setattr(job, "workers", lambda *_: [])
    monkeypatch.setattr(records, "of_place", lambda on_gpu: {"device": "Made-up GPU", "torch": "2.11"})
    times = {"sdpa": 100.0, "default": 80.0, "winner": 50.0}

    def found(jobs, workers, seconds):
        for each in jobs:
            values = {**each.space.declared(each.space.default), **WINNER}
            winners.save("h100", each.space.version.name, each.space.kind, values, {"ratio": "1.1"}, each.home)
        return 0

    class Arena:
        def __init__(self, problem, baselines):
            self.problem = problem
            self.first = [] if problem.window else ["sdpa"]

        def hold(self, kernels, settings):
            rounds = {name: np.full(16, times[name]) for name in [*self.first, *kernels]}
            checks = {name: SimpleNamespace(passed=True) for name in kernels}
            base = next(iter(rounds))
            measurement = SimpleNamespace(
                checks=dict.fromkeys(rounds),
                baseline=base,
                times=rounds.__getitem__,
                time_us=lambda name: float(np.median(rounds[name])),
                ratio=lambda name: paired_ratio(rounds[base], rounds[name]),
                notes=list,
            )
            return SimpleNamespace(checks=checks, measurement=measurement)

    monkeypatch.setattr(campaign, "run", found)
    monkeypatch.setattr(gains, "Arena", Arena)
    return times


@pytest.fixture
def exported(on_a_gpu, tmp_path):
    Demand(("mine.py",), {PLAIN: 10, WINDOW: 1}, {}).save(file := tmp_path / "p.json")
    assert tool("--problems", file, "--export", tmp_path / "out", "--version", "24") == 0
    return tmp_path / "out"


def test_the_gain_of_each_and_of_all(exported, capsys):
    assert tool("--check", "--export", exported) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "10 100.0 80.0 50.0 2.000 [2.000, 2.000] 1.600 [1.600, 1.600]" in said
    assert "1 80.0 50.0 1.600 [1.600, 1.600]" in said, "torch has no windows"
    assert "In all: attention took 1.1 ms, and takes 0.6 ms with what is adopted, x 1.964" in said
    assert "nothing is slower than it was" in said


def test_what_is_exported_is_used(exported, monkeypatch):
    """The winner goes before the rung's default and before what is tuned; its kernels are there without a compiler."""
    adopted = Entrant("", RUNG, {}, tuned_for="h100")
    before = adopted.config(PLAIN, H100)
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(exported))
    for problem in (PLAIN, WINDOW):
        config = adopted.config(problem, H100)
        assert config != before
        assert config.block_n == 64
        assert prebuilt.find(RUNG, config, H100.arch).directory.parent == exported / "kernels"
    other = Problem(num_heads=2, seqlen_q=512, head_dim=64, lse=False)
    assert prebuilt.find(RUNG, adopted.config(other, H100), H100.arch) is None
    q = torch.randn(1, 20, 2, 64).bfloat16()
    assert attention(q, q, q, causal=True).isfinite().all()


def test_a_folder_that_is_not_there_is_no_export(monkeypatch):
    monkeypatch.setenv("FLASHLADDER_ADOPTED", "/nonexist")
    with pytest.raises(ConfigError, match="FLASHLADDER_ADOPTED=/nonexist: there is no such folder"):
        Entrant("", RUNG, {}, tuned_for="h100").config(PLAIN, H100)


def fastest(problem):
    return catalog.choice(problem, catalog.Card(H100.arch, H100))[0]


def test_each_problem_is_of_the_rung_that_attention_launches(on_a_gpu, tmp_path, monkeypatch):
    """Without --version: Hopper's where it takes the problem."""
    monkeypatch.setattr(prebuilt, "compile_into", lambda folder, requests: None)
    problems = (PLAIN, WINDOW, Problem(num_heads=2, seqlen_q=512, head_dim=320, causal=True, lse=False))
    Demand(("mine.py",), dict.fromkeys(problems, 10), {}).save(file := tmp_path / "p.json")
    assert tool("--problems", file, "--export", tmp_path / "out") == 0
    guard = export.load_guard(tmp_path / "out")
    rungs = {gain.problem: gain.rung for gain in guard.gains}
    assert rungs == {problem: fastest(problem).name for problem in problems}
    assert len(set(rungs.values())) == 2
    assert {winner.version for winner in winners.of_gpu("h100", tmp_path / "out")} == set(rungs.values())


def test_a_problem_stays_with_the_rung_that_it_was_tuned_for(on_a_gpu, tmp_path, monkeypatch):
    """Also where it is checked or adopted again after another rung was found faster."""
    monkeypatch.setattr(prebuilt, "compile_into", lambda folder, requests: None)
    monkeypatch.setattr(prebuilt, "missing", lambda folder, requests: [])
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    ladder = catalog.ladder_of("forward")
    always = [launch for launch in ladder.launches if launch.when == "True"]
    takers = [launch for launch in always if catalog.find(launch.rung).takes(PLAIN)]
    rivals = tuple(launch.model_copy(update={"rival": True}) for launch in takers[:2])
    monkeypatch.setattr(launches, "ladder_of", lambda operation: ladder.model_copy(update={"launches": rivals}))
    out, first, second = tmp_path / "out", *(catalog.find(launch.rung) for launch in rivals)
    Demand(("mine.py",), {PLAIN: 10}, {}).save(file := tmp_path / "p.json")
    assert tool("--problems", file, "--export", out) == 0
    winners.save("h100", second.name, winners.name_of(PLAIN), {}, {"ratio": "9.0"})
    assert tool("--check", "--export", out) == 0
    assert tool("--problems", file, "--export", out) == 0
    assert [gain.rung for gain in export.load_guard(out).gains] == [first.name]
    assert {winner.version for winner in winners.of_gpu("h100", out)} == {first.name}
    assert fastest(PLAIN) == second
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(out))
    assert fastest(PLAIN) == first


def test_short_keys_and_long_ones_have_a_search_each(on_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "compile_into", lambda folder, requests: None)
    long = replace(PLAIN, seqlen_q=4096, seqlen_k=4096)
    Demand(("mine.py",), {PLAIN: 10, WINDOW: 1, long: 3}, {}).save(file := tmp_path / "p.json")
    assert tool("--problems", file, "--export", tmp_path / "out", "--version", "24") == 0
    kinds = {winner.kind for winner in winners.of_gpu("h100", tmp_path / "out")}
    assert kinds == {
        f"dtype=bf16,head_dim=64,causal=true,length={length}" for length in catalog.ladder_of("forward").lengths
    }


def test_a_regression_is_told(exported, on_a_gpu, capsys):
    on_a_gpu["winner"] = 60.0
    assert tool("--check", "--export", exported) == console.EXIT_ERROR
    said = " ".join(capsys.readouterr().out.split())
    assert f"{PLAIN.name}: to sdpa it was 2.000 [2.000, 2.000], and is 1.667" in said
    assert f"{WINDOW.name}: to the rung's default it was 1.600 [1.600, 1.600], and is 1.333" in said
    assert said.count(WINDOW.name) == 1
    on_a_gpu["winner"] = 50.5  # within what another day takes
    assert tool("--check", "--export", exported) == 0


def test_an_export_that_does_not_stand_is_told(exported, capsys):
    for kernel in (exported / "kernels").glob("*/*.cubin"):
        kernel.write_bytes(b"")
    assert tool("--check", "--export", exported) == console.EXIT_ERROR
    assert "4 of 4 kernels are damaged, or of other sources: adopt again" in capsys.readouterr().out
    winners = exported / "tuned" / "h100.yaml"
    winners.write_text(winners.read_text().replace("block_n=64", "block_n=63"))
    assert tool("--check", "--export", exported) == console.EXIT_ERROR
    assert "does not stand any more: " in " ".join(capsys.readouterr().out.split())
    (exported / export.GUARD).write_text('{"format": 1, "gains": [{}]}')
    assert tool("--check", "--export", exported) == console.EXIT_ERROR
    assert "guard.json is damaged" in capsys.readouterr().err


def test_a_time_that_was_never_measured_is_no_gain(exported):
    guard = json.loads((exported / export.GUARD).read_text())
    guard["gains"][0]["ours_us"] = -1
    (exported / export.GUARD).write_text(json.dumps(guard))
    with pytest.raises(ResultsError, match="has a time or a ratio that was never measured"):
        export.load_guard(exported)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_program_on_a_gpu(tmp_path, monkeypatch):
    """From a program to winners that its attention uses, and a guard that finds nothing slower a moment later."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    (tmp_path / "program.py").write_text(
        "import torch, torch.nn.functional as F\n"
        "q = torch.randn(2, 16, 2048, 128, device='cuda', dtype=torch.bfloat16)\n"
        "for _ in range(4): F.scaled_dot_product_attention(q, q, q, is_causal=True)\n"
    )
    out = tmp_path / "out"
    words = [sys.executable, "-m", "flashladder", "adopt", "--export", str(out)]
    subprocess.run([*words, "--budget-seconds", "20", "--", "python", str(tmp_path / "program.py")], check=True)
    guard = export.load_guard(out)
    (gain,) = guard.gains
    assert (gain.calls, gain.baseline, gain.problem.causal) == (4, "sdpa", True)
    assert gain.to_default.value > 0.97
    subprocess.run([*words, "--check"], check=True)
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(out))
    fake_cuda.forget_kernels(monkeypatch)
    q = torch.randn(1, 300, 2, 128, device="cuda").bfloat16()
    o = attention(q, q, q, causal=True)
    (found,) = set(ready.by_kind.values())
    assert found.artifact.directory.parent == out / "kernels"
    heads = q.float().transpose(1, 2)
    exact = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(o.float(), exact, rtol=0, atol=0.03)


def test_what_is_timed_is_what_is_launched(monkeypatch, tmp_path):
    """Also where the export has no winner for a problem, but the repository has."""
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    (tmp_path / "mine").mkdir()
    rung, timed = catalog.find("next_q"), []
    winners.save("h100", rung.name, winners.name_of(PLAIN), {"num_stages": 2, "q_stages": 1}, {})
    monkeypatch.setattr(gains, "assemble", lambda entrants, *_: (timed.extend(entrants), ({}, []))[1])
    gains.measure([SimpleNamespace(problem=PLAIN)], lambda _: rung, SimpleNamespace(gpu=H100), tmp_path / "mine", None)
    assert timed[-1].values == winners.config(rung, "h100", PLAIN, tmp_path / "mine").as_dict()
