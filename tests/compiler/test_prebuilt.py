"""Kernels that came with the package: found before the cache, without a compiler; those that are wrong are not used."""

import json
import shutil
import subprocess
import sys
from random import Random

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.compiler import BuildRequest, build_one, prebuilt, toolchain
from flashladder.common.compiler import compile as build_module
from flashladder.common.compiler.cubin import sections
from flashladder.common.errors import ConfigError, ToolchainError
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.problem.kind import Kind
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ahead, ready
from flashladder.tests.support import fake_cuda, usual_calls
from flashladder.tests.support.tiny_ladder import make_rung

ARCH = "sm_80"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A rung, and the folder with its kernels."""
    folder = tmp_path_factory.mktemp("prebuilt")
    rung = make_rung(folder / "ladder", "07_tiny")
    configs = [rung.config(block_m=block_m) for block_m in (64, 128)]
    prebuilt.compile_into(folder / "package", [BuildRequest(rung, config, ARCH, lines=False) for config in configs])
    return rung, folder / "package"


@pytest.fixture
def rung(built, tmp_path, monkeypatch):
    """The rung; PREBUILT is a copy of the folder, and there is no compiler."""
    rung, folder = built
    shutil.copytree(folder, tmp_path / "package")
    monkeypatch.setattr(prebuilt, "PREBUILT", tmp_path / "package")

    def none():
        raise ToolchainError("no usable nvcc")

    monkeypatch.setattr(build_module, "toolchain", none)
    return rung


def place(rung, **values):
    request = BuildRequest(rung, rung.config(**values), ARCH, lines=False)
    (found,) = prebuilt.PREBUILT.glob(prebuilt.folder_name(request, prebuilt.Sources()))
    return found


def test_it_is_found_without_a_compiler(rung, capsys):
    found = prebuilt.find(rung, rung.config(block_m=128), ARCH)
    assert (found.version, found.config, found.arch) == (rung.name, rung.config(block_m=128), ARCH)
    assert found.launch.block_m == 128
    assert prebuilt.find(rung, rung.config(dtype="fp16"), ARCH) is None
    assert prebuilt.find(rung, rung.config(), "sm_86") is None
    assert capsys.readouterr().err == ""
    with pytest.raises(ToolchainError):
        build_one(rung, rung.config(dtype="fp16"), ARCH)


def test_its_machine_code_is_that_of_a_kernel_with_lines(rung, monkeypatch):
    monkeypatch.setattr(build_module, "toolchain", toolchain.toolchain)
    found, usual = prebuilt.find(rung, rung.config(), ARCH), build_one(rung, rung.config(), ARCH)
    codes = [
        {
            section.name: section.content
            for section in sections(each.cubin)
            if section.name.startswith((".text", ".nv.con"))
        }
        for each in (found, usual)
    ]
    assert codes[0] == codes[1]
    assert len(codes[0]) > 1
    assert found.kernels == usual.kernels
    assert len(found.cubin.read_bytes()) < len(usual.cubin.read_bytes())


def test_where_the_sources_lie_does_not_matter(rung, tmp_path):
    elsewhere = make_rung(tmp_path / "elsewhere", "07_tiny")
    assert prebuilt.find(elsewhere, elsewhere.config(), ARCH).config == rung.config()
    elsewhere.kernel.write_text(elsewhere.kernel.read_text() + "// edited\n")
    assert prebuilt.find(elsewhere, elsewhere.config(), ARCH) is None


@pytest.mark.parametrize("file", ["kernel.cubin", "artifact.json"])
def test_what_is_damaged_is_named_and_not_used(rung, file, capsys):
    damaged = place(rung, block_m=128) / file
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert prebuilt.find(rung, rung.config(block_m=128), ARCH) is None
    said = capsys.readouterr().err
    assert str(damaged.parent) in said
    assert "is damaged, and is not used: install flashladder again" in said
    assert prebuilt.find(rung, rung.config(), ARCH), "the other is whole"


def test_what_is_foreign_is_named_and_not_used(rung, capsys):
    """Another configuration's kernel in its place; and one whose facts were changed."""
    other, own = place(rung, block_m=64), place(rung, block_m=128)
    shutil.rmtree(own)
    shutil.copytree(other, own)
    assert prebuilt.find(rung, rung.config(block_m=128), ARCH) is None
    assert "is 07_tiny with " in capsys.readouterr().err
    facts = json.loads((other / "artifact.json").read_text())
    (other / "artifact.json").write_text(json.dumps(facts | {"arch": "sm_90a"}))
    assert prebuilt.find(rung, rung.config(block_m=64), ARCH) is None
    assert "for sm_90a, not 07_tiny for sm_80" in capsys.readouterr().err


