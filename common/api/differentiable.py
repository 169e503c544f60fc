"""attention that torch differentiates: the gradients are those of a rung of the backward ladder.

The forward pass keeps Q, K, V, O and the log-sum-exp. It has two operators, a plain one and a general one. Both have
the same backward pass, which is an operator of its own.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from flashladder.common import catalog
from flashladder.common.api import general, op
from flashladder.common.catalog import Version
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import target
from flashladder.common.runtime.launch import ALIGNMENT, PROBLEMS_KEPT
from flashladder.common.runtime.tuned import is_long

LADDER = "backward"  # the name of the ladder, and of what it computes

_Gradients = tuple[torch.Tensor | None, ...]

op.LIBRARY.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    "float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, Tensor? alibi_slopes) "
    "-> (Tensor, Tensor, Tensor)"
)


class Options(NamedTuple):
    """What is asked for beside Q, K and V, as the general operator takes it; without a change, plain attention."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    causal: bool = False
    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None

    @property
    def packing(self) -> general.Packing:
        """How sequences lie in the tensors."""
        return general.Packing(*self[:4])

    @property
    def is_plain(self) -> bool:
        """Whether the plain operator takes it."""
        has_more = self.softcap or self.alibi_slopes is not None or self.cu_seqlens_q is not None
        return not has_more and (self.window_left, self.window_right) == general.OPEN

    def problem(self, q: torch.Tensor, k: torch.Tensor, dlse: bool) -> Problem:
        """That of the backward pass."""
        bounds = {"window_left": self.window_left, "window_right": self.window_right, "softcap": self.softcap}
        more = {"alibi": self.alibi_slopes is not None, "options": (("dlse", dlse),), **self.packing.sizes(q, k)}
        return op.problem_of(q, k, self.causal, self.softmax_scale, True, operation=LADDER, **bounds, **more)


def refuse(**asked: Any) -> None:
    """UnsupportedProblemError that names arguments of which no backward rung knows, where they are asked for."""
    if unknown := listing(name for name, is_asked in asked.items() if is_asked):
        raise UnsupportedProblemError(
            f"the inputs want a gradient, and backward rungs take no {unknown}: leave it out, or call it in "
            "torch.no_grad()"
        )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, version: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, which both have gradients. UnsupportedProblemError for what no backward rung takes."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise UnsupportedProblemError(
            "the inputs want a gradient, and backward rungs sum dQ in any order, which "
            "torch.use_deterministic_algorithms forbids: with warn_only=True it works"
        )
    if not torch.compiler.is_compiling() and not q.is_meta:
        rung_for(options.problem(q, k, dlse=False), _arch(q.device))
    if options.is_plain:
        o, lse = torch.ops.flashladder.attention(q, k, v, options.causal, options.softmax_scale, version, True)
    else:
        o, lse = general.forward(q, k, v, *options, version, True)
    return o, lse


@lru_cache(PROBLEMS_KEPT)
def rung_for(problem: Problem, arch: str) -> Version:
    """The highest backward rung that takes a problem; UnsupportedProblemError says what the lowest one lacks."""
    rungs = [rung for rung in catalog.versions(ladder=LADDER) if rung.runs_on(arch) and not rung.draft]
    if able := [rung for rung in rungs if rung.takes(problem)]:
        return able[-1]
    try:
        rungs[0].config_for(problem)
    except UnsupportedProblemError as error:
        reason = f"the inputs want a gradient, and {error}: call it in torch.no_grad()"
        raise UnsupportedProblemError(reason) from None
    raise UnsupportedProblemError(f"the inputs want a gradient, and no backward rung takes {problem.name}")


@cache
def _arch(device: torch.device) -> str:
    """What kernels are compiled for where tensors lie."""
    if device.type != "cuda":
        return target.resolve("emulator", None).arch
    with torch.cuda.device(device):
        return target.resolve("gpu", None).arch


