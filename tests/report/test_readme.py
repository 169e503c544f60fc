"""The commands of README and docs/: each is one that its tool understands; the quick ones run."""

import re
import shlex
from importlib import import_module

import pytest

from flashladder.common import catalog, own
from flashladder.common.paths import ROOT
from flashladder.tests.report.test_rung_pages import LINK, anchors
from flashladder.tools.commands import COMMANDS, main
from flashladder.tools.commands.arguments import config_values

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *DOCS,
    *(ROOT / "results").glob("*.md"),
    *(page for page in sorted((ROOT / "versions").glob("**/*.md")) if own.PRIVATE not in page.parents),
]
COMMAND = re.compile(r"^(?: {4,}|.*`(?=flashladder \w+ ))flashladder ([a-z]\w*)((?:[^`\n\\]|\\\n)*)", re.MULTILINE)
QUICK = [
    "run 02",
    "explain 02",
    "exercise 02",
    "run --list",
    "run 02 --config block_m=128 num_warps=8",
    "run 02 --seqlen 1024 --heads 4 --gpu h100",
    "run triton --causal",
    "accuracy --list",
]
MOST_BYTES, MOST_LINES = 13 * 1024, 150  # of README.md: one page


def commands(page):
    """The commands that a page calls, with their arguments."""
    for name, rest in COMMAND.findall(page.read_text()):
        yield name, shlex.split(rest.replace("\\\n", " "), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_tool_understands_its_commands(page):
    for name, arguments in commands(page):
        parsed = import_module(COMMANDS[name].module).parser().parse_args([word for word in arguments if word != "..."])
        if (patch := getattr(parsed, "patch", None)) and patch.parent.name:
            assert (ROOT / patch).is_file()
        if fields := getattr(parsed, "config", None):
            references = {each.name: each for each in catalog.references()}
            for named in getattr(parsed, "versions", [getattr(parsed, "version", None)]):
                kernel = references.get(named) or catalog.find(named)
                kernel.config(**config_values(fields))  # ConfigError for what it refuses


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_a_bench_names_its_kernels(page):
    """Without one it prints its help."""
    assert not re.search(r"^    flashladder bench *(#|$)", page.read_text(), re.MULTILINE)


def test_commands_are_found():
    found = [command for page in PAGES for command in commands(page)]
    assert ("run", ["02", "--config", "block_m=128", "num_warps=8"]) in found
    assert ("run", ["37", "--against", "37", "--config", "block_n=64"]) in found
    assert {name for name, _ in found} >= set(COMMANDS) - {"plots", "neighbours", "picture"}


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run_as_printed(command, tmp_path, monkeypatch):
    """In this process: one of their own takes seconds to import torch, and test_commands.py has them."""
    assert any(f"    flashladder {command}" in page.read_text() for page in DOCS)
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_extras_are_quoted_and_there(page):
    """zsh takes brackets without quotes for a pattern."""
    text = page.read_text()
    assert not re.search(r"pip install (-e )?\.\[", text)
    setup = (ROOT / "setup.py").read_text()
    for extra in re.findall(r"pip install (?:-e )?'\.\[(\w+)\]'", text):
        assert f'        "{extra}": ' in setup


@pytest.mark.parametrize("page", ["README.md", "versions/README.md", "versions/forward/README.md"])
def test_the_source_of_rungs_01_to_16_is_credited(page):
    text = " ".join((ROOT / page).read_text().split())
    assert "in their order" in text
    assert "(https://github.com/sonnyli/flash_attention_from_scratch)" in text


def test_the_readme_has_the_rungs_of_ampere():
    (cell,) = re.findall(r"^\| 8\.0, .* \| (forward/.*); `attention`", (ROOT / "README.md").read_text(), re.MULTILINE)
    said = [
        f"{ladder}/{number:02}"
        for ladder, numbers in re.findall(r"(\w+)/((?:\d\d|, |to|and| )+)", cell)
        for first, last in re.findall(r"(\d\d)(?: to (\d\d))?", numbers)
        for number in range(int(first), int(last or first) + 1)
    ]
    ladders = dict.fromkeys(name.split("/")[0] for name in said)
    rungs = [rung for ladder in ladders for rung in catalog.versions(ladder=ladder) if rung.instruction_set == "ampere"]
    names = [(f"{rung.ladder}/{rung.number}", rung.draft) for rung in rungs]
    assert said == [name for name, draft in names if name in said or not draft]


def test_every_source_that_a_rung_names_is_listed():
    listed = (ROOT / "versions" / "README.md").read_text()
    for page in (ROOT / "versions").glob("*/*/README.md"):
        for source in re.findall(r"FlashAttention-[1-4]|FlashMLA|arXiv:[\d.]+|doi\.org/[\w./]+", page.read_text()):
            name = source.removeprefix("arXiv:").replace("FlashAttention-1", "FlashAttention]")
            assert name in listed, f"{page}: {source}"


def test_the_readme_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= MOST_BYTES
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("picture", "words"), [("run", "PASS"), ("race", "no barrier orders the two"), ("grade", "not solved yet")]
)
def test_pictures_of_output_show_what_they_are_of(picture, words):
    """`flashladder picture terminal` draws them."""
    assert f"](docs/pictures/{picture}.svg)" in (ROOT / "README.md").read_text()
    drawn = (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text()
    assert words in re.sub("<[^>]*>", "", drawn).replace("&#160;", " ")
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", drawn), "a picture asks no server"


@pytest.mark.slow
def test_readme_and_pages_have_the_figures_of_the_logs(monkeypatch):
    """Every table and chart between markers: none is older than what it is made from."""
    monkeypatch.delenv("FLASHLADDER_RESULTS", raising=False)
    assert main(["dashboard", "--check"]) == 0, "`flashladder dashboard` brings them up to date"


def test_a_rung_of_ones_own_is_made_and_judged_as_printed(tmp_path, monkeypatch):
    made, watched, judged = re.findall(
        r"^    flashladder (\S+ my_idea [^#]*)", (ROOT / "docs" / "own-rungs.md").read_text(), re.MULTILINE
    )
    assert "--watch" in watched  # test_watch.py runs it
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv(own.VARIABLE, str(tmp_path / "mine"))
    for command in (made, judged):
        assert main(shlex.split(command)) == 0
    assert (tmp_path / "mine" / "00_my_idea" / "tried.csv").exists()
    assert "| same code |" in (tmp_path / "mine" / "00_my_idea" / "README.md").read_text()


@pytest.mark.parametrize(
    ("page", "number"),
    [("README.md", 1), ("docs/models.md", 6), ("docs/decode.md", 12), ("docs/masks.md", 6), ("docs/layout.md", 1)],
)
def test_python_runs_as_printed(page, number):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == number
    names = {}  # a block goes on where the one before it ended
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_make_knows_the_targets_that_are_named():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:^ {4}|`)make (\w+)", "".join(path.read_text() for path in PAGES), re.MULTILINE))
    assert named >= {"venv", "test", "doctor", "help"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
