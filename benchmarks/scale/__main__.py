"""Print the tables of docs/scale.md, `python benchmarks/scale`; --write puts them there."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on sys.path. The benchmarks import from the folder above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from scale.main import main

    sys.exit(main())
