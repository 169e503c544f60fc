"""The CuTe kernel without a GPU: compiled for Hopper, its PTX run by the emulator. Needs nvidia-cutlass-dsl."""

import re
import struct
import subprocess
import sys

import pytest
import torch

from flashladder.common import catalog, emulator
from flashladder.common.measure.references import load, missing
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem

pytest.importorskip("cutlass", reason="pip install nvidia-cutlass-dsl")

REFERENCE = catalog.find_implementation("cute")
COMPILE = """
import sys
from flashladder.common import catalog
from flashladder.common.measure import references
reference = catalog.find_implementation("cute")
references.load(reference).compiled(reference.parse_config(sys.argv[1]))
"""


@pytest.fixture(params=["causal=false", "causal=true,block_n=32,dtype=fp16"])
def kernel(request, tmp_path):
    """A configuration and its PTX. The compiler reads its environment when it is imported: in another process."""
    environment = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c", COMPILE]
    subprocess.run([*command, request.param], check=True)
    (ptx,) = tmp_path.glob("*.ptx")
    return REFERENCE.parse_config(request.param), ptx.read_text()


def test_right_on_the_emulator_without_conflicts(kernel):
    assert missing(REFERENCE) is None
    config, ptx = kernel
    for shape in (
        {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 128, "seqlen_k": 192, "layout": "padded", "softmax_scale": 0.5},
        {"batch": 2, "seqlen_q": 256, "seqlen_k": 64},
    ):
        problem = Problem(**shape, dtype=config.dtype, causal=config.causal)
        REFERENCE.check(problem, config)
        tensors = make_inputs(problem)
        report = run(ptx, config, problem, tensors)
        verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(problem.name)
        assert report.shared_wavefronts == report.shared_wavefronts_ideal


def run(ptx, config, problem, tensors):
    memory, addresses = emulator.GlobalMemory(), {}
    for buffer in tensors.buffers:
        writes, name = set(problem.outputs).issuperset(buffer.names), "/".join(buffer.names)
        base = memory.add(name, buffer.data.view(torch.uint8).numpy(), readonly=not writes, initialised=not writes)
        begin = base - buffer.data.data_ptr()
        addresses |= {name: begin + view.data_ptr() for name, view in buffer.views.items()}
    strides = [step for name in "qkvo" for step in getattr(tensors, name).stride()[:3]]
    params = struct.pack(
        "<5Q4i12qf",
        *(addresses[name] for name in ("q", "k", "v", "o", "lse")),
        *(problem.num_heads, problem.num_heads // problem.num_heads_k, problem.seqlen_q, problem.seqlen_k),
        *strides,
        problem.softmax_scale * load(REFERENCE).LOG2_E,
    )
    report = emulator.run(
        ptx,
        params,
        (problem.seqlen_q // config.block_m, problem.num_heads, problem.batch),
        32 * config.num_warps,
        (config.block_m + 2 * config.block_n) * config.head_dim * 2,
        memory,
        entry=re.search(r"\.entry (\S+)\(", ptx)[1],
    )
    for buffer in tensors.buffers:
        if set(problem.outputs).issuperset(buffer.names):
            buffer.data.view(torch.uint8).copy_(torch.from_numpy(memory.read("/".join(buffer.names))))
    return report
