"""Dots of rows: for each segment of rows the sum of left * right, over the columns that both have. For tests alone."""

from typing import ClassVar

import torch

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.buffers import OUTPUT, Tensor, contiguous, laid_out
from flashladder.common.problem.options import Option
from flashladder.common.problem.problem import BANDWIDTH, DTYPES, Operation


class RowDots(Operation):
    """left and right are (batch, seqlen_q, heads, head_dim or head_dim_v); dots is (batch, heads, segments), fp32."""

    name = "row_dots"
    options = (Option("segment", int, "rows that are summed together", default=1),)
    sizes = ("segment",)
    signed_together = (("left", "right"),)
    unit = BANDWIDTH
    usual: ClassVar = {"batch": 4, "num_heads": 8, "seqlen_q": 4096, "head_dim": 96, "head_dim_v": 64}
    small: ClassVar = {"batch": 1, "num_heads": 2, "seqlen_q": 70, "head_dim": 96, "head_dim_v": 64}

    def check(self, problem):
        if problem.head_dim_v > problem.head_dim:
            raise UnsupportedProblemError(f"head_dim_v={problem.head_dim_v}: must be at most {problem.head_dim}")

    def flops(self, problem):
        return 2.0 * problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim_v

    def tensors(self, problem):
        p, columns = problem, {"left": problem.head_dim, "right": problem.head_dim_v}
        views = {name: laid_out(p.layout, (p.batch, p.seqlen_q, p.num_heads, d)) for name, d in columns.items()}
        rows = {name: Tensor(view, DTYPES[p.dtype]) for name, view in views.items()}
        return {**rows, "dots": Tensor(contiguous(p.batch, p.num_heads, segments(p)), torch.float32, OUTPUT)}

    def compute(self, problem, tensors, dtype):
        left, right = (tensors[name].to(dtype) for name in problem.inputs)
        rows = (left[..., : problem.head_dim_v] * right).sum(-1).transpose(1, 2)
        padded = torch.nn.functional.pad(rows, (0, segments(problem) * problem.segment - problem.seqlen_q))
        return {"dots": padded.unflatten(-1, (-1, problem.segment)).sum(-1)}


def segments(problem):
    """How many there are of a sequence; the last one may be shorter."""
    return -(-problem.seqlen_q // problem.segment)


OPERATION = RowDots()
