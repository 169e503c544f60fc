"""Other people's kernels for the forward pass. "Official" is FlashAttention-2 as torch ships it.

They compute the log-sum-exp too, which is given where it costs nothing. Where a problem asks for none, cuDNN leaves it
out, and the others compute it all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch

from flashladder.common.errors import DeviceError
from flashladder.common.measure.baselines import Baseline, CpuBaseline, RunOnce, by_name, mask_functions
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.operations import forward
from flashladder.common.problem.operations.forward import SINKS
from flashladder.common.problem.problem import Problem

_BLOCK_OF_4 = (128, 128)  # rows and keys that FlashAttention-4 lists for an expression
_TORCH_WORDS = {"sqrt": torch.sqrt, "whole": torch.Tensor.int, "real": torch.Tensor.float}
_SCORES_LIMIT = 2**32  # bytes that textbook attention may take for S


class Output(NamedTuple):
    """O, (batch, seqlen_q, num_heads, head_dim_v); LSE, (batch, num_heads, seqlen_q), where the library gives it."""

    o: torch.Tensor
    lse: torch.Tensor | None = None


def takes_square_causal(problem: Problem) -> str | None:
    """Its causal masks are aligned to the top left."""
    unequal = problem.causal and problem.seqlen_q != problem.seqlen_k
    return "takes no causal mask with seqlen_q != seqlen_k" if unequal else None


def _takes_what_fits(problem: Problem) -> str | None:
    scores = 4 * problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    too_large = f"would need {scores / 2**30:.0f} GiB for S" if scores > _SCORES_LIMIT else None
    return too_large or takes_square_causal(problem)


def _takes_contiguous(problem: Problem) -> str | None:
    return None if problem.layout == "bshd" else "takes contiguous tensors"


def _takes_no_groups(problem: Problem) -> str | None:
    return None if problem.num_heads == problem.num_heads_k else "takes no grouped queries"


def _torch_flash(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    if problem.window:
        return _torch_flash_in_window(problem, tensors)
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, 0.0, causal, False, scale=scale)
        return Output(o.transpose(1, 2), lse)

    return run


def _torch_flash_in_window(problem: Problem, tensors: Tensors) -> RunOnce:
    """By the operator beneath, which takes a window."""
    q, k, v = tensors.q, tensors.k, tensors.v
    kernel = torch.ops.aten._flash_attention_forward.default
    causal, (left, right) = problem.causal, sides_of(problem, None)
    options = {"scale": problem.softmax_scale, "window_size_left": left, "window_size_right": right}

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **options)
        return Output(o, lse)

    return run


def _torch_cudnn(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    causal, scale = problem.causal, problem.softmax_scale

    def run() -> Output:
        o, lse, *_ = kernel(q, k, v, None, problem.lse, 0.0, causal, False, scale=scale)
        return Output(o.transpose(1, 2), lse.reshape(q.shape[:3]) if problem.lse else None)

    return run


def _torch_math(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    kernel = torch.ops.aten._scaled_dot_product_attention_math.default
    options = {"scale": problem.softmax_scale, "enable_gqa": problem.num_heads != problem.num_heads_k}

    def run() -> Output:
        return Output(kernel(q, k, v, None, 0.0, problem.causal, None, **options)[0].transpose(1, 2))

    return run


def _flash_attn(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """flash_attn_func of FlashAttention 2 and 3: some releases of 3 give LSE unasked, some never."""
    q, k, v = tensors.q, tensors.k, tensors.v
    options = options_of(problem, -1)
    if "return_attn_probs" in signature(module.flash_attn_func).parameters:
        options["return_attn_probs"] = True  # gives LSE; without dropout no probabilities are made

    def run() -> Output:
        given = module.flash_attn_func(q, k, v, **options)
        return Output(given) if isinstance(given, torch.Tensor) else Output(*given[:2])

    return run


def _flash_3(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    """Sinks go to `fwd(q, k, v, ...)` of packed rows, which vLLM's build of it has."""
    if not problem.sinks:
        return _flash_attn(module, problem, tensors)
    if not (fwd := getattr(module, "fwd", None)):
        raise DeviceError("FlashAttention-3 takes no sinks in this build")
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=tensors.q.device)
    options = options_of_packed(problem, starts * problem.seqlen_q, starts * problem.seqlen_k)
    options["s_aux"] = tensors.by_name[SINKS].to(torch.bfloat16)
    q, k, v = (tensor.flatten(0, 1) for tensor in (tensors.q, tensors.k, tensors.v))
    return lambda: Output(fwd(q, k, v, **options)[0].view_as(tensors.o))


def options_of_packed(problem: Problem, starts_q: torch.Tensor, starts_k: torch.Tensor) -> dict[str, Any]:
    """What FlashAttention-3 is told of packed rows, by the names that all its functions have."""
    return {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
    }


