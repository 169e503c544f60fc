"""The sources of others' kernels at their pinned commits, and what nvcc makes of them."""

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
import yaml

from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.paths import cache_dir

SOURCES = yaml.safe_load(Path(__file__).with_name("sources.yaml").read_text())
FETCH_SECONDS = 300
# What does not compile without it: assertions that name what is not there (fast.cu), or call a function (CUTLASS).
FLAGS = ("-std=c++20", "-O3", "-lineinfo", "-DNDEBUG", "-w", "--expt-relaxed-constexpr")


def sources(name):
    """The folder of a repository's files at its commit; the test is skipped where they cannot be had."""
    asked = SOURCES[name]
    folder = cache_dir() / "public" / f"{name}-{asked['commit'][:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(folder.parent, f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other tests may want them too
        try:
            if not folder.exists():
                _extract(_repository(name), asked, folder)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error).encode()).decode().strip().splitlines()
            pytest.skip(
                f"the sources of {name} are not there, commit {asked['commit'][:12]} of {asked['url']}: {said[-1]}. "
                f"FLASHLADDER_PUBLIC=DIR names clones: DIR/{name} or DIR/{name}.git"
            )
    return folder


def _repository(name):
    """A clone that was named, or one with nothing but the commit."""
    if named := os.environ.get("FLASHLADDER_PUBLIC"):
        found = [path for path in (Path(named, name), Path(named, f"{name}.git")) if path.exists()]
        if not found:
            raise FileNotFoundError(f"neither {name} nor {name}.git in {named}")
        return found[0]
    folder = cache_dir() / "public" / f"{name}.git"
    _git("init", "--quiet", "--bare", folder)
    asked = SOURCES[name]
    _git("-C", folder, "fetch", "--quiet", "--depth=1", asked["url"], asked["commit"])
    return folder


def _extract(repository, asked, folder):
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        archive = part / "files.tar"
        _git("-C", repository, "archive", f"--output={archive}", asked["commit"], "--", *asked["paths"])
        with tarfile.open(archive) as files:
            files.extractall(part / "files", filter="data")
        (part / "files").rename(folder)
    finally:
        shutil.rmtree(part)


def _git(*arguments):
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    subprocess.run(["git", *arguments], check=True, capture_output=True, timeout=FETCH_SECONDS, env=environment)


def compiled(source, includes, folder, is_program=False):
    """The PTX of a source beside this file; and the path of the program that it makes, None if it is none."""
    tools, source = toolchain(), Path(__file__).with_name(source)
    ptx, program = folder / f"{source.stem}.ptx", folder / source.stem if is_program else None
    flags = [*FLAGS, *(f"-I{path}" for path in includes), "-ccbin", tools.host_compiler]
    if is_program:  # one call makes both, as nvcc takes a minute and more
        flags += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", "--keep", "--keep-dir", folder, "-o", program]
        flags += ["-gencode=arch=compute_90a,code=compute_90a"]
    else:
        flags += ["-arch=sm_90a", "-ptx", "-o", ptx]
    subprocess.run([tools.nvcc, *flags, source], check=True)
    return ptx.read_text(), program