def test_attention_looks_here_first(several, monkeypatch):
    fake_cuda.for_attention(monkeypatch, "a100")
    kind = Problem(num_heads=2, head_dim=64, dtype="fp16", causal=True, lse=False)
    rung = catalog.choice(kind, catalog.Card("sm_80", load_gpu("a100")))[0]
    default = rung.config_for(kind, load_gpu("a100")).header()
    asked = [request for request in several if request.arch == ARCH and request.config.header() == default]
    assert len(asked) == 1, "it is among what is built into a wheel"
    artifact = build_one(rung, asked[0].config, ARCH)
    looked_for = []
    monkeypatch.setattr(ready.prebuilt, "find", lambda *what: looked_for.append(what) or artifact)
    monkeypatch.setattr(ready, "build_one", None)
    q = torch.zeros(1, 10, 2, 64, dtype=torch.float16)
    attention(q, q, q, causal=True)
    assert looked_for == [(rung, asked[0].config, ARCH)]


@pytest.fixture(scope="module")
def several():
    return ahead.requests("8.0; 9.0a")


def test_what_is_built_for_an_architecture(several):
    kinds = {(each.config.dtype, each.config.head_dim, each.config.causal) for each in several}
    assert len(kinds) == 8
    any_rows = {"sm_80": {"decode/15_any_rows"}, "sm_90a": {"decode/16_rows_by_warpgroups", "decode/17_lagging_rows"}}
    steps = {"sm_80": {"decode/06_equal_parts"}, "sm_90a": {"decode/07_dependent_combine", "decode/13_cluster_combine"}}
    prompts = {"sm_80": {"24_woven_general"}, "sm_90a": {"49_every_width"}}
    for arch, names in prompts.items():
        expected = names | any_rows[arch] | steps[arch] | {"decode/12_append"}
        assert {each.version.name for each in several if each.arch == arch} == expected
    assert {each.lines for each in several} == {False}
    pages = {each.config.page_size for each in several if each.version.name in any_rows["sm_90a"]}
    assert pages == {16, 32, 64, 128, 256}
    assert len(several) == len(set(several)) < 250
    assert ahead.requests("") == []


def test_architectures_are_named_in_any_order(monkeypatch):
    monkeypatch.setattr(ahead, "kinds", lambda: [Kind("forward", "bf16", 64, 64)])
    assert ahead.requests("8.0,9.0a") == ahead.requests("8.0; 9.0a;8.0")
    assert len(ahead.requests("9.0a 8.0")) == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gpus_of_which_one_stands_for_others_choose_alike(several, arch):
    kinds = ahead.kinds()[::41]
    for gpu in (gpu for gpu in map(load_gpu, gpu_names()) if gpu.arch == arch):
        chosen = {catalog.choice(kind, catalog.Card(arch, gpu)) for kind in kinds}
        assert chosen <= {(each.version, each.config) for each in several}, gpu.name


class AskedFor(Exception):
    """A kernel that a call wants made ready."""


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_what_calls_ask_for_is_built(several, gpu, monkeypatch):
    """The calls are made, of sizes and kinds by chance; none comes to its kernel."""
    fake_cuda.for_attention(monkeypatch, gpu)

    def made(rung, config, *_):
        raise AskedFor(rung.name, config)

    monkeypatch.setattr(ready, "_made", made)
    of_list = {(each.version.name, each.config) for each in several if each.arch == load_gpu(gpu).arch}
    asked, random = set(), Random(gpu)
    for call in (*usual_calls.CALLS,) * 60:
        with pytest.raises(AskedFor) as found:
            call(random)
        assert found.value.args in of_list, call.__name__
        asked.add(found.value.args)
    assert len({name for name, _ in asked}) == len({name for name, _ in of_list})


@pytest.mark.parametrize(
    ("archs", "words"),
    [
        ("sm_80", "'sm_80' is no architecture; FLASHLADDER_ARCHS is a list such as 8.0;8.6;9.0a"),
        ("8.0;9.0", "a GPU of architecture 9.0 runs kernels for 9.0a, not 9.0"),
        ("8.0a", "runs kernels for 8.0, not 8.0a"),
        ("8.7", "describes no GPU with sm_87; of those described the architectures are"),
    ],
)
def test_what_is_no_architecture_is_refused(archs, words):
    with pytest.raises(ConfigError, match=words):
        ahead.requests(archs)


def test_it_needs_no_torch():
    """pip builds a package in an environment that has none."""
    without = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'pandas']))"
    command = f"{without}; from flashladder.common.runtime import ahead; print(len(ahead.requests('8.0')))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "72\n"), done.stderr
