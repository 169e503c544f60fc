"""`python -m flashladder COMMAND ...`; without a command it says which there are."""

import sys

from flashladder.tools.commands import main

if __name__ == "__main__":
    sys.exit(main())
