"""Attention of one long sequence over several devices: each keeps its queries, and keys and values go round a ring.

Liu et al., Ring Attention (arXiv:2310.01889). Under a causal mask the sequence is cut into twice as many chunks as
there are ranks, and rank r has the chunks r and 2 * world_size - 1 - r, so that all have as much to do in every step:
the zigzag of zhuzilin/ring-flash-attention.

The gradients are those of each step under the final log-sum-exp: a softmax over all keys is then a sum over the steps.
Keys and values go round once more, and the sums of their gradients, in fp32, go with them until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashladder.common.api import attention, gradients, validate
from flashladder.common.api.differentiable import require_rung
from flashladder.common.api.merge import merge_states
from flashladder.common.api.options import Options
from flashladder.common.catalog import FASTEST
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing

_gradients = torch.ops.flashladder.attention_backward


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    version: str = FASTEST,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of a sequence that lies on the ranks of a process group, with its gradients. All ranks call it alike.

    q, k and v are this rank's part, shaped as `attention` takes them, and of one shape on all ranks. With `causal` the
    part is what `zigzag_split` gives, and q and k are of one length; without, any part is, in any order of ranks.
    Returns this rank's part of O, and with `return_lse` of the log-sum-exp.

    The keys and values of the next step are on their way, by `group`'s backend (NCCL on GPUs), while the kernel runs.
    Partial outputs are summed in fp32. Where one rank wants gradients, all have to, and to call backward.

    Raises UnsupportedProblemError without a process group, for a causal part that is no zigzag's, and as `attention`.
    """
    q, k, v = validate.tensors(q=q, k=k, v=v)
    causal, return_lse = validate.flag("causal", causal), validate.flag("return_lse", return_lse)
    trains = gradients.needed(q, k, v)
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedProblemError("there is no process group: call torch.distributed.init_process_group first")
    if q.dim() != 4 or k.shape != v.shape:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in (("q", q), ("k", k), ("v", v)))
        raise UnsupportedProblemError(f"{shapes}: q should be (batch, seqlen, heads, head_dim), and k and v alike")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if causal and (q.shape[1] != k.shape[1] or q.shape[1] % 2):
        raise UnsupportedProblemError(
            f"parts of {q.shape[1]} queries and {k.shape[1]} keys: with causal=True they should be as many, two chunks "
            "of one length each, as zigzag_split gives them"
        )
    ring = _Ring(group, rank, world_size, Options(causal=causal, softmax_scale=softmax_scale, version=version))
    if trains:
        gradients.refuse_transforms()
        rows, keys, masked = _seen(rank, rank, q.shape[1], causal)
        require_rung(q[:, rows], k[:, keys], v[:, keys], replace(ring.options, causal=masked))
        o, lse = _Differentiable.apply(q, k, v, ring)
    else:
        o, lse = ring.attend(q, k, v)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class _Ring:
    """A rank's place among others, and what all of them compute."""

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    options: Options

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """O and the log-sum-exp of this rank's rows."""
        same: dict[str, Any] = {"softmax_scale": self.options.softmax_scale, "version": self.options.version}
        for step, rows, keys, masked, (k_here, v_here) in self._steps(q, k, v):
            part = attention(q[:, rows], k_here[:, keys], v_here[:, keys], causal=masked, return_lse=True, **same)
            if step == 0:
                o, lse = part[0].float(), part[1]
            else:
                o[:, rows], lse[..., rows] = merge_states(o[:, rows], lse[..., rows], *part)
        return o.to(q.dtype), lse

    def differentiate(self, dout: torch.Tensor, dlse: torch.Tensor | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        """dQ, dK and dV of this rank's part, by what `attend` was given and gave."""
        q, k, v, o, lse = saved
        dq, sums = torch.zeros_like(q, dtype=torch.float32), torch.zeros(2, *k.shape, device=k.device)
        coming, arriving = torch.empty_like(sums), list[dist.Work]()
        for _, rows, keys, masked, (k_here, v_here) in self._steps(q, k, v):
            given = dout[:, rows], q[:, rows], k_here[:, keys], v_here[:, keys], o[:, rows], lse[..., rows].contiguous()
            dlse_here = None if dlse is None else dlse[..., rows].contiguous()
            asked = replace(self.options, causal=masked).flat()
            parts = _gradients(*given, dlse_here, *asked, True, True, False)
            dq[:, rows] += parts[0]
            if arriving:  # the sums of the keys that are here, by the ranks that had them before
                _wait(arriving)
                sums, coming = coming, sums
            sums[0, :, keys] += parts[1]
            sums[1, :, keys] += parts[2]
            if self.world_size > 1:
                arriving = pass_on(sums, coming, self.group, self.rank, self.world_size)
        if arriving:
            _wait(arriving)
            sums = coming
        return [made.to(x.dtype) for made, x in zip((dq, *sums), (q, k, v), strict=True)]

    def _steps(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Step]:
        """The steps of a round. The keys and values of the next one come in while one is computed."""
        here = torch.stack((k, v))  # one message
        coming = torch.empty_like(here)
        for step in range(self.world_size):
            is_last = step == self.world_size - 1
            arriving = [] if is_last else pass_on(here, coming, self.group, self.rank, self.world_size)
            source = (self.rank - step) % self.world_size
            yield _Step(step, *_seen(self.rank, source, q.shape[1], self.options.causal), here.unbind(0))
            _wait(arriving)
            here, coming = coming, here


class _Step(NamedTuple):
    """Which rows see which keys of the part that is here, and whether under the causal mask."""

    number: int
    rows: slice
    keys: slice
    masked: bool
    part: tuple[torch.Tensor, ...]  # K and V


class _Differentiable(torch.autograd.Function):
    """`_Ring.attend` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: _Ring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = ring.attend(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        o = ctx.saved_tensors[3]
        return *ctx.ring.differentiate(torch.zeros_like(o) if dout is None else dout, dlse, *ctx.saved_tensors), None


def _wait(transfers: Sequence[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()


def zigzag_split(whole: torch.Tensor, rank: int, world_size: int, dim: int = 1) -> torch.Tensor:
    """The part of a rank, along the dimension of the sequence: chunks `rank` and 2 * world_size - 1 - `rank`.

    Positions are split likewise. Raises UnsupportedProblemError where the chunks would not be of one length.
    """
    whole = validate.tensor("whole", whole)
    rank, world_size = validate.whole("rank", rank), validate.whole("world_size", world_size)
    _check_dim(dim, whole)
    if not 0 <= rank < world_size:
        raise UnsupportedProblemError(f"rank {rank} of {world_size}; ranks are from 0 to {world_size - 1}")
    if (length := whole.shape[dim]) % (2 * world_size):
        raise UnsupportedProblemError(
            f"a sequence of {length} over {world_size} ranks; it should be a multiple of {2 * world_size}"
        )
    chunks = whole.chunk(2 * world_size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def zigzag_join(parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The whole sequence again, of the parts of all ranks in their order.

    Raises UnsupportedProblemError for parts of several shapes, or of odd lengths.
    """
    if not isinstance(parts, Sequence) or not parts:
        raise UnsupportedProblemError("parts should be a list of tensors, one of each rank")
    parts = validate.tensors(**{f"parts[{rank}]": part for rank, part in enumerate(parts)})
    _check_dim(dim, parts[0])
    if len(shapes := {tuple(part.shape) for part in parts}) > 1:
        raise UnsupportedProblemError(f"parts of the shapes {listing(sorted(shapes))}; they should be of one")
    if not (rows := parts[0].shape[dim]) or rows % 2:
        raise UnsupportedProblemError(f"parts of {rows} rows; each is two chunks of one length")
    firsts, seconds = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*firsts, *reversed(seconds)), dim)


