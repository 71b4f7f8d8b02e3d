"""Start the GPU benchmark: `python benchmarks/gpu`. main.py has its options and its parts."""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on sys.path. The benchmarks import from the folder above, where
    # the other scripts lie, and this one's modules (log, ops, train) must not become top-level.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from gpu.main import main

    gc.freeze()  # imported modules are no garbage, and every gc.collect() would visit them again
    sys.exit(main())
