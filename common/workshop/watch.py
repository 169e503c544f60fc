"""A trial at every save: what stays open beside the editor, and says each figure as soon as it is known.

Files are polled: there are a few dozen, and an editor that replaces a file, a network drive and a container then make
no difference.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich.text import Text

from flashladder.common import catalog
from flashladder.common.catalog import Version, schema
from flashladder.common.compiler import Artifact
from flashladder.common.compiler.sources import Sources, header_folders
from flashladder.common.console import console, warn
from flashladder.common.errors import (
    BuildError,
    ConfigError,
    DeviceError,
    EmulatorError,
    FlashLadderError,
    UnsupportedProblemError,
    VerificationError,
)
from flashladder.common.workshop import trial, verdict
from flashladder.common.workshop.trial import Built, Emulated, Idea, IdeaTimer, Trial, TrialPart

POLL_SECONDS = 0.1
FAILURES = {  # what is said of a save, by what a part of its trial raised
    BuildError: "does not compile",
    VerificationError: "is wrong",
    EmulatorError: "fails on the emulator",
    DeviceError: "fails on the GPU",
    ConfigError: "cannot be configured",
    UnsupportedProblemError: "does not take the problem",
}
NEXT = {Emulated: "ptxas", Built: "reading the machine code", Trial: "on the GPU"}  # what goes on after a part
LABEL = 12  # columns of what a line is about
FileTimes = dict[Path, tuple[int, int]]  # time and size of each file


class SavedAgain(FlashLadderError):
    """What is tried is not what the files say any more."""


def watch(name: str, compose: Callable[[Version], Idea], timer: IdeaTimer | None, trials: int | None = None) -> None:
    """Holds a trial now and at every save, until interrupted, or `trials` times.

    `compose` makes of the rung what is to be tried. Whatever is wrong with a save is said, and the next waited for.
    """
    version = catalog.find(name)
    seen: FileTimes = {}
    held = 0
    while trials is None or held < trials:
        now = _stamp(version)
        if now == seen or now != _settled(version):
            time.sleep(POLL_SECONDS)
            continue
        saved = [path.name for path in now if now[path] != seen.get(path)] if seen else []
        seen, held = now, held + 1
        _say_saved(version, saved)
        is_stale = partial(_is_stale, version, seen)
        with _waiting_on_failure(version, is_stale):
            catalog.forget()
            version = catalog.find(version.name)
            _try(compose(version), timer, is_stale)
            console.print(Text("waiting for the next save (Ctrl-C ends)", "dim"))


def files(version: Version) -> set[Path]:
    """What a save may touch: the kernel, all that it includes, the declaration, and headers that it might include."""
    found = {version.kernel, version.directory / schema.FILE}
    for folder in header_folders(version.kernel)[:2]:  # its own, and its ladder's
        found |= {*folder.rglob("*.cuh")}
    with suppress(FlashLadderError):  # the kernel is just being replaced
        found |= {*Sources().closure(version.kernel)}
    return found


def _stamp(version: Version) -> FileTimes:
    found = {}
    for path in sorted(files(version)):
        with suppress(FileNotFoundError):
            state = path.stat()
            found[path] = state.st_mtime_ns, state.st_size
    return found


def _is_stale(version: Version, seen: FileTimes) -> bool:
    return _stamp(version) != seen


def _settled(version: Version) -> FileTimes:
    """The files a moment later: an editor may still be writing."""
    time.sleep(POLL_SECONDS / 2)
    return _stamp(version)


def _say_saved(version: Version, saved: list[str]) -> None:
    what = f"saved {', '.join(saved)}" if saved else f"{version.name} as it is"
    console.print(Text(f"\n{time.strftime('%H:%M:%S')}  {what}", "bold"), soft_wrap=True)


@contextmanager
def _waiting_on_failure(version: Version, is_stale: Callable[[], bool]) -> Iterator[None]:
    """Says what is wrong with a save, unless it is stale."""
    try:
        yield
    except FlashLadderError as error:
        if is_stale():
            console.print(Text("saved again: this trial ends", "dim"))
            return
        kind = next((words for known, words in FAILURES.items() if isinstance(error, known)), "cannot be tried")
        if type(error).__name__ == "RaceError":
            kind = "races"
        console.print(Text(f"{version.name} {kind}", "bold red"), soft_wrap=True)
        console.print(_shown(str(error)), soft_wrap=True)
        console.print(Text("waiting for the next save (Ctrl-C ends)", "dim"))


def _shown(message: str) -> str:
    """An error's words, with paths as short as they can be from here."""
    return re.sub(re.escape(f"{os.getcwd()}{os.sep}"), "", message)


def _try(idea: Idea, timer: IdeaTimer | None, is_stale: Callable[[], bool]) -> None:
    """The parts of a trial, each said when it is done. SavedAgain where the emulator is at what is stale."""
    began = time.perf_counter()
    with console.status("compiling") as status:

        def progress(done: int, total: int, where: str = "") -> None:
            if is_stale():
                raise SavedAgain
            status.update(Text(f"on the emulator {where}", no_wrap=True, overflow="ellipsis"))

        def tell(part: TrialPart) -> None:
            _say_part(began, idea, part)
            status.update(NEXT[type(part)])

        held = trial.hold(idea, timer, tell, progress)
    for note in held.timing.notes if held.timing else ():
        warn(note)


def _say_part(began: float, idea: Idea, part: TrialPart) -> None:
    match part:
        case Emulated(check=check):
            errors = f"error of {check.output} {check.max_error:.2g} (tolerance {check.tolerance:.2g})"
            untried = verdict.untried(idea)
            _say("emulated", began, f"right, and no race; {errors}" + (f"; {untried}" if untried else ""))
        case Built():
            _say("compiled", began, _compiled(part.ours))
        case Trial(timing=None):
            _say("against " + idea.against, began, _changed(part))
        case Trial():
            _say("measured", began, verdict.in_words(part))


def _say(what: str, began: float, words: str) -> None:
    seconds = f"{time.perf_counter() - began:5.1f} s"
    console.print(Text.assemble((f"{what:{LABEL}}", "cyan"), (f"{seconds}  ", "dim"), words), soft_wrap=True)


def _compiled(ours: Artifact) -> str:
    spills = f"{ours.spill_store_bytes + ours.spill_load_bytes} bytes of spills" if ours.local_bytes else "no spills"
    how = "from the cache" if ours.cached else f"for {ours.arch}"
    return f"{how}: {ours.registers} registers, {spills}"


def _changed(held: Trial) -> str:
    """What the compiler made of it, beside the parent."""
    if held.is_same_code:
        return "the same machine code"
    figures = [f"{name}: {old:,} → {new:,}" for name, (old, new) in verdict.changes(held).items()]
    return "; ".join(figures) or "other machine code, and no figure changed"
