"""What a model of transformers gains: prefill and generation of a random Llama, ours beside torch's attention.

python tools/model.py                                      8 layers, 16/4 heads: 2 x 4,096 tokens, then 64 more
python tools/model.py --layers 32 --heads 32 --heads-k 8 --batch 1 --seqlen 16384
python tools/model.py --implementations sdpa,flash_attention_2,ladder
python tools/model.py --device emulator                    without a GPU: a few tokens, logits compared, not timed

Ratios and differences are to the first implementation. Times are medians over rounds that all take part in, in turns;
generation is the time of a token, with a cache that grows. Nothing is logged.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from flashladder.common.console import Parser, console, table
from flashladder.common.errors import ToolchainError

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
WARM_UPS, ROUNDS = 2, 8


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("--implementations", default="sdpa,ladder", help="of attention (default: sdpa,ladder)")
    made.add_argument("--device", choices=("auto", "gpu", "emulator"), default="auto", help="default: a GPU if any")
    for name, (on_gpu, emulated) in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=int, metavar="N", help=f"default: {on_gpu}; {emulated} on the emulator")
    return made


def main(arguments: argparse.Namespace) -> int:
    try:
        import transformers
    except ImportError:
        raise ToolchainError("transformers is missing: pip install transformers") from None
    import torch

    from flashladder import register_with_transformers
    from flashladder.common.run import target

    register_with_transformers()
    on_gpu = target.resolve(arguments.device, None).on_gpu
    sizes = {
        name: defaults[not on_gpu] if (given := getattr(arguments, name)) is None else given
        for name, defaults in SIZES.items()
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=sizes["heads"] * sizes["head_dim"],
        intermediate_size=4 * sizes["heads"] * sizes["head_dim"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads_k"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=sizes["seqlen"] + sizes["tokens"],
    )
    model = transformers.LlamaForCausalLM(config).to("cuda" if on_gpu else "cpu", torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (sizes["batch"], sizes["seqlen"]), device=model.device)
    names = arguments.implementations.split(",")
    with torch.inference_mode():
        logits = {name: _prefill(model, name, ids) for name in names}
        times = _times(model, names, ids, sizes["tokens"]) if on_gpu else {}
    console.print(", ".join(f"{name} {size}" for name, size in sizes.items()), style="bold")
    console.print(_shown(logits, times))
    return 0


def _prefill(model: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model(ids).logits


def _generate(model: Any, name: str, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )


def _times(model: Any, names: list[str], ids: torch.Tensor, tokens: int) -> dict[str, tuple[float, float]]:
    """Of each implementation: milliseconds of a prefill, and of a generated token."""
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for _ in range(WARM_UPS + ROUNDS):
        for name, (prefills, steps) in taken.items():
            first = _ms(partial(_generate, model, name, ids, 1))
            prefills.append(_ms(partial(_prefill, model, name, ids)))
            steps.append((_ms(partial(_generate, model, name, ids, 1 + tokens)) - first) / tokens)
    return {name: (median(p[WARM_UPS:]), median(s[WARM_UPS:])) for name, (p, s) in taken.items()}


def _ms(call: Callable[[], object]) -> float:
    """By the host's clock, which is a person's."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _shown(logits: dict[str, torch.Tensor], times: dict[str, tuple[float, float]]) -> Table:
    first, *_ = logits
    timed = ("prefill, ms", "to the first", "a token, ms", "to the first") if times else ()
    columns = ("largest difference of logits", *timed)
    made = table("", "attention", *columns, right=columns)
    for name, given in logits.items():
        cells = [f"{float((given - logits[first]).abs().max()):.2g}"]
        for mine, base in zip(times.get(name, ()), times.get(first, ()), strict=True):
            cells += [f"{mine:.3f}", f"{base / mine:.3f}"]
        made.add_row(name, *cells)
    return made
