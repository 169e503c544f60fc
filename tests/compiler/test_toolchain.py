import pytest

from flashladder.common.compiler import toolchain as toolchain_module
from flashladder.common.compiler.toolchain import find_host_compiler, find_ninja, find_tool, missing_extras, toolchain
from flashladder.common.errors import ToolchainError


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without any CUDA tool, but with a g++."""
    for variable in ("FLASHLADDER_CUDA", "CUDA_HOME", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain_module, "SYSTEM_TOOLKIT", tmp_path / "system")
    monkeypatch.setattr(toolchain_module, "_in_wheels", lambda name: tmp_path / "wheels" / name)
    write_tool(tmp_path / "path" / "g++", "g++ 12")
    toolchain.cache_clear()
    yield tmp_path
    toolchain.cache_clear()


def write_tool(path, says, status=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def write_toolkit(folder, release, tools=("nvcc", "ptxas")):
    for tool in tools:
        write_tool(folder / "bin" / tool, f"{tool}: Cuda compilation tools, release {release}, V{release}.88")
    return folder


def test_tools_are_taken_from_the_first_place_that_has_them(bare, monkeypatch):
    write_tool(bare / "wheels" / "nvcc", "release 13.0")
    assert find_tool("nvcc") == bare / "wheels" / "nvcc"
    system = write_toolkit(bare / "system", "13.0")
    assert find_tool("nvcc") == system / "bin" / "nvcc"
    wrapper = write_tool(bare / "path" / "nvcc", "release 13.0")
    assert find_tool("nvcc") == wrapper
    home = write_toolkit(bare / "home", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_tool("nvcc") == home / "bin" / "nvcc"
    explicit = write_toolkit(bare / "explicit", "13.0")
    monkeypatch.setenv("FLASHLADDER_CUDA", str(explicit))
    assert find_tool("nvcc") == explicit / "bin" / "nvcc"


def test_each_tool_is_looked_for_separately(bare):
    write_toolkit(bare / "system", "13.0")
    write_tool(bare / "wheels" / "nvdisasm", "release 13.2")
    assert find_tool("ptxas") == bare / "system" / "bin" / "ptxas"
    assert find_tool("nvdisasm") == bare / "wheels" / "nvdisasm"
    assert missing_extras() == ["disassemblers"]


def test_missing_compiler_names_every_place_and_the_remedy(bare):
    with pytest.raises(ToolchainError) as error:
        toolchain()
    for part in ("no usable nvcc", "$PATH: it has none", "system/bin/nvcc is not there", "wheels/nvcc is not there"):
        assert part in str(error.value)
    assert "pip install 'flashladder[compiler]'" in str(error.value)
    assert missing_extras() == ["compiler", "disassemblers"]


def test_explicit_toolkit_without_a_compiler_is_not_replaced(bare, monkeypatch):
    write_toolkit(bare / "system", "13.0", tools=("nvcc", "ptxas", "nvdisasm"))
    monkeypatch.setenv("FLASHLADDER_CUDA", str(bare / "empty"))
    with pytest.raises(ToolchainError, match=r"\$FLASHLADDER_CUDA: .*empty/bin/nvcc is not there.*or unset it"):
        find_tool("nvcc")
    assert find_tool("nvdisasm") == bare / "system" / "bin" / "nvdisasm"


def test_old_or_broken_compiler_is_passed_over(bare):
    write_tool(bare / "path" / "nvcc", "release 11.8")
    with pytest.raises(ToolchainError, match=r"path/nvcc is CUDA 11.8, older than 12.0"):
        find_tool("nvcc")
    write_tool(bare / "system" / "bin" / "nvcc", "broken", status=1)
    with pytest.raises(ToolchainError, match=r"system/bin/nvcc is there but does not run"):
        find_tool("nvcc")
    write_tool(bare / "wheels" / "nvcc", "release 13.0")
    assert find_tool("nvcc") == bare / "wheels" / "nvcc"


def test_tool_that_names_no_release_is_refused(bare):
    write_tool(bare / "path" / "nvcc", "hello")
    with pytest.raises(ToolchainError, match="path/nvcc --version names no release: hello"):
        find_tool("nvcc")


def test_ptxas_is_of_the_same_release_as_nvcc(bare):
    write_tool(bare / "path" / "nvcc", "release 13.0")
    write_tool(bare / "path" / "ptxas", "release 12.9")
    with pytest.raises(ToolchainError, match=r"no usable ptxas .*path/ptxas is CUDA 12.9, but nvcc is 13.0"):
        toolchain()
    write_tool(bare / "wheels" / "ptxas", "release 13.0")
    assert toolchain().ptxas == bare / "wheels" / "ptxas"
    assert toolchain().release == "13.0"


def test_identity_follows_versions_and_flags(bare, monkeypatch):
    write_toolkit(bare / "system", "13.0")
    before = toolchain().identity
    assert "V13.0.88" in before
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DX")
    toolchain.cache_clear()
    assert toolchain().identity != before


def test_host_compiler(bare, monkeypatch):
    assert find_host_compiler() == bare / "path" / "g++"
    monkeypatch.setenv("NVCC_CCBIN", "clang++-99")
    with pytest.raises(ToolchainError, match=r"clang\+\+-99 is not on PATH.*apt-get install g\+\+"):
        find_host_compiler()


def test_ninja_comes_with_its_wheel_or_is_on_path(bare, monkeypatch):
    assert find_ninja().name == "ninja"
    monkeypatch.setattr(toolchain_module.importlib.metadata, "files", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install ninja"):
        find_ninja()
    ninja = write_tool(bare / "path" / "ninja", "1.13")
    assert find_ninja() == ninja


def test_the_toolchain_of_this_machine_works():
    toolchain.cache_clear()
    found = toolchain()
    assert float(found.release) >= 12.0
    assert "release" in found.identity
