import subprocess
from pathlib import Path

import pytest

from flashladder.common.toolchain import toolchain


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The PTX of kernels.cu."""
    tools, target = toolchain(), tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    source = Path(__file__).with_name("kernels.cu")
    flags = ["-std=c++17", "-O3", "-lineinfo", "-arch=sm_80", "-ccbin", tools.host_compiler]
    subprocess.run([tools.nvcc, *flags, "-ptx", source, "-o", target], check=True)
    return target.read_text()
