"""Where things are. Every other file asks here."""

import os
import sys
from pathlib import Path

from flashladder.common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
AS_NAMES = "surrogateescape"  # errors= of text that has names of files in it, which may be of another encoding
VERSIONS = ROOT / "versions"
REFERENCES = "references"  # their folder in that of all ladders
CUDA_HEADERS = ROOT / "common" / "cuda"
CONFIGS = ROOT / "configs"
OPERATIONS = ROOT / "common" / "problem" / "operations"  # of this repository, a file each
TRAINED = ROOT / "common" / "problem" / "families" / "trained.npz"  # Q, K and V that a model was recorded with
PUBLISHED = ROOT / "results"  # the project's own, which git tracks
UNPUBLISHED = PUBLISHED / "unpublished"  # a person's, of commands that would change those
PREBUILT = ROOT / "prebuilt"  # kernels that came with an installed package


def mixed_checkouts(place: Path) -> str | None:
    """What is wrong where a folder or a script is not of this checkout; None where it is, or of none.

    A copied checkout brings an environment that still knows the original.
    """
    around = (place.resolve(), *place.resolve().parents)
    root = next((folder for folder in around if _is_checkout(folder)), ROOT)
    if root == ROOT:
        return None
    return (
        f"{place} would run the code of another checkout, {ROOT}, which {sys.executable} knows as flashladder: run "
        f"`make venv` in {root}, or set PYTHONPATH to a folder in which `flashladder` is a link to it"
    )


def cache_dir() -> Path:
    """The folder of compiled kernels: $FLASHLADDER_CACHE, else flashladder in $XDG_CACHE_HOME or ~/.cache."""
    if explicit := os.environ.get("FLASHLADDER_CACHE"):
        return Path(explicit).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashladder"


def results_dir(home: Path | None = None) -> Path:
    """The folder of measurements: $FLASHLADDER_RESULTS, else results/ of `home`, of the checkout, or of this folder."""
    if explicit := os.environ.get("FLASHLADDER_RESULTS"):
        return Path(explicit).expanduser().absolute()
    if home:
        return home / "results"
    return (ROOT if is_checkout() else Path.cwd()) / "results"


def adopted_dir() -> Path | None:
    """The folder of winners for one program, $FLASHLADDER_ADOPTED, which go before others; None without.

    ConfigError where there is no such folder.
    """
    if not (named := os.environ.get("FLASHLADDER_ADOPTED")):
        return None
    folder = Path(named).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"FLASHLADDER_ADOPTED={named}: there is no such folder; name one that `flashladder adopt` made, or unset it"
        )
    return folder


def is_checkout() -> bool:
    """Whether this is the project's own folder, not a package that was installed from it."""
    return _is_checkout(ROOT)


def _is_checkout(folder: Path) -> bool:
    return (folder / "setup.py").exists() and (folder / "common" / "paths.py").exists()
