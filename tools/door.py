"""What the scripts of tools/ and tuner/ do: each is the door to a command, for those who are in a checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOORS = (ROOT / "tools", ROOT / "tuner")


def enter(file: str) -> None:
    """Run the command whose door is this file.

    The doors' folders leave the path: what imports profile wants the library's, not tools/profile.py.
    """
    script = Path(file).resolve()
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() not in DOORS]
    try:
        from flashladder.tools import commands
    except ImportError as error:
        door = script.relative_to(ROOT)
        sys.exit(f"{sys.executable} has no {error.name}: run `make venv`, then `.venv/bin/python {door}`")
    sys.exit(commands.enter(script))
