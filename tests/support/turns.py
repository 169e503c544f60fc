"""What is asked by turns, an eighth in a run: long tests of rungs that no call launches, or marked in_turn, and
mutations to be found.

FLASHLADDER_TESTS=all asks all.
"""

import os
import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from flashladder.common import catalog
from flashladder.common.catalog.catalogue import Version
from flashladder.common.compiler.sources import Sources
from flashladder.common.paths import ROOT
from flashladder.common.problem.problem import operation_names

PARTS = 8
SOURCES = Sources()
EMULATOR = sorted((ROOT / "common" / "emulator").rglob("*.py"))


def is_asked(item):
    """Whether a long test is asked. Its turn follows from the files of its rungs, of the emulator and of the test:
    when one of them changes, other tests are asked."""
    rungs = rungs_of(item)
    takes_turns = item.get_closest_marker("in_turn") or not any(rung in launched() for rung in rungs)
    if item.get_closest_marker("every_time") or not rungs or not takes_turns:
        return True
    digests = (SOURCES.digest(rung.kernel, paths=False) for rung in rungs)
    return is_in_turn(item.name, _of_files(Path(item.path)), _of_files(*EMULATOR), *digests)


def rungs_of(item):
    """The rungs among a test's parameters, those of exercises among them, the one that its parameter `rung` names, such
    as 49 or decode/15, and those that its mark names: `in_turn("decode/15")`."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    values = [getattr(value, "version", value) for value in given.values()]
    rungs = [value for value in values if isinstance(value, Version)]
    if isinstance(named := given.get("rung"), str) and re.fullmatch(r"([a-z]+/)?\d\d", named):
        rungs.append(catalog.find(named))
    if mark := item.get_closest_marker("in_turn"):
        rungs += map(catalog.find, mark.args)
    return rungs


def is_in_turn(name, *digests):
    """Whether what has this name, and is made of files with these digests, is in the part that is asked."""
    return os.environ.get("FLASHLADDER_TESTS") == "all" or part(name, *digests) == 0


def part(name, *digests):
    """The part that it is in, from 0 on."""
    return crc32("\n".join((name, *digests)).encode()) % PARTS


@cache
def launched():
    """What calls launch, of every ladder."""
    return {catalog.find(launch.rung) for name in operation_names() for launch in catalog.ladder_of(name).launches}


@cache
def _of_files(*files):
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
