"""The package `flashladder` is this folder: `flashladder.common.build` is the folder common/build."""

from setuptools import find_namespace_packages, setup

SUBPACKAGES = find_namespace_packages(include=["tools.commands*", "common*", "tuner*"], exclude=["common.cuda*"])

TUNER = ["optuna>=5,<6", "psycopg[binary]"]

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
    package_data={"flashladder": ["versions/**/*", "common/cuda/**/*", "common/dashboard/page.*", "configs/**/*"]},
    exclude_package_data={"flashladder": ["versions/private/**/*"]},
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
        # The CUDA compiler, for machines without a toolkit. Name all five parts: without them newer wheels are
        # pulled, whose ptxas refuses the PTX of this nvcc.
        "compiler": ["cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"],
        "disassemblers": ["nvidia-cuda-cuobjdump==13.*", "nvidia-cuda-nvdisasm==13.*"],
        # No pin for triton: a CUDA build of torch brings the one that it wants. A CPU build brings none.
        "references": ["triton"],
        "tuner": TUNER,
        "watch": ["optuna-dashboard"],
        "dev": [
            *("setuptools>=77", "pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "types-PyYAML", "pre-commit"),
            "triton",
            'transformers>=5.23; python_version >= "3.11"',
            *TUNER,
        ],
    },
)
