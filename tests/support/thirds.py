"""What is asked by thirds: long tests of rungs that no call launches, or marked in_turn, and mutations that are found.

FLASHLADDER_TESTS=all asks all.
"""

import os
import re
from functools import cache
from zlib import crc32

from flashladder.common import catalog
from flashladder.common.catalog.catalogue import Version
from flashladder.common.compiler.sources import Sources
from flashladder.common.problem.problem import operation_names

PARTS = 3
NAMES = ("rung", "number", "name")  # parameters that say which rung
SOURCES = Sources()


def is_asked(item):
    """Whether a test is among those. Which third follows from what its rungs are compiled from, so that another one is
    asked when that changes."""
    rungs = rungs_of(item)
    takes_turns = item.get_closest_marker("in_turn") or not any(rung in launched() for rung in rungs)
    if item.get_closest_marker("every_time") or not rungs or not takes_turns:
        return True
    return is_in_turn(item.name, *(SOURCES.digest(rung.kernel, paths=False) for rung in rungs))


def rungs_of(item):
    """The rungs that a test's parameters are, or name: 49, decode/15."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    named = [value for name, value in given.items() if name in NAMES and re.fullmatch(r"([a-z]+/)?\d\d", str(value))]
    return [*(value for value in given.values() if isinstance(value, Version)), *map(catalog.find, named)]


def is_in_turn(name, *digests):
    """Whether something is in the third that is asked of what has these digests."""
    return os.environ.get("FLASHLADDER_TESTS") == "all" or part(name, *digests) == 0


def part(name, *digests):
    """The third that a test is in, from 0 on."""
    return crc32("\n".join((name, *digests)).encode()) % PARTS


@cache
def launched():
    """What calls launch, of every ladder."""
    return {catalog.find(launch.rung) for name in operation_names() for launch in catalog.ladder_of(name).launches}
