"""A model of transformers with one implementation of attention and another: errors of logits, and times."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch

from flashladder.common.api.frontends.transformers import register_with_transformers
from flashladder.common.console import warn
from flashladder.common.errors import ConfigError, ToolchainError

TORCHS = ("flash", "cudnn")  # kernels behind sdpa
NO_KERNEL = re.compile("No (available kernel|viable backend)")  # torch, where such a kernel does not take a problem
TIMES = ("attention", "prefill", "a token")
WARM_UPS, ROUNDS = 2, 8


def random_model(sizes: dict[str, int], device: str) -> Any:
    """A random Llama in bf16."""
    try:
        import transformers
    except ImportError:
        raise ToolchainError("transformers is missing: pip install transformers") from None
    register_with_transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=sizes["heads"] * sizes["head_dim"],
        intermediate_size=4 * sizes["heads"] * sizes["head_dim"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads_k"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=sizes["seqlen"] + sizes["tokens"] + 1,
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


@contextmanager
def _attending(model: Any, name: str) -> Iterator[str]:
    """The model's attention is that of a name; gives what transformers calls it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind, _, kernel = name.partition(":")
    if kernel and (kind != "sdpa" or kernel not in TORCHS):
        raise ConfigError(f"--implementations {name}: of sdpa's kernels there are sdpa:flash and sdpa:cudnn")
    try:
        model.set_attn_implementation(kind)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--implementations {name}: {str(error).splitlines()[0]}") from None
    with sdpa_kernel(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION")) if kernel else nullcontext():
        yield kind


def errors_of(model: Any, names: list[str], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The largest error of the logits; without the implementations that have no kernel for the model."""
    real = mask.bool()
    with _attending(exactly := copy.deepcopy(model).float(), "sdpa"):
        exact = exactly(ids, attention_mask=mask).logits[real]
    del exactly
    found = {}
    for name in names:
        try:
            with _attending(model, name):
                found[name] = float((model(ids, attention_mask=mask).logits[real].float() - exact).abs().max())
        except RuntimeError as error:
            if not NO_KERNEL.match(str(error)):
                raise
            warn(f"{name}: torch has no such kernel for this model")
    if not found:
        raise ConfigError(f"--implementations {','.join(names)}: torch has no such kernel for this model")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def times_of(
    model: Any, names: list[str], ids: torch.Tensor, mask: torch.Tensor, tokens: int
) -> dict[str, list[float]]:
    """Of each implementation the milliseconds that TIMES names; NaN where there are none."""
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for _ in range(WARM_UPS + ROUNDS):
        for name, rounds in taken.items():
            with _attending(model, name) as kind:
                with _watched(kind) as calls:
                    prefill = _ms(partial(model, ids, attention_mask=mask))
                attention = sum(begin.elapsed_time(end) for begin, end in calls) if calls else math.nan
                first, all_of_them = (_ms(partial(_generate, model, ids, mask, count)) for count in (1, 1 + tokens))
                rounds.append((attention, prefill, (all_of_them - first) / tokens))
    return {name: [median(each) for each in zip(*rounds[WARM_UPS:], strict=True)] for name, rounds in taken.items()}


@contextmanager
def _watched(kind: str) -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events of the GPU before and after each call of transformers' attention function; none for eager."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual, calls = ALL_ATTENTION_FUNCTIONS.get(kind), []

    def attend(*given: Any, **options: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = usual(*given, **options)
        end.record()
        calls.append((begin, end))
        return made

    if usual:
        AttentionInterface.register(kind, attend)
    try:
        yield calls
    finally:
        if usual:
            AttentionInterface.register(kind, usual)


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, do_sample=False, **lengths)


def _ms(call: Callable[[], object]) -> float:
    """By the host's clock, which is a person's; NaN where torch has no such kernel."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    try:
        call()
    except RuntimeError as error:
        if not NO_KERNEL.match(str(error)):
            raise
        return math.nan
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)
