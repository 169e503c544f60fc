"""The host's mirror of the kernel argument, and what it refuses."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest
import torch

from flashladder.common.errors import BuildError, UnsupportedProblemError
from flashladder.common.paths import CUDA_HEADERS
from flashladder.common.run.launch import AttentionParams, TensorStride, attention_params, grid

LAUNCH = SimpleNamespace(num_threads=128, shared_bytes=49152, block_m=64, block_n=64, params_bytes=160)


def tensors(batch=2, seqlen_q=100, seqlen_k=70, heads=4, heads_k=2, head_dim=128, dtype=torch.bfloat16):
    q, o = (torch.zeros(batch, seqlen_q, heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.zeros(batch, seqlen_k, heads_k, head_dim, dtype=dtype) for _ in range(2))
    return {"q": q, "k": k, "v": v, "o": o, "lse": torch.zeros(batch, heads, seqlen_q)}


def pack(given, **options):
    return AttentionParams.from_buffer_copy(attention_params(**given, softmax_scale=0.5, **options))


def test_the_mirror_has_the_layout_of_the_header(tmp_path):
    offsets = [(name, getattr(AttentionParams, name).offset) for name, _ in AttentionParams._fields_]
    checks = [f"static_assert(offsetof(AttentionParams, {name}) == {offset});" for name, offset in offsets]
    checks += [
        f"static_assert(offsetof(TensorStride, {name}) == {getattr(TensorStride, name).offset});"
        for name, _ in TensorStride._fields_
    ]
    checks += [f"static_assert(sizeof(AttentionParams) == {ctypes.sizeof(AttentionParams)});"]
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "params.cuh"', *checks]))
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-I", CUDA_HEADERS, source], check=True)


def test_packing():
    given = tensors()
    given["k"] = given["k"].transpose(1, 2).contiguous().transpose(1, 2)
    params = pack(given)
    assert [getattr(params, name) for name in given] == [tensor.data_ptr() for tensor in given.values()]
    assert (params.q_stride.batch, params.q_stride.row, params.q_stride.head) == (100 * 512, 512, 128)
    assert (params.k_stride.batch, params.k_stride.row, params.k_stride.head) == (70 * 256, 128, 70 * 128)
    sizes = params.batch, params.num_heads, params.num_heads_k, params.seqlen_q, params.seqlen_k, params.softmax_scale
    assert sizes == (2, 4, 2, 100, 70, 0.5)


def test_other_addresses_and_no_lse():
    given = tensors() | {"lse": None}
    params = pack(given, addresses={"q": 16, "k": 32, "v": 48, "o": 64})
    assert (params.q, params.k, params.v, params.o, params.lse) == (16, 32, 48, 64, None)
    assert pack(given).lse is None


def test_grid():
    assert grid(LAUNCH, attention_params(**tensors(), softmax_scale=1.0)) == (2, 4, 2)


def test_grid_refuses_another_argument_struct():
    other = SimpleNamespace(**{**vars(LAUNCH), "params_bytes": 168})
    with pytest.raises(BuildError, match="takes 168 bytes of AttentionParams, the host packs 160"):
        grid(other, attention_params(**tensors(), softmax_scale=1.0))


def test_grid_refuses_more_blocks_than_cuda():
    params = AttentionParams(batch=65536, num_heads=1, seqlen_q=1)
    with pytest.raises(UnsupportedProblemError, match="batch=65536: a launch takes at most 65535"):
        grid(LAUNCH, bytes(params))


BF16 = torch.bfloat16
REFUSED = {
    "three dimensions": ("q", lambda t: t[0], r"q has shape \(100, 4, 128\); kernels take \(batch, seqlen, heads"),
    "empty": ("v", lambda t: t[:, :0], "v has shape .* every dimension must be at least 1"),
    "fp32": ("k", lambda t: t.float(), "k is torch.float32; kernels take torch.bfloat16 or torch.float16"),
    "two dtypes": ("v", lambda t: t.half(), "v torch.float16 .* one dtype"),
    "last dimension strided": (
        "q",
        lambda t: torch.zeros(2, 100, 4, 256, dtype=BF16)[..., ::2],
        r"q has strides .* last dimension contiguous \(stride 1\)",
    ),
    "odd row stride": (
        "o",
        lambda t: torch.zeros(2, 100, 4, 132, dtype=BF16)[..., :128],
        r"o has strides .* multiples of 8 elements \(16 bytes\)",
    ),
    "rows too far apart": (
        "k",
        lambda t: torch.empty_strided(t.shape, (2**40, 2**25, 128, 1), dtype=BF16, device="meta"),
        "k has rows 33554432 elements apart; kernels take at most 33554424",
    ),
    "misaligned": (
        "q",
        lambda t: torch.zeros(t.numel() + 1, dtype=BF16)[1:].view(t.shape),
        "q starts at address .* multiple of 16 bytes",
    ),
    "other key length": ("v", lambda t: t[:, 1:], r"v has shape \(2, 69, 2, 128\).* it is \(2, 70, 2, 128\)"),
    "output of another shape": ("o", lambda t: t[:, :, :2], r"o has shape .* it is \(2, 100, 4, 128\)"),
    "lse in 16 bits": ("lse", lambda t: t.half(), "lse is .* torch.float32"),
    "lse strided": ("lse", lambda t: torch.zeros(2, 4, 200)[..., ::2], "lse is .* contiguous"),
}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_tensors(name, change, message):
    given = tensors()
    given[name] = change(given[name])
    with pytest.raises(UnsupportedProblemError, match=message):
        attention_params(**given, softmax_scale=1.0)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UnsupportedProblemError, match="4 query heads do not share 3 key heads evenly"):
        attention_params(**tensors(heads_k=3), softmax_scale=1.0)
