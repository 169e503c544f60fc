"""Each piece of work in a fork of this process, some at a time.

A fork of a process that has imported torch and flashladder, and no more, is as good as a fresh process, which takes
seconds for these imports. It has a CUDA context of its own, as this process never asks the driver for one. It has empty
caches of flashladder and of torch's memory, as nothing was called or allocated here: see `require_fresh`.
"""

import faulthandler
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashladder.common.runtime import fast_path, ready

SHOWN = 8  # of the first and of the last lines of a process that failed


def require_fresh() -> None:
    """Nothing was called in this process."""
    assert not torch.cuda.is_initialized()
    assert not ready.by_kind
    assert fast_path.missing == fast_path.NOT_ASKED


def each_in_a_fork(
    work: Callable[[Any], Any], tasks: Iterable[Any], at_a_time: int, seconds: int
) -> Iterator[tuple[Any, Any, str]]:
    """Of each task, as they end: what the work gave, and how it went wrong: an error, a signal, no end; "" if not."""
    waiting, running = list(tasks), {}
    with tempfile.TemporaryDirectory(prefix="first-calls-") as folder:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                place = Path(folder, str(len(waiting)))
                task = waiting.pop(0)
                running[_forked(work, task, place, seconds)] = task, place
            pid, status = os.wait()
            task, place = running.pop(pid)
            yield task, *_outcome(place, os.waitstatus_to_exitcode(status))


def _forked(work: Callable[[Any], Any], task: Any, place: Path, seconds: int) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    with place.with_suffix(".said").open("a") as said:
        try:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            faulthandler.enable(file=said)
            faulthandler.dump_traceback_later(seconds, exit=True, file=said)
            place.with_suffix(".made").write_bytes(pickle.dumps(work(task)))
            code = 0
        except BaseException:
            traceback.print_exc(file=said)
            said.flush()
        finally:
            os._exit(code)
    return 0


def _outcome(place: Path, code: int) -> tuple[Any, str]:
    if not code:
        return pickle.loads(place.with_suffix(".made").read_bytes()), ""
    said = place.with_suffix(".said").read_text(errors="replace").strip().splitlines()
    how = f"died of signal {-code}" if code < 0 else f"ended with {code}"
    parts = said if len(said) <= 2 * SHOWN else [*said[:SHOWN], "...", *said[-SHOWN:]]
    return None, "\n".join([how, *(f"  {line}" for line in parts)])
