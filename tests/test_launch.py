"""The host's mirror of the kernel argument, and what it refuses."""

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

from flashladder.common.compiler.artifact import Artifact, RungKernel
from flashladder.common.compiler.declaration import (
    LaunchInfo,
    LaunchRecord,
    TensorMapInfo,
    TensorMapRecord,
    Workspace,
    WorkspaceRecord,
)
from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
from flashladder.common.paths import CUDA_HEADERS
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.launch import AttentionParams, TensorStride, launches, pack, workspace_bytes

ARTIFACT = Artifact(
    version="07_tiny",
    config=KernelConfig.of(block_m=64),
    arch="sm_80",
    directory=Path(),
    kernels=(RungKernel("attention_forward", LaunchInfo(128, 49152, 64, 64, params_bytes=160), 32, 0, 0, 0),),
    operation="forward",
    compile_seconds=0.0,
    cached=True,
)
SIZES = {"batch": 2, "seqlen_q": 100, "seqlen_k": 70, "num_heads": 4, "num_heads_k": 2, "head_dim": 128}
PROBLEM = Problem(**SIZES, softmax_scale=0.5)


def tensors():
    q, o = (torch.zeros(2, 100, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(2, 70, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    return {"q": q, "k": k, "v": v, "o": o, "lse": torch.zeros(2, 4, 100)}


def packed(given, **options):
    return AttentionParams.from_buffer_copy(pack(PROBLEM, Tensors(given, PROBLEM.asked), **options))


def grid(problem=PROBLEM, num_sms=132, params=bytes(160), **declared):
    """Of a kernel that declares these things."""
    launch = dataclasses.replace(ARTIFACT.launch, **declared)
    kernel = dataclasses.replace(ARTIFACT.main, launch=launch)
    (found,) = launches(dataclasses.replace(ARTIFACT, kernels=(kernel,)), problem, params, num_sms)
    return found.grid


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


def test_the_records_have_the_layout_of_the_header(tmp_path):
    records = {"TensorMap": TensorMapRecord, "Launch": LaunchRecord, "WorkspaceSize": WorkspaceRecord}
    checks = []
    for name, record in records.items():
        checks += [f"static_assert(sizeof({name}) == {ctypes.sizeof(record)});"]
        checks += [
            f"static_assert(offsetof({name}, {field}) == {getattr(record, field).offset});"
            for field, _ in record._fields_
        ]
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "launch.cuh"', *checks]))
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-I", CUDA_HEADERS, source], check=True)


def test_packing():
    given = tensors()
    given["k"] = given["k"].transpose(1, 2).contiguous().transpose(1, 2)
    params = packed(given)
    assert [getattr(params, name) for name in given] == [tensor.data_ptr() for tensor in given.values()]
    assert (params.q_stride.batch, params.q_stride.row, params.q_stride.head) == (100 * 512, 512, 128)
    assert (params.k_stride.batch, params.k_stride.row, params.k_stride.head) == (70 * 256, 128, 70 * 128)
    sizes = params.batch, params.num_heads, params.num_heads_k, params.seqlen_q, params.seqlen_k, params.softmax_scale
    assert sizes == (2, 4, 2, 100, 70, 0.5)


def test_other_addresses_and_no_lse():
    given = tensors()
    del given["lse"]
    params = packed(given, addresses={"q": 16, "k": 32, "v": 48, "o": 64})
    assert (params.q, params.k, params.v, params.o, params.lse) == (16, 32, 48, 64, None)
    assert packed(given).lse is None


def test_a_grid_is_the_tiles_of_queries_or_what_the_kernel_says():
    assert grid() == (2, 4, 2)
    assert grid(grid=("cdiv(seqlen_k, block_n)", "num_heads_k", "batch * 3")) == (2, 2, 6)
    assert grid(grid=("head_dim // 16", "1", "1")) == (8, 1, 1)


def test_a_persistent_grid_is_as_large_as_the_gpu_but_no_larger_than_its_tiles():
    assert grid(ctas_per_sm=2, num_sms=3) == (6, 1, 1)
    assert grid(ctas_per_sm=2) == (16, 1, 1)


def test_a_persistent_grid_counts_no_more_tiles_than_32_bits_hold():
    """Of packed sequences also those that have no rows: each has a place, but takes no memory."""
    lengths = {"operation": "packed", "total_q": 300, "seqlen_q": 300, "total_k": 300}
    declared = {"ctas_per_sm": 1, "grid": ("total_q // block_m + batch", "num_heads", "1")}
    assert grid(Problem(batch=2**30, **lengths), **declared) == (132, 1, 1)
    for batch, num_heads in ((2**31, 1), (2**26, 32)):
        message = f"batch={batch} with num_heads={num_heads} are up to {(4 + batch) * num_heads} tiles"
        with pytest.raises(UnsupportedProblemError, match=message):
            grid(Problem(batch=batch, num_heads=num_heads, **lengths), **declared)


def test_a_workspace_is_as_large_as_the_kernel_says():
    workspace = Workspace("partial_o", 4, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m * head_dim", False)
    assert workspace_bytes(ARTIFACT, PROBLEM, workspace) == 4 * 2 * 4 * 128 * 128
    with pytest.raises(ConfigError, match=r"size of the workspace x 'splits' reads splits; there are batch, block_m"):
        workspace_bytes(ARTIFACT, PROBLEM, Workspace("x", 4, "splits", False))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"params_bytes": 168}, "takes 168 bytes of parameters, the host packs 160 for the operation forward"),
        ({"cluster": (2, 1, 1)}, "07_tiny wants clusters of 2 x 1 x 1 CTAs, which neither .* has yet"),
    ],
)
def test_what_cannot_be_run_yet_is_refused_by_name(declared, message):
    with pytest.raises(BuildError, match=f"attention_forward of 07_tiny .*{message.removeprefix('07_tiny ')}"):
        grid(**declared)


