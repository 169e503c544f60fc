import subprocess
from pathlib import Path

import pytest

from flashladder.common.build.toolchain import toolchain


@pytest.fixture(scope="session")
def compile_kernels(tmp_path_factory):
    """The PTX of a source beside this file, for an arch."""
    tools = toolchain()
    compiled = {}

    def compile_for(arch, source="kernels.cu"):
        if (arch, source) not in compiled:
            target = tmp_path_factory.mktemp("ptx") / f"{arch}.ptx"
            flags = ["-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-ccbin", tools.host_compiler]
            subprocess.run([tools.nvcc, *flags, "-ptx", Path(__file__).with_name(source), "-o", target], check=True)
            compiled[arch, source] = target.read_text()
        return compiled[arch, source]

    return compile_for


@pytest.fixture(scope="session")
def kernels(compile_kernels):
    """The PTX of kernels.cu for sm_80."""
    return compile_kernels("sm_80")
