import re
import sys

import pytest

from flashladder.tools import bootstrap


def test_what_pip_cannot_bring_is_asked_for_by_its_command(monkeypatch):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        bootstrap.check_machine()
    assert "sudo apt-get install python3-venv" in str(error.value)
    assert "sudo apt-get install g++. Without one nvcc compiles no kernel. What runs then" in str(error.value)


def test_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"Python 3.10 or later, not .*PYTHON=/path/to/a/newer/python3"):
        bootstrap.check_machine()


@pytest.mark.parametrize(
    ("version", "usable"),
    [("2.13.0+cpu", True), ("2.9.0", True), ("3.0.1", True), ("2.8.1", False), ("1.13", False), ("main", False)],
)
def test_an_installed_torch_is_used_when_it_will_do(monkeypatch, version, usable):
    monkeypatch.setattr(bootstrap.importlib.metadata, "version", lambda name: version)
    assert bootstrap.has_usable_torch() == usable


def test_pins_yield_to_lent_packages(monkeypatch):
    constraints = []
    monkeypatch.setattr(bootstrap, "lent_packages", lambda: {"torch", "pyyaml"})

    def run_pip(command):
        with open(command[command.index("--constraint") + 1]) as file:
            constraints.extend(file.read().splitlines())
        return 0, []

    monkeypatch.setattr(bootstrap, "run_pip", run_pip)
    bootstrap.pip_install("something")
    pinned = {bootstrap.normal(line) for line in constraints}
    assert {"numpy", "rich", "types-pyyaml"} <= pinned
    assert not {"torch", "pyyaml"} & pinned


def test_failing_pip_says_what_to_do_without_a_network(monkeypatch, capfd):
    monkeypatch.setattr(bootstrap, "lent_packages", set)
    monkeypatch.setattr(bootstrap, "run_pip", lambda command: (1, [*map(str, range(100)), "no such host"]))
    with pytest.raises(SystemExit, match="PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make venv"):
        bootstrap.pip_install("something")
    assert capfd.readouterr().out.splitlines()[-2:] == ["99", "no such host"]


def test_of_what_pip_says_few_lines_are_shown(capfd):
    lines = [f"Collecting package{number}" for number in range(200)]
    lines += ["  Downloading torch.whl (846.1 MB)", "  Downloading six.whl (12.3 MB)", "  Downloading x.whl (846.1 kB)"]
    lines += ["Installing collected packages: torch, six"]
    code, said = bootstrap.run_pip([sys.executable, "-c", f"print(*{lines}, sep='\\n'); exit(3)"])
    assert (code, said) == (3, lines)
    assert capfd.readouterr().out.split("\n") == [
        "  Downloading torch.whl (846.1 MB)",
        "  Installing collected packages: torch, six",
        "",
    ]


@pytest.mark.parametrize(("shared", "for_cpu"), [(True, False), (False, True), (False, False)])
def test_size_and_time_are_said_beforehand(shared, for_cpu):
    assert re.search(r"GB to download, [\d.]+ GB of disk, .* minutes", bootstrap.announcement(shared, for_cpu))


@pytest.mark.parametrize(
    ("asked", "gpu", "for_cpu"),
    [("", True, False), ("", False, True), ("cuda", False, False), ("cpu", True, True)],
)
def test_torch_is_the_build_that_suits_the_machine(monkeypatch, asked, gpu, for_cpu):
    monkeypatch.setenv(bootstrap.TORCH, asked)
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    assert bootstrap.wants_cpu_torch() == for_cpu


def test_another_build_of_torch_is_refused(monkeypatch):
    monkeypatch.setenv(bootstrap.TORCH, "rocm")
    with pytest.raises(SystemExit, match="FLASHLADDER_TORCH=rocm is no build of torch: cpu or cuda"):
        bootstrap.wants_cpu_torch()


def test_where_there_is_no_torch_for_cpus_pip_goes_on(monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(bootstrap, "try_pip", lambda *arguments: asked.append(arguments) or ["no such host"])
    bootstrap.install_cpu_torch()
    assert asked == [("torch", "--no-deps", "--index-url", bootstrap.CPU_WHEELS, "--retries", "1")]
    assert "no torch for CPUs" in capfd.readouterr().out


@pytest.mark.parametrize("maker", ["", "/nowhere/python3", sys.executable])
def test_an_environment_is_not_made_around_itself(monkeypatch, tmp_path, maker):
    """As `make quick` in an active .venv, whose python3 it is."""
    calls = []
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "MAKER", tmp_path / "maker")
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, words: calls.append((path, words)))
    bootstrap.leave_environment(bootstrap.TESTS)
    assert not calls
    if maker:
        (tmp_path / "maker").write_text(maker)
    monkeypatch.setattr(bootstrap.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(bootstrap.sys, "_base_executable", "/usr/bin/python3")
    bootstrap.leave_environment(bootstrap.TESTS)
    outer = sys.executable if maker == sys.executable else "/usr/bin/python3"
    assert calls == [(outer, [outer, str(bootstrap.ROOT / "tools" / "bootstrap.py"), bootstrap.TESTS])]


def test_the_extras_are_setups():
    setup = (bootstrap.ROOT / "setup.py").read_text()
    assert all(f'        "{extra}": ' in setup for extra in (bootstrap.TOOLS, bootstrap.TESTS))


@pytest.mark.parametrize(("release", "will_do"), [("11.8", False), ("12.0", True), ("13.2", True), (None, False)])
def test_an_installation_brings_a_compiler_where_none_will_do(tmp_path, monkeypatch, release, will_do):
    setup = bootstrap.ROOT / "setup.py"
    beginning = setup.read_text().partition("LACKING = ")[0]
    exec(compile(beginning, "setup.py", "exec"), names := {"__file__": str(setup)})
    names["TOOLKITS"] = [str(tmp_path)]
    monkeypatch.setenv("PATH", "/nowhere")
    if release:
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
    assert names["has_nvcc"]() == will_do


def test_another_checkouts_environment_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    bootstrap.VENV.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        SystemExit, match=r"\.venv is a link to the environment of another checkout, .*/elsewhere: delete it"
    ):
        bootstrap.main()


def test_up_to_date_environment_is_left_alone(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / "python")
    (tmp_path / "python").symlink_to(sys.executable)
    for name in ("check_machine", "make_environment", "pip_install"):
        monkeypatch.setattr(bootstrap, name, lambda *arguments, name=name: made.append(name))
    monkeypatch.setattr(bootstrap, "missing_extras", list)
    monkeypatch.setattr(bootstrap, "has_usable_torch", lambda: True)
    bootstrap.main()
    assert made == ["check_machine", "make_environment", "pip_install"]
    bootstrap.main()
    assert len(made) == 3
    (tmp_path / "python").unlink()
    bootstrap.main()
    assert len(made) == 6, "its interpreter is gone"
    (tmp_path / "python").symlink_to(sys.executable)
    bootstrap.main()
    assert len(made) == 6
    for name in bootstrap.INPUTS:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes((bootstrap.ROOT / name).read_bytes())
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "copy")
    bootstrap.main()
    assert len(made) == 9, "it was copied with its checkout"
    bootstrap.main(bootstrap.TESTS)
    assert made[9:] == ["pip_install"], "the tests need more, in the same environment"
    bootstrap.main()
    bootstrap.main(bootstrap.TESTS)
    assert len(made) == 10
