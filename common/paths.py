"""Where things are. Every other file asks here."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ROOT / "versions"
CUDA_HEADERS = ROOT / "common" / "cuda"
CONFIGS = ROOT / "configs"


def cache_dir() -> Path:
    """The folder of compiled kernels: $FLASHLADDER_CACHE, else flashladder in $XDG_CACHE_HOME or ~/.cache."""
    if explicit := os.environ.get("FLASHLADDER_CACHE"):
        return Path(explicit).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashladder"


def results_dir() -> Path:
    """The folder of measurements: $FLASHLADDER_RESULTS, else results/ of the checkout, else ./results."""
    if explicit := os.environ.get("FLASHLADDER_RESULTS"):
        return Path(explicit).expanduser().absolute()
    is_checkout = (ROOT / "setup.py").exists()
    return (ROOT if is_checkout else Path.cwd()) / "results"
