"""The tests' own setup: what runs alone, and what can be interrupted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashladder.common.paths import ROOT
from flashladder.tests.support import release

JOURNAL = """
import os, time
from pathlib import Path
import pytest

def note(name):
    begin = time.monotonic()
    time.sleep(0.05)
    Path("journal", name).write_text(f"{begin} {time.monotonic()}")

@pytest.fixture
def slow_setup(request):
    note(f"setup {request.node.name}")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(4))
def test_alone(number, slow_setup):
    note(f"alone {number}")

@pytest.mark.parametrize("number", range(30))
def test_other(number):
    note(f"other {number}")
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest in a folder of its own with the setup of these tests."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "journal").mkdir()
    ours = ("PYTEST_XDIST", "FLASHLADDER_TESTS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def call(text, *arguments):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n alone\n gpu\n")
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return call


@pytest.mark.slow
def test_what_is_marked_alone_runs_alone(run, tmp_path):
    done = run(JOURNAL, "-n", "3", "--dist", "worksteal")
    assert done.returncode == 0, done.stdout
    times = {path.name: tuple(map(float, path.read_text().split())) for path in (tmp_path / "journal").iterdir()}
    assert len(times) == 30 + 2 * 4
    apart = [name for name in times if not name.startswith("other")]
    for name in apart:
        begin, end = times[name]
        overlapping = [other for other, (b, e) in times.items() if other != name and b < end and begin < e]
        assert not overlapping, name
    others = [times[name] for name in times if name.startswith("other")]
    assert any(a[0] < b[1] and b[0] < a[1] for a in others for b in others if a != b), "nothing ran at once"


@pytest.mark.slow
def test_without_workers_what_is_alone_comes_last(run):
    done = run(JOURNAL, "-v")
    verdicts = [line.split("::")[1].split("[")[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert verdicts == ["test_other"] * 30 + ["test_alone"] * 4


def test_a_test_that_hangs_ends(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("timeout"), "pytest-timeout comes by make dev"
    assert float(pytestconfig.getini("timeout")) > 0


@pytest.mark.slow
def test_before_a_release_each_part_has_a_test(tmp_path):
    assert not [part for part in release.PARTS if not (ROOT / part.partition("::")[0]).exists()]
    body = {"one": "pass", "two": "pytest.skip('no GPU')"}
    for name, does in body.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n@pytest.mark.gpu\ndef test_it(): {does}\n")
    start = "from pathlib import Path; from flashladder.tests.support import release; "
    start += f"release.ROOT = Path({str(tmp_path)!r})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    def code_of(*parts):
        command = [sys.executable, "-c", f"{start}; raise SystemExit(release.main({parts}))"]
        return subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL).returncode

    assert code_of("test_one.py::test_it") == 0
    assert code_of("test_one.py", "test_two.py") == 1


def test_an_interruptible_program_is_so_where_interrupts_are_ignored():
    """As under nohup: the whole chain, from a shell that ignores them."""
    inner = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    start = f"interruptible.start([sys.executable, '-c', {inner!r}])"
    outer = f"import sys; from flashladder.tests.support import interruptible; print({start}.communicate()[0])"
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    said = subprocess.run([*ignoring, sys.executable, "-c", outer], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True"
    plain = subprocess.run([*ignoring, sys.executable, "-c", inner], capture_output=True, text=True, check=True)
    assert plain.stdout.strip() == "False"
