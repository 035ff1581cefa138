"""`python -m limitkeeper` is the command `limitkeeper`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
