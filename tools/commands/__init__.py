"""What a person types: `flashladder COMMAND ...`, which is also `python -m flashladder COMMAND ...`.

A command is a module here. It has `parser()`, whose texts are its docstring, and `main(arguments)`, which gives the
exit code. A new command is such a module and a line of GROUPS. It reads options, calls what is in the rooms of
common/, and prints.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder import __version__
from flashladder.common.console import EXIT_ERROR, Parser, console, fail, run
from flashladder.common.errors import FlashLadderError, unknown
from flashladder.common.packages import lack
from flashladder.common.paths import ROOT, is_checkout, mixed_checkouts

if TYPE_CHECKING:
    from flashladder.common.report.answer import Answer


@dataclass(frozen=True)
class Command:
    """A command: its file here, what it does in a line, and whether it is about the files of a checkout."""

    file: str
    summary: str
    needs_checkout: bool = False

    @property
    def module(self) -> str:
        return f"{__name__}.{self.file}"


GROUPS = {
    "Rungs": {
        "run": Command("run_version", "compile a rung or a reference, run it, check it, measure it"),
        "explain": Command("explain", "why a rung is slow, and which rung's idea is against it"),
        "exercise": Command("exercise", "a rung with its idea taken out, to be put in again and graded"),
        "mask": Command("mask", "which blocks of keys a mask by an expression costs"),
        "new": Command("new_version", "make a new rung from another"),
        "sass": Command("sass", "the machine code of a rung, or of two side by side"),
        "neighbours": Command("neighbours", "how many lines of code each step of a ladder is"),
        "profile": Command("profile", "what a GPU counts in a rung, beside what is predicted"),
        "timeline": Command("timeline", "who does what when in a rung of Hopper, by time stamps of a GPU"),
    },
    "Benchmarks": {
        "bench": Command("bench", "time kernels beside the official ones, over many shapes"),
        "ladder": Command("ladder", "measure the whole ladder on this GPU, in one run"),
        "packed": Command("packed", "time packed sequences beside padded ones and FlashAttention-2's"),
        "accuracy": Command("accuracy", "errors over families of inputs, against bars"),
        "experiment": Command("experiment", "sweeps: block sizes, types, lengths, the order of loops"),
        "compare": Command("compare", "two logged benchmarks side by side"),
        "overhead": Command("overhead", "what a call of attention() costs the host, beside torch's own"),
        "model": Command("model", "what a model of transformers gains: prefill and generation"),
        "train": Command("train", "train a small GPT with attention() and with torch's own"),
        "ring": Command("ring", "one long sequence over several GPUs: right? near to linear?"),
    },
    "Tuning": {
        "search": Command("search", "find the fastest configuration of a rung on a GPU"),
        "adopt": Command("adopt", "tune for one program: what it asks for, what it gains, the winners"),
        "studies": Command("studies", "a machine's searches: a list, or live in a browser"),
        "plots": Command("plots", "a search's study as pictures"),
        "replay": Command("replay", "how good the search is: replay it over a whole study"),
    },
    "Results": {
        "dashboard": Command("dashboard", "make dashboard.html and the tables of all results"),
        "received": Command("received", "check results that somebody sent, before they are merged"),
        "book": Command("book", "make a site of all pages, for a browser", needs_checkout=True),
        "picture": Command("picture", "bring the pictures in versions/ up to date", needs_checkout=True),
    },
    "Installing": {
        "doctor": Command("doctor", "what this machine has and lacks, and what mends it"),
        "hub": Command("hub", "lay a wheel out as a kernel of Hugging Face's `kernels`"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
MOVED = {  # old names, and what does their work now
    "evidence": "`flashladder dashboard` brings pages up to date, and `flashladder sass LOWER UPPER` compares two rungs"
}


def main(words: Sequence[str] | None = None, script: Path | None = None) -> int:
    """`flashladder COMMAND ...`, without the first word; the exit code.

    `script` is what was run instead of the program `flashladder`.
    """
    if mixed := mixed_checkouts(script or Path.cwd()):
        return fail(mixed)
    name, *rest = list(sys.argv[1:] if words is None else words) or [""]
    if name in ("", "-h", "--help"):
        console.print(_overview(), soft_wrap=True)
        return 0 if name else EXIT_ERROR
    if name == "--version":
        console.print(f"flashladder {__version__}")
        return 0
    if name in MOVED:
        return fail(f"there is no command {name} any more: {MOVED[name]}")
    if name not in COMMANDS:
        return fail(str(unknown("command", name, COMMANDS)))
    if COMMANDS[name].needs_checkout and not is_checkout():
        return fail(f"flashladder {name} works on the files of a checkout, which {ROOT} is not: run it in a git clone")
    try:
        module = import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        return fail(lack(error))
    parser: Parser = module.parser()
    parser.prog = f"flashladder {name}"
    return run(partial(_answer, name, module.main), parser, rest)


def ask(command: str, *words: str) -> Answer:
    """What `flashladder COMMAND ... --json` prints. SystemExit for words that the command does not know."""
    module = import_module(COMMANDS[command].module)
    parser: Parser = module.parser()
    parser.prog = f"flashladder {command}"
    return _judged(command, module.main, parser.parse_args([*words, "--json"]))[1]


def _answer(name: str, main: Callable[[Namespace], int], arguments: Namespace) -> int:
    """Runs a command. With --json its findings alone go to stdout, an error among them."""
    if not getattr(arguments, "json", None):
        return main(arguments)
    code, answer = _judged(name, main, arguments)
    print(answer.model_dump_json(indent=1))
    return code


def _judged(name: str, main: Callable[[Namespace], int], arguments: Namespace) -> tuple[int, Answer]:
    console.quiet = True
    try:
        code = main(arguments)
    except (FlashLadderError, OSError, ModuleNotFoundError) as error:
        arguments.json.fail(error)
        code = EXIT_ERROR
    finally:
        console.quiet = False
    return code, arguments.json.answer(name)


def _overview() -> str:
    lines = [
        "usage: flashladder COMMAND ...",
        "",
        "A laboratory for attention kernels. `flashladder COMMAND --help` says more:",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<11} {command.summary}" for name, command in group.items())]
    return "\n".join(lines)
