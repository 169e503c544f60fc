"""A new rung, made from another: a folder with all that a rung needs, and nothing elsewhere that would name it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flashladder.common import catalog, own
from flashladder.common.catalog import Reference, Version, schema
from flashladder.common.compiler.sources import Sources, find_header, header_folders
from flashladder.common.errors import ConfigError
from flashladder.common.host import find_git
from flashladder.common.paths import VERSIONS
from flashladder.common.report.pages import documents

NAME = re.compile(r"[a-z][a-z0-9_]*")
LAST = 99
OPEN = "To be written"  # begins what the author has to fill in
DRAFT = "draft: true"
FOLDER = re.compile(r"^(?:b/common/cuda|b/versions/forward|b/versions|[^/]+)/")  # before a header's name in a patch
# Not taken from the parent.
REPLACED = ("title", "idea", "parent", "draft", "kernel", "step", "no_exercise", "milestone", "pictures")


def make(name: str, parent: str, private: bool = False, patch: Path | None = None) -> Version:
    """Makes the next rung of the parent's ladder, or of a ladder of one's own; all of it or nothing.

    With a patch of `tried.patch` it is the rung that was tried then. ConfigError where there is no such parent, the
    name cannot be had, or the patch does not fit.
    """
    origin = _parent(parent)
    _check_name(name)
    ladder = _ladder(origin, private)
    folder = own.PRIVATE if ladder == own.PRIVATE.name else catalog.folder_of(ladder, origin.root)
    number = _next_number(ladder, origin.root)
    directory = folder / f"{number}_{name}"
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
            _write(Path(temporary, directory.name), origin, number, name, folder, patch)
            Path(temporary, directory.name).rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror or error}") from None
    return catalog.find(f"{ladder}/{directory.name}", origin.root)


def _parent(name: str) -> Version:
    found = catalog.find_implementation(name)
    if isinstance(found, Reference):
        raise ConfigError(f"{name} is a reference, with no kernel.cu to begin with; name a rung, such as 24")
    return found


def _check_name(name: str) -> None:
    """Raises ConfigError unless a rung can be called so, and none is yet."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name} is no name of a rung: lower-case letters, digits and _, a letter first: my_idea")
    for ladder in catalog.ladders():
        for taken in catalog.rung_names(ladder=ladder):
            if taken.rpartition("/")[2][3:] == name:
                raise ConfigError(f"the name {name} is taken by {taken}: choose another, or go on with that rung")
    references = (reference.name for reference in catalog.references())
    others = {*catalog.ladders(), *references, *(path.name for path in VERSIONS.iterdir())}
    if name in others:
        raise ConfigError(f"the name {name} is taken by a ladder or a reference: choose another")


def _ladder(origin: Version, private: bool) -> str:
    """The ladder that the rung goes to: the parent's, or the first of one's own, which may be the parent's too."""
    if not private or origin.home:
        return origin.ladder
    return next((name for name in own.ladders() if name != own.PRIVATE.name), own.PRIVATE.name)


def _next_number(ladder: str, root: Path) -> str:
    taken = [int(catalog.address_of(name)[-2:]) for name in catalog.rung_names(root, ladder)]
    number = max(taken, default=-1) + 1
    if number > LAST:
        raise ConfigError(f"the ladder has a rung {LAST}: there is no number left. Begin another with --private")
    return f"{number:02}"


def _write(directory: Path, origin: Version, number: str, name: str, ladder: Path, patch: Path | None) -> None:
    """kernel.cu, the headers that it would not find from there or the patch changes, version.yaml and its page."""
    directory.mkdir()
    shutil.copyfile(origin.kernel, directory / "kernel.cu")
    shutil.copyfile(origin.directory / schema.FILE, directory / schema.FILE)
    changes = _changes(patch) if patch else {}
    folders = header_folders(ladder / directory.name / "kernel.cu")
    for path, header in Sources().headers(origin.kernel).items():
        if header in changes or find_header(header, folders) != path:
            (directory / header).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / header)
    if patch:
        _apply(patch, changes, directory)
    title = name.replace("_", " ").capitalize()
    idea = f"{OPEN} - what it does otherwise than {origin.name}, in one sentence."
    (directory / schema.FILE).write_text(_declaration(directory, origin, title, idea))
    dropped = f"`flashladder run ... --against {origin.address}` adds a line at each verdict."
    (directory / documents.PAGE).write_text(documents.page(number, title, idea, _words(origin), dropped))


def _changes(patch: Path) -> dict[str, str]:
    """The hunks of a patch by the names of their files, as includes name headers. ConfigError where there are none."""
    try:
        text = re.sub(r"^(?:diff --git|index) .*\n", "", patch.read_text(), flags=re.MULTILINE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{patch} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    parts = re.split(r"^--- .*\n\+\+\+ (.*)\n", text, flags=re.MULTILINE)[1:]
    if not parts:
        raise ConfigError(f"{patch} is no patch: name a file of a rung's tried/")
    files = (FOLDER.sub("", file.strip()) for file in parts[::2])
    return dict(zip(files, parts[1::2], strict=True))


def _apply(patch: Path, changes: Mapping[str, str], directory: Path) -> None:
    """Patches the files of a folder, of which those that are not there are new. ConfigError where one does not fit."""
    command = [find_git(), "apply", "--recount", "-"]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}  # as if it were in no checkout
    for name, hunks in changes.items():
        old = f"a/{name}" if (directory / name).exists() else "/dev/null"
        change = f"--- {old}\n+++ b/{name}\n{hunks}"
        done = subprocess.run(command, input=change, text=True, capture_output=True, cwd=directory, env=environment)
        if done.returncode:
            raise ConfigError(f"{patch} does not fit {name} as it is now: {done.stderr.strip()}")


def _declaration(directory: Path, origin: Version, title: str, idea: str) -> str:
    """The version.yaml in a new rung's folder, so far its parent's, under another title."""
    text = (directory / schema.FILE).read_text()
    return (
        f"title: {title}\nidea: {idea}\nparent: {origin.name}  # what it is compared with\n"
        f"{DRAFT}  # delete this line when README.md is written: from then on the tests read it\n{inherited(text)}"
    )


def inherited(declared: str) -> str:
    """What a new rung takes of its parent's version.yaml."""
    keys = "|".join(REPLACED)
    return re.sub(rf"^(?:{keys}):.*\n(?:[ \t]+.*\n)*", "", declared, flags=re.MULTILINE).lstrip()


def _words(origin: Version) -> dict[str, str]:
    """What is to be written in each part of the page."""
    waste, idea, where, measured = documents.PARTS
    return {
        waste: f"{OPEN}: what {origin.name} spends that it need not, with the figure that shows it.",
        idea: f"{OPEN}: what is done instead, and why that is right for every input.",
        where: f"{OPEN}: the names in [`kernel.cu`](kernel.cu) to look for.",
        measured: f"{OPEN}: what was expected, and why it came so. `flashladder dashboard` makes the table.",
    }
