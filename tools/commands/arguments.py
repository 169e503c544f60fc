"""Options that several tools share: the problem, the configuration, the device."""

from __future__ import annotations

import argparse
import itertools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flashladder.common.catalog import ladder_of
from flashladder.common.errors import ConfigError, unknown
from flashladder.common.problem.config import Value, gpu_names, parse_values, spell

if TYPE_CHECKING:
    from flashladder.common.catalog import Reference, Version
    from flashladder.common.problem.config import GpuDescription, KernelConfig
    from flashladder.common.problem.problem import Operation, Problem

_DTYPES = ("bf16", "fp16")
MOST_SEEDS = 1_000_000
TOKENS = 16384  # of a row of benchmarks, where nobody says
_SHAPES = ("seqlens", "causal", "batch", "tokens", "heads", "heads_k", "head_dim", "head_dim_v", "dtype", "family")
_PROBLEMS = (*_SHAPES, "set", "lse", "window", "softcap")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device and --gpu."""
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device",
        choices=("auto", "gpu", "emulator", "cpu"),
        default="auto",
        help="default: a GPU if any; the emulator is for rungs, the cpu for references",
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"the GPU to compile for ({', '.join(gpu_names())}); default: the one here, or h100",
    )


class _Gather(argparse.Action):
    """--json: what the command finds is gathered, to be printed at its end."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        from flashladder.common.report.answer import Findings

        setattr(namespace, self.dest, Findings())


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json; `arguments.json` is None, or Findings to add to."""
    parser.add_argument(
        "--json", action=_Gather, nargs=0, help="print one answer for programs (docs/programs.md), and nothing else"
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """--config, as many fields as wanted."""
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="compile-time parameters, such as block_m=128 num_warps=8; the others have the rung's defaults",
    )


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The options that describe one attention problem."""
    parser.set_defaults(lse=True)
    group = parser.add_argument_group("problem")
    for option, meaning in (
        ("--batch", "sequences"),
        ("--heads", "heads of Q"),
        ("--heads-k", "heads of K and V (default: as Q)"),
        ("--seqlen", "rows of Q, K and V"),
        ("--seqlen-q", "rows of Q (default: --seqlen)"),
        ("--seqlen-k", "rows of K and V (default: as Q)"),
        ("--head-dim", "columns"),
        ("--head-dim-v", "columns of V and O (default: --head-dim)"),
    ):
        group.add_argument(option, type=int, metavar="N", help=meaning)
    group.add_argument("--dtype", choices=_DTYPES)
    group.add_argument("--causal", action="store_true", help="each row sees no later key, aligned to the bottom right")
    group.add_argument("--softmax-scale", type=float, metavar="X", help="default: 1/sqrt(head_dim)")
    group.add_argument("--seed", type=int, help="of the random inputs (default: 0; with --json one that is drawn anew)")
    group.add_argument("--family", metavar="NAME", help="of inputs: plateau_4 for example (default: normal)")
    group.add_argument("--layout", default="bshd", help="bshd, bhsd, padded or qkv: how the tensors lie in memory")
    _add_options(group)


def add_expressions(parser: argparse.ArgumentParser, purpose: str = "checked on the emulator") -> None:
    """--mask, --score and --tensor: a mask and a score that are expressions, and what they read."""
    group = parser.add_argument_group(f"a mask or a score by an expression (docs/masks.md), {purpose}")
    group.add_argument("--mask", metavar="TEXT", help='which keys a row sees: "k <= q || image[q] == image[k]"')
    group.add_argument("--score", metavar="TEXT", help='what a score becomes: "s + slope[h] * (k - q)"')
    add_tensors(group)


def add_tensors(parser: argparse._ActionsContainer) -> None:
    """--tensor, as many as wanted."""
    parser.add_argument(
        "--tensor",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="what they read: image=FILE.npy, far=64, or image=arange:64:int32 (zeros, ones, arange or random, sizes, "
        "and a dtype; default: fp32, of arange int32)",
    )


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="what the operation alone knows, such as page_size=64",
    )


