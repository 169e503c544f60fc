import pytest

from flashladder.common.catalog import winners
from flashladder.common.compiler import library
from flashladder.common.compiler import toolchain as toolchain_module
from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import load_gpu
from flashladder.common.runtime import device, gpu
from flashladder.common.workshop import machine
from flashladder.tools.commands import doctor


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The findings of a run of the doctor, in a cache of its own."""
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    toolchain.cache_clear()
    yield lambda probes: {finding.what: finding for finding in machine.examine(probes)}
    toolchain.cache_clear()


def test_this_machine_has_what_is_needed(found, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    findings = found(machine.NEEDED)
    assert all(finding.good for finding in findings.values()), findings
    assert "02_swizzling for sm_80:" in findings["a kernel compiles"].found
    assert doctor.main() == 0
    report = capsys.readouterr().out
    for what in (*machine.NEEDED, *machine.FOR_A_GPU, *machine.OPTIONAL):
        assert what in report


def test_missing_compiler_is_reported_with_its_remedy(found, capsys, monkeypatch, tmp_path):
    for variable in ("FLASHLADDER_CUDA", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(toolchain_module, "SYSTEM_TOOLKIT", tmp_path)
    monkeypatch.setattr(toolchain_module, "_in_wheels", lambda name: None)
    findings = found(machine.NEEDED)
    lacking = {what for what, finding in findings.items() if not finding.good}
    assert lacking == {"CUDA compiler", "host compiler", "a kernel compiles", "the emulator runs it"}
    assert "pip install 'flashladder[compiler]'" in findings["CUDA compiler"].found
    assert "apt-get install g++" in findings["host compiler"].found
    assert doctor.main() == 1
    assert "flashladder[compiler]" in "".join(capsys.readouterr().out.split()), "brackets are not taken for markup"


def test_missing_package_is_reported_with_its_remedy(found, monkeypatch):
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda name: ["rich", "no-such-package>=2", 'x; extra == "y"']
    )
    finding = found({"packages": machine.packages})["packages"]
    assert not finding.good
    assert finding.found.endswith("pip install no-such-package`")
    assert finding.found.startswith("no-such-package: ")


def test_folder_that_cannot_be_written(found, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "file" / "results"))
    finding = found(machine.NEEDED)["results folder"]
    assert not finding.good
    assert "file/results: Not a directory. Set FLASHLADDER_RESULTS to a folder that can be written." in finding.found


def test_it_makes_no_folder(found, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "new" / "results"))
    assert found({"results": machine.NEEDED["results folder"]})["results"].good
    assert list(tmp_path.iterdir()) == []


class FakeDriver:
    def __init__(self, version):
        self.version = version

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.version


def test_driver_must_know_the_compiler(found, monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: FakeDriver(99010))
    assert found({"driver": machine.driver})["driver"].found == "knows CUDA 99.1"
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: FakeDriver(11080))
    finding = found({"driver": machine.driver})["driver"]
    assert not finding.good
    assert "it knows CUDA 11.8, but the compiler is CUDA" in finding.found
    assert "set FLASHLADDER_CUDA to a CUDA 11 toolkit" in finding.found


def test_a_lack_does_not_stop_the_examination(found):
    def lacking():
        raise ConfigError("it lacks; do this")

    findings = found({"one": lacking, "two": lambda: "fine"})
    assert [finding.good for finding in findings.values()] == [False, True]
    assert findings["one"].found == "it lacks; do this"


def test_winners_of_the_gpu_or_of_the_nearest(found, monkeypatch, tmp_path):
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(device, "present", lambda index: None)
    monkeypatch.setattr(device, "describe", lambda here: load_gpu("gh200"))
    probe = {"winners": machine.FOR_A_GPU["winners"]}
    assert found(probe)["winners"].found.startswith("none for gh200 or a card like it: `flashladder search")
    for name in ("h200", "gh200"):
        winners.save(name, "02_swizzling", "dtype=bf16", {"block_n": 32}, {})
        said = found(probe)["winners"]
        nearest = "gh200 has none; the nearest card that has some is " if name == "h200" else ""
        assert (said.good, said.found) == (True, f"{nearest}{name}: 1 rungs")


def test_calls_in_cpp(found, monkeypatch):
    probe = {"calls in C++": machine.FOR_A_GPU["calls in C++"]}
    assert found(probe)["calls in C++"].found == "to be compiled by a first call"
    monkeypatch.setenv("FLASHLADDER_FAST", "0")
    assert found(probe)["calls in C++"].found == "FLASHLADDER_FAST=0 turns it off"
    monkeypatch.delenv("FLASHLADDER_FAST")
    monkeypatch.setattr(library.sysconfig, "get_path", lambda name: "/no/such")
    assert found(probe)["calls in C++"].found.startswith("no Python.h in /no/such")
