"""Tensors that stretch over more than 2^31 elements, as no problem's layout does."""

import pytest
import torch

from flashladder.common.problem.buffers import Buffer, View
from flashladder.common.problem.check import Expected, expect
from flashladder.common.problem.inputs import Tensors, make_inputs
from flashladder.common.problem.problem import DTYPES, Problem

NEEDED_GIB = 16


def spread(problem: Problem, strides: tuple[int, ...]) -> tuple[Tensors, Expected]:
    """The problem's inputs with these strides, q, k, v and o interleaved in one buffer; and what o and lse should be.

    q and k have one shape. One stride is much larger than all else together, and leaves room for four tensors.
    """
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < NEEDED_GIB * 2**30:
        pytest.skip(f"needs {NEEDED_GIB} GiB of free GPU memory")
    near = make_inputs(problem, "cuda")
    expected = expect(problem, near)
    shape = tuple(near.q.shape)
    apart = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s != max(strides))
    views = {name: View(shape, strides, offset=-(-apart // 8) * 8 * place) for place, name in enumerate("qkvo")}
    buffer = Buffer(views, DTYPES[problem.dtype], "cuda")
    (lse_buffer,) = (other for other in near.buffers if "lse" in other.names)
    tensors = Tensors({**buffer.views, "lse": near.lse}, near.problem, buffers=(buffer, lse_buffer))
    for name in "qkv":
        getattr(tensors, name).copy_(getattr(near, name))
    tensors.poison()
    return tensors, expected
