"""Start a call, `python benchmarks/gpu 1`, or a worker of one. main.py has the options."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on sys.path. The benchmarks import from the folder above, where
    # the other scripts lie, and this one's modules (log, ops, train) must not become top-level.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if sys.argv[1:2] == ["worker"]:
        from gpu.worker import serve

        sys.exit(serve(*sys.argv[2:]))
    from gpu.main import main

    sys.exit(main())
