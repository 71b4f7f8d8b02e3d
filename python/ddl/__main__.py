"""`python -m ddl` is `ddl`."""

import sys

from ddl.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
