"""What the host hands to kernels, as these declare it, and what it refuses."""

import ctypes
import dataclasses
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from flashladder.common.compiler.artifact import Artifact, RungKernel
from flashladder.common.compiler.declaration import (
    FieldRecord,
    LaunchInfo,
    LaunchRecord,
    ParamsField,
    TensorMapInfo,
    TensorMapRecord,
    Workspace,
    WorkspaceRecord,
)
from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
from flashladder.common.paths import CUDA_HEADERS
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations.forward import ALL_KEYS
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.launch import Launcher
from flashladder.tests.support.attention_params import FIELDS, PARAMS

ARTIFACT = Artifact(
    version="07_tiny",
    config=KernelConfig.of(block_m=64),
    arch="sm_80",
    directory=Path(),
    kernels=(RungKernel("attention_forward", LaunchInfo(128, 49152, 64, 64, **PARAMS), 32, 0, 0, 0),),
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


def of(**declared):
    """An artifact whose kernel declares these things."""
    launch = dataclasses.replace(ARTIFACT.launch, **declared)
    return dataclasses.replace(ARTIFACT, kernels=(dataclasses.replace(ARTIFACT.main, launch=launch),))


def launched(given=None, problem=PROBLEM, num_sms=132, addresses=None, **declared):
    """The launch of such a kernel."""
    given = tensors() if given is None else given
    (found,) = Launcher(of(**declared)).launches(problem, Tensors(given, problem), num_sms, addresses)
    return found


def packed(*given, **options):
    """The fields of the first argument, by name."""
    params = launched(*given, **options).params
    codes = {"Q": "<Q", "s": "<3q", "i": "<i", "f": "<f"}
    values = {each.name: struct.unpack_from(codes[each.format], params, each.offset) for each in FIELDS}
    return {name: value if len(value) > 1 else value[0] for name, value in values.items()}


def grid(problem=PROBLEM, **options):
    """Of tensors without memory."""
    given = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in problem.tensors.items()}
    return launched(given, problem, **options).grid


def test_the_records_have_the_layout_of_the_header(tmp_path):
    records = {
        "Field": FieldRecord,
        "TensorMap": TensorMapRecord,
        "Launch": LaunchRecord,
        "WorkspaceSize": WorkspaceRecord,
    }
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
    assert [params[name] for name in given] == [tensor.data_ptr() for tensor in given.values()]
    assert (params["q_stride"], params["k_stride"]) == ((100 * 512, 512, 128), (70 * 256, 128, 70 * 128))
    sizes = ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "softmax_scale")
    assert [params[name] for name in sizes] == [2, 4, 2, 100, 70, 0.5]


def test_other_addresses_and_no_lse():
    given = tensors()
    del given["lse"]
    addresses = {"q": 16, "k": 32, "v": 48, "o": 64}
    params = packed(given, addresses=addresses)
    assert {name: params[name] for name in (*addresses, "lse")} == {**addresses, "lse": 0}
    assert packed(given)["lse"] == 0


def test_fields_are_filled_by_name_wherever_they_lie():
    fields = (
        ParamsField("v", "Q", 8),
        ParamsField("q_stride", "s", 24),
        ParamsField("seqlen_k", "q", 56),
        ParamsField("window_left", "i", 64),
    )
    given = tensors()
    windows = {None: ALL_KEYS, 5: 5}
    for window_left, told in windows.items():
        problem = dataclasses.replace(PROBLEM, window_left=window_left)
        params = launched(given, problem, params_bytes=72, fields=fields).params
        assert struct.unpack("<8xQ8x3q8xqi4x", params) == (given["v"].data_ptr(), 100 * 512, 512, 128, 70, told)


@pytest.mark.parametrize(
    "name", ["splits", "lse_stride", "asked"], ids=["no number of the problem", "of three dimensions", "no number"]
)
def test_a_field_that_nobody_knows_is_named(name):
    message = f"attention_forward of 07_tiny takes {name}, which is no tensor of the operation forward, nor the strides"
    with pytest.raises(BuildError, match=message):
        launched(fields=(*FIELDS[:-1], ParamsField(name, "i", 156)))


def test_a_number_that_has_no_room_is_refused():
    with pytest.raises(
        UnsupportedProblemError, match=r"softmax_scale=0.5 does not fit the argument of attention_forward"
    ):
        launched(fields=(*FIELDS[:-1], ParamsField("softmax_scale", "i", 156)))


@pytest.mark.parametrize(
    ("cluster", "options", "refusal"),
    [
        ((2, 1, 1), {}, ""),
        ((1, 2, 2), {}, ""),
        (
            (4, 1, 1),
            {},
            r"the grid of attention_forward of 07_tiny is 2 x 4 x 2 CTAs for .*: not .* its clusters, 4 x 1 x 1",
        ),
        ((3, 1, 1), {"ctas_per_sm": 1}, ""),
    ],
)
def test_a_grid_is_a_multiple_of_clusters(cluster, options, refusal):
    if refusal:
        with pytest.raises(UnsupportedProblemError, match=refusal):
            launched(cluster=cluster, **options)
        return
    made = launched(cluster=cluster, **options)
    assert made.cluster == cluster
    assert made.grid == ((15, 1, 1) if options else (2, 4, 2))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"cluster": (32, 1, 1)}, "wants clusters of 32 CTAs; a GPU has at most 16 in one"),
        ({"is_dependent": True}, "depends on the kernel before it; it is the rung's first one"),
    ],
)
def test_what_no_gpu_runs_is_refused_by_name(declared, message):
    with pytest.raises(BuildError, match=f"attention_forward of 07_tiny {message}"):
        launched(**declared)


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
    def num_bytes(count):
        made = dataclasses.replace(ARTIFACT, workspaces=(Workspace("x", 4, count, False),))
        return Launcher(made).workspace_bytes(PROBLEM)

    assert num_bytes("batch * num_heads * cdiv(seqlen_q, block_m) * block_m * head_dim") == [4 * 2 * 4 * 128 * 128]
    with pytest.raises(ConfigError, match=r"size of the workspace x 'splits' reads splits; there are batch, block_m"):
        num_bytes("splits")


def test_a_tensor_map_has_the_strides_of_its_tensor():
    """Fastest first, in bytes; where a dimension has one element only, torch's stride means nothing to TMA."""
    problem = dataclasses.replace(PROBLEM, batch=1)
    given = {name: tensor[:1] for name, tensor in tensors().items()}
    maps = TensorMapInfo("q", 128, 64, 128), TensorMapInfo("k", 64, 64, 128)
    launch = launched(given, problem, tensor_maps=maps)
    assert [mapped.address for mapped in launch.tensor_maps] == [given["q"].data_ptr(), given["k"].data_ptr()]
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
        launched(given)
