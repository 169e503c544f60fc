import subprocess
from pathlib import Path

import pytest

from flashladder.common.build.toolchain import toolchain


@pytest.fixture(scope="session")
def compile_kernels(tmp_path_factory):
    """The PTX of kernels.cu for an arch."""
    tools, source = toolchain(), Path(__file__).with_name("kernels.cu")
    compiled = {}

    def compile_for(arch):
        if arch not in compiled:
            target = tmp_path_factory.mktemp("ptx") / f"{arch}.ptx"
            flags = ["-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-ccbin", tools.host_compiler]
            subprocess.run([tools.nvcc, *flags, "-ptx", source, "-o", target], check=True)
            compiled[arch] = target.read_text()
        return compiled[arch]

    return compile_for


@pytest.fixture(scope="session")
def kernels(compile_kernels):
    """The PTX of kernels.cu for sm_80."""
    return compile_kernels("sm_80")
