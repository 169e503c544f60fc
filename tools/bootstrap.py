"""Makes .venv, the environment that everything here runs in: `python3 tools/bootstrap.py`.

Needs Python 3.10, venv and g++; the rest is installed by pip, at the versions of constraints.txt. A torch or a CUDA
toolkit that the machine already has is used instead. Without a GPU, torch is the build for CPUs. What tests and lint
need besides comes with `bootstrap.py dev`. Does nothing when .venv is up to date, and is of this folder: in a copied or
moved checkout it is made anew. Where it runs in .venv itself, the Python that made .venv takes over.
"""

from __future__ import annotations  # for the sake of the message that an older Python gets

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "flashladder.stamp"  # holds the digest of the files that the environment was made from
MAKER = VENV / "flashladder.python"  # names the Python that made the environment
INPUTS = ("setup.py", "common/packages.py", "pyproject.toml", "constraints.txt", "tools/bootstrap.py")
MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = tuple(map(int, runpy.run_path(str(ROOT / "common/packages.py"))["OLDEST"]["torch"].split(".")))
TOOLS, TESTS = "tuner", "dev"  # the extras of setup.py: what the tools need, and what tests and lint need besides
TORCH = "FLASHLADDER_TORCH"  # "cpu" or "cuda" decides which build of torch is installed
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
FOR_TESTS = "0.5 GB to download, 1.3 GB of disk"
LARGE_MB = 50  # a download that a line tells of where there is no terminal
WITHOUT_COMPILER = (
    "Without one nvcc compiles no kernel. What runs then, by `pip install .`: the Python references (flashladder run "
    "py_fa2), Triton's on a GPU, and attention() with kernels that another machine built (docs/install.md)"
)
LAST_LINES = 20  # of what pip said, where it failed


def main(extra: str = TOOLS) -> None:
    if VENV.is_symlink():
        sys.exit(
            f"{VENV} is a link to the environment of another checkout, {VENV.resolve()}: delete it, then make venv"
        )
    leave_environment(extra)
    decisive = [os.fsencode(ROOT), *((ROOT / name).read_bytes() for name in INPUTS)]
    digest = hashlib.sha256(b"".join(decisive)).hexdigest()
    there = STAMP.read_text().split() if PYTHON.exists() and STAMP.exists() else []
    if there[:1] == [digest] and extra in there:
        return
    if there[:1] == [digest]:
        print(f"Adding what tests and lint need to {VENV}: {FOR_TESTS}.", flush=True)
    else:
        begin()
    pip_install("-e", f"{ROOT}[{extra}]")
    extras = missing_extras()
    if extras:
        pip_install("-e", f"{ROOT}[{','.join(extras)}]")
    STAMP.write_text(" ".join([digest, TOOLS, *([TESTS] if extra == TESTS else [])]))


def begin() -> None:
    """An environment with torch: the machine's own, or the build that suits it."""
    check_machine()
    shared = has_usable_torch()
    for_cpu = not shared and wants_cpu_torch()
    print(announcement(shared, for_cpu), flush=True)
    make_environment(shared)
    if for_cpu:
        install_cpu_torch()


def leave_environment(extra: str) -> None:
    """Goes on in the Python that made .venv where this one is .venv's own: an environment is not made around itself."""
    if Path(sys.prefix).resolve() != VENV:
        return
    maker = MAKER.read_text() if MAKER.exists() else ""
    outer = maker if Path(maker).is_file() else str(getattr(sys, "_base_executable", ""))
    os.execv(outer, [outer, str(Path(__file__).resolve()), extra])


def announcement(shared: bool, for_cpu: bool) -> str:
    """What is about to happen, what it takes, and how long."""
    if shared:
        takes = "around the installed torch: 0.3 GB to download, 0.5 GB of disk, about 2 minutes"
    elif for_cpu:
        why = f"{TORCH} says so" if os.environ.get(TORCH) else f"no GPU was found; {TORCH}=cuda takes the one for CUDA"
        takes = f"with torch's build for CPUs ({why}): 0.5 GB to download, 1.3 GB of disk, about 3 minutes"
    else:
        takes = (
            f"with torch's build for CUDA ({TORCH}=cpu takes the one for CPUs): 2.7 GB to download, 6 GB of disk, 5 to "
            "15 minutes"
        )
    return f"Making {VENV} {takes}. This happens once."


def wants_cpu_torch() -> bool:
    """Whether torch is to be the build for CPUs: as FLASHLADDER_TORCH says, or else where there is no GPU."""
    asked = os.environ.get(TORCH, "")
    if asked not in ("", "cpu", "cuda"):
        sys.exit(f"{TORCH}={asked} is no build of torch: cpu or cuda")
    return asked == "cpu" or (not asked and not has_gpu())


def has_gpu() -> bool:
    """Whether an NVIDIA driver finds a GPU."""
    count = ctypes.c_int(0)
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


def install_cpu_torch() -> None:
    """Torch alone, from where its builds for CPUs lie. Where that fails, the build for CUDA comes with the rest."""
    if try_pip("torch", "--no-deps", "--index-url", CPU_WHEELS, "--retries", "1"):
        print(f"  no torch for CPUs by {CPU_WHEELS}: pip takes the build that its own index has", flush=True)


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
        lacks.append(f"a C++ compiler: sudo apt-get install g++. {WITHOUT_COMPILER}")
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
    MAKER.write_text(sys.executable)
    if shared and sys.prefix != sys.base_prefix:  # inside an environment, whose packages are not the system's
        for folder in (VENV / "lib").glob("python*/site-packages"):
            (folder / "outer_environment.pth").write_text(sysconfig.get_path("purelib"))


def pip_install(*arguments: str) -> None:
    """As `try_pip` does; ends with pip's last lines where that fails."""
    said = try_pip(*arguments)
    if said:
        print(*said[-LAST_LINES:], sep="\n")
        sys.exit(
            "pip could not install what FlashLadder needs; its last lines say why. Without a network, point pip at "
            "a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make venv"
        )


def try_pip(*arguments: str) -> list[str]:
    """pip in .venv, at the tested versions of all packages but those that an outer environment lends.

    Gives what pip said where it failed.
    """
    lent = lent_packages()
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if normal(line) not in lent]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        command = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--constraint", constraints.name]
        code, said = run_pip([*command, *arguments])
    return said if code else []


def run_pip(command: list[str]) -> tuple[int, list[str]]:
    """Its exit code and what it said. One line of the terminal shows what it does; elsewhere, large downloads do."""
    said = []
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed by `>&-`
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
