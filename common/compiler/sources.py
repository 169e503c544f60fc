"""The source files of a kernel: the closure of its quoted includes, its digest, and the proof that it is complete."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from flashladder.common.errors import BuildError
from flashladder.common.own import FIRST
from flashladder.common.paths import AS_NAMES, CUDA_HEADERS, VERSIONS

Place = TypeVar("Place", bound=tuple[str, int])  # file and line


def header_folders(kernel: Path) -> list[Path]:
    """Where a kernel's headers are looked for, the first one first.

    Its own folder, `cuda` beside its rung, common/cuda, and the folders of all ladders and of the first one's rungs:
    what a rung shares with a few later ones lies with it. A rung in a checkout has that checkout's; one that lies
    elsewhere has this one's, and what `cuda` of every ladder has.
    """
    checkouts = (parent for parent in kernel.parents[1:] if (parent / "common" / "cuda").is_dir())
    root = next(checkouts, None)
    common, versions = (root / "common" / "cuda", root / "versions") if root else (CUDA_HEADERS, VERSIONS)
    elsewhere = [] if kernel.is_relative_to(versions) else sorted(versions.glob("*/cuda"))
    return [kernel.parent, kernel.parents[1] / "cuda", common, versions, versions / FIRST, *elsewhere]


def find_header(name: str, folders: Iterable[Path]) -> Path | None:
    """The file that an include of this name reads; None where there is none, as of the generated config.cuh."""
    return next((path.resolve() for folder in folders if (path := folder / name).is_file()), None)


class Sources:
    """Reads each file once; make a new one to see the files as they are now."""

    def __init__(self) -> None:
        self._texts: dict[Path, bytes] = {}
        self._headers: dict[Path, dict[Path, str]] = {}
        self._digests: dict[tuple[Path, bool], str] = {}

    def closure(self, kernel: Path) -> tuple[Path, ...]:
        """The kernel and every file that it includes in quotes, directly or not; the generated config.cuh apart."""
        return tuple(sorted({kernel.resolve(), *self.headers(kernel)}))

    def headers(self, kernel: Path) -> dict[Path, str]:
        """The same without the kernel, each with the name by which it is included."""
        if kernel not in self._headers:
            found: dict[Path, str] = {}
            waiting = [kernel.resolve()]
            while waiting:
                new = {path: name for path, name in self._included(waiting.pop(), kernel) if path not in found}
                found |= new
                waiting += new
            self._headers[kernel] = found
        return self._headers[kernel]

    def digest(self, kernel: Path, paths: bool = True) -> str:
        """A hash of the closure: of its contents, and of its paths, which the line tables of PTX and cubin name.

        Without `paths` files are known by their names alone, wherever they lie.
        """
        if (kernel, paths) not in self._digests:
            known_by = [str(path) if paths else path.name for path in self.closure(kernel)]
            contents = [hashlib.sha256(self._text(path)).hexdigest() for path in self.closure(kernel)]
            lines = [f"{content} {name}\n" for content, name in zip(contents, known_by, strict=True)]
            self._digests[kernel, paths] = hashlib.sha256(
                os.fsencode("".join(lines if paths else sorted(lines)))
            ).hexdigest()
        return self._digests[kernel, paths]

    def check_complete(self, kernel: Path, depfile: Path) -> None:
        """Raises BuildError when the compiler read a file of ours that the closure lacks: its edits would go unseen."""
        ours = (*header_folders(kernel.resolve()), VERSIONS, kernel.resolve().parents[1])
        unseen = [
            path
            for path in _dependencies(depfile)
            if path not in self.closure(kernel) and any(path.is_relative_to(root) for root in ours)
        ]
        if unseen:
            raise BuildError(
                f"{kernel} includes {unseen[0]} in a way that the build does not follow: an edit of it would not "
                'rebuild the kernel. Write a plain `#include "name"` of a file beside it, in cuda beside its rung, in '
                "common/cuda or in versions."
            )

    def _text(self, path: Path) -> bytes:
        if path not in self._texts:
            try:
                self._texts[path] = path.read_bytes()
            except OSError as error:
                raise BuildError(f"the source file {path} cannot be read: {error.strerror}") from None
        return self._texts[path]

    def _included(self, path: Path, kernel: Path) -> Iterator[tuple[Path, str]]:
        """The files that one file includes in quotes, found as the compiler finds them; what is nowhere is left out."""
        folders = (path.parent, *header_folders(kernel.resolve()))
        for name in map(os.fsdecode, re.findall(rb'^\s*#\s*include\s*"([^"]+)"', self._text(path), re.MULTILINE)):
            if found := find_header(name, folders):
                yield found, name


def own_line(chain: Sequence[Place]) -> Place:
    """Of the places at which something was inlined, innermost first: the innermost in the outermost one's file.

    In a kernel that is the line which does it, also within a lambda that is inlined further up.
    """
    return next(place for place in chain if place[0] == chain[-1][0])


def _dependencies(depfile: Path) -> list[Path]:
    """The absolute prerequisites in a Makefile rule of the preprocessor: all but config.cuh."""
    prerequisites = depfile.read_text(errors=AS_NAMES).replace("\\\n", " ").partition(": ")[2]
    words = re.findall(r"(?<!\S)/(?:\\.|[^\s\\])+", prerequisites)
    return [Path(re.sub(r"\\([ #])", r"\1", word).replace("$$", "$")).resolve() for word in words]
