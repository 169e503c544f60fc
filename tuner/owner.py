"""Who measures a trial: a process, named so that another one on the same machine can tell whether it still lives."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def me() -> str:
    """This process: machine and boot, the namespace of its process ids, its id, and when it started."""
    return f"{_machine()}/{os.getpid()}/{_start(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the process ran on this machine and has ended. Of other machines nothing is known: False."""
    machine, process, start = _parts(owner)
    return machine == _machine() and _start(int(process)) != start


def _parts(owner: str) -> tuple[str, str, str]:
    """Machine, which has a / of its own, process and start."""
    running, _, start = owner.rpartition("/")
    machine, _, process = running.rpartition("/")
    return machine, process, start


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _start(process: int) -> str:
    """When a process started, in ticks since boot; empty where there is none, or nothing but its remains."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