def _check_dim(dim: int, tensor: torch.Tensor) -> None:
    if not -tensor.dim() <= validate.whole("dim", dim) < tensor.dim():
        raise UnsupportedProblemError(f"dim={dim} of a tensor of shape {tuple(tensor.shape)}, which has no such one")


def pass_on(
    here: torch.Tensor, coming: torch.Tensor, group: dist.ProcessGroup | None, rank: int, world_size: int
) -> list[dist.Work]:
    """Sends what is here to the next rank, and what the rank before has is coming; both go on meanwhile."""
    after, before = (
        other if group is None else dist.get_global_rank(group, other)
        for other in ((rank + 1) % world_size, (rank - 1) % world_size)
    )
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, here, after, group), dist.P2POp(dist.irecv, coming, before, group)]
    )


def _seen(rank: int, source: int, seqlen: int, causal: bool) -> tuple[slice, slice, bool]:
    """Which of a rank's rows see which keys of another rank's part, and whether under the causal mask."""
    half, whole = seqlen // 2, slice(0, seqlen)
    if not causal:
        return whole, slice(None), False
    if source == rank:
        return whole, whole, True
    if source < rank:  # its first chunk is before both of ours, its second behind them
        return whole, slice(0, half), False
    return slice(half, seqlen), whole, False  # both its chunks are between ours
