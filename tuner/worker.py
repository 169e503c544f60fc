"""A process that measures kernels, and its watchdog: whatever a kernel does, the search goes on.

The process holds a bench, which is a replaceable part (tuner/gpu_bench.py on a GPU). A kernel that faults, hangs,
crashes the process or is wrong comes back as a Quarantine, and the process is replaced: what such a kernel left behind
in it, or in the GPU's memory, harms nobody after it.

Processes are forked from a server that has imported torch and never touched a GPU, so that a new one is there at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flashladder.common.errors import DeviceError, FlashLadderError, VerificationError, first_line

if TYPE_CHECKING:
    from flashladder.common.compiler.artifact import Artifact
    from flashladder.common.measure.statistics import Times
    from flashladder.common.problem.problem import Problem
    from flashladder.common.records.records import Row

ATTEMPTS = 5  # to measure a kernel, if the process is killed meanwhile
START_SECONDS = 300.0  # for importing torch, taking the GPU and computing the exact answers

Entrants = Mapping[str, "Sequence[Artifact]"]  # by name, the artifacts for each problem


@dataclass(frozen=True)
class Comparison:
    """The times of every round, in microseconds: for each problem, by the name of the contender."""

    baseline: str
    control: str  # the baseline once more
    times: tuple[Mapping[str, Times], ...]
    notes: tuple[str, ...] = ()

    def pairs(self, over: str, under: str) -> list[tuple[Times, Times]]:
        """The times of two contenders, for each problem."""
        return [(times[over], times[under]) for times in self.times]

    def medians(self, name: str) -> list[float]:
        """The median time of a contender, for each problem."""
        return [float(median(times[name])) for times in self.times]


@dataclass(frozen=True)
class Quarantine:
    """A kernel that must not be used."""

    verdict: Literal["wrong", "faulted", "hung", "crashed"]
    reason: str


@dataclass(frozen=True)
class _Broken:
    """An error that is no kernel's fault."""

    error: FlashLadderError | None
    traceback: str


class Bench(Protocol):
    """What measures, in the process."""

    def place(self) -> Row:
        """Where and with what it measures; `device` at least."""

    def prepare(self, problem: Problem) -> None:
        """Make ready for a problem. A FlashLadderError ends the search."""

    def compare(self, problems: Sequence[Problem], entrants: Entrants, rounds: int | None) -> Comparison:
        """Verify and time kernels. VerificationError, DeviceError or RuntimeError where one of them is at fault."""


class Interrupted(Exception):
    """The worker was stopped while it measured."""


class _Killed(Exception):
    """Somebody killed the process, or the system did for want of memory."""


class Worker:
    """The side of the search. Every call may take as long as the watchdog's patience allows."""

    def __init__(
        self, make_bench: Callable[[], Bench], environment: Mapping[str, str] | None = None, patience: float = 60.0
    ) -> None:
        self._make_bench = make_bench
        self._environment = dict(environment or {})
        self._patience = patience  # seconds for each problem of a comparison
        self._process: multiprocessing.process.BaseProcess | None = None
        self._stopped = False
        self.place: Row = {}

    def compare(self, problems: Sequence[Problem], entrants: Entrants, rounds: int | None) -> Comparison | Quarantine:
        """Measures in the process, which is started where there is none, and replaced after a quarantine.

        Raises FlashLadderError where the machine, not the kernel, is at fault; Interrupted when it was stopped.
        """
        patience = self._patience * len(problems) * len(entrants)
        for _ in range(ATTEMPTS):
            try:
                self._make_ready(problems)
                answer = self._ask(("compare", problems, entrants, rounds), patience)
            except _Killed:
                self._kill()
                continue
            if isinstance(answer, Quarantine):
                self._kill()
            return answer
        raise DeviceError(f"the process that measures was killed {ATTEMPTS} times: is the machine out of memory?")

    def warm_up(self, problems: Sequence[Problem]) -> None:
        """Starts the process and makes it ready, which `compare` does otherwise; raises as that does."""
        try:
            self._make_ready(problems)
        except _Killed:
            self._kill()  # compare tries again

    def stop(self) -> None:
        """Ends the process at once, whatever it does; may be called from any thread."""
        self._stopped = True
        self._kill()

    def _make_ready(self, problems: Sequence[Problem]) -> None:
        """Start the process where there is none, and have it prepare the problems."""
        if self._stopped:
            raise Interrupted
        if not self._process:
            self.place = self._required(self._start())
        for problem in problems:
            self._required(self._ask(("prepare", problem), START_SECONDS))

    def _start(self) -> Any:
        context = multiprocessing.get_context("forkserver")  # a process that has imported much, and done nothing
        context.set_forkserver_preload(["flashladder.tuner.gpu_bench"])
        self._connection, theirs = context.Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        output = f"/proc/{os.getpid()}/fd/{self._output.fileno()}"  # it has no name: nobody need remove it
        arguments = (theirs, self._make_bench, self._environment, output)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        if self._stopped:
            self._kill()
            raise Interrupted
        return self._receive(START_SECONDS)

    def _required(self, answer: Any) -> Any:
        if isinstance(answer, Quarantine):
            self._kill()
            raise DeviceError(f"the process that measures {answer.verdict} before it had a kernel: {answer.reason}")
        return answer

    def _ask(self, request: tuple[Any, ...], seconds: float) -> Any:
        with suppress(OSError):  # a dead process is found out by what it does not answer
            self._connection.send(request)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                return Quarantine("hung", f"no answer within {seconds:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            if self._stopped:
                raise Interrupted from None
            return self._post_mortem()
        if isinstance(answer, _Broken):
            self._kill()
            raise answer.error or RuntimeError(f"the process that measures broke:\n{answer.traceback}")
        return answer

    def _post_mortem(self) -> Quarantine:
        """What a dead process died of. Raises _Killed where that was a kill -9, which no kernel can do."""
        process = self._process
        assert process is not None
        process.join(5)
        if process.exitcode == -signal.SIGKILL:
            raise _Killed
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        said = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        return Quarantine("crashed", f"exit code {process.exitcode}{said}")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process:
            process.kill()
            process.join(10)
            self._connection.close()
            self._output.close()


def _serve(
    pipe: connection.Connection, make_bench: Callable[[], Bench], environment: Mapping[str, str], output: str
) -> None:
    """The process: makes the bench, says where it is, and answers requests until the search is gone."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the search decides what it means
    threading.Thread(target=die_with_the_search, daemon=True).start()
    with open(output, "ab") as file:
        for standard in (1, 2):  # sys.stdout and sys.stderr may be None, or something that has no number
            os.dup2(file.fileno(), standard)
    try:
        bench = make_bench()
        pipe.send(bench.place())
        while True:
            verb, *arguments = pipe.recv()
            if verb == "prepare":
                bench.prepare(*arguments)
            pipe.send(_compare(bench, *arguments) if verb == "compare" else None)
    except EOFError:
        return
    except Exception as error:
        known = error if isinstance(error, FlashLadderError) else None
        pipe.send(_Broken(known, traceback.format_exc()))


def _compare(bench: Bench, *arguments: Any) -> Comparison | Quarantine:
    try:
        return bench.compare(*arguments)
    except VerificationError as error:
        return Quarantine("wrong", str(error))
    except (DeviceError, RuntimeError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise DeviceError(
                f"the GPU's memory is full ({first_line(error)}): choose smaller problems, or see who else uses it"
            ) from error
        return Quarantine("faulted", first_line(error))


def die_with_the_search() -> None:
    """Ends the process when the one that started it is gone, even by kill -9 and in the midst of a kernel."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
