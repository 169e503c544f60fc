"""attention that torch differentiates: the gradients are those of a rung of the backward ladder.

The forward pass keeps Q, K, V, O and the log-sum-exp. It has two operators, a plain one and a general one. Both have
the same backward pass, which is an operator of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flashladder.common.api import general, gradients, op
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.config import listing
from flashladder.common.problem.problem import DETERMINISTIC, Problem
from flashladder.common.runtime.launch import ALIGNMENT
from flashladder.common.runtime.ready import choice_for, ready_for

OPERATION = "backward"

_SINKS = -3  # their place among the general operator's inputs
_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state")  # of the options
_Gradients = tuple[torch.Tensor | None, ...]

op.LIBRARY.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    "float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, Tensor? alibi_slopes, "
    "bool deterministic, float dropout_p, Tensor? rng_state, bool wants_dq, bool wants_dkv) "
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
    deterministic: bool = False  # of the backward pass
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None

    @property
    def packing(self) -> general.Packing:
        """How sequences lie in the tensors."""
        return general.Packing(*self[:4])

    @property
    def has_more(self) -> bool:
        """Whether the forward pass of it is none of the plain operator's."""
        more = self.softcap or self.dropout_p or self.alibi_slopes is not None or self.cu_seqlens_q is not None
        return bool(more) or (self.window_left, self.window_right) != general.OPEN

    @property
    def is_plain(self) -> bool:
        """Whether the plain operator takes it, with its gradients."""
        return not self.has_more and not self.deterministic

    def problem(self, q: torch.Tensor, k: torch.Tensor, **asked: bool) -> Problem:
        """That of the backward pass, whose options are those that are `asked` for.

        Also torch's switch may ask for the same bits each time.
        """
        bounds = {"window_left": self.window_left, "window_right": self.window_right, "softcap": self.softcap}
        more: dict[str, Any] = {
            "alibi": self.alibi_slopes is not None,
            "dropout_p": self.dropout_p,
            **self.packing.sizes(q, k),
        }
        asked[DETERMINISTIC] = self.deterministic or _torch_wants_the_same_bits()
        more["options"] = tuple(asked.items())
        return op.problem_of(q, k, self.causal, self.softmax_scale, True, operation=OPERATION, **bounds, **more)


def refuse(**asked: Any) -> None:
    """UnsupportedProblemError that names arguments of which no backward rung knows, where they are asked for."""
    if unknown := listing(name for name, is_asked in asked.items() if is_asked):
        raise UnsupportedProblemError(
            f"the inputs want a gradient, and backward rungs take no {unknown}: leave it out, or call it in "
            "torch.no_grad()"
        )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, sinks: torch.Tensor | None, version: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, which both have gradients. UnsupportedProblemError for what no backward rung takes."""
    gradients.refuse_transforms()
    require_rung(q, k, options)
    if not op.seen(q, k, v):
        o, lse = _Direct.apply(q, k, v, options, sinks, version, True)
    elif options.is_plain and sinks is None:
        o, lse = torch.ops.flashladder.attention(q, k, v, options.causal, options.softmax_scale, version, True)
    else:
        o, lse = general.forward(q, k, v, *options, sinks, version, True)
    return o, lse


def require_rung(q: torch.Tensor, k: torch.Tensor, options: Options) -> None:
    """UnsupportedProblemError where no backward rung takes what a forward pass is to have gradients of."""
    if not torch.compiler.is_compiling() and not q.is_meta:
        _require(options.problem(q, k), q)


def _torch_wants_the_same_bits() -> bool:
    """Whether torch.use_deterministic_algorithms asks for them; with warn_only it does not."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _require(problem: Problem, q: torch.Tensor) -> None:
    """UnsupportedProblemError where no rung takes a problem, with what would work."""
    try:
        choice_for(problem, q)
    except UnsupportedProblemError as error:
        instead = "call it in torch.no_grad()"
        if problem.deterministic:
            instead += ", or without deterministic and with torch.use_deterministic_algorithms(True, warn_only=True)"
        raise UnsupportedProblemError(f"the inputs want a gradient, and {error}: {instead}") from None


def _keep_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, causal, softmax_scale, *_ = inputs
    keep(ctx, (q, k, v), Options(causal=causal, softmax_scale=softmax_scale), None, output)


def _keep_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *options, sinks, _, _ = inputs
    keep(ctx, (q, k, v), Options(*options), sinks, output)


