"""python -m flashladder.tests.mutants: small faults, each put into a copy of the code, and whether a test fails.

40 mutants of Python and 20 of device code, as the seed has it, each against the tests of its own room, for a minute at
most, until the first failure. A failure counts if the same test passes without the mutant. Survivors run once against
all tests. The copy, of the last commit, and the state lie in build/mutants: a run that was stopped goes on where it
stopped. survivors.yaml says which changes are none, and why. Exit code 1 if too few of the others are found.
"""

import argparse
import functools
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashladder.common.paths import ROOT
from flashladder.tests.mutants import rooms
from flashladder.tests.mutants.changes import Mutant, choose

SEED, OF_PYTHON, OF_DEVICE_CODE = 47, 40, 20
SECONDS, SECONDS_OF_ALL = 60, 1800  # of the tests of a room, and of all tests
BUSY = 8  # times as long may it take where other programs run
FIRST = 5  # tests that found other mutants of the room
LEAST_FOUND = 0.85  # of the mutants that change what the code does
FOUND, IN_ROOM, IN_ALL, UNJUDGED = "found", "survived its room", "survived all tests", "the tests fail without it too"
PLACE = ROOT / "build" / "mutants"
COPY = PLACE / "flashladder"  # by which tests import it
REASONS = Path(__file__).with_name("survivors.yaml")
ALL_TESTS = ["-m", "not slow and not gpu", "-n", "auto", "--ignore=tests/public", "tests"]  # as `make test`


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m flashladder.tests.mutants", description=__doc__)
    made.add_argument("--seed", type=int, default=SEED, help="which mutants (default: %(default)s)")
    made.add_argument("--python", type=int, default=OF_PYTHON, metavar="N", help="of Python (default: %(default)s)")
    made.add_argument("--device", type=int, default=OF_DEVICE_CODE, metavar="N", help="of device code")
    made.add_argument("--again", action="store_true", help="ask the survivors again, as after a new test")
    return made


class Log:
    """A line of JSON for each judgement; the last one of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.rows = {row["mutant"]: row for row in map(json.loads, path.read_text().splitlines())}

    def state(self, mutant: Mutant) -> str:
        return self.rows[mutant.name]["state"] if mutant.name in self.rows else ""

    def add(self, mutant: Mutant, row: dict[str, Any]) -> None:
        self.rows[mutant.name] = {"mutant": mutant.name, **row}
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[mutant.name]) + "\n")

    def finders(self, tests: Sequence[str]) -> list[str]:
        """The tests of these files that have found most mutants."""
        counts = Counter(row["by"] for row in self.rows.values() if row["state"] == FOUND)
        return [test for test, _ in counts.most_common() if test.partition("::")[0] in tests][:FIRST]

    def forget_all_but(self, state: str) -> None:
        self.rows = {name: row for name, row in self.rows.items() if row["state"] == state}


def main(arguments: argparse.Namespace) -> int:
    chosen = choose(ROOT, rooms.python_files(), arguments.python, arguments.seed)
    chosen += choose(ROOT, rooms.device_files(), arguments.device, arguments.seed)
    log = Log(PLACE / f"{arguments.seed}.jsonl")
    if arguments.again:
        log.forget_all_but(FOUND)
    reasons = {entry["change"]: entry["reason"] for entry in yaml.safe_load(REASONS.read_text())}
    copy_last_commit()
    new = [mutant for mutant in chosen if mutant.name not in log.rows.keys() | reasons.keys()]
    print(f"{len(new)} of {len(chosen)} mutants are left: {SECONDS} s each, at most. {log.path}", flush=True)
    ask([(mutant, rooms.near(ROOT / mutant.path)) for mutant in new], log, SECONDS, IN_ROOM)
    left = [mutant for mutant in chosen if log.state(mutant) == IN_ROOM and mutant.name not in reasons]
    print(f"{len(left)} survived their rooms: about 9 minutes each for all tests", flush=True)
    ask([(mutant, ALL_TESTS) for mutant in left], log, SECONDS_OF_ALL, IN_ALL)
    return report([mutant for mutant in chosen if mutant.name not in reasons], log)


def ask(asked: Sequence[tuple[Mutant, list[str]]], log: Log, seconds: int, survived: str) -> None:
    for number, (mutant, tests) in enumerate(asked, 1):
        print(f"[{number}/{len(asked)}] {mutant}", flush=True)
        row = judge(mutant, [*log.finders(tests), *tests], seconds, survived)
        log.add(mutant, row)
        print(f"    {row['state']}: {row['by']} ({row['seconds']:.0f} s)", flush=True)


def report(judged: Sequence[Mutant], log: Log) -> int:
    left = [mutant for mutant in judged if log.state(mutant) != FOUND]
    for mutant in left:
        print(f"{log.state(mutant)}: {mutant}")
    share = 1 - len(left) / len(judged) if judged else 0.0
    print(f"{len(judged) - len(left)} of {len(judged)} found, {share:.0%}")
    return 0 if share >= LEAST_FOUND else 1


# -- the copy


def copy_last_commit() -> None:
    """At one place for all runs, as what is compiled is known by it too."""
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        sys.exit("There are changes that are not committed: mutants are of the last commit, so commit or stash them.")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if not COPY.exists():
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, COPY], check=True)
    for command in (
        ["fetch", "-q", "origin", "HEAD"],
        ["checkout", "-qf", "--detach", commit.strip()],
        ["clean", "-fdq"],
    ):
        subprocess.run(["git", *command], cwd=COPY, check=True)


def judge(mutant: Mutant, tests: Sequence[str], seconds: float, survived: str) -> dict[str, Any]:
    """What the tests say of a mutant: `by` is the first that fails."""
    begin, path = time.monotonic(), COPY / mutant.path
    text, compiled = path.read_bytes(), Path(importlib.util.cache_from_source(path))
    # A compiler that is wrong may write what others would read.
    own_cache = "compiler" in path.parts
    try:
        path.write_bytes(mutant.applied(text))
        compiled.unlink(missing_ok=True)  # Python knows a file by its size and the second
        code = run(["-x", "--cache-clear", *tests], seconds, own_cache)
    finally:
        path.write_bytes(text)
        compiled.unlink(missing_ok=True)
    failed = COPY / ".pytest_cache" / "v" / "cache" / "lastfailed"
    by = next(iter(json.loads(failed.read_text())), "") if failed.exists() else ""
    state = survived
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, None):
        state = FOUND if passes(*([by] if by else ["--collect-only", *tests])) else UNJUDGED
    by = by or ("no end in time" if code is None else f"pytest's exit code {code}")
    return {"state": state, "by": by, "seconds": time.monotonic() - begin}


@functools.cache
def passes(*tests: str) -> bool:
    """Whether tests pass without any mutant."""
    return run(tests, SECONDS, own_cache=False) == 0


def run(arguments: Sequence[str], seconds: int, own_cache: bool) -> int | None:
    """pytest's exit code in the copy; None where time ran out: of the processor, as others may use it too."""
    cache = PLACE / ("cache-of-one" if own_cache else "cache")
    shutil.rmtree(PLACE / "cache-of-one", ignore_errors=True)
    places = {"PYTHONPATH": str(PLACE), "FLASHLADDER_CACHE": str(cache), "HOME": str(PLACE / "home")}
    command = [sys.executable, "-m", "pytest", "-q", f"--timeout={min(seconds * 2 // 3, 600)}", *arguments]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (seconds, seconds))
    with subprocess.Popen(
        command,
        cwd=COPY,
        env=os.environ | places,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limit,
    ) as process:
        try:
            code = process.wait(seconds * BUSY)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
