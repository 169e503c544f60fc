"""A rung made by `flashladder new`: complete, taken up by every tool and test, and breaking none of them."""

import os
import shutil
import subprocess
import sys

import pytest

from flashladder.common import catalog, console, own
from flashladder.common.catalog import find
from flashladder.common.compiler.sources import Sources
from flashladder.common.errors import ConfigError
from flashladder.common.paths import ROOT
from flashladder.common.report import sections
from flashladder.common.report.pages import documents, steps
from flashladder.common.workshop import scaffold
from flashladder.tools.commands import new_version

pytestmark = pytest.mark.slow

MADE = f"{int(catalog.versions()[-1].number) + 1:02}_my_idea"

# What a rung made by hand broke, and all that is tested of each rung; words of `pytest -k`.
FILES = (
    *(f"report/test_{name}" for name in ("picture", "rung_pages", "readme", "dashboard", "neighbours")),
    "predict/test_profile",
    "rungs/test_rungs",
)
TOUCHED = (
    "test_the_path_leads_through_every_rung_and_reference",
    "test_the_path_names_every_rung_as_its_page_does",
    "test_the_readme_has_the_rungs_of_ampere",
    "test_what_an_h100_counted_is_what_was_predicted",
    "test_the_committed_instruction_mix_has_every_rung",
    "test_no_step_is_larger_than_it_may_be",
    MADE,
)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(new_version.main, new_version.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """A ladder of one's own, in which rungs can be made."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv(own.VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout with a new rung; what runs it, with its output."""
    folder = tmp_path_factory.mktemp("new")
    root = folder / "flashladder"
    for name in ("common", "configs", "results", "tests", "tools", "tuner", "versions"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "private"))
    for name in ("__init__.py", "pyproject.toml", "setup.py", "README.md", "Makefile"):
        shutil.copy(ROOT / name, root)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FLASHLADDER_TESTS"))}
    known["FLASHLADDER_TESTS"] = "all"  # the new rung's among them

    def call(*command):
        options = {"capture_output": True, "text": True, "cwd": root, "env": known | {"PYTHONPATH": str(folder)}}
        done = subprocess.run([sys.executable, *command], **options)
        return done.returncode, done.stdout + done.stderr

    code, out = call("-m", "flashladder", "new", "my_idea", "--from", "24")
    assert code == 0, out
    return call


def test_a_new_rung_breaks_no_test_and_is_tested(checkout):
    files = [f"tests/{name}.py" for name in FILES]
    code, out = checkout("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *files, "-k", " or ".join(TOUCHED))
    assert code == 0, out
    assert f"PASSED tests/rungs/test_rungs.py::test_default[{MADE}]" in out


def test_tools_take_a_new_rung_up(checkout):
    code, out = checkout("tools/run_version.py", "--list")
    assert code == 0
    assert MADE in out
    assert "a draft, from" in out
    code, out = checkout("-c", "from flashladder.common.records import ladders; print(*ladders.titles())")
    assert "24_woven_general" in out
    assert MADE not in out, "no published picture has a draft"


def test_a_new_rung_is_its_parent_under_another_name(ladder):
    made = scaffold.make("my_idea", "22", private=True)
    assert (made.name, made.parent, made.draft) == ("mine/00_my_idea", "22_barrier_amid", True)
    assert sorted(path.name for path in made.directory.iterdir()) == ["README.md", "kernel.cu", "version.yaml"]
    assert made.below() == find("22")
    assert made.config() == find("22").config()
    assert [*made.space()] == [*find("22").space()]
    assert made.kernel.read_text() == find("22").kernel.read_text()
    page = (made.directory / "README.md").read_text()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [*documents.PARTS, documents.DROPPED]
    assert sections.between(made.directory / documents.PAGE, documents.TRIED) == ""
    (step,) = (each for each in steps.sections() if each.path == made.directory / documents.PAGE)
    assert step.is_current(), "else `flashladder dashboard --check` fails for a rung that was just made"
    assert scaffold.OPEN in page


def test_rungs_follow_each_other_and_their_kernel_is_their_own(ladder):
    first, second = (scaffold.make(name, "07", private=True) for name in ("one", "two"))
    assert (first.number, second.number) == ("00", "01")
    assert first.kernel == first.directory / "kernel.cu"
    (first.directory / "kernel.cu").write_text('#include "beside.cuh"\n' + first.kernel.read_text())
    (first.directory / "beside.cuh").write_text("#pragma once\n")
    third = scaffold.make("three", "one")
    assert (third.name, third.parent) == ("mine/02_three", "mine/00_one")
    assert (third.directory / "beside.cuh").exists()
    assert find("three") == third


def test_headers_that_lie_with_lower_rungs_are_found_from_everywhere(ladder):
    made = scaffold.make("my_idea", "22", private=True)
    assert not [*made.directory.glob("*.cuh")]
    assert Sources().headers(made.kernel) == Sources().headers(find("22").kernel)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "--from", "77"), "no version 77; there are 00_minimal"),
        (
            ("new", "--from", "triton"),
            "triton is a reference, with no kernel.cu to begin with; name a rung",
        ),
        (("taken", "--from", "24"), "the name taken is taken by mine/00_taken: choose another, or go on with that"),
        (("swizzling", "--from", "24"), "the name swizzling is taken by 02_swizzling"),
        (("mine", "--from", "24"), "the name mine is taken by a ladder or a reference"),
        (("triton", "--from", "24"), "the name triton is taken by a ladder or a reference"),
        (("My-Idea", "--from", "24"), "My-Idea is no name of a rung: lower-case letters, digits and _"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(ladder, run, arguments, message):
    scaffold.make("taken", "24", private=True)
    code, _, err = run(*arguments, "--private")
    assert code == console.EXIT_ERROR
    assert message in err
    assert [path.name for path in ladder.iterdir()] == ["00_taken"]


def test_the_tool_says_what_to_fill_in_and_what_comes_next(ladder, run):
    code, out, _ = run("my_idea", "--from", "24", "--private")
    assert code == 0
    assert f"mine/00_my_idea in {ladder / '00_my_idea'}" in " ".join(out.split())
    assert "flashladder run my_idea --watch" in out
    assert "flashladder run my_idea --against 24" in out


def test_a_ladder_of_a_hundred_rungs_is_full(ladder):
    made = scaffold.make("last", "24", private=True)
    made.directory.rename(ladder / "99_last")
    with pytest.raises(ConfigError, match="has a rung 99: there is no number left"):
        scaffold.make("one_more", "last")


def test_a_parent_that_is_gone_is_named(ladder):
    made = scaffold.make("my_idea", "24", private=True)
    declared = made.directory / "version.yaml"
    declared.write_text(declared.read_text().replace("24_woven_general  #", "24_gone  #"))
    catalog.forget()
    with pytest.raises(ConfigError, match=r"version\.yaml: its parent: no version 24_gone; there are"):
        find("my_idea").below()
