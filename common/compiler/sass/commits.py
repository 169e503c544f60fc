"""Kernels of two commits: whether the compiler makes the same machine code of them, but for the numbers of registers.

Both sides are compiled by today's compiler code, with today's flags but for line tables, and for the configurations
that are asked for. Kernels and headers alone are the commit's, so that its Python may be laid out in any way.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from flashladder.common.compiler import artifact as artifacts
from flashladder.common.compiler.compile import BuildProgress, BuildRequest, machine_code, to_compile
from flashladder.common.compiler.cubin import sections
from flashladder.common.compiler.sass.allocation import first_exchange
from flashladder.common.compiler.sass.diff import changed, normalised
from flashladder.common.compiler.sass.instruction import SassInstruction, disassemble_functions
from flashladder.common.compiler.sass.opcodes import histogram
from flashladder.common.errors import BuildError, ConfigError
from flashladder.common.host import find_git
from flashladder.common.own import FIRST
from flashladder.common.paths import AS_NAMES, CUDA_HEADERS, ROOT, VERSIONS

SOURCES = tuple(str(folder.relative_to(ROOT)) for folder in (VERSIONS, CUDA_HEADERS))  # what a kernel is compiled from
_SECONDS = 3.0  # of one core, to compile a kernel
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_DATA = re.compile(r"\.nv\.(shared|global|constant[124-9])")

Functions = dict[str, list[SassInstruction]]  # of a cubin, by name


class Verdict(Enum):
    """What comes of the comparison of one kernel, the worst last."""

    IDENTICAL = "identical"
    RENAMED = "other registers"  # each instruction is the same, and works on the same values
    MOVED = "values moved"  # each is the same but for the numbers of registers; one or more read another value
    NEW = "new"  # the base has no such kernel
    CHANGED = "differs"
    FAILED = "does not compile"


@dataclass(frozen=True)
class Figures:
    """What two machine codes of one kernel are compared by at first sight."""

    instructions: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Comparison:
    """One kernel in one configuration on both sides."""

    request: BuildRequest
    verdict: Verdict
    before: Figures | None = None  # only of what differs
    after: Figures | None = None
    detail: str = ""  # the first line that differs or reads another value, or the compiler's words
    counts: tuple[tuple[str, int], ...] = ()  # how many more instructions of a kind there are

    @property
    def is_same(self) -> bool:
        return self.verdict not in (Verdict.CHANGED, Verdict.FAILED)


@dataclass(frozen=True)
class Sides:
    """The same kernels as two checkouts have them; None where the base has no such file."""

    requests: tuple[BuildRequest, ...]
    before: tuple[BuildRequest | None, ...]
    after: tuple[BuildRequest, ...]

    @cached_property
    def to_compile(self) -> int:
        """How many kernels of both sides are not in the cache."""
        return to_compile(self._all)

    @property
    def seconds(self) -> float:
        """About how long compiling them takes."""
        return self.to_compile * _SECONDS / len(os.sched_getaffinity(0))

    @property
    def _all(self) -> list[BuildRequest]:
        return [request for request in (*self.before, *self.after) if request]

    def compare(self, progress: BuildProgress | None = None) -> Iterator[Comparison]:
        """Compiles all of them, then compares one after the other."""
        made = dict(zip(map(_key, self._all), machine_code(self._all, progress), strict=True))
        for request, before, after in zip(self.requests, self.before, self.after, strict=True):
            if before is None:
                yield Comparison(request, Verdict.NEW)
            else:
                yield _compared(request, made[_key(before)], made[_key(after)])


@contextmanager
def sides(
    requests: Sequence[BuildRequest], base: str, head: str | None = None, repository: Path = ROOT
) -> Iterator[Sides]:
    """The kernels of the requests, of a working tree, as they are at two commits; without `head` as they lie there.

    ConfigError for what is no commit.
    """
    with _checkout(repository, base) as old, _checkout(repository, head) as new:
        plain = tuple(replace(request, lines=False) for request in requests)
        before = [_moved(request, repository, old) for request in plain]
        after = [_moved(request, repository, new) for request in plain]
        both = [each for each in zip(plain, before, after, strict=True) if each[2]]
        yield Sides(*(tuple(side) for side in zip(*both, strict=True))) if both else Sides((), (), ())


@contextmanager
def _checkout(repository: Path, commit: str | None) -> Iterator[Path]:
    """A folder with the kernels and headers of a commit; the working tree itself for None."""
    if commit is None:
        yield repository
        return
    command = [find_git(), "-C", str(repository), "archive", "--format=zip", commit, "--", *SOURCES]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        raise ConfigError(f"git gives no kernels of {commit}: {archive.stderr.decode().strip()}")
    with TemporaryDirectory(prefix="flashladder-") as folder:
        zipfile.ZipFile(io.BytesIO(archive.stdout)).extractall(folder)
        yield Path(folder).resolve()


def _moved(request: BuildRequest, repository: Path, checkout: Path) -> BuildRequest | None:
    """The request of another checkout's kernel; None where that has none.

    The rungs of the first ladder lay in the folder of all ladders once.
    """
    kernel = request.version.kernel
    if not kernel.is_relative_to(repository):
        return None
    place = kernel.relative_to(repository)
    places = [checkout / place, checkout / Path(*(part for part in place.parts if part != FIRST))]
    there = next((path for path in places if path.is_file()), None)
    return replace(request, version=replace(request.version, kernel=there)) if there else None


def _key(request: BuildRequest) -> tuple[Path, str, str]:
    return request.version.kernel, request.config.header(), request.arch


def _compared(request: BuildRequest, before: Path | BuildError, after: Path | BuildError) -> Comparison:
    if isinstance(before, BuildError) or isinstance(after, BuildError):
        failed = {"before": before, "after": after}
        words = "; ".join(f"{side}: {_reason(made)}" for side, made in failed.items() if isinstance(made, BuildError))
        return Comparison(request, Verdict.FAILED, detail=words)
    if before == after:  # of the same sources
        return Comparison(request, Verdict.IDENTICAL)
    left, right = (disassemble_functions(folder / artifacts.CUBIN) for folder in (before, after))
    figures = _figures(before, left), _figures(after, right)
    difference = first_difference(left, right)
    if difference is None and figures[0] != figures[1]:
        difference = "the same instructions with other registers or spills"
    if difference is None and _data(before) != _data(after):
        difference = "the same instructions with other constants or shared memory"
    if difference is None:
        return _allocation(request, left, right)
    return Comparison(request, Verdict.CHANGED, *figures, difference, _count_changes(left, right))


def _allocation(request: BuildRequest, left: Functions, right: Functions) -> Comparison:
    """Of kernels that are the same but for the numbers of registers: whether their values are where they were."""
    if _texts(left) == _texts(right):
        return Comparison(request, Verdict.IDENTICAL)
    move = first_move(left, right)
    return Comparison(request, Verdict.MOVED if move else Verdict.RENAMED, detail=move or "")


def _reason(error: BuildError) -> str:
    """The first line in which the compiler complains."""
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if "error" in line), lines[-1])


def _figures(folder: Path, code: Functions) -> Figures:
    log = (folder / artifacts.LOG).read_text(errors=AS_NAMES)
    found = [artifacts.resources(log, entry) for entry in _ENTRY.findall(log)]
    return Figures(
        instructions=sum(map(len, code.values())),
        registers=max(each["registers"] for each in found),
        spill_bytes=sum(each["spill_store_bytes"] + each["spill_load_bytes"] for each in found),
    )


def _data(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What a cubin has beside its code, apart from arguments, and from the declarations, which the host alone reads."""
    found = sections(folder / artifacts.CUBIN)
    return {each.name: (each.size, each.content) for each in found if _DATA.match(each.name)}