def _flash_attn_4(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = tensors.q, tensors.k, tensors.v
    options = {**options_of(problem, None), **sinks_for_4(problem, tensors), **_mask_for_4(problem, q.device)}

    def run() -> Output:
        o, lse, *_ = module.flash_attn_func(q, k, v, **options, return_lse=True)
        return Output(o, lse)

    return run


def sinks_for_4(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """As FlashAttention-4 takes them."""
    return {"learnable_sink": tensors.by_name[SINKS].to(torch.bfloat16)} if problem.sinks else {}


def _mask_for_4(problem: Problem, device: torch.device) -> dict[str, Any]:
    """An expression as FlashAttention-4 takes it, with lists of its blocks: the causal mask is a part of it then."""
    if not problem.mods:
        return {}
    mask = mask_of_4(problem)
    listing = import_module("flash_attn.cute.compute_block_sparsity").compute_block_sparsity
    sizes = (each or 1 for each in mask_functions.sizes(problem))
    lists = listing(*_BLOCK_OF_4, *sizes, problem.seqlen_q, problem.seqlen_k, mask, None, device)
    return {"mask_mod": mask, "block_sparse_tensors": lists, "causal": False}


def mask_of_4(problem: Problem) -> Callable[..., Any]:
    """The mask as FlashAttention-4's functions are written."""
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    words = {"sqrt": cute.math.sqrt, "whole": lambda x: x.to(cutlass.Int32), "real": lambda x: x.to(cutlass.Float32)}
    mask = mask_functions.function(problem, words)
    mask.__cute_hash__ = mask_functions.source(problem)  # type: ignore[attr-defined]  # it has no file to be hashed
    return mask


def options_of(problem: Problem, everything: int | None) -> dict[str, Any]:
    """What every flash_attn_func takes, and of bounds what is asked for: early releases lack some."""
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    if problem.window:
        options["window_size"] = sides_of(problem, everything)
    if problem.softcap:
        options["softcap"] = problem.softcap
    return options


def sides_of(problem: Problem, everything: int | None) -> tuple[int | None, int | None]:
    """Its sides, with a library's word for all keys, whose number may be too large for the library's integers."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    left, right = (
        everything if keys is None or keys >= longest else keys for keys in (problem.window_left, problem.window_right)
    )
    return left, right


def _flex(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    given, kernel = _heads_first(tensors), flex_attention(module, problem, tensors.device)
    return lambda: Output(kernel(*given).transpose(1, 2))


def flex_attention(module: Any, problem: Problem, device: torch.device) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled, of q, k and v of (batch, heads, seqlen, head_dim)."""
    mask = block_mask(problem, device) if problem.causal or problem.mods else None
    # It is compiled for each problem's lengths. By torch's own limit the ninth would not be.
    torch._dynamo.config.recompile_limit = 64
    kernel = torch.compile(module.flex_attention, dynamic=False)
    grouped = problem.num_heads != problem.num_heads_k
    return partial(kernel, block_mask=mask, scale=problem.softmax_scale, enable_gqa=grouped)


def block_mask(problem: Problem, device: torch.device) -> Any:
    """The mask as FlexAttention takes it: with lists of blocks of 128 rows and 128 keys."""
    module = import_module("torch.nn.attention.flex_attention")
    visible = mask_functions.function(problem, _TORCH_WORDS)
    sizes = (*mask_functions.sizes(problem), problem.seqlen_q, problem.seqlen_k)
    return module.create_block_mask(visible, *sizes, device=device)


def takes_what_others_do_not(problem: Problem) -> str | None:
    widest = Baseline.max_head_dim
    if problem.mods:
        return mask_functions.refusal(problem)
    return None if problem.head_dim > widest else f"is measured above head_dim {widest} alone, where others end"


def _flashinfer(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = (tensor.flatten(0, 1) for tensor in (tensors.q, tensors.k, tensors.v))
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts * problem.seqlen_q,
        starts * problem.seqlen_k,
        problem.num_heads,
        problem.num_heads_k,
        problem.head_dim,
        causal=problem.causal,
        sm_scale=problem.softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )

    def run() -> Output:
        return Output(wrapper.run(q, k, v, return_lse=True)[0].view(tensors.q.shape))  # its LSE is in log2

    return run


def _xformers(module: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    bias = module.fmha.attn_bias.LowerTriangularFromBottomRightMask() if problem.causal else None

    def run() -> Output:
        o, lse = module.fmha.memory_efficient_attention_forward_requires_grad(
            tensors.q, tensors.k, tensors.v, attn_bias=bias, scale=problem.softmax_scale
        )
        return Output(o, lse[..., : problem.seqlen_q])  # it comes padded

    return run


def _sdpa(_: Any, problem: Problem, tensors: Tensors) -> RunOnce:
    q, k, v = _heads_first(tensors)
    grouped = problem.num_heads != problem.num_heads_k

    def run() -> Output:
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, scale=problem.softmax_scale, enable_gqa=grouped
        )
        return Output(o.transpose(1, 2))

    return run


def _heads_first(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors.q.transpose(1, 2), tensors.k.transpose(1, 2), tensors.v.transpose(1, 2)


def _takes_what_was_built(problem: Problem) -> str | None:
    """FlashAttention-3 can be built without types, bounds and more; asked for some of these it ends the process. Sinks
    are of vLLM's build, for up to 64 heads."""
    if problem.sinks and (problem.num_heads > 64 or problem.head_dim != problem.head_dim_v):
        return "takes sinks of up to 64 heads, where V has as many columns as K"
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return None  # a package that does not say: all is built
    wanted = {
        "FP16": ("fp16", problem.dtype == "fp16"),
        "LOCAL": ("sliding windows", problem.window),
        "SOFTCAP": ("softcaps", problem.softcap),
        "VARLEN": ("packed sequences", problem.packed),
    }
    for flag, (what, is_asked) in wanted.items():
        if is_asked and flags.get(f"FLASHATTENTION_DISABLE_{flag}"):
            return f"was built without {what}"
    # A wider one would do, but slowly; what is wider than all is refused elsewhere.
    size = next((columns for columns in (64, 96, 128, 192, 256) if problem.head_dim <= columns), 0)
    return f"was built without head_dim {size}" if flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}") else None


_baseline = partial(Baseline, forward.OPERATION.name)
_DEEPSEEK = ((192, 128),)  # head_dim and head_dim_v of its prefill
_TORCH = "pip install torch (a CUDA build)"
_FA3 = 'pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
BASELINES = by_name(
    _baseline("fa2", "FlashAttention-2 (torch)", "torch", "torch", _TORCH, _torch_flash, bounds=("window",)),
    _baseline(
        name="cudnn",
        title="cuDNN (torch)",
        module="torch",
        package="cudnn",
        install=_TORCH,
        bind=_torch_cudnn,
        refuses=takes_square_causal,
        head_dims_apart=_DEEPSEEK,
    ),
    _baseline(
        name="math",
        title="textbook attention (torch)",
        module="torch",
        package="torch",
        install=_TORCH,
        bind=_torch_math,
        refuses=_takes_what_fits,
        head_dims_apart=_DEEPSEEK,
    ),
    _baseline(
        name="flash-attn",
        title="FlashAttention-2",
        module="flash_attn",
        package="flash-attn",
        install="pip install flash-attn --no-build-isolation",
        bind=_flash_attn,
        bounds=("window", "softcap"),
    ),
    _baseline(
        name="fa3",
        title="FlashAttention-3",
        module="flash_attn_interface",
        package="flash_attn_3",
        install=_FA3,
        bind=_flash_3,
        refuses=_takes_what_was_built,
        arches=(9,),
        bounds=("window", "softcap", "sinks"),
        head_dims_apart=_DEEPSEEK,
    ),
    _baseline(
        name="fa4",
        title="FlashAttention-4",
        module="flash_attn.cute",
        package="flash-attn-4",
        install="pip install --pre flash-attn-4",
        bind=_flash_attn_4,
        refuses=mask_functions.refusal,
        arches=(9, 10),
        bounds=("window", "softcap", "sinks", "mods"),
        head_dims_apart=_DEEPSEEK,
        compiles=True,
    ),
    _baseline(
        name="flashinfer",
        title="FlashInfer",
        module="flashinfer",
        package="flashinfer-python",
        install="pip install flashinfer-python",
        bind=_flashinfer,
        refuses=_takes_contiguous,
        compiles=True,
    ),
    _baseline(
        name="flex",
        title="FlexAttention (torch)",
        module="torch.nn.attention.flex_attention",
        package="torch",
        install=_TORCH,
        bind=_flex,
        refuses=takes_what_others_do_not,
        bounds=("mods",),
        max_head_dim=512,
        compiles=True,
    ),
    _baseline("xformers", "xFormers", "xformers.ops", "xformers", "pip install xformers", _xformers, _takes_no_groups),
)
_MATH = BASELINES["math"]
SDPA = CpuBaseline(
    forward.OPERATION.name, "sdpa", "scaled_dot_product_attention (torch)", "torch", "torch", "", _sdpa, _MATH.refuses
)
AS_TORCH_CHOOSES = _baseline("sdpa", SDPA.title, "torch", "torch", _TORCH, _sdpa, takes_square_causal)  # on a GPU
ON_CPU = by_name(SDPA, CpuBaseline(**vars(_MATH)))