def add_shapes(parser: argparse.ArgumentParser, seqlens: str | None, families: Sequence[str] = ("normal",)) -> None:
    """The options that describe a row of problems, of all sequence lengths; `seqlens` is the default.

    So are `families`, as far as the operation has them. Without seqlens, the ladder says them, and the batch.
    """
    of_ladder = seqlens is None
    parser.set_defaults(usual_families=families, of_ladder=of_ladder, lse=True, window=(None, None), softcap=0.0)
    group = parser.add_argument_group("problems")
    usual = seqlens or "the ladder's"
    group.add_argument("--seqlens", default=seqlens, help=f"512..4096 doubles; or a list, 512,4096 (default: {usual})")
    group.add_argument("--causal", choices=("no", "yes", "both"), default="no")
    number = group.add_mutually_exclusive_group()
    number.add_argument("--batch", type=_numbers, metavar="N[,N]", help="sequences (default: as many as --tokens has)")
    number.add_argument("--tokens", type=count, help=f"batch x seqlen (default: {TOKENS})")
    group.add_argument(
        "--heads",
        type=_numbers,
        metavar="N[,N]",
        help="heads of Q (default: what the operation is usually timed with, 16)",
    )
    group.add_argument("--heads-k", type=int, help="heads of K and V (default: as Q)")
    group.add_argument("--head-dim", type=int, help="columns (default: as usual for the operation, 128)")
    group.add_argument("--head-dim-v", type=int, help="columns of V and O (default: --head-dim)")
    group.add_argument("--dtype", choices=_DTYPES, default="bf16")
    group.add_argument("--seed", type=int, default=0)
    usual = ",".join(families)
    group.add_argument("--family", type=_names, metavar="NAME[,NAME]", help=f"of inputs (default: {usual})")
    _add_options(group)


