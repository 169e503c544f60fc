"""Makes .venv, the environment that everything here runs in: `python3 tools/bootstrap.py`.

Needs Python 3.10, venv and g++; the rest is installed by pip, at the versions of constraints.txt. A torch or a CUDA
toolkit that the machine already has is used instead. What tests and lint need besides comes with `bootstrap.py dev`.
Does nothing when .venv is up to date, and is of this folder: in a copied or moved checkout it is made anew.
"""

from __future__ import annotations  # for the sake of the message that an older Python gets

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "flashladder.stamp"  # holds the digest of the files that the environment was made from
INPUTS = ("setup.py", "pyproject.toml", "constraints.txt", "tools/bootstrap.py")
MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 9)
TOOLS, TESTS = "tuner", "dev"  # the extras of setup.py: what the tools need, and what tests and lint need besides
LARGE_MB = 50  # a download that a line tells of where there is no terminal
LAST_LINES = 20  # of what pip said, where it failed


def main(extra: str = TOOLS) -> None:
    if VENV.is_symlink():
        sys.exit(
            f"{VENV} is a link to the environment of another checkout, {VENV.resolve()}: delete it, then make venv"
        )
    decisive = [os.fsencode(ROOT), *((ROOT / name).read_bytes() for name in INPUTS)]
    digest = hashlib.sha256(b"".join(decisive)).hexdigest()
    there = STAMP.read_text().split() if PYTHON.exists() and STAMP.exists() else []
    if there[:1] == [digest] and extra in there:
        return
    check_machine()
    shared = has_usable_torch()
    print(announcement(shared, extra), flush=True)
    make_environment(shared)
    pip_install("-e", f"{ROOT}[{extra}]")
    extras = missing_extras()
    if extras:
        pip_install("-e", f"{ROOT}[{','.join(extras)}]")
    STAMP.write_text(" ".join([digest, TOOLS, *([TESTS] if extra == TESTS else [])]))


def announcement(shared: bool, extra: str) -> str:
    """What is about to happen, what it takes, and how long."""
    torch = (
        "around the installed torch: 0.5 GB of disk"
        if shared
        else "with torch: 1.3 GB of disk where pip has a build for CPUs, several GB with the build for CUDA"
    )
    tests = ", and 1.3 GB for tests and lint, Triton above all" if extra == TESTS else ""
    return f"Making {VENV} {torch}{tests}. This happens once, and takes minutes."


def check_machine() -> None:
    """Stops with one clear message for each thing that pip cannot bring."""
    lacks = []
    if sys.version_info < MINIMUM_PYTHON:
        wanted = ".".join(map(str, MINIMUM_PYTHON))
        lacks.append(
            f"Python {wanted} or later, not {sys.version.split()[0]}: make ... PYTHON=/path/to/a/newer/python3"
        )
    elif importlib.util.find_spec("ensurepip") is None:
        lacks.append("Python's venv and ensurepip: sudo apt-get install python3-venv")
    if shutil.which(os.environ.get("NVCC_CCBIN", "g++")) is None:
        lacks.append("a C++ compiler, which nvcc needs: sudo apt-get install g++")
    if lacks:
        sys.exit("FlashLadder needs\n" + "\n".join(f"  - {lack}" for lack in lacks))


def has_usable_torch() -> bool:
    """Whether the Python that runs this file has a torch that will do."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= MINIMUM_TORCH


def make_environment(shared: bool) -> None:
    """An environment of its own; a shared one also sees the packages of the Python that runs this file."""
    builder = venv.EnvBuilder(
        with_pip=True, symlinks=True, system_site_packages=shared, clear=VENV.exists() and not PYTHON.exists()
    )
    builder.create(VENV)
    if shared and sys.prefix != sys.base_prefix:  # inside an environment, whose packages are not the system's
        for folder in (VENV / "lib").glob("python*/site-packages"):
            (folder / "outer_environment.pth").write_text(sysconfig.get_path("purelib"))


def pip_install(*arguments: str) -> None:
    """pip in .venv, at the tested versions of all packages but those that an outer environment lends."""
    lent = lent_packages()
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if normal(line) not in lent]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        command = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--constraint", constraints.name]
        code, said = run_pip([*command, *arguments])
    if code:
        print(*said[-LAST_LINES:], sep="\n")
        sys.exit(
            "pip could not install what FlashLadder needs; its last lines say why. Without a network, point pip at "
            "a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make venv"
        )


def run_pip(command: list[str]) -> tuple[int, list[str]]:
    """Its exit code and what it said. One line of the terminal shows what it does; elsewhere, large downloads do."""
    said = []
    is_terminal = sys.stdout.isatty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout
        for line in pip.stdout:
            said.append(line.rstrip())
            megabytes = re.search(r"Downloading .*\((\d+)[\d.]* MB\)", line)
            if is_terminal:
                print(f"\r\033[K{said[-1].strip()[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            elif (megabytes and int(megabytes[1]) >= LARGE_MB) or line.startswith("Installing"):
                print(f"  {said[-1].strip()[:110]}", flush=True)
    if is_terminal:
        print("\r\033[K", end="", flush=True)
    return pip.returncode, said


def lent_packages() -> set[str]:
    """The names of the packages that .venv sees but does not hold."""
    return {
        normal(name)
        for name in run_python(
            "import sys, importlib.metadata as metadata\n"
            "for package in metadata.distributions():\n"
            "    if not str(package.locate_file('')).startswith(sys.prefix): print(package.metadata['Name'])"
        )
    }


def missing_extras() -> list[str]:
    """The extras of setup.py that bring the CUDA tools this machine lacks."""
    return run_python("from flashladder.common.compiler.toolchain import missing_extras; print(*missing_extras())")


def run_python(code: str) -> list[str]:
    """The words that the Python of .venv prints."""
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def normal(requirement: str) -> str:
    """The package's name in a line such as `PyYAML==6.0.3`, as pip compares names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>;\[ ]", requirement)[0]).lower()


if __name__ == "__main__":
    main(*sys.argv[1:2])
