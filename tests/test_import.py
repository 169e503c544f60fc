"""The package's names: what a star brings, what an import tells that fails, and what it loads."""

import subprocess
import sys

import pytest
import yaml

import flashladder
from flashladder.common import lazy
from flashladder.common.paths import ROOT


def test_a_star_brings_the_public_functions():
    names: dict[str, object] = {}
    exec("from flashladder import *", names)
    assert names.keys() - {"__builtins__"} == set(flashladder.__all__)
    assert [name for name in flashladder.__all__ if not callable(names[name])] == ["masks"]
    assert names["masks"].__name__ == "flashladder.common.api.masks"


def test_an_error_inside_an_import_keeps_its_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import sys\nsys.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flashladder, "__getattr__", lazy.importer("flashladder", {"attention": "broken_module"}))
    with pytest.raises(ImportError, match=r"flashladder.attention cannot be imported: .*no_such_thing") as raised:
        from flashladder import attention  # noqa: F401
    assert isinstance(raised.value.__cause__, AttributeError)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'flashladder' has no attribute 'atention'"):
        flashladder.atention  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'atention'"):
        from flashladder import atention  # noqa: F401


def test_importing_the_package_imports_little():
    code = "import sys; before = {*sys.modules}; import flashladder; print(*sys.modules.keys() - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} <= {"flashladder", "collections"}


def test_the_version_is_told(capsys):
    from flashladder.tools import commands

    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashladder {flashladder.__version__}\n"
    setup = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert setup.stdout.split()[-1] == flashladder.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == flashladder.__version__