def _texts(code: Functions) -> dict[str, list[str]]:
    return {name: [each.text for each in instructions] for name, instructions in code.items()}


def _count_changes(left: Functions, right: Functions) -> tuple[tuple[str, int], ...]:
    before, after = (histogram(each for code in side.values() for each in code) for side in (left, right))
    return tuple((kind, now - then) for kind, then, now in changed(before, after))


def first_difference(left: Functions, right: Functions) -> str | None:
    """Where two cubins' code differs first by more than the numbers of registers; None where it does not."""
    if left.keys() != right.keys():
        return f"functions {', '.join(left)} -> {', '.join(right)}"
    differences = (_function_difference(left[name], right[name]) for name in left)
    return next(filter(None, differences), None)


def first_move(left: Functions, right: Functions) -> str | None:
    """The first instruction that reads another value than its partner; the code differs in no more than registers."""
    for name, instructions in left.items():
        exchanged = first_exchange(instructions, right[name])
        if exchanged is not None:
            return f"instruction {exchanged} reads another value: {instructions[exchanged].text}"
    return None


def _function_difference(left: list[SassInstruction], right: list[SassInstruction]) -> str | None:
    for number, (before, after) in enumerate(zip_longest(map(normalised, left), map(normalised, right))):
        if before != after:
            texts = [side[number].text if number < len(side) else "nothing" for side in (left, right)]
            return f"instruction {number}: {' -> '.join(texts)}"
    for number, pair in enumerate(zip(left, right, strict=True)):
        if len({_jump(instruction) for instruction in pair}) > 1:
            return f"instruction {number} jumps elsewhere: {left[number].text}"
    return None


def _jump(instruction: SassInstruction) -> int | None:
    """How far it is to the label that it names."""
    return None if instruction.target is None else instruction.target - instruction.address
