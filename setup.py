"""The package `flashladder` is this folder: `flashladder.common.compiler` is the folder common/compiler.

FLASHLADDER_ARCHS="8.0;9.0a" builds kernels into the package, for machines without a compiler: common/runtime/ahead.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ARCHS = os.environ.get("FLASHLADDER_ARCHS", "").strip()

SUBPACKAGES = find_namespace_packages(include=["tools.commands*", "common*", "tuner*"], exclude=["common.cuda*"])

MODELS = ("transformers>=5.23", "diffusers>=0.42", "kernels>=0.17")  # attention goes into them; the tests try it
TUNER = ["optuna>=5,<6", "psycopg[binary]"]

# The CUDA compiler, for machines without a toolkit. Name all five parts: without them newer wheels are pulled, whose
# ptxas refuses the PTX of this nvcc.
COMPILER = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"
TOOLKITS = [os.environ.get("FLASHLADDER_CUDA"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
HAS_NVCC = shutil.which("nvcc") or any(Path(folder, "bin", "nvcc").exists() for folder in TOOLKITS if folder)
# What the kernels' build needs, in the environment that pip makes for it.
BUILD = ["PyYAML", "pydantic>=2", "rich", "ninja", "cuda-pathfinder", *([] if HAS_NVCC else [COMPILER])]


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
    version="0.1.0",
    description="A laboratory for attention kernels: CUDA kernels, one idea a rung, measured beside the official ones",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    script_name="setup.py",  # tells setuptools that this file is not a module of the package
    package_dir={"flashladder": "."},
    packages=["flashladder", *(f"flashladder.{name}" for name in SUBPACKAGES)],
    package_data={
        "flashladder": [
            "versions/**/*",
            "common/cuda/**/*",
            "common/runtime/*.cpp",
            "common/report/templates/*",
            "common/runtime/*.h",
            "configs/**/*",
        ]
    },
    exclude_package_data={"flashladder": ["versions/private/**/*"]},
    cmdclass={"build_py": BuildWithKernels},
    setup_requires=BUILD if ARCHS else [],
    entry_points={"console_scripts": ["flashladder=flashladder.tools.commands:main"]},
    install_requires=[
        "torch>=2.9",
        "numpy>=2",
        "pandas",
        "matplotlib",
        "jinja2",
        "PyYAML",
        "pydantic>=2",
        "rich",
        "ninja",
        "nvidia-ml-py",
        "cuda-pathfinder",
        "cuda-bindings>=12.9,<14",
    ],
    extras_require={
        "compiler": [COMPILER],
        "disassemblers": ["nvidia-cuda-cuobjdump==13.*", "nvidia-cuda-nvdisasm==13.*"],
        # No pin for triton: a CUDA build of torch brings the one that it wants. A CPU build brings none.
        "references": ["triton"],
        "tuner": TUNER,
        "watch": ["optuna-dashboard"],
        "dev": [
            *("setuptools>=77", "pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "types-PyYAML", "pre-commit"),
            "triton",
            *(f'{package}; python_version >= "3.11"' for package in MODELS),
            *TUNER,
        ],
    },
)
