"""A wheel laid out as a kernel of Hugging Face's `kernels`, loaded by the real package; and what is no wheel."""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile

import pytest

from flashladder.common import console
from flashladder.common.paths import ROOT
from flashladder.tools.commands import hub

pytestmark = pytest.mark.slow

USE = """
import sys
from pathlib import Path
from kernels import get_kernel, get_local_kernel
import torch

kernel = get_local_kernel(Path(sys.argv[1])) if sys.argv[2] == "local" else get_kernel("me/flashladder", version=1)
q = torch.randn(1, 20, 2, 64).bfloat16()
heads = q.float().transpose(1, 2)
exact = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)
assert (kernel.flash_attn_func(q, q, q, causal=True).float() - exact).abs().max() < 0.02
pages, table, rows = torch.zeros(2, 3, 16, 2, 64).bfloat16(), torch.tensor([[2, 0]]).int(), torch.tensor([0]).int()
o = kernel.flash_attn_with_kvcache(  # as transformers calls it, arguments by name
    q, *pages, q, q, causal=True, softmax_scale=0.125, max_seqlen_q=20, block_table=table, cache_seqlens=rows
)
assert (o.float() - exact).abs().max() < 0.02
import flashladder
assert Path(flashladder.__file__).is_relative_to(sys.argv[1]), flashladder.__file__
assert Path(kernel.__file__).parent == Path(sys.argv[1], "build", "torch-cpu")
"""


def tool(*words):
    return console.run(hub.main, hub.parser(), [str(word) for word in words])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """As pip makes it, without kernels: tests/tools/test_wheel.py has pip make one."""
    path = tmp_path_factory.mktemp("wheel") / "flashladder-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(ROOT / "__init__.py", "flashladder/__init__.py")
        archive.writestr("flashladder-0.1.0.dist-info/METADATA", "")
        for folder in ("common", "configs", "tools/commands", "tuner", "versions"):
            for file in (ROOT / folder).rglob("*"):
                if file.is_file() and file.suffix != ".pyc":
                    archive.write(file, f"flashladder/{file.relative_to(ROOT)}")
    return path


def test_a_variant_for_each_backend(wheel, tmp_path, capsys):
    out = tmp_path / "kernel"
    assert tool(wheel, "--out", out, "--backend", "cuda", "cpu") == 0
    assert f"{out}: torch-cuda, torch-cpu, with 0 kernels" in "".join(capsys.readouterr().out.split("\n"))
    variants = sorted((out / "build").iterdir())
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    ids = set()
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"]["type"] == variant.name.removeprefix("torch-")
        ids.add(metadata["id"])
        assert sorted(each.name for each in variant.iterdir()) == ["__init__.py", "flashladder", "metadata.json"]
    assert len(ids) == 2, "each is a module of its own"


needs_kernels = pytest.mark.skipif(
    not importlib.util.find_spec("kernels"), reason="kernels is not installed: pip install kernels"
)


@needs_kernels
@pytest.mark.parametrize("way", ["local", "from the Hub"])
def test_the_real_package_loads_it(way, wheel, tmp_path, monkeypatch):
    """A local path; and a name on the Hub that is overridden by one."""
    out = tmp_path / "kernel"
    assert tool(wheel, "--out", out, "--backend", "cpu") == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"me/flashladder={out}")
    done = subprocess.run([sys.executable, "-c", USE, out, way], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@needs_kernels
def test_the_real_package_reads_its_sources(wheel, tmp_path, capfd):
    """build.toml, without a complaint; and kernel-builder copies what a variant has, by the endings that it is told."""
    from kernels._rust import Backend, Build

    assert tool(wheel, "--out", tmp_path / "source", "--source", "--backend", "cuda", "cpu") == 0
    assert tool(wheel, "--out", tmp_path / "built") == 0
    assert "source: build.toml, with 0 kernels" in "".join(capfd.readouterr().out.split("\n"))
    build = Build.open(tmp_path / "source")
    assert set(build.general.backends) == {Backend.CUDA, Backend.CPU}
    assert capfd.readouterr().err == "", "an edition of its format that is not the newest, for example"
    endings = re.search(r"pyext = \[(.*)\]", (tmp_path / "source" / "build.toml").read_text())[1]
    copied = {
        str(file.relative_to(tmp_path / "source" / "torch-ext" / "flashladder"))
        for file in (tmp_path / "source" / "torch-ext" / "flashladder").rglob("*")
        if file.is_file() and f'"{file.suffix[1:]}"' in endings
    }
    variant = tmp_path / "built" / "build" / "torch-cuda"
    built = {str(file.relative_to(variant)) for file in variant.rglob("*") if file.is_file()}
    assert copied == built - {"metadata.json"}
    assert "kernel-builder.lib.genKernelFlakeOutputs" in (tmp_path / "source" / "flake.nix").read_text()


def test_another_flashladder_is_not_taken_for_it(wheel, tmp_path):
    out = tmp_path / "kernel"
    assert tool(wheel, "--out", out) == 0
    code = f"import flashladder, runpy; runpy.run_path({str(out / 'build' / 'torch-cuda' / '__init__.py')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "already: one of the two can be used" in done.stderr


def test_what_is_no_wheel_is_refused(wheel, tmp_path, capsys):
    (tmp_path / "a.whl").write_bytes(b"PK no zip")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("numpy/__init__.py", "")
    (tmp_path / "there").mkdir()
    for words, refusal in (
        ((tmp_path / "no.whl",), "cannot lay .*no.whl out: .*No such file"),
        ((tmp_path / "a.whl",), "cannot lay .*a.whl out: File is not a zip file"),
        ((tmp_path / "b.whl",), "b.whl is no wheel of flashladder: pip wheel . --no-deps makes one"),
        ((wheel, "--out", tmp_path / "there"), "there is there already: name a new folder with --out"),
    ):
        options = () if "--out" in words else ("--out", tmp_path / "kernel")
        assert tool(*words, *options) == console.EXIT_ERROR
        assert re.search(refusal, capsys.readouterr().err)
        assert not (tmp_path / "kernel").exists()
