"""A mask and a score, checked for their author: on the emulator, beside the exact answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from flashladder.common.api import expressions
from flashladder.common.api.backward import OPERATION
from flashladder.common.api.options import Modified, Options, options_of
from flashladder.common.api.validate import OPEN, Window
from flashladder.common.catalog import FASTEST
from flashladder.common.compiler import PtxModule, translate
from flashladder.common.emulator import Report
from flashladder.common.errors import ExpressionError, UnsupportedProblemError, VerificationError
from flashladder.common.expression import Mods
from flashladder.common.problem.check import Check, expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import LSE, Problem
from flashladder.common.runtime import ready, target
from flashladder.common.runtime.execute import on_emulator

MOST_SPANS = 8  # of rows that see no key, in words


@dataclass(frozen=True)
class MaskCheck:
    """What the emulator found of a mask and a score: no read out of bounds and no race, or it would have said so."""

    problem: Problem
    check: Check  # of O and the log-sum-exp against the exact ones
    report: Report  # what was counted
    num_rows: int  # over all heads and sequences
    num_unseeing: int  # those that see no key, whose O is 0
    unseeing: tuple[str, ...]  # the same in the expressions' words: "q=0 to 3 at h=1"

    def __str__(self) -> str:
        """How many rows see no key, and which."""
        if not self.num_unseeing:
            return f"each of {self.num_rows:,} sees a key"
        return f"{self.num_unseeing:,} of {self.num_rows:,} see no key: {'; '.join(self.unseeing)}"


def check_mask(
    mask: str | None = None,
    score: str | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    batch: int = 1,
    num_heads: int = 2,
    num_heads_k: int | None = None,
    seqlen_q: int = 64,
    seqlen_k: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window: Window = OPEN,
    softmax_scale: float | None = None,
    seed: int = 0,
    version: str = FASTEST,
) -> MaskCheck:
    """Runs attention(mask=, score=, tensors=) of these sizes on the emulator, on random Q, K and V, and checks it.

    The arguments are attention's; num_heads_k is num_heads where none is given, and seqlen_k is seqlen_q. Tensors are
    on the CPU. The kernel evaluates the expression itself, also where `attention` would ask for its mask as a window.
    Returns what was found, with the rows that see no key: a test may assert that there are none. A new expression takes
    a second or two, which its compilation takes.

    Raises ExpressionError for text that is none and for an index that leaves its tensor, RaceError (an EmulatorError)
    for a race, VerificationError for a wrong O or log-sum-exp and for rows that are NaN, and UnsupportedProblemError
    and ConfigError as attention does.
    """
    num_heads_k, seqlen_k = num_heads_k or num_heads, seqlen_k or seqlen_q
    q = torch.empty(1, dtype=dtype).expand(batch, seqlen_q, num_heads, head_dim)
    k = torch.empty(1, dtype=dtype).expand(batch, seqlen_k, num_heads_k, head_dim)
    options = options_of(
        q.device, batch, num_heads, causal=causal, softmax_scale=softmax_scale, window=window, softcap=0.0,
        alibi_slopes=None, sinks=None, dropout_p=0.0, deterministic=False, version=version,
    )  # fmt: skip
    asked = _asked(options, mask, score, tensors, q, k)
    problem = replace(asked.forward_problem(q, k, k, lse=True), seed=seed)
    rung, config = ready.choice_for(problem, q.device, version)
    found = checked(translate(rung, config, target.resolve("emulator", None).arch), problem, asked)
    found.check.require(f"attention with {' and '.join(Mods.parse(asked.mods).trees)} as {rung.name} computes it")
    return found


def of_problem(
    problem: Problem, mask: str | None, score: str | None, tensors: Mapping[str, torch.Tensor]
) -> tuple[Problem, Modified]:
    """A problem of attention with expressions, and what they read; of the backward pass with all gradients that it has.
    Raises as `attention` does."""
    q, k = (
        torch.empty(1).expand(problem.batch, seqlen, heads, problem.head_dim)
        for seqlen, heads in ((problem.seqlen_q, problem.num_heads), (problem.seqlen_k, problem.num_heads_k))
    )
    bounds = {name: getattr(problem, name) for name in ("causal", "window_left", "window_right")}
    asked = _asked(Options(**bounds), mask, score, tensors, q, k)
    if problem.operation == OPERATION:
        asked = asked.asking(len(asked.read) * [True])
    return replace(problem, mods=asked.mods, extents=tuple(tuple(x.shape) for x in asked.read)), asked


def _asked(
    options: Options, mask: str | None, score: str | None, tensors: Mapping[str, torch.Tensor] | None,
    q: torch.Tensor, k: torch.Tensor,
) -> Modified:  # fmt: skip
    """The options with expressions, whose every index is within its tensor."""
    if mask is None and score is None:
        raise ExpressionError("there is nothing to check: give a mask, a score, or both")
    if not (q.numel() and k.numel()):
        raise UnsupportedProblemError(f"q of {tuple(q.shape)} and k of {tuple(k.shape)} have nothing to check")
    asked = expressions.added(options, mask, score, tensors, q, k)
    expressions.check(asked, q, k)
    return asked


def checked(
    module: PtxModule, problem: Problem, asked: Modified, progress: Callable[..., None] | None = None
) -> MaskCheck:
    """What the emulator makes of it, under the race detector; the verdict may be that it is wrong.

    VerificationError for rows whose exact O is NaN: no kernel could be right.
    """
    tensors = make_inputs(problem)
    for name, read in asked.tensors.items():
        tensors.by_name[name].copy_(read)
    problem.asked.settle(problem, tensors.by_name)
    expected = expect(problem, tensors)
    first, of_rows = problem.seqlen_k - problem.seqlen_q, {**tensors.by_name, **expected.exact}
    if (nan := of_rows["o"].isnan().any(-1).transpose(1, 2)).any():
        raise VerificationError(f"rows are NaN by the exact answer too: {'; '.join(_in_words(nan, first))}")
    report = on_emulator(module, problem, tensors, progress=progress)
    check = verify(expected, tensors.outputs, tensors.buffers)
    unseeing = of_rows[LSE].isneginf()
    return MaskCheck(problem, check, report, unseeing.numel(), int(unseeing.sum()), tuple(_in_words(unseeing, first)))


def _in_words(rows: torch.Tensor, first: int) -> list[str]:
    """Which of the rows, (batch, heads, rows), are true, by expressions' names; q counts from `first`."""
    words = []
    batch, num_heads, _ = rows.shape
    for b in range(batch):
        heads: dict[str, list[int]] = {}
        for h in range(num_heads):
            spans = list(_spans(rows[b, h], first))
            kept = spans if len(spans) <= MOST_SPANS else [*spans[:MOST_SPANS], f"{len(spans) - MOST_SPANS} spans more"]
            if spans:
                heads.setdefault(", ".join(kept), []).append(h)
        of_sequence = f"b={b}, " if batch > 1 else ""
        for listed, of in heads.items():
            of_heads = "every h" if len(of) == num_heads else f"h={', '.join(map(str, of))}"
            words.append(f"q={listed} at {of_sequence}{of_heads}")
    return words


def _spans(rows: torch.Tensor, first: int) -> Iterator[str]:
    """Runs of rows that are true: "3", "7 to 9"."""
    for is_true, run in groupby(enumerate(rows.tolist(), first), key=lambda each: each[1]):
        if is_true:
            begin, *rest = [number for number, _ in run]
            yield f"{begin} to {rest[-1]}" if rest else f"{begin}"
