"""What a person types: `flashladder COMMAND ...`, which is also `python -m flashladder COMMAND ...`.

In a checkout each command has a door, a script in tools/ or tuner/: `python tools/bench.py` is `flashladder bench`. The
command is the module here that bears the script's name. It has `parser()`, whose texts are its docstring, and
`main(arguments)`, which gives the exit code. A new command is such a module, a line of COMMANDS and a door.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from flashladder.common.console import EXIT_ERROR, Parser, console, fail, run
from flashladder.common.errors import unknown
from flashladder.common.packages import lack
from flashladder.common.paths import ROOT, is_checkout, mixed_checkouts


@dataclass(frozen=True)
class Command:
    """A command: its door, what it does in a line, and whether it is about the files of a checkout."""

    door: str
    summary: str
    needs_checkout: bool = False

    @property
    def module(self) -> str:
        return f"{__name__}.{Path(self.door).stem}"


COMMANDS = {
    "run": Command("tools/run_version.py", "compile a rung or a reference, run it, check it, measure it"),
    "new": Command("tools/new_version.py", "make a new rung from another"),
    "bench": Command("tools/bench.py", "time kernels beside the official ones, over many shapes"),
    "packed": Command("tools/packed.py", "time packed sequences beside padded ones and FlashAttention-2's"),
    "search": Command("tuner/search.py", "find the fastest configuration of a rung on a GPU"),
    "adopt": Command("tools/adopt.py", "tune for one program: what it asks for, what it gains, the winners"),
    "hub": Command("tools/hub.py", "lay a wheel out as a kernel of Hugging Face's `kernels`"),
    "overhead": Command("tools/overhead.py", "what a call of attention() costs the host, beside torch's own"),
    "compare": Command("tools/compare.py", "two logged benchmarks side by side"),
    "sass": Command("tools/sass.py", "the machine code of a rung, or of two side by side"),
    "neighbours": Command("tools/neighbours.py", "how many lines of code each step of a ladder is"),
    "profile": Command("tools/profile.py", "what a GPU counts in a rung, beside what is predicted"),
    "timeline": Command("tools/timeline.py", "who does what when in a rung of Hopper, by time stamps of a GPU"),
    "explain": Command("tools/explain.py", "why a rung is slow, and which rung's idea is against it"),
    "exercise": Command("tools/exercise.py", "a rung with its idea taken out, to be put in again and graded"),
    "accuracy": Command("tools/accuracy.py", "errors over families of inputs, against bars"),
    "model": Command("tools/model.py", "what a model of transformers gains: prefill and generation"),
    "ring": Command("tools/ring.py", "one long sequence over several GPUs: right? near to linear?"),
    "ladder": Command("tools/ladder.py", "measure the whole ladder on this GPU, in one run"),
    "experiment": Command("tools/experiment.py", "sweeps: block sizes, types, lengths, the order of loops"),
    "received": Command("tools/received.py", "check results that somebody sent, before they are merged"),
    "dashboard": Command("tools/dashboard.py", "make dashboard.html and the tables of all results"),
    "plots": Command("tuner/plots.py", "a search's study as pictures"),
    "replay": Command("tuner/replay.py", "how good the search is: replay it over a whole study"),
    "doctor": Command("tools/doctor.py", "what this machine has and lacks, and what mends it"),
    "evidence": Command("tools/evidence.py", "bring the tables in the rungs' pages up to date", needs_checkout=True),
    "picture": Command("tools/picture.py", "bring the pictures in versions/ up to date", needs_checkout=True),
}


def main(words: Sequence[str] | None = None) -> int:
    """`flashladder COMMAND ...`, without the first word; the exit code."""
    name, *rest = list(sys.argv[1:] if words is None else words) or [""]
    if name in ("", "-h", "--help"):
        console.print(_overview(), markup=False, soft_wrap=True)
        return 0 if name else EXIT_ERROR
    if name not in COMMANDS:
        return fail(str(unknown("command", name, COMMANDS)))
    return _start(name, rest, f"flashladder {name}")


def enter(script: Path) -> int:
    """What a door leads to: the command of that script, with the arguments of this program."""
    if mixed := mixed_checkouts(script):
        return fail(mixed)
    return _start(next(name for name, command in COMMANDS.items() if script.match(command.door)), sys.argv[1:])


def _start(name: str, words: Sequence[str], program: str | None = None) -> int:
    """A command; `program` is what a person typed instead of its door."""
    command = COMMANDS[name]
    if command.needs_checkout and not is_checkout():
        return fail(f"flashladder {name} works on the files of a checkout, which {ROOT} is not: run it in a git clone")
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        return fail(lack(error))
    parser: Parser = module.parser()
    if program:
        parser.prog = program
        parser.epilog = (parser.epilog or "").replace(f"python {command.door}", program)
    return run(module.main, parser, words)


def _overview() -> str:
    lines = (f"  {name:<11} {command.summary}" for name, command in COMMANDS.items())
    return "\n".join(
        [
            "usage: flashladder COMMAND ...",
            "",
            "A laboratory for attention kernels. `flashladder COMMAND --help` says more:",
            "",
            *lines,
        ]
    )
