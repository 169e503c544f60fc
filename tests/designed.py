"""Batches of which each sequence has scores of its own design, and the bars that each misses after a kernel's run."""

import torch

from flashladder.common.problem.families import Family
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.studies.accuracy import deviation, yardstick


def drawn_by(designs, **options):
    """A problem with a sequence for each design, and its inputs."""
    problem = Problem(batch=len(designs), **options)
    tensors = make_inputs(problem)
    for i, design in enumerate(designs):
        inputs = [x[i : i + 1] for x in (tensors.q, tensors.k, tensors.v)]
        Family("", "", design).draw(*inputs, problem.softmax_scale, torch.Generator().manual_seed(i))
    return problem, tensors


def missed_of_each(problem, tensors):
    """The bars that each sequence of the outputs misses, beside a plain FlashAttention-2."""
    truths, (o, lse) = deviation.exact(problem, tensors).sequences(), yardstick.run(problem, tensors)
    found = []
    for i, truth in enumerate(truths):
        theirs, ours = (
            deviation.compare(truth, x[i : i + 1], y[i : i + 1]) for x, y in ((o, lse), (tensors.o, tensors.lse))
        )
        found.append(deviation.bars(truth, theirs, problem.dtype, problem.seqlen_k, False).missed(ours))
    return found
