"""What is asked by turns: in a run an eighth of the long tests of rungs that no call launches and of mutations to be
found, and a quarter of those of launched rungs that are marked in_turn; of each test function one case at least.

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

PARTS, PARTS_OF_LAUNCHED = 8, 4
SOURCES = Sources()
EMULATOR = sorted((ROOT / "common" / "emulator").rglob("*.py"))


def left_out(items):
    """The long tests that are left to other runs."""
    functions = {}
    for item in items:
        if item.get_closest_marker("slow"):
            functions.setdefault((item.path, item.originalname), []).append(item)
    found = []
    for cases in functions.values():
        unasked = sorted((case for case in cases if not is_asked(case)), key=lambda case: crc32(case.name.encode()))
        found += unasked if len(unasked) < len(cases) else unasked[1:]
    return found


def is_asked(item):
    """Whether a long test is asked. Its turn follows from the files of its rungs, of the emulator and of the test:
    when one of them changes, other tests are asked."""
    rungs = rungs_of(item)
    is_launched = any(rung in launched() for rung in rungs)
    takes_turns = item.get_closest_marker("in_turn") or not is_launched
    if item.get_closest_marker("every_time") or not rungs or not takes_turns:
        return True
    digests = (SOURCES.digest(rung.kernel, paths=False) for rung in rungs)
    parts = PARTS_OF_LAUNCHED if is_launched else PARTS
    return is_in_turn(item.name, _of_files(Path(item.path)), _of_files(*EMULATOR), *digests, parts=parts)


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


def is_in_turn(name, *digests, parts=PARTS):
    """Whether what has this name, and is made of files with these digests, is in the part that is asked."""
    return os.environ.get("FLASHLADDER_TESTS") == "all" or part(name, *digests, parts=parts) == 0


def part(name, *digests, parts=PARTS):
    """The part that it is in, from 0 on."""
    return crc32("\n".join((name, *digests)).encode()) % parts


@cache
def launched():
    """What calls launch, of every ladder."""
    return {catalog.find(launch.rung) for name in operation_names() for launch in catalog.ladder_of(name).launches}


@cache
def _of_files(*files):
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
