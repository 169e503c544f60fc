"""The source files of a kernel: the closure of its quoted includes, its digest, and the proof that it is complete."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from flashladder.common.errors import BuildError
from flashladder.common.paths import CUDA_HEADERS, ROOT, VERSIONS

Place = TypeVar("Place", bound=tuple[str, int])  # file and line


def header_folders(kernel: Path) -> list[Path]:
    """Where a kernel's headers are looked for, behind its own folder: `cuda` beside its rung, and common/cuda.

    A rung in a checkout has that checkout's common/cuda; one that lies elsewhere has this one's.
    """
    in_checkouts = (parent / CUDA_HEADERS.relative_to(ROOT) for parent in kernel.parents[1:])
    return [kernel.parents[1] / "cuda", next(filter(Path.is_dir, in_checkouts), CUDA_HEADERS)]


class Sources:
    """Reads each file once; make a new one to see the files as they are now."""

    def __init__(self) -> None:
        self._texts: dict[Path, bytes] = {}
        self._closures: dict[Path, tuple[Path, ...]] = {}
        self._digests: dict[tuple[Path, bool], str] = {}

    def closure(self, kernel: Path) -> tuple[Path, ...]:
        """The kernel and every file that it includes in quotes, directly or not; the generated config.cuh apart."""
        if kernel not in self._closures:
            found: dict[Path, None] = {}
            waiting = [kernel.resolve()]
            while waiting:
                if (path := waiting.pop()) not in found:
                    found[path] = None
                    waiting += self._included(path, header_folders(kernel.resolve()))
            self._closures[kernel] = tuple(sorted(found))
        return self._closures[kernel]

    def digest(self, kernel: Path, paths: bool = True) -> str:
        """A hash of the closure: of its contents, and of its paths, which the line tables of PTX and cubin name.

        Without `paths` files are known by their names alone, wherever they lie.
        """
        if (kernel, paths) not in self._digests:
            known_by = [str(path) if paths else path.name for path in self.closure(kernel)]
            contents = [hashlib.sha256(self._text(path)).hexdigest() for path in self.closure(kernel)]
            lines = [f"{content} {name}\n" for content, name in zip(contents, known_by, strict=True)]
            self._digests[kernel, paths] = hashlib.sha256(
                "".join(lines if paths else sorted(lines)).encode()
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
                'rebuild the kernel. Write a plain `#include "name"` of a file beside it, in cuda beside its rung, or '
                "in common/cuda."
            )

    def _text(self, path: Path) -> bytes:
        if path not in self._texts:
            try:
                self._texts[path] = path.read_bytes()
            except OSError as error:
                raise BuildError(f"the source file {path} cannot be read: {error.strerror}") from None
        return self._texts[path]

    def _included(self, path: Path, folders: Sequence[Path]) -> list[Path]:
        """The files that one file includes in quotes, found as the compiler finds them; what is nowhere is left out."""
        names = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', self._text(path), re.MULTILINE)
        places = ([folder / os.fsdecode(name) for folder in (path.parent, *folders)] for name in names)
        return [found.resolve() for each in places if (found := next(filter(Path.is_file, each), None))]


def own_line(chain: Sequence[Place]) -> Place:
    """Of the places at which something was inlined, innermost first: the innermost in the outermost one's file.

    In a kernel that is the line which does it, also within a lambda that is inlined further up.
    """
    return next(place for place in chain if place[0] == chain[-1][0])


def _dependencies(depfile: Path) -> list[Path]:
    """The prerequisites in a Makefile rule as the preprocessor writes it."""
    prerequisites = depfile.read_text().replace("\\\n", " ").partition(": ")[2]
    words = re.findall(r"(?:\\.|[^\s\\])+", prerequisites)
    return [Path(re.sub(r"\\(.)", r"\1", word).replace("$$", "$")).resolve() for word in words]
