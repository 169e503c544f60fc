import subprocess
from pathlib import Path

import pytest

from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.paths import CUDA_HEADERS, VERSIONS


@pytest.fixture(scope="session")
def compile_kernels(tmp_path_factory):
    """The PTX of a source beside this file, for an arch."""
    compiled = {}

    def compile_for(arch, source="kernels.cu"):
        if (arch, source) not in compiled:
            compiled[arch, source] = compiled_to("ptx", arch, source, tmp_path_factory).read_text()
        return compiled[arch, source]

    return compile_for


def compiled_to(form, arch, source, tmp_path_factory):
    """A file of a source beside this one, as PTX or as a cubin."""
    tools, target = toolchain(), tmp_path_factory.mktemp(form) / f"{arch}.{form}"
    flags = ["-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-ccbin", tools.host_compiler, f"-{form}"]
    flags += [f"-I{folder}" for folder in (CUDA_HEADERS, VERSIONS / "forward")]
    subprocess.run([tools.nvcc, *flags, Path(__file__).with_name(source), "-o", target], check=True)
    return target


@pytest.fixture(scope="session")
def kernels(compile_kernels):
    """The PTX of kernels.cu for sm_80."""
    return compile_kernels("sm_80")
