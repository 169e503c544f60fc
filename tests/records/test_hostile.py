"""Files of a stranger: each cell that is wrong is refused by name, and what is written acts nowhere."""

import csv
import io

import pandas as pd
import pytest

from flashladder.common import console, escape
from flashladder.common.records import cells, received
from flashladder.common.records.log import Log, Schema
from flashladder.common.records.schemas import LADDER
from flashladder.common.report import tables
from flashladder.common.report.charts import theme
from flashladder.tests.support import made_up
from flashladder.tools.commands import dashboard
from flashladder.tools.commands import received as command

TEXTS = ("kind", "run", "time", "commit", "torch", "toolkit", "driver", "device", "gpu_id", "version", "config", "arch")
TEXTS += (
    "code",
    "dtype",
    "layout",
    "family",
    "operation",
    "options",
    "mode",
    "baseline",
    "baseline_version",
    "verdict",
)
TEXTS += ("notes", "chosen_by", "round_us")
HTML, LINK, FORMULA = "<img src=x onerror=alert(1)>", "[a](https://b.c)", "=1+1"
ATTACKS = (HTML, LINK, FORMULA, "@SUM(A1)", "\x1b[31mred", "www.a.b", "a|b", "`a`", "$x^2$", "\ud800", "x\u202ey")
MAY_BE_EMPTY = {"notes", "chosen_by", "window_left", "window_right", "softcap", "operation", "head_dim_v", "options"}
BAD = [
    *((name, attack) for name in TEXTS for attack in ATTACKS),
    *((name, "1e999") for name in ("tolerance", "lse_tolerance", "control_high", "time_us", "power_limit_w")),
    *((name, "-1") for name in ("max_error", "lse_error", "control_low", "registers", "compile_seconds", "sm_mhz")),
    *((name, "9" * 400) for name in ("batch", "seqlen_k", "registers", "seed", "samples", "softmax_scale")),
    *((name, "9" * 30) for name in ("seqlen_q", "head_dim", "num_heads", "rounds", "seed")),
    *((name, "0") for name in ("samples", "rounds", "seqlen_q", "arch", "ratio", "time_us")),
    *((name, "nan") for name in ("tolerance", "softmax_scale", "control_low", "thermal_share", "ratio")),
    *((name, "yes") for name in ("passed", "causal", "lse")),
    *(("ratio_low", "1e3"), ("ratio_high", "1e-3"), ("control_low", "2")),
    *(("round_us", "1 2 1e999"), ("round_us", "1 -2"), ("round_us", "1_0 2"), ("operation", "forwards")),
]


@pytest.fixture
def row():
    """A row that lacks nothing, as texts."""
    line = made_up.row("02", "own", 512, arch="sm_90a", softmax_scale=0.088, seed=0, layout="bshd", family="normal")
    line |= dict.fromkeys(("max_error", "tolerance", "lse_error", "lse_tolerance", "control_low", "control_high"), 1.0)
    line |= {"lse": True, "power_limit_w": 700.0, "shared_bytes": 1, "compile_seconds": 1.0, "sm_mhz": 1500.0}
    header = [*LADDER.columns]
    line |= {"commit": "abcdef0", "chosen_by": "tuner"}
    return dict(zip(header, next(csv.reader([LADDER.line(line, header)])), strict=True))


def sent(folder, rows, name="ladder_h100.csv"):
    with (folder / name).open("w", newline="", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def results(folder, monkeypatch):
    """A folder of results with a page on the ladder."""
    (folder / "ladder.md").write_text("<!-- ladder:begin -->\n<!-- ladder:end -->\n")
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(folder))
    return folder


def bad_rows(row):
    return [row | {name: value.replace("\ud800", "\udc80")} for name, value in BAD]


def test_a_cell_that_is_wrong_is_refused_by_its_row_and_column(row, tmp_path, capsys):
    path = sent(tmp_path, bad_rows(row))
    found = received.faults(path)
    assert len(found) == len(BAD)
    for line, ((name, value), fault) in enumerate(zip(BAD, found, strict=True), start=2):
        assert fault.startswith(f"{path}:{line}: "), fault
        assert name.removesuffix("_low").removesuffix("_high") in fault, (name, value, fault)
        assert not set(fault) & {"\x1b", "\u202e", "\udc80"}, fault
        assert len(fault) < len(str(path)) + 400, fault
    assert console.run(command.main, command.parser(), [str(path)]) == console.EXIT_ERROR
    assert "\x1b" not in capsys.readouterr().out


def test_an_empty_cell_is_refused(row, tmp_path):
    for name in row.keys() - MAY_BE_EMPTY:
        (fault,) = received.faults(sent(tmp_path, [row | {name: ""}]))
        assert name in fault, fault


def test_tolerances_of_the_largest_numbers_are_taken(row, tmp_path):
    """As the family largest_values has them; what the laboratory writes it reads."""
    found = received.faults(sent(tmp_path, [row | {"family": "largest_values", "tolerance": "1.3e+36"}]))
    assert not [fault for fault in found if "tolerance" in fault]


def test_the_dashboard_leaves_out_what_is_wrong(row, tmp_path, monkeypatch, capsys):
    folder = results(tmp_path, monkeypatch)
    sent(folder, [row, *bad_rows(row)])
    assert console.run(dashboard.main, dashboard.parser(), []) == 0
    said = capsys.readouterr()
    assert said.err.count("the line is left where it is") == len(BAD)
    written = {file.name: file.read_text() for file in folder.iterdir() if not file.name.endswith("h100.csv")}
    assert f"{len(BAD)} damaged lines" in written["dashboard.html"]
    for name, text in {**written, "stdout": said.out, "stderr": said.err}.items():
        assert "\x1b" not in text, name
        assert name == "stderr" or HTML not in text, name


