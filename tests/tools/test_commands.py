"""The one entry point, `flashladder COMMAND`, and the two scripts that lead to the same commands."""

import re
import subprocess
import sys

import pytest

from flashladder.common import console, packages
from flashladder.common.paths import ROOT
from flashladder.tools import commands


def call(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_each_command_has_a_line(words, capsys):
    assert commands.main(words) == (0 if words else console.EXIT_ERROR)
    lines = capsys.readouterr().out.splitlines()
    for title, group in commands.GROUPS.items():
        listed = [f"  {name:<11} {command.summary}" for name, command in group.items()]
        begin = lines.index(f"{title}:") + 1
        assert lines[begin : begin + len(group)] == listed
    assert max(map(len, lines)) <= 80


def test_an_unknown_command(capsys):
    assert commands.main(["bnch", "07"]) == console.EXIT_ERROR
    said = capsys.readouterr().err
    assert "no command bnch; did you mean bench? There are run, explain, exercise, " in said
    assert commands.main(["7"]) == console.EXIT_ERROR
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", commands.MOVED)
def test_an_old_name_says_what_does_its_work_now(name, capsys):
    assert commands.main([name]) == console.EXIT_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert f"there is no command {name} any more" in said
    assert set(re.findall(r"`flashladder (\w+)", said)) <= set(commands.COMMANDS)


def test_it_runs_as_a_module():
    done = call("-m", "flashladder", "run", "--list", cwd="/")
    assert done.returncode == 0, done.stderr
    assert "02_swizzling" in done.stdout


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_is_spelled_as_it_is_typed(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.main([name, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: flashladder {name} ")
    assert f"flashladder {name}" in said.partition("\n\n")[2]


def test_every_module_is_a_command():
    modules = {path.stem for path in ROOT.glob("tools/commands/*.py")} - {"__init__", "arguments"}
    assert modules == {command.file for command in commands.COMMANDS.values()}


@pytest.mark.parametrize(("script", "name"), [("tools/run_version.py", "run"), ("tuner/search.py", "search")])
@pytest.mark.parametrize("words", [["--help"], ["--hlep"], []])
def test_a_script_says_what_its_command_says(script, name, words):
    by_script, by_name = call(ROOT / script, *words), call("-m", "flashladder", name, *words)
    assert by_name.stdout + by_name.stderr
    for said in ("stdout", "stderr", "returncode"):
        assert getattr(by_script, said) == getattr(by_name, said)


def test_help_waits_for_nothing_that_is_slow_to_import():
    code = (
        "import sys, importlib; from flashladder.tools import commands\n"
        "for command in commands.COMMANDS.values(): importlib.import_module(command.module).parser().format_help()\n"
        "print(*{'torch', 'optuna', 'pandas', 'matplotlib', 'numpy'} & sys.modules.keys())"
    )
    done = call("-c", code)
    assert done.stdout == "\n", done.stderr


def test_without_the_package_a_script_says_what_would_work(tmp_path):
    (tmp_path / "flashladder.py").write_text("raise ModuleNotFoundError(name='flashladder')")
    done = call(ROOT / "tools" / "run_version.py", "07", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == f"{sys.executable} has no flashladder: run `make venv`, then `.venv/bin/flashladder run`\n"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("flashladder.tuner")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    for words in (["search", "02", "--gpu", "a100", "--offline"], ["plots", "study"], ["replay", "study"]):
        assert commands.main(words) == console.EXIT_ERROR
        assert "has no optuna; " in (said := capsys.readouterr().err)
        assert "-m pip install 'flashladder[tuner]'` brings it; 'flashladder[all]' brings what every" in said


def test_a_missing_package_of_no_extra(monkeypatch):
    assert "has no nothing; in a checkout `make venv`" in packages.lack(ModuleNotFoundError(name="nothing"))
    with pytest.raises(ModuleNotFoundError):
        packages.lack(ModuleNotFoundError(name="flashladder.common.nothing"))


def test_an_option_is_not_guessed_from_its_beginning(capsys):
    for words, meant in ((["bench", "07", "--seqlen", "4096"], "--seqlens"), (["run", "02", "--casual"], "--causal")):
        with pytest.raises(SystemExit, match="2"):
            commands.main(words)
        assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "swizling"], "no version swizling; did you mean 02_swizzling?"),
        (
            ["run", "woven"],
            "no version woven; did you mean 20_woven_copies or 21_woven_exponentials or 24_woven_general?",
        ),
        (["run", "py_fa3"], "no version py_fa3; did you mean py_fa2?"),
        (["run", "02", "--gpu", "h10"], "no description of the GPU h10; did you mean h100? There are .*"),
        (["run", "02", "--config", "blok_m=64"], "unknown field blok_m; did you mean block_m?"),
        (["sass", "py_fa1"], "py_fa1 is a reference, not a rung of a ladder; rungs have numbers, such as 02"),
        (["experiment", "block"], "no experiment block; did you mean blocks? There are blocks, .*"),
    ],
)
def test_a_name_that_is_not_quite_right(words, message, capsys):
    assert commands.main(words) == console.EXIT_ERROR
    assert re.search(message.replace("?", r"\?") + "\n$", capsys.readouterr().err)
