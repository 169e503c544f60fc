"""A wheel with kernels in it, as pip makes it: small, and of use where there is no compiler."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashladder.common.paths import ROOT

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
ARCHS = "8.0;9.0a"
MOST_BYTES = 50 * 10**6
IS_WHOLE = (
    os.environ.get("FLASHLADDER_TESTS") == "all"
)  # else with a quarter of the kernels, for the time that they take
KINDS, QUARTER = '(("bf16", "fp16"), (64, 128),', '(("bf16",), (128,),'
PARTS = ("common", "configs", "tools", "tuner", "versions", *(path.name for path in ROOT.glob("*.*") if path.is_file()))


def pip(*words, **environment):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def copy(folder):
    """Of the checkout, as pip builds in the folder that it is given."""
    folder.mkdir()
    for name in (*PARTS, "LICENSE"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copied(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    checkout = copy(folder / "checkout")
    if not IS_WHOLE:
        ahead = checkout / "common" / "runtime" / "ahead.py"
        text = ahead.read_text()
        assert KINDS in text
        ahead.write_text(text.replace(KINDS, QUARTER))
    built = ("wheel", checkout, "--no-build-isolation", "--no-deps", "-w", folder)
    done = pip(*built, FLASHLADDER_ARCHS=ARCHS)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    refused = pip(*built, FLASHLADDER_ARCHS="9.0")
    assert refused.returncode
    assert "FLASHLADDER_ARCHS=9.0: a GPU of architecture 9.0 runs kernels for 9.0a" in refused.stdout + refused.stderr
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    done = pip("install", "--no-deps", "--target", folder, wheel)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_small(wheel, capsys):
    with capsys.disabled():
        print(f"\n{wheel.stat().st_size / 1e6:.2f} MB for {ARCHS}")
    assert wheel.stat().st_size <= MOST_BYTES // (1 if IS_WHOLE else 4)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_calls_need_no_compiler(installed, gpu, tmp_path):
    """Every kind of tensors that `attention` takes of those that the wheel is for; the others, and calls of caches, by
    chance. The driver is a stand-in, which is handed the cubins."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "FLASHLADDER_CUDA": str(tmp_path),  # a toolkit without anything
        "FLASHLADDER_CACHE": str(tmp_path / "cache"),
    }
    script = [sys.executable, HERE / "support" / "use_prebuilt.py", gpu, *([] if IS_WHOLE else ["quarter"])]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"flashladder of {installed}" in done.stdout
    kernels, launches = map(int, re.findall(r"(\d+) (?:kernels|launches)", done.stdout))
    least = (16 if gpu == "a100" else 8) // (
        1 if IS_WHOLE else 4
    )  # Hopper's rung has no kernel of its own without the log-sum-exp
    assert least <= kernels <= 2 * least, "one for short keys, and one for long ones where winners differ"
    assert launches > kernels
    (modules,) = re.findall(r"all calls: (\d+) modules", done.stdout)
    assert int(modules) > 3 * kernels
    assert "refused without a compiler: no usable nvcc" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_without_the_variable_there_is_none(tmp_path):
    stale = copy(tmp_path / "checkout") / "build" / "lib" / "flashladder" / "prebuilt" / "old"
    stale.mkdir(parents=True)
    done = pip(
        "wheel", tmp_path / "checkout", "--no-build-isolation", "--no-deps", "-w", tmp_path, FLASHLADDER_ARCHS=""
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True).stdout
    assert "flashladder/py.typed" in names
    assert "flashladder/common/runtime/ahead.py" in names
    assert "flashladder/common/runtime/fast_path.cpp" in names
    assert "flashladder/common/runtime/node.cpp" in names
    assert "flashladder/common/problem/families/trained.npz" in names
    assert "prebuilt/" not in names.replace("common/compiler/prebuilt.py", "")


@pytest.mark.parametrize("archs", ["8.0", ""])
def test_what_a_build_asks_pip_for(archs, tmp_path):
    """pip makes an environment for a build; kernels need a compiler there, if the machine has none."""
    command = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    environment = {"PATH": "/usr/bin:/bin", "FLASHLADDER_ARCHS": archs}
    checkout = copy(tmp_path / "checkout")
    asked = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=environment, cwd=checkout
    )
    assert asked.returncode == 0, asked.stderr
    assert ("ninja" in asked.stdout) == bool(archs)
    has_nvcc = any(Path(folder, "nvcc").exists() for folder in ("/usr/bin", "/bin", "/usr/local/cuda/bin"))
    assert ("cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.*" in asked.stdout) == (bool(archs) and not has_nvcc)


CALLS = """
import sys
import torch

sys.modules |= dict.fromkeys(("pandas", "matplotlib", "jinja2", "pynvml", "optuna"))  # as if they were not there
import flashladder
q, pages = torch.randn(1, 20, 2, 64).bfloat16(), torch.zeros(2, 3, 16, 2, 64).bfloat16()
o = flashladder.attention(q, q, q, causal=True)
table, keys, starts = torch.tensor([[2, 0]]).int(), torch.tensor([20]).int(), torch.tensor([0, 20]).int()
flashladder.reshape_and_cache(q[0], q[0], *pages, torch.cat((torch.arange(32, 48), torch.arange(4))))
options = {"block_table": table, "causal": True}
packed = flashladder.flash_attn_varlen_func(q[0], *pages, starts, None, 20, 32, seqused_k=keys, **options)
cached = flashladder.flash_attn_with_kvcache(q, *pages, cache_seqlens=keys, **options)
for x in (packed, cached[0]):
    assert (x - o[0]).abs().max() < 0.02
print(flashladder.__file__)
"""


def test_a_slim_one_has_the_calls_without_the_laboratory(tmp_path):
    built = ("wheel", copy(tmp_path / "checkout"), "--no-build-isolation", "--no-deps", "-w", tmp_path)
    done = pip(*built, FLASHLADDER_SLIM="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    done = pip("install", "--no-deps", "--target", tmp_path / "installed", wheel)
    assert done.returncode == 0, done.stderr
    (found,) = importlib.metadata.distributions(name="flashladder", path=[str(tmp_path / "installed")])
    needed = {re.split(r"[^\w-]", each)[0] for each in found.requires if "extra ==" not in each}
    assert needed >= {"torch", "PyYAML"}
    assert not needed & {"pandas", "matplotlib", "jinja2", "nvidia-ml-py", "typing-extensions", "optuna"}
    assert {each.group for each in found.entry_points} == {"vllm.general_plugins", "sglang.srt.plugins"}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "installed"))