def test_what_is_written_does_not_act_even_if_it_was_not_refused(tmp_path, monkeypatch, capsys):
    def trusting(self, texts):
        plain = {name: cells.base(self.columns[name]) for name, text in texts.items() if text}
        return {name: texts[name] == "true" if kind is bool else kind(texts[name]) for name, kind in plain.items()}

    attack = f"{HTML} {LINK} $x^2$ a|b \x1b[31m"
    folder = results(tmp_path, monkeypatch)
    log = made_up.ladder(
        folder, dtypes=("bf16",), run=FORMULA, driver=attack, device=attack, torch=attack, notes=attack
    )
    log.append([made_up.field("cudnn", seqlen, version=attack) for seqlen in made_up.LENGTHS])
    monkeypatch.setattr(Schema, "validate", trusting)
    assert console.run(dashboard.main, dashboard.parser(), []) == 0
    html, page, sheet = ((folder / f"{n}").read_text() for n in ("dashboard.html", "ladder.md", "dashboard.csv"))
    assert "&lt;img" in html
    assert "<img src=x" not in html + page.replace(r"\<", "")
    assert r"\<img src=x onerror=alert(1)\> \[a\](https:\//b.c) \$x^2\$ a\|b" in " ".join(page.split())
    assert not [cell for line in csv.reader(io.StringIO(sheet)) for cell in line if cell[:1] in {"=", "+", "@"}]
    assert "\x1b" not in html + page + capsys.readouterr().out


@theme.figure
def picture():
    drawn = theme.pixels(90, 90)
    theme.tip(drawn.text(0, 0, "$x^2$\x1b<b>"), "\x1b<i>")
    return drawn


def test_in_a_picture_text_is_text():
    svg = theme.inline_svg(picture(), "name", "<a>")
    assert "$x^2$\\x1b&lt;b&gt;" in svg
    assert 'data-tip="\\x1b&lt;i&gt;"' in svg
    assert "\x1b" not in svg


def test_each_place_has_its_escape(capsys):
    console.warn("a\x1b[31m\x9b\u202e[bold]b")
    assert capsys.readouterr().err == "note: a\\x1b[31m\\x9b\\u202e[bold]b\n"
    console.console.print(tables.facts("\x1b", {"\x07": "\x1b]0;a"}))
    assert not set(capsys.readouterr().out) & {"\x1b", "\x07"}
    assert tables.markdown(["<b>"], [["a\n|`b`", escape.Markdown("[c](d)")]]).splitlines()[::2] == [
        r"| \<b\> |",
        r"| a \|\`b\` | [c](d) |",
    ]
    frame = escape.spreadsheet(
        pd.DataFrame({"text": ["=1", "+1", "-1", "@a", "\ta", "a=1", ""], "figure": range(-3, 4)})
    )
    assert list(frame["text"]) == ["'=1", "'+1", "'-1", "'@a", "'\ta", "a=1", ""]
    assert list(frame["figure"]) == [*range(-3, 4)]


HEAD = ",".join(LADDER.columns) + "\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x7fELF\0\xff\xfe\n\0\n", "this is no header of this log"),
        (b"", "has no rows"),
        (HEAD.encode()[:-1] + b",kind\n", "this is no header of this log"),
        (b"own,a\n", "this is no header of this log"),
        (b"k" * 10**7 + b"\n", "this is no header of this log"),
        (HEAD.encode() + b"own," + b"9" * 10**7 + b"\n", "field larger than field limit"),
        (HEAD.encode() + b"own\n", f"1 cells under {len(LADDER.columns)} columns"),
        (HEAD.encode() + b'"own\n', "no CSV"),
        (HEAD.encode() + b"own", "torn: the line has no end"),
    ],
    ids=range(9),
)
def test_a_damaged_file_ends_in_a_clear_error(content, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "ladder_h100.csv").write_bytes(content)
    assert console.run(command.main, command.parser(), [str(tmp_path / "ladder_h100.csv")]) == console.EXIT_ERROR
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert len(said.out + said.err) < 3000


def test_a_mark_of_byte_order_is_no_part_of_the_header(row, tmp_path):
    path = sent(tmp_path, [row])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    frame, damaged = Log(path, LADDER).read()
    assert (list(frame["kind"]), list(frame.columns), damaged) == (["own"], [*LADDER.columns], [])


def test_a_column_and_a_name_that_nobody_knows(row, tmp_path):
    (fault,) = received.faults(sent(tmp_path, [row | {HTML: "1"}]))
    assert f"has columns that a ladder's log has not: {HTML!r}" in fault
    with pytest.raises(console.FlashLadderError, match=r"should be ladder_\* with a GPU's name, such as h100"):
        received.faults(sent(tmp_path, [row], "ladder_<b>.csv"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 10**5, "more than 16 levels"),
        ("- " * 10**5, "more than 16 levels"),
        ("a: &a [b]\nc: *a", "aliases, and"),
        ("\0", "is damaged"),
        ("a: 2026-99-99", "is damaged"),
        ("02_swizzling: {k: {config: block_m=64, times_us: [-1], driver: '<b>', torch: 3}}", "times_us='-1' should be"),
        ("02_swizzling: {k: {config: block_m=64, driver: '<b>'}}", "driver='<b>' should be a release"),
    ],
    ids=range(7),
)
def test_winners_of_a_stranger(text, words, tmp_path, capsys):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "l4.yaml").write_text(text)
    assert console.run(command.main, command.parser(), [str(tmp_path / "tuned" / "l4.yaml")]) == console.EXIT_ERROR
    said = capsys.readouterr()
    assert words in said.out + said.err
