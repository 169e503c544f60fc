"""python -m flashladder.tests.first_calls.run DEVICE [WORDS]: the calls of table.py whose names have the words.

DEVICE is cuda, or cpu for those that the emulator takes. Exit code 1 where one of them is wrong.
"""

import contextlib
import os
import sys
import time

import torch

from flashladder.common.compiler import library
from flashladder.common.errors import FlashLadderError
from flashladder.common.runtime import fast_path
from flashladder.tests.first_calls.forks import each_in_a_fork, require_fresh
from flashladder.tests.first_calls.table import GPU, ROWS
from flashladder.tests.first_calls.trial import ON_EMULATOR, ON_GPU, Trial, faults_of

SECONDS = 240  # of a process: one that hangs does not hang the others


def main(device: str, words: str = "") -> int:
    rows = [row for row in ROWS if words in row.name and (device == GPU or row.emulated)]
    trials = [Trial(row, device, way) for way in (ON_GPU if device == GPU else ON_EMULATOR) for row in rows]
    torch.set_num_threads(1)  # as many processes as there are cores
    begin, wrong = time.monotonic(), 0
    if device == GPU:
        build_extension()
    require_fresh()
    for trial, faults, how in each_in_a_fork(faults_of, trials, len(os.sched_getaffinity(0)), SECONDS):
        said = [how] if how else faults
        wrong += bool(said)
        for fault in said:
            print(f"{trial}: {fault}", flush=True)
    print(f"{len(trials)} first calls in {time.monotonic() - begin:.0f} s, {wrong} wrong")
    return 1 if wrong or not trials else 0


def build_extension() -> None:
    """Once for all; where it cannot be built, they say so."""
    with contextlib.suppress(FlashLadderError):
        for source in (fast_path.SOURCE, fast_path.NODE):
            library.build_extension(source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