def of_problems(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a row of problems that are not at their defaults."""
    given = [name for name in _PROBLEMS if getattr(arguments, name) != parser.get_default(name)]
    return [f"--{'no-' if name == 'lse' else ''}{name.replace('_', '-')}" for name in given]


def _numbers(text: str) -> list[int]:
    """Whole numbers between commas, each once."""
    return list(dict.fromkeys(map(count, text.split(","))))


def _names(text: str) -> list[str]:
    """What commas separate, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def add_no_lse(parser: argparse.ArgumentParser) -> None:
    """--no-lse, for tools whose rows stand for themselves: ladders, tuned configurations and studies have it."""
    parser.add_argument(
        "--no-lse",
        dest="lse",
        action="store_false",
        help="ask for no log-sum-exp, which inference does not need: rung 24 is then compiled without its sum",
    )


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """--window and --softcap, for tools that tell rows with them from all others."""
    parser.add_argument(
        "--window",
        type=_window,
        metavar="LEFT,RIGHT",
        help="so many keys before a row's own and behind it; all, or nothing, is all of that side: 4096, or 512,64",
    )
    parser.add_argument("--softcap", type=float, metavar="X", help="scores become X * tanh(score / X)")


def _window(text: str) -> tuple[int | None, int | None]:
    """Keys before a row's own and behind it, None for all."""
    if not re.fullmatch(r"(\d{1,18}|all)(,(\d{1,18}|all)?)?|,(\d{1,18}|all)", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LEFT,RIGHT: keys before a row's own and behind it, such as 512,64; 4096 (all behind it); "
            "or all,0 (all before it)"
        )
    left, _, right = text.partition(",")
    return _keys(left), _keys(right)


def _keys(side: str) -> int | None:
    return None if side in ("", "all") else int(side)


def add_timing(parser: argparse.ArgumentParser, default: str | None = "hot") -> None:
    """--mode and --rounds."""
    parser.add_argument(
        "--mode",
        choices=("hot", "graph", "cold_graph", "cold", "sustained"),
        default=default,
        help="hot: short bursts, L2 as it is; graph: those in a CUDA graph; cold_graph: there, from one copy of the "
        "tensors to the next; cold: L2 flushed before each launch; sustained: at the power limit "
        f"(default: {default or 'as the ladder says, or hot'})",
    )
    add_rounds(parser)


def add_rounds(parser: argparse.ArgumentParser, text: str = "rounds of timing (default: as many as needed)") -> None:
    """--rounds, at least one."""
    parser.add_argument("--rounds", type=count, metavar="N", help=text)


def add_strategy(parser: argparse._ActionsContainer) -> None:
    """--strategy, with what each is."""
    from flashladder.tuner.strategies import USUAL, ideas

    known = ideas()
    told = "; ".join(f"{name}: {idea.rstrip('.')}" for name, idea in known.items()).replace("%", "%%")
    parser.add_argument("--strategy", choices=list(known), default=USUAL, help=f"{told} (default: {USUAL})")


def count(text: str) -> int:
    """The type of an option that says how many."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """The type of an option that is a time."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def config_values(tokens: Sequence[str]) -> dict[str, Value]:
    """The values of --config: separate words, or one word with commas."""
    return parse_values(",".join(tokens))


def values_with_expressions(arguments: argparse.Namespace) -> dict[str, Value]:
    """The values of --config, and the expressions among them. ExpressionError for text that is none."""
    values = config_values(arguments.config)
    if arguments.mask is None and arguments.score is None:
        if arguments.tensor:
            raise ConfigError("--tensor is what an expression reads: give --mask or --score too")
        return values
    from flashladder.common.expression import Mods, given

    tensors = given.tensors(arguments.tensor)
    mods = Mods.of(arguments.mask or "", arguments.score or "", given.declared(tensors))
    return values | {"mods": mods.spelled}


def which_configuration(
    version: Version, config: KernelConfig, gpu: GpuDescription, values: Mapping[str, Value]
) -> str:
    """The configuration of a rung in full, who chose it, and the other one that `flashladder run` takes."""
    from flashladder.common.catalog import winners
    from flashladder.common.problem.problem import Problem, operation_named

    said = "by --config, the rest by default" if values else "the rung's default"
    text = f"Configuration of {version.address}: {config.name.replace(',', ', ')} ({said})."
    tuned_for = winners.source(gpu, version.home)
    usual = Problem(**operation_named(version.operation).usual, operation=version.operation)
    if values or not tuned_for or not (winner := winners.config(version, tuned_for, usual)):
        return text
    own = config.as_dict()
    others = {name: value for name, value in winner.items if name in version.choices and own.get(name) != value}
    if not others:
        return text
    listed = " ".join(f"{name}={spell(value)}" for name, value in others.items())
    return f"{text} `flashladder run` takes what was tuned for {tuned_for}: --config {listed} shows that."


def problem(
    arguments: argparse.Namespace,
    operation: str,
    size: Literal["usual", "sampled", "small"] = "usual",
    **defaults: Any,
) -> Problem:
    """The problem of the options. What was not given is as in `defaults`, or of one of the operation's own sizes.

    UnsupportedProblemError if it is none.
    """
    from flashladder.common.problem.problem import Problem, operation_named

    kind = operation_named(operation)
    given = {
        "batch": arguments.batch,
        "num_heads": arguments.heads,
        "num_heads_k": arguments.heads_k,
        "seqlen_q": arguments.seqlen_q if arguments.seqlen_q is not None else arguments.seqlen,
        "seqlen_k": arguments.seqlen_k if arguments.seqlen_k is not None else arguments.seqlen,
        "head_dim": arguments.head_dim,
        "head_dim_v": arguments.head_dim_v,
        "dtype": arguments.dtype,
        "softmax_scale": arguments.softmax_scale,
        "family": arguments.family,
    }
    usual: dict[str, Any] = {**getattr(kind, size), **defaults}
    if arguments.seed is None:  # a program must not try kernels on inputs that they could know
        arguments.seed = 1 + secrets.randbelow(MOST_SEEDS) if getattr(arguments, "json", None) else 0
    own = _own(arguments, kind, usual)
    sizes = usual | {name: value for name, value in given.items() if value is not None}
    if given["seqlen_q"] is None:
        sizes = kind.sized(sizes, own)
    return Problem(
        **sizes | {"options": own},
        causal=arguments.causal,
        seed=arguments.seed,
        layout=arguments.layout,
        operation=operation,
        lse=arguments.lse,
    )


def needed(kernel: Version | Reference) -> dict[str, Value]:
    """The options without which a kernel takes no problem of its operation, as --set would give them."""
    from flashladder.common.problem.problem import operation_named

    usual = {option.name: option.default for option in operation_named(kernel.operation).options}
    only = {name: choice.values[0] for name, choice in kernel.choices.items() if len(choice.values) == 1}
    return {name: value for name, value in only.items() if name in usual and value != usual[name]}


def _own(arguments: argparse.Namespace, kind: Operation, usual: Mapping[str, Any]) -> dict[str, Value]:
    """The operation's own options: what --set says, and what is usual."""
    return {**usual.get("options", {}), **kind.parse(",".join(arguments.set))}


def shapes(arguments: argparse.Namespace, operation: str) -> list[Problem]:
    """The problems of `add_shapes`; UnsupportedProblemError if one is none, ConfigError for other wrong values."""
    from flashladder.common.problem.problem import Problem, operation_named

    kind = operation_named(operation)
    left, right = arguments.window
    if right is not None and arguments.causal != "no":
        before = "all" if left is None else left
        raise ConfigError(
            f"--window {before},{right} --causal {arguments.causal}: with a causal mask no row sees a key behind its "
            f"own; give --window {before}, or --causal no"
        )
    sizes = {
        "num_heads_k": arguments.heads_k,
        "head_dim": arguments.head_dim,
        "head_dim_v": arguments.head_dim_v,
    }
    own = _own(arguments, kind, kind.usual)
    families = arguments.family or [name for name in arguments.usual_families if name in kind.families]
    given = {**kind.usual, **{name: value for name, value in sizes.items() if value is not None}}
    return [
        Problem(
            **given | size | {"options": own},
            dtype=arguments.dtype,
            causal=causal,
            seed=arguments.seed,
            family=family,
            operation=operation,
            lse=arguments.lse,
            window_left=left,
            window_right=right,
            softcap=arguments.softcap,
        )
        for causal in {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.causal]
        for family in families
        for size in _sizes(arguments, kind)
    ]


def _sizes(arguments: argparse.Namespace, kind: Operation) -> Iterator[dict[str, int]]:
    """The batch, the lengths and the heads of each problem of a row, as far as they are not the usual ones."""
    search = ladder_of(kind.name).search
    seqlens = search.seqlens if arguments.seqlens is None else lengths(arguments.seqlens)
    batches = arguments.batch or (search.batch if arguments.of_ladder and not arguments.tokens else ())
    of_batches = [{"batch": batch} for batch in batches] or [{}]
    of_heads = [{"num_heads": heads} for heads in arguments.heads or ()] or [{}]
    for seqlen, batch, heads in itertools.product(seqlens, of_batches, of_heads):
        yield {**kind.of_length(seqlen, arguments.tokens or TOKENS), **batch, **heads}


def chosen(what: str, given: str | None, known: Iterable[str]) -> list[str]:
    """The names between commas, or all; ConfigError for one that is unknown."""
    known = list(known)
    names = given.split(",") if given else known
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
    return names


def lengths(text: str) -> list[int]:
    """'512..4096' is 512, 1024, 2048, 4096; otherwise numbers between commas."""
    first, doubling, last = text.partition("..")
    try:
        numbers = [int(number) for number in ((first, last) if doubling else text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or (doubling and numbers[0] > numbers[1]):
        raise ConfigError(f"--seqlens {text} is neither a range such as 512..4096 nor a list such as 512,4096")
    if not doubling:
        return numbers
    begin, end = numbers
    return [begin << power for power in range(64) if begin << power <= end]
