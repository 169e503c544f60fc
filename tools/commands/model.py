"""What a model of transformers gains: prefill and generation of a random Llama, ours beside torch's attention.

flashladder model                                      8 layers, 16/4 heads: 2 x 4,096 tokens, then 64 more
flashladder model --layers 32 --heads 32 --heads-k 8 --batch 1 --seqlen 16384
flashladder model --implementations sdpa,flash_attention_2,ladder
flashladder model --padding 1024                       the same, the first sequence padded by so much, to the left
flashladder model --device emulator                    without a GPU: a few tokens, logits compared, not timed

`sdpa:flash` and `sdpa:cudnn` are transformers' sdpa with that kernel of torch's and no other. Errors of logits are
against the same model in fp32; the exit code is 2 where one is above twice that of the first implementation that ran,
or where a layer's attention did not run on the one asked for. Ratios are to the first that ran, which is named: with
padding, `sdpa:flash` does not. Times are medians over rounds that all take part in, in turns: the GPU's in the
attention of all layers of a prefill, and the host's clock of a whole prefill and of a generated token, with a cache
that grows. Nothing is logged.
"""

from __future__ import annotations

import argparse
import math
import warnings

from rich.table import Table

from flashladder.common.console import Parser, console, fail
from flashladder.common.errors import ConfigError, VerificationError
from flashladder.common.report.tables import numbers, table

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

    from flashladder.common.api.frontends.fallback import FallbackWarning
    from flashladder.common.runtime import target
    from flashladder.common.studies.models import model_trial

    on_gpu = target.resolve(arguments.device, None).on_gpu
    sizes = {
        name: defaults[not on_gpu] if (given := getattr(arguments, name)) is None else given
        for name, defaults in SIZES.items()
    }
    names = (arguments.implementations or IMPLEMENTATIONS[not on_gpu]).split(",")
    model = model_trial.random_model(sizes, "cuda" if on_gpu else "cpu")
    ids = torch.randint(0, model.config.vocab_size, (sizes["batch"], sizes["seqlen"]), device=model.device)
    if not 0 <= arguments.padding < sizes["seqlen"]:
        raise ConfigError(f"--padding {arguments.padding}: of {sizes['seqlen']} tokens, some should be none")
    mask = torch.ones_like(ids)  # or else generate() takes ids that happen to be pad_token_id for padding
    mask[0, : arguments.padding] = 0
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            errors = model_trial.errors_of(model, names, ids, mask)
            times = model_trial.times_of(model, list(errors), ids, mask, sizes["tokens"]) if on_gpu else {}
    except FallbackWarning as said:
        raise VerificationError(str(said)) from None
    sizes["padding"] = arguments.padding
    console.print(", ".join(f"{name} {size}" for name, size in sizes.items()), style="bold")
    console.print(_shown(errors, times))
    first = next(iter(errors))
    allowed = 2 * errors[first] + 1e-5
    wrong = [f"{name}: {error:.2g}" for name, error in errors.items() if not error <= allowed]
    return fail(f"{', '.join(wrong)}: logits are wrong by more than twice {first}'s error") if wrong else 0


def _shown(errors: dict[str, float], times: dict[str, list[float]]) -> Table:
    from flashladder.common.studies.models.model_trial import TIMES

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