def keep(
    ctx: Any,
    inputs: tuple[torch.Tensor, ...],
    options: Options,
    sinks: torch.Tensor | None,
    output: tuple[torch.Tensor, ...],
) -> None:
    """Q, K, V, O, the log-sum-exp, and what was asked for, for `differentiate`."""
    if output[0].numel() and not output[1].numel():
        raise UnsupportedProblemError(
            "the inputs want a gradient, which torch.vmap hid: call it with return_lse=True, or without vmap"
        )
    ctx.save_for_backward(*inputs, *output, sinks, *(getattr(options, name) for name in _TENSORS))
    nothing: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.options = options._replace(**nothing)
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> _Gradients:
    """The gradients of all inputs of an operator that begin with Q, K and V, and may have sinks."""
    found: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    if dout is None and dlse is None:
        return tuple(found)
    q, k, v, o, lse, sinks, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(o) if dout is None else dout
    options = ctx.options._replace(**dict(zip(_TENSORS, tensors, strict=True)))
    of_q, of_k, of_v = asked = ctx.needs_input_grad[:3]
    if any(asked):
        looked_at = torch.is_grad_enabled() or op.seen(q, k, v) or op.seen(dout, o, lse)
        compute = torch.ops.flashladder.attention_backward if looked_at else _backward
        made = compute(dout, q, k, v, o, lse, dlse, *options, of_q, of_k or of_v)
        found[:3] = [gradient if wanted else None for gradient, wanted in zip(made, asked, strict=True)]
    if sinks is not None and ctx.needs_input_grad[_SINKS]:
        found[_SINKS] = _of_sinks(sinks, o, lse, dout, dlse, options.cu_seqlens_q)
    return tuple(found)


class _Direct(torch.autograd.Function):
    """Both operators and their gradients where nobody looks on: torch takes less time of the host to this.

    Its last inputs are those of the general operator, as `differentiate` expects them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Options,
        sinks: torch.Tensor | None,
        version: str,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if options.is_plain and sinks is None:
            plain = q.detach(), k.detach(), v.detach(), None  # C++ leaves what wants a gradient to Python
            asked = options.causal, options.softmax_scale, version, lse
            found: Any = op.on_fast_path(*plain, *asked) or op.straight(*plain, *asked)
        else:
            found = general.computed(q, k, v, *options, sinks, version, lse)
        keep(ctx, (q, k, v), options, sinks, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return differentiate(ctx, *gradients)


def _of_sinks(
    sinks: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
) -> torch.Tensor:
    """(heads,): a sink takes the share exp(sink - LSE) of each row's weights; dLSE pulls it up, dO O pushes it down."""
    share = (sinks[:, None] - lse).exp().masked_fill(lse == -math.inf, 0)  # no key, and no sink
    pull = -(dout.float() * o).sum(-1).transpose(1, 2).view_as(lse)  # packed, lse has no batch
    pulled = share * (pull if dlse is None else pull + dlse)
    if cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        pulled = pulled.masked_fill(row >= cu_seqlens_q[-1], 0)  # of no sequence; dO and dLSE may be NaN there
    return pulled.transpose(0, -2).flatten(1).sum(1)


torch.library.register_autograd("flashladder::attention", differentiate, setup_context=_keep_plain, lib=op.LIBRARY)
general.forward.register_autograd(differentiate, setup_context=_keep_general)


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
    """dQ, dK and dV, strided as Q, K and V are. Rows and keys of no sequence have zeros.

    What nobody wants has no elements.
    """
    *given_options, wants_dq, wants_dkv = values
    options = Options(*given_options)
    packing = options.packing
    is_packed = packing.cu_seqlens_q is not None
    new = torch.zeros_like if is_packed else torch.empty_like
    made = {"dq": new(q)} if wants_dq else {}
    made |= {"dk": new(k), "dv": new(v)} if wants_dkv else {}
    found = tuple(made.get(name, q.new_empty(0)) for name in ("dq", "dk", "dv"))
    if packing.is_blind(q, k):
        return found
    problem = options.problem(q, k, dlse=dlse is not None, wants_dq=wants_dq, wants_dkv=wants_dkv)
    _require(problem, q)
    given = {"q": q, "k": k, "v": v, "o": o, "dout": _as_kernels_read(dout), "lse": lse}
    given |= general.more_inputs(packing, options.alibi_slopes, options.rng_state)
    given |= {} if dlse is None else {"dlse": dlse.contiguous()}
    ready_for(problem, q).launch(problem, given | made)
    if is_packed and not q.is_cuda:  # the emulator gives all of its memory back
        for of, name in (("q", "dq"), ("k", "dk"), ("k", "dv")):
            if name in made:
                made[name][:, int(given[f"cu_seqlens_{of}"][-1]) :] = 0
    return found


def _as_kernels_read(dout: torch.Tensor) -> torch.Tensor:
    """dO, copied where its strides are not those of a kernel's input: o.sum() gives one with no strides at all."""
    elements = ALIGNMENT // dout.element_size()
    *steps, last = dout.stride()
    is_plain = last == 1 and not any(step % elements for step in steps) and dout.data_ptr() % ALIGNMENT == 0
    return dout if is_plain else dout.contiguous()


for _device in ("CPU", "CUDA"):
    op.LIBRARY.impl("attention_backward", _backward, _device)


@torch.library.register_fake("flashladder::attention_backward", lib=op.LIBRARY)
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
    wants_dq, wants_dkv = more[-2:]
    wanted = ((q, wants_dq), (k, wants_dkv), (v, wants_dkv))
    return tuple(torch.empty_like(tensor) if is_wanted else q.new_empty(0) for tensor, is_wanted in wanted)


def _refuse_again(ctx: Any, *_: Any) -> _Gradients:
    raise UnsupportedProblemError(
        "a gradient of a gradient is wanted (double backward), and no rung computes it: scaled_dot_product_attention "
        "with torch's math backend does"
    )


torch.library.register_autograd("flashladder::attention_backward", _refuse_again, lib=op.LIBRARY)