def test_a_tensor_map_has_the_strides_of_its_tensor():
    """Fastest first, in bytes; where a dimension has one element only, torch's stride means nothing to TMA."""
    problem = dataclasses.replace(PROBLEM, batch=1)
    given = Tensors({name: tensor[:1] for name, tensor in tensors().items()}, PROBLEM.asked)
    maps = TensorMapInfo("q", 128, 64, 128), TensorMapInfo("k", 64, 64, 128)
    kernel = dataclasses.replace(ARTIFACT.main, launch=dataclasses.replace(ARTIFACT.launch, tensor_maps=maps))
    (launch,) = launches(dataclasses.replace(ARTIFACT, kernels=(kernel,)), problem, pack(problem, given), num_sms=1)
    assert [mapped.address for mapped in launch.tensor_maps] == [given.q.data_ptr(), given.k.data_ptr()]
    assert [mapped.dims for mapped in launch.tensor_maps] == [(128, 100, 4, 1), (128, 70, 2, 1)]
    assert [mapped.strides for mapped in launch.tensor_maps] == [(1024, 256, 16), (512, 256, 16)]
    assert [mapped.box for mapped in launch.tensor_maps] == [(64, 128, 1, 1), (64, 64, 1, 1)]


def test_a_grid_takes_no_more_blocks_than_cuda():
    with pytest.raises(UnsupportedProblemError, match="batch=65536 along z: a launch takes at most 65535"):
        grid(Problem(batch=65536, seqlen_q=1))


BF16 = torch.bfloat16
REFUSED = {
    "three dimensions": ("q", lambda t: t[0], r"q has shape \(100, 4, 128\); kernels take \(batch, seqlen, heads"),
    "empty": ("v", lambda t: t[:, :0], "v has shape .* every dimension must be at least 1"),
    "fp32": ("k", lambda t: t.float(), "k is torch.float32; kernels take torch.bfloat16 or torch.float16"),
    "two dtypes": ("v", lambda t: t.half(), "v is .* torch.float16; with the other tensors it is .* torch.bfloat16"),
    "two devices": ("v", lambda t: t.to("meta"), "q on cpu, k on cpu, v on meta, .* one device"),
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
    "other key length": ("v", lambda t: t[:, 1:], r"v is \(2, 69, 2, 128\) .* it is \(2, 70, 2, 128\)"),
    "output of another shape": ("o", lambda t: t[:, :, :2], r"o is .* it is \(2, 100, 4, 128\)"),
    "lse in 16 bits": ("lse", lambda t: t.half(), "lse is .* torch.float32"),
    "lse strided": ("lse", lambda t: torch.zeros(2, 4, 200)[..., ::2], "lse has strides .* contiguous"),
}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_tensors(name, change, message):
    given = tensors()
    given[name] = change(given[name])
    with pytest.raises(UnsupportedProblemError, match=message):
        pack(PROBLEM, Tensors(given, PROBLEM.asked))
