"""Which Markdown pages the book has, where it keeps them, and their order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashladder.common import own
from flashladder.common.paths import ROOT

PAGE = "README.md"  # what a folder shows of itself
FURTHER = "Further pages"  # of the repository's own folders, which no part names
PARTS = {  # of the book; a page that none names stands below that of the folder around it
    "Begin": (
        "docs/install.md",
        "docs/path-student.md",
        "docs/path-author.md",
        "docs/path-user.md",
        "docs/glossary.md",
    ),
    "The ladders": (
        "versions/README.md",
        *(f"versions/{ladder}/{PAGE}" for ladder in ("forward", "backward", "decode", "mla")),
        "docs/learning.md",
    ),
    "In a model": ("docs/models.md", "docs/decode.md", "docs/masks.md", "docs/limits.md"),
    "The laboratory": (
        *("docs/own-rungs.md", "docs/programs.md", "docs/measuring.md", "docs/tuner.md", "docs/cost-model.md"),
        *("docs/emulator.md", "docs/settings.md"),
    ),
    "Results": tuple(
        f"results/{name}.md" for name in ("ladder", "forward", "backward", "decode", "mla", "accuracy", "SENDING")
    ),
    "The project": ("docs/layout.md", "CONTRIBUTING.md", "CHANGELOG.md"),
}
_WHERE = ("*.md", "docs/**/*.md", "results/*.md", "versions/**/*.md", "tests/emulator/RACES.md")


def pages(root: Path = ROOT) -> list[Path]:
    """All Markdown pages of the repository that tell a reader something."""
    found = sorted({path for pattern in _WHERE for path in root.glob(pattern)})
    return [path for path in found if own.PRIVATE not in path.parents]


def document(path: Path, root: Path = ROOT) -> str:
    """Sphinx's name for a page, a folder or a source file: where the book has it, without a suffix."""
    place = path.relative_to(root)
    if path.name == PAGE or path.is_dir():
        return (place if path.is_dir() else place.parent).joinpath("index").as_posix()
    return place.with_suffix("").as_posix() if path.suffix == ".md" else place.as_posix()


def tables(found: Iterable[Path], root: Path = ROOT) -> dict[Path, dict[str, list[Path]]]:
    """By page the tables of contents that it ends with, by their titles: of the first one the parts of the book."""
    top, known = root / PAGE, set(found)
    parts = {title: [root / name for name in names if root / name in known] for title, names in PARTS.items()}
    named = {page for part in parts.values() for page in part}
    made: dict[Path, dict[str, list[Path]]] = {top: {**parts, FURTHER: []}}
    for page in sorted(known - named - {top}):
        around = (folder / PAGE for folder in page.parents if folder / PAGE in known)
        above = next(candidate for candidate in around if candidate != page)
        made.setdefault(above, {}).setdefault(FURTHER if above == top else "", []).append(page)
    return made
