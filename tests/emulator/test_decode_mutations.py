"""The same as test_mutations.py for decode and mla: the kernel that has the keys, and the one that combines their parts
where the CTA that comes last does not."""

import pytest
from one_kernel import OneKernel

from flashladder.common.problem.problem import Problem

pytestmark = pytest.mark.slow

BY_TMA, OF_ROWS = ("decode/08", "decode/09"), ("decode/15", "decode/16", "decode/17")
ASKED = ("decode/06", "decode/07", *BY_TMA, "decode/10", *OF_ROWS, "mla/00", "mla/01", "mla/02")
DEPENDENT = ("decode/07", *BY_TMA)
SIZES = {
    "decode": {"seqlen_q": 1, "num_heads": 2, "num_heads_k": 1, "head_dim": 64},
    "mla": {"seqlen_q": 1, "num_heads": 16, "num_heads_k": 1, "head_dim": 576, "head_dim_v": 512},
}


def kernel(name, entry, *lengths, parts=2, rows=(), softmax_scale=None, **config):
    """Of a rung, with sequences of these lengths that are cut into so many parts, or have so many rows."""
    ladder = name.partition("/")[0]
    options = {"num_splits": parts, **({"packed_q": True, "paged": True} if rows else {})}
    sizes = {**SIZES[ladder], "seqlens_q": rows, "seqlens_k": lengths, "causal": bool(rows)}
    problem = Problem(**sizes, options=options, operation=ladder, softmax_scale=softmax_scale)
    return OneKernel(name, entry, problem, **config)


def main(name):
    """The one that has the keys. Rings of three stages come round in 5 blocks of 64 keys, and where nvcc unrolls the
    producer's loop four times in 11; mla has one place or two."""
    if name in BY_TMA:
        return kernel(name, "attention_decode", 690, parts=1)
    if name == "decode/15":
        return kernel(name, "attention_decode", 400, 100, parts=0, rows=(20, 50))
    if name == "decode/16":  # a warpgroup whose rows see a block less than the other's, and one without rows
        return kernel(name, "attention_decode", 650, 400, 100, parts=0, rows=(64, 5, 3))
    if name == "decode/17":  # so, one block that is not full, and scores far from each other, which P loses
        sizes = {"parts": 0, "rows": (64, 5, 3), "softmax_scale": 100.0}
        return kernel(name, "attention_decode", 650, 400, 40, **sizes, block_n=64)
    return kernel(name, "attention_decode", 590, 100) if "decode" in name else kernel(name, "attention_mla", 300)


@pytest.mark.parametrize("rung", ASKED)
def test_the_loss_of_any_synchronisation_is_reported(rung):
    main(rung).is_exact(rung)


@pytest.mark.parametrize("rung", DEPENDENT)
def test_parts_that_are_read_before_the_other_kernel_has_ended_are_reported(rung):
    kernel(rung, "combine", 590, 100).is_exact(f"{rung}, combine")


def test_forks_answer_as_runs_do():
    """Also where an atomic operation in global memory is of its CTA alone."""
    main("decode/10").forks_answer_as_runs_do()
