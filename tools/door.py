"""How `python tools/run_version.py` and `python tuner/search.py` come to their commands."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOORS = (ROOT / "tools", ROOT / "tuner")


def enter(command: str) -> None:
    """Run a command with the arguments of this program.

    The folders of the scripts leave the path: an import of `storage` wants a package, not tuner/storage.py.
    """
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() not in DOORS]
    try:
        from flashladder.tools import commands
    except ImportError as error:
        sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/flashladder {command}`")
    sys.exit(commands.main([command, *sys.argv[1:]], Path(sys.argv[0])))
