"""Gradients of what a call is given beside Q, K and V: of sinks, and of tensors that a score reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashladder.common.api.options import Modified, Options
from flashladder.common.expression import Mods


def of_sinks(
    options: Options, o: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """(heads,), by torch, for where no kernel runs: a sink takes the share exp(sink - LSE) of each row's weights; dLSE
    pulls it up, dO O pushes it down."""
    share = (options.tensors["sinks"][:, None] - lse).exp()
    pushed = (dout.float() * o).sum(-1).masked_fill((o == 0).all(-1), 0)  # of a row without keys, whose dO may be NaN
    pull = -pushed.transpose(1, 2).reshape(lse.shape)  # packed, lse has no batch
    pulled = (share * (pull if dlse is None else pull + dlse)).masked_fill(lse == -math.inf, 0)  # no key, and no sink
    if options.cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        pulled = pulled.masked_fill(row >= options.cu_seqlens_q[-1], 0)  # of no sequence; dO and dLSE may be NaN there
    return summed(pulled)


def summed(pulls: torch.Tensor) -> torch.Tensor:
    """(heads,), the gradient of sinks, of what each row adds to it."""
    return pulls.sum((-1,) if pulls.dim() == 2 else (0, -1))  # packed, there is no batch


def no_sums(options: Modified) -> dict[str, torch.Tensor]:
    """Zeros, fp32, for the gradients of the tensors that are read, by kernels' names; of those that are asked for."""
    each = zip(Mods.parse(options.mods).tensors, options.read, options.asked, strict=True)
    return {tensor.gradient: x.new_zeros(x.numel(), dtype=torch.float32) for tensor, x, is_asked in each if is_asked}


def of_read(options: Modified, sums: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of all, which are like the tensors; those that nobody asked for have no elements."""
    each = zip(Mods.parse(options.mods).tensors, options.read, strict=True)
    return [
        sums[tensor.gradient].to(x.dtype).view_as(x) if tensor.gradient in sums else x.new_empty(0)
        for tensor, x in each
    ]
