"""Compile kernels in a process of their own, without the time to import torch.

    python compile_kernels.py NATIVE SITE_PACKAGES ARCHITECTURE SIZE…

NATIVE is the path of the extension, SITE_PACKAGES the directory that NVRTC is looked for in.
ARCHITECTURE is a name such as "sm_90", or "cuda:0" for a GPU of this machine. For every hidden size
it compiles the kernel of a `rewrite`, and prints the native code's reports as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any


def described(*shape: int) -> tuple[list[int], str, int]:
    """Describe an aligned float32 tensor as `Warmup.add` takes it."""
    return list(shape), "float32", 0


def load(native: str) -> Any:
    """Import the extension alone: the package around it imports torch."""
    spec = importlib.util.spec_from_file_location("_native", native)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(native: str, site_packages: str, architecture: str, *sizes: str) -> None:
    module = load(native)
    module.search_nvrtc_in([site_packages])
    gpu = architecture.partition("cuda:")[2]
    warmup = module.Warmup(None if gpu else architecture, int(gpu or 0))
    for d in map(int, sizes):
        shapes = {"state": (1, d, 1), "direction": (1, d), "value": (1, 1), "gate": (1,)}
        tensors = {name: described(*shape) for name, shape in shapes.items()}
        warmup.add("rewrite", {**tensors, "eps_k": 0.1})
    print(json.dumps(warmup.compile()))


if __name__ == "__main__":
    main(*sys.argv[1:])
