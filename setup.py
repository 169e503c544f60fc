"""The package `flashladder` is this folder: `flashladder.common.compiler` is the folder common/compiler.

FLASHLADDER_ARCHS="8.0;9.0a" builds kernels into the package, for machines without a compiler: common/runtime/ahead.py.
FLASHLADDER_SLIM=1 leaves the laboratory out, and what it alone needs: what models and engines call is there.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ARCHS = os.environ.get("FLASHLADDER_ARCHS", "").strip()

SLIM = os.environ.get("FLASHLADDER_SLIM", "").strip() not in ("", "0")
# The rooms of common/ that a call is made in
CALLS = ("api", "catalog", "compiler", "emulator", "expression", "problem", "runtime")

PACKAGES = ["common", *(f"common.{room}*" for room in CALLS)] if SLIM else ["tools.commands*", "common*", "tuner*"]
SUBPACKAGES = find_namespace_packages(include=PACKAGES, exclude=["common.cuda*"])
LABORATORY = ["pandas", "matplotlib", "jinja2", "typing-extensions", "nvidia-ml-py"]
ENGINES = "flashladder.common.api.frontends.engines"
COMMANDS = {"console_scripts": ["flashladder=flashladder.tools.commands:main"]}

# The CUDA compiler, for machines without a toolkit. All five parts are named, so that they are of one release: that of
# torch where it has one.
COMPILER = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.*"
DISASSEMBLERS = ["nvidia-cuda-cuobjdump==13.*", "nvidia-cuda-nvdisasm==13.*"]
TOOLKITS = [os.environ.get("FLASHLADDER_CUDA"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]

OLDEST = runpy.run_path(str(Path(__file__).with_name("common") / "packages.py"))["OLDEST"]
MODELS = [  # attention goes into them; the tests try it
    f'{package}>={OLDEST[package]}; python_version >= "3.11"' for package in ("transformers", "diffusers", "kernels")
]
REFERENCES = ["triton"]  # without a pin: a CUDA build of torch brings the one that it wants, a CPU build brings none
TUNER = ["optuna>=5,<6", "psycopg[binary]"]
WATCH = ["optuna-dashboard"]
BOOK = ["sphinx>=8", "myst-parser>=4", "furo", "sphinx-mathjax-offline"]  # the last: MathJax and its fonts


def has_nvcc() -> bool:
    """Whether this machine has a compiler that will do: CUDA 12 or later."""
    paths = [shutil.which("nvcc"), *(Path(folder, "bin", "nvcc") for folder in TOOLKITS if folder)]
    return any(path and os.access(path, os.X_OK) and release_of(path) >= 12 for path in paths)


def release_of(nvcc: str | Path) -> int:
    """The major release of CUDA; 0 where it does not say."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.", said)
    return int(found[1]) if found else 0


def version() -> str:
    """As `flashladder.__version__` has it; the package cannot be imported yet."""
    return re.search(r'^__version__ = "(.*?)"', Path(__file__).with_name("__init__.py").read_text(), re.MULTILINE)[1]


LACKING = [] if has_nvcc() else [COMPILER]
# What the kernels' build needs, in the environment that pip makes for it.
BUILD = ["PyYAML", "pydantic>=2", "rich", "ninja", "cuda-pathfinder", *LACKING]


class BuildWithKernels(build_py):
    """Copies the package, then has the copy build its kernels."""

    def run(self):
        prebuilt = Path(self.build_lib, "flashladder", "prebuilt")
        shutil.rmtree(prebuilt, ignore_errors=True)  # of an earlier build
        super().run()
        if ARCHS and not self.editable_mode:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([self.build_lib, *sys.path[1:]])}
            command = [sys.executable, "-m", "flashladder.common.runtime.ahead", str(prebuilt), ARCHS]
            if subprocess.run(command, env=environment).returncode:
                sys.exit("the kernels of FLASHLADDER_ARCHS were not built, see above")


setup(
    name="flashladder",
    version=version() + ("+slim" if SLIM else ""),
    description="A laboratory for attention kernels: CUDA kernels, one idea a rung, measured beside the official ones",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    script_name="setup.py",  # tells setuptools that this file is not a module of the package
    package_dir={"flashladder": "."},
    packages=["flashladder", *(f"flashladder.{name}" for name in SUBPACKAGES)],
    package_data={
        "flashladder": [
            "py.typed",
            "versions/**/*",
            "common/cuda/**/*",
            "common/problem/families/*.npz",
            "common/runtime/*.cpp",
            *([] if SLIM else ["common/report/templates/*"]),
            "common/runtime/*.h",
            "configs/**/*",
        ]
    },
    exclude_package_data={"flashladder": ["versions/private/**/*"]},
    cmdclass={"build_py": BuildWithKernels},
    setup_requires=BUILD if ARCHS else [],
    entry_points={
        **({} if SLIM else COMMANDS),
        "vllm.general_plugins": [f"flashladder={ENGINES}:plug_into_vllm"],
        "sglang.srt.plugins": [f"flashladder={ENGINES}:plug_into_sglang"],
    },
    install_requires=[
        f"torch>={OLDEST['torch']}",
        *("numpy>=2", "PyYAML", "pydantic>=2", "rich", "ninja"),
        *([] if SLIM else LABORATORY),
        "cuda-pathfinder",
        "cuda-bindings>=12.9,<14",
        # An installation with kernels in it is for machines without a compiler.
        *([] if ARCHS else [*LACKING, *DISASSEMBLERS]),
    ],
    extras_require={
        "compiler": [COMPILER],
        "disassemblers": DISASSEMBLERS,
        "references": REFERENCES,
        "tuner": TUNER,
        "watch": WATCH,
        "models": MODELS,
        "book": BOOK,
        "dev": [
            *("setuptools>=77", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
            *("ruff", "mypy", "types-PyYAML", "clang-format", "pre-commit"),
            *REFERENCES,
            *MODELS,
            *TUNER,
            *BOOK,
        ],
        "all": [COMPILER, *DISASSEMBLERS, *REFERENCES, *TUNER, *WATCH, *MODELS, *BOOK],
    },
)
