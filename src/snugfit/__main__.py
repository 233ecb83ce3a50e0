"""``python -m snugfit``: the command line, where the script ``snugfit`` is not on the path."""

import sys

from snugfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
