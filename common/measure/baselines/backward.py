"""Other people's kernels for the backward pass, without what automatic differentiation costs around them. "Official" is
FlashAttention-2 as torch ships it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from flashladder.common.measure.baselines import CpuBaseline, RunOnce, by_name, mask_functions
from flashladder.common.measure.baselines import forward as of_forward
from flashladder.common.measure.baselines.forward import sides_of, takes_square_causal
from flashladder.common.problem.config import listing
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations.backward import DLSE, DSINKS
from flashladder.common.problem.operations.packed import STARTS
from flashladder.common.problem.problem import DETERMINISTIC, Problem

_MORE = {
    "packed": "packed sequences",
    DLSE: "gradient of the log-sum-exp",
    DSINKS: "gradient of sinks",
    DETERMINISTIC: "promise of the same bits each time",
}


class Gradients(NamedTuple):
    """Like q, k and v: (batch, seqlen, heads, head_dim)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _takes_no(*names: str) -> Callable[[Problem], str | None]:
    """The refusal of a library that lacks these."""

    def refusal(problem: Problem) -> str | None:
        asked = [words for name, words in _MORE.items() if name in names and getattr(problem, name)]
        return f"takes no {listing(asked)}" if asked else None

    return refusal


def _refuses_on_cpu(problem: Problem) -> str | None:
    """torch expands K and V before it calls the operator."""
    grouped = None if problem.num_heads == problem.num_heads_k else "takes no grouped queries"
    return _takes_no("packed", DLSE, DSINKS)(problem) or grouped or takes_square_causal(problem)


def _refuses_cudnn(problem: Problem) -> str | None:
    return _takes_no(*_MORE)(problem) or takes_square_causal(problem)


def _heads_first(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors.by_name[name].transpose(1, 2) for name in ("dout", "q", "k", "v", "o")]


def _gradients(made: tuple[torch.Tensor, ...]) -> Gradients:
    dq, dk, dv = (tensor.transpose(1, 2) for tensor in made[:3])
    return Gradients(dq, dk, dv)


def _rows_first(tensors: Tensors, *names: str) -> list[torch.Tensor]:
    """As flash-attn takes them: packed sequences have no batch."""
    found = [tensors.by_name[name] for name in names]
    return [tensor[0] for tensor in found] if tensors.problem.packed else found


def _torch_flash(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """By the operator beneath, which takes packed sequences, groups and windows."""
    kernel = torch.ops.aten._flash_attention_backward.default
    given = _rows_first(tensors, "dout", "q", "k", "v", "o")
    seed = torch.zeros(2, dtype=torch.uint64, device=given[0].device)  # of no dropout
    starts = [tensors.by_name.get(name) for name in STARTS]
    sizes = (*starts, problem.seqlen_q, problem.seqlen_k, 0.0, problem.causal, seed, seed)
    options: dict[str, Any] = {"scale": problem.softmax_scale}
    if problem.window:
        options |= zip(("window_size_left", "window_size_right"), sides_of(problem, None), strict=True)

    def run() -> Gradients:
        with _same_bits() if problem.deterministic else nullcontext():
            found = kernel(*given, tensors.lse, *sizes, **options)
        return Gradients(*(gradient.view(tensors.by_name[x].shape) for x, gradient in zip("qkv", found, strict=True)))

    return run


@contextmanager
def _same_bits() -> Iterator[None]:
    """torch's operators ask its switch for them. It also has them fill what they allocate, which is no part of it."""
    filling: Any = torch.utils.deterministic  # which no type says the attribute of
    mode, fills = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        filling.fill_uninitialized_memory = fills


def _torch_cudnn(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    dout, q, k, v, o = _heads_first(tensors)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of no dropout
    sizes = (seed, seed, None, None, None, problem.seqlen_q, problem.seqlen_k, 0.0, problem.causal)

    def run() -> Gradients:
        lse = tensors.lse.unsqueeze(-1)
        return _gradients(kernel(dout, q, k, v, o, lse, *sizes, scale=problem.softmax_scale))

    return run


def _flash_attn_4(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """What its automatic differentiation calls; of options those that are asked for, as early releases lack some."""
    given = _rows_first(tensors, "q", "k", "v", "o", "dout")
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    if problem.window:
        options |= zip(("window_size_left", "window_size_right"), sides_of(problem, None), strict=True)
    if problem.packed:
        options |= {name: tensors.by_name[name] for name in STARTS}
        options |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    options |= {name: value for name in ("softcap", DETERMINISTIC) if (value := getattr(problem, name))}
    if problem.dlse:
        options[DLSE] = tensors.by_name[DLSE]
    if problem.mods:
        options |= _mask_for_4(problem, tensors.device)

    def run() -> Gradients:
        found = module._flash_attn_bwd(*given, tensors.lse, **options)
        return Gradients(*(gradient.view(tensors.by_name[x].shape) for x, gradient in zip("qkv", found, strict=True)))

    return run


def _mask_for_4(problem: Problem, device: torch.device) -> dict[str, Any]:
    """With lists of the blocks of rows that see a block of keys."""
    mask = of_forward.block_mask(problem, device)
    listed = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    lists = listed(
        mask.q_num_blocks,
        mask.q_indices,
        mask.full_q_num_blocks,
        mask.full_q_indices,
        block_size=mask.BLOCK_SIZE,
    )
    return {"mask_mod": of_forward.mask_of_4(problem), "block_sparse_tensors": lists, "causal": False}


def _refuses_4(problem: Problem) -> str | None:
    lacking = _takes_no(DSINKS, DETERMINISTIC) if problem.mods else _takes_no(DSINKS)
    return lacking(problem) or mask_functions.refusal(problem)


def _flex(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Of a graph that is kept, so that the backward pass runs alone; of copies, as others may write to the tensors."""
    functorch: Any = import_module("torch._functorch.config")
    functorch.donated_buffer = False  # else a graph's memory is used again by its first backward pass
    dout, *given = (tensors.by_name[name].detach().transpose(1, 2).clone() for name in ("dout", "q", "k", "v"))
    given = [tensor.requires_grad_() for tensor in given]
    o = of_forward.flex_attention(module, problem, tensors.device)(*given)
    return lambda: _gradients(torch.autograd.grad(o, given, dout, retain_graph=True))


def _refuses_flex(problem: Problem) -> str | None:
    return _takes_no(*_MORE)(problem) or of_forward.takes_what_others_do_not(problem)


def _torch_cpu(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dout, q, k, v, o = _heads_first(tensors)

    def run() -> Gradients:
        return _gradients(kernel(dout, q, k, v, o, tensors.lse, 0.0, problem.causal, scale=problem.softmax_scale))

    return run


_of = partial(replace, operation="backward")
_FORWARD = of_forward.BASELINES
BASELINES = by_name(
    _of(_FORWARD["fa2"], bind=_torch_flash, refuses=_takes_no(DLSE, DSINKS)),
    _of(_FORWARD["cudnn"], bind=_torch_cudnn, refuses=_refuses_cudnn),
    _of(_FORWARD["fa4"], module="flash_attn.cute.interface", bind=_flash_attn_4, refuses=_refuses_4),
    _of(_FORWARD["flex"], bind=_flex, refuses=_refuses_flex),
)
ON_CPU = by_name(
    CpuBaseline(
        "backward",
        "sdpa",
        "scaled_dot_product_attention (torch)",
        "torch",
        "torch",
        "",
        _torch_cpu,
        _refuses_on_cpu,
    )
)
