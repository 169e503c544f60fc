"""A ladder of one tiny rung in a temporary folder, whose kernels compile quickly."""

from pathlib import Path

from flashladder.common.catalog import Version, catalogue, directory_of, find

VERSION_YAML = """
title: Tiny
idea: Nothing but a copy.
instruction_set: ampere
supports: {dtype: [bf16, fp16], head_dim: [64, 128], seqlen_q: block_m, seqlen_k: any, lse: true}
config:
  block_m: {default: 64, values: [64, 128]}
  num_warps: {default: 4, values: [4, 8]}
  double_buffer: {default: false, values: [false, true]}
rules:
  - {require: "block_m == 128 or not double_buffer", why: "a small tile has nothing to buffer"}
"""

# `constant` is in a header beside the kernel; `body` is what a test adds. No dtype, as cuda_bf16.h is slow to read.
KERNEL = """
#include "config.cuh"
#include "params.cuh"
#include "helper.cuh"
FLASHLADDER_LAUNCH(config::num_warps * 32, 1024, config::block_m, 64);
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams params) {
    BODY
    params.lse[threadIdx.x] = constant;
}
"""
HELPER = "#pragma once\nconstexpr float constant = 1.0f;\n"


def make_rung(
    root: Path,
    name: str = "07_tiny",
    yaml: str = VERSION_YAML,
    kernel: str = KERNEL,
    body: str = "",
    helper: str = HELPER,
) -> Version:
    """Writes a rung into a ladder in `root`, the first one where none is named, and reads it back."""
    directory = directory_of(name, root)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "version.yaml").write_text(yaml)
    (directory / "kernel.cu").write_text(kernel.replace("BODY", body))
    (directory / "helper.cuh").write_text(helper)
    catalogue._load.cache_clear()
    return find(name, root)
