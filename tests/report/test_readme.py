"""The commands of the READMEs: each is one that its tool understands; the quick ones of the first README run."""

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from flashladder.common import own
from flashladder.common.paths import ROOT
from flashladder.tools.commands import COMMANDS

READMES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "versions").glob("**/*.md")) if own.PRIVATE not in page.parents),
]
COMMAND = re.compile(r"^(?: {4}|.*`(?=flashladder \w+ ))flashladder ([a-z]\w*)((?:[^`\n\\]|\\\n)*)", re.MULTILINE)
FLASHLADDER = [sys.executable, "-m", "flashladder"]
QUICK = [
    "run --list",
    "run 02 --config block_m=128 num_warps=8",
    "run 02 --seqlen 1024 --heads 4 --gpu h100",
    "run triton --causal",
    "exercise",
]


def commands(readme):
    """The commands that a README calls, with their arguments."""
    for name, rest in COMMAND.findall(readme.read_text()):
        yield name, shlex.split(rest.replace("\\\n", " "), comments=True)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_tool_understands_its_commands(readme):
    for name, arguments in commands(readme):
        import_module(COMMANDS[name].module).parser().parse_args([word for word in arguments if word != "..."])


def test_commands_are_found():
    found = [command for readme in READMES for command in commands(readme)]
    assert ("run", ["02", "--config", "block_m=128", "num_warps=8"]) in found
    assert len(found) > 12


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run_as_printed(command, tmp_path):
    assert f"    flashladder {command}" in (ROOT / "README.md").read_text()
    environment = ["env", f"FLASHLADDER_RESULTS={tmp_path}"]
    subprocess.run([*environment, *FLASHLADDER, *shlex.split(command)], check=True)


@pytest.mark.slow
def test_a_rung_of_ones_own_is_made_and_judged_as_printed(tmp_path):
    made, watched, judged = re.findall(
        r"^    flashladder (\S+ my_idea [^#]*)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert "--watch" in watched  # test_watch.py runs it
    (tmp_path / "mine").mkdir()
    environment = ["env", f"FLASHLADDER_VERSIONS={tmp_path / 'mine'}"]
    for command in (made, judged):
        subprocess.run([*environment, *FLASHLADDER, *shlex.split(command)], check=True)
    assert (tmp_path / "mine" / "00_my_idea" / "tried.csv").exists()
    assert "| same code |" in (tmp_path / "mine" / "00_my_idea" / "evidence.md").read_text()


def test_python_runs_as_printed():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}  # a block goes on where the one before it ended
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_make_knows_the_targets_that_are_named():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:^ {4}|`)make (\w+)", "".join(path.read_text() for path in READMES), re.MULTILINE))
    assert named >= {"run", "test", "doctor"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
