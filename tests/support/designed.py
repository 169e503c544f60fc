"""Inputs of a family; batches whose sequences each have scores of their own design, and the bars that each misses."""

import torch

from flashladder.common.problem.families import Family
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.studies.accuracy import deviation, yardstick

SMALL = {"seqlen_q": 128, "seqlen_k": 512}


def drawn(family, **options):
    """A small problem of a family, and its inputs."""
    problem = Problem(**(SMALL | options), family=family)
    return problem, make_inputs(problem)


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