def _keep_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, causal, softmax_scale, *_ = inputs
    _keep(ctx, (q, k, v), Options(causal=causal, softmax_scale=softmax_scale), output)


def _keep_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *options, _, _ = inputs
    _keep(ctx, (q, k, v), Options(*options), output)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], options: Options, output: tuple[torch.Tensor, ...]) -> None:
    tensors = options.cu_seqlens_q, options.cu_seqlens_k, options.alibi_slopes
    ctx.save_for_backward(*inputs, *output, *tensors)
    ctx.options = options._replace(cu_seqlens_q=None, cu_seqlens_k=None, alibi_slopes=None)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
    nothing = (None,) * (len(ctx.needs_input_grad) - 3)  # of the options
    if dout is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, slopes = ctx.saved_tensors
    dout = torch.zeros_like(o) if dout is None else dout
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options = ctx.options._replace(**starts, alibi_slopes=slopes)
    made = torch.ops.flashladder.attention_backward(dout, q, k, v, o, lse, dlse, *options)
    asked = ctx.needs_input_grad[:3]
    return *(gradient if wanted else None for gradient, wanted in zip(made, asked, strict=True)), *nothing


torch.library.register_autograd("flashladder::attention", _differentiate, setup_context=_keep_plain, lib=op.LIBRARY)
general.forward.register_autograd(_differentiate, setup_context=_keep_general)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *values: Any,
) -> tuple[torch.Tensor, ...]:
    """dQ, dK and dV, contiguous. Rows and keys of no sequence have zeros."""
    options = Options(*values)
    packing = options.packing
    is_packed = packing.cu_seqlens_q is not None
    made = {
        f"d{name}": (tensor.new_zeros if is_packed else tensor.new_empty)(tensor.shape)
        for name, tensor in (("q", q), ("k", k), ("v", v))
    }
    if packing.is_blind(q, k):
        return tuple(made.values())
    problem = options.problem(q, k, dlse is not None)
    rung = rung_for(problem, _arch(q.device))
    features = is_packed, problem.window, problem.softcap > 0, problem.alibi, problem.dlse
    kind = (LADDER, rung.name, q.dtype, q.device, *q.shape[2:], k.shape[2], problem.causal, *features, is_long(problem))
    ready = op.ready_for(kind, problem, q, rung.name)
    given = {"q": q, "k": k, "v": v, "o": o, "dout": _as_kernels_read(dout), "lse": lse}
    given |= general.more_inputs(packing, options.alibi_slopes) | ({} if dlse is None else {"dlse": dlse.contiguous()})
    op.slow_path(ready, problem, given | made)
    if is_packed and not q.is_cuda:  # the emulator gives all of its memory back
        for of, name in (("q", "dq"), ("k", "dk"), ("k", "dv")):
            made[name][:, int(given[f"cu_seqlens_{of}"][-1]) :] = 0
    return tuple(made.values())


def _as_kernels_read(dout: torch.Tensor) -> torch.Tensor:
    """dO, copied where its strides are not those of a kernel's input: o.sum() gives one with no strides at all."""
    elements = ALIGNMENT // dout.element_size()
    *steps, last = dout.stride()
    is_plain = last == 1 and not any(step % elements for step in steps) and dout.data_ptr() % ALIGNMENT == 0
    return dout if is_plain else dout.contiguous()


for _device in ("CPU", "CUDA"):
    op.LIBRARY.impl("attention_backward", _backward, _device)


@torch.library.register_fake("flashladder::attention_backward", lib=op.LIBRARY)
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _refuse_again(ctx: Any, *_: Any) -> _Gradients:
    raise UnsupportedProblemError(
        "a gradient of a gradient is wanted (double backward), and no rung computes it: scaled_dot_product_attention "
        "with torch's math backend does"
    )


torch.library.register_autograd("flashladder::attention_backward", _refuse_again, lib=op.LIBRARY)
