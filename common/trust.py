"""Whether what lies in a folder may be run: only where nobody but this user and root can have put it there."""

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from flashladder.common.errors import ConfigError

VARIABLE = "FLASHLADDER_TRUST"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOTS = 0  # root's user and group


def check(place: Path, root: Path) -> None:
    """Raises ConfigError where others can write a folder of kernels, or put another in its place.

    All from `root` down must be this user's or root's, and nothing from / down for others to write: sticky folders
    such as /tmp and the user's own group apart. What is not there is nobody's. FLASHLADDER_TRUST=1 checks nothing.
    """
    if os.environ.get(VARIABLE) == "1":
        return
    content: list[Path] = []
    with suppress(OSError):
        content += place.iterdir()
    ways = {path for end in (place, place.resolve()) for path in (end, *end.parents)}
    for path in (*sorted(ways), *content):
        inside = any(path.is_relative_to(top) for top in (root, root.resolve()))
        if who := _others(path, inside):
            raise ConfigError(
                f"{path} {who}: what others put into {root} would be run. Take it from them (chown, `chmod go-w`), "
                f"name a folder of your own, or set {VARIABLE}=1 to run what is there"
            )


def make(folder: Path) -> None:
    """Makes a folder, and those above it, which only this user can write, whatever the umask. OSError as of mkdir."""
    if not folder.parent.exists():
        make(folder.parent)
    folder.mkdir(mode=0o755, exist_ok=True)


def withhold(folder: Path) -> None:
    """Takes from all others the right to write a folder and the files in it."""
    for path in (folder, *folder.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_WRITE)


def _others(path: Path, inside: bool) -> str:
    """Who else can write a file or folder, in words that go on from its name; empty where nobody can."""
    try:
        found = path.stat()
    except OSError:  # it is not there, or not for this user either
        return ""
    if inside and found.st_uid not in (ROOTS, os.geteuid()):
        return f"belongs to the user {found.st_uid}"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if found.st_mode & stat.S_IWGRP and not _is_own(found.st_gid):
        return f"can be written by the group {found.st_gid}"
    return ""


def _is_own(gid: int) -> bool:
    """Whether a group is root's, or this user's alone: many systems give each user one, and let it write."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return gid == ROOTS or (group.gr_name == user and set(group.gr_mem) <= {user})
