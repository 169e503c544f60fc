"""What a model of transformers gains: prefill and generation of a random Llama, ours beside torch's attention.

python tools/model.py                                      8 layers, 16/4 heads: 2 x 4,096 tokens, then 64 more
python tools/model.py --layers 32 --heads 32 --heads-k 8 --batch 1 --seqlen 16384
python tools/model.py --implementations sdpa,flash_attention_2,ladder
python tools/model.py --padding 1024                       the same, the first sequence padded by so much, to the left
python tools/model.py --device emulator                    without a GPU: a few tokens, logits compared, not timed

`sdpa:flash` and `sdpa:cudnn` are transformers' sdpa with that kernel of torch's and no other. Errors of logits are
against the same model in fp32; the exit code is 2 where one is above twice that of the first implementation that ran,
or where a layer's attention did not run on the one asked for. Ratios are to the first that ran, which is named: with
padding, `sdpa:flash` does not. Times are medians over rounds that all take part in, in turns: the GPU's in the
attention of all layers of a prefill, and the host's clock of a whole prefill and of a generated token, with a cache
that grows. Nothing is logged.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from flashladder.common.console import Parser, console, fail, warn
from flashladder.common.errors import ConfigError, ToolchainError, VerificationError
from flashladder.common.report.tables import numbers, table

if TYPE_CHECKING:
    import torch

SIZES = {  # on a GPU, and on the emulator
    "layers": (8, 1),
    "heads": (16, 2),
    "heads_k": (4, 1),
    "head_dim": (128, 64),
    "batch": (2, 1),
    "seqlen": (4096, 16),
    "tokens": (64, 2),
}
IMPLEMENTATIONS = "sdpa:flash,sdpa:cudnn,ladder", "sdpa,ladder"  # likewise
TORCHS = ("flash", "cudnn")  # kernels behind sdpa
NO_KERNEL = re.compile("No (available kernel|viable backend)")  # torch, where such a kernel does not take a problem
TIMES = ("attention", "prefill", "a token")
WARM_UPS, ROUNDS = 2, 8


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--implementations", help=f"of attention (default: {' or, emulated, '.join(IMPLEMENTATIONS)})")
    made.add_argument("--device", choices=("auto", "gpu", "emulator"), default="auto", help="default: a GPU if any")
    for name, (on_gpu, emulated) in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=int, metavar="N", help=f"default: {on_gpu}; {emulated} on the emulator")
    made.add_argument("--padding", type=int, default=0, metavar="N", help="in front of the first sequence (default: 0)")
    return made


def main(arguments: argparse.Namespace) -> int:
    import torch

    from flashladder.common.api.fallback import FallbackWarning
    from flashladder.common.runtime import target

    on_gpu = target.resolve(arguments.device, None).on_gpu
    sizes = {
        name: defaults[not on_gpu] if (given := getattr(arguments, name)) is None else given
        for name, defaults in SIZES.items()
    }
    names = (arguments.implementations or IMPLEMENTATIONS[not on_gpu]).split(",")
    model = _model(sizes, "cuda" if on_gpu else "cpu")
    ids = torch.randint(0, model.config.vocab_size, (sizes["batch"], sizes["seqlen"]), device=model.device)
    if not 0 <= arguments.padding < sizes["seqlen"]:
        raise ConfigError(f"--padding {arguments.padding}: of {sizes['seqlen']} tokens, some should be none")
    mask = torch.ones_like(ids)  # or else generate() takes ids that happen to be pad_token_id for padding
    mask[0, : arguments.padding] = 0
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            errors = _errors(model, names, ids, mask)
            times = _times(model, list(errors), ids, mask, sizes["tokens"]) if on_gpu else {}
    except FallbackWarning as said:
        raise VerificationError(str(said)) from None
    sizes["padding"] = arguments.padding
    console.print(", ".join(f"{name} {size}" for name, size in sizes.items()), style="bold")
    console.print(_shown(errors, times))
    first = next(iter(errors))
    allowed = 2 * errors[first] + 1e-5
    wrong = [f"{name}: {error:.2g}" for name, error in errors.items() if not error <= allowed]
    return fail(f"{', '.join(wrong)}: logits are wrong by more than twice {first}'s error") if wrong else 0


def _model(sizes: dict[str, int], device: str) -> Any:
    """A random Llama in bf16."""
    try:
        import transformers
    except ImportError:
        raise ToolchainError("transformers is missing: pip install transformers") from None
    import torch

    from flashladder import register_with_transformers

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


def _errors(model: Any, names: list[str], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The largest error of the logits; without the implementations that have no kernel for the model."""
    import torch

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


def _times(model: Any, names: list[str], ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> dict[str, list[float]]:
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
    import torch
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
    import torch

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


def _shown(errors: dict[str, float], times: dict[str, list[float]]) -> Table:
    columns, ratios = ["error of logits"], []
    for place, name in enumerate(TIMES if times else ()):
        ran = {other: taken[place] for other, taken in times.items() if not math.isnan(taken[place])}
        first = next(iter(ran), "none")
        columns += [f"{name}, ms", f"to {first}"]
        ratios.append({other: (mine, ran[first] / mine) for other, mine in ran.items()})
    rows = []
    for name, error in errors.items():
        figures = [f"{figure:.3f}" if name in ran else "-" for ran in ratios for figure in ran.get(name, (0, 0))]
        rows.append((name, f"{error:.2g}", *figures))
    return table("", ["implementation", *numbers(*columns)], rows)
