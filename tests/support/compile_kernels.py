"""Compile kernels in a process of their own, without the time to import torch.

    python compile_kernels.py NATIVE TORCH ARCHITECTURE SIZE…

NATIVE is the path of the extension, TORCH that of torch's __init__.py. ARCHITECTURE is a name such
as "sm_90", or "cuda:0" for a GPU of this machine. For every hidden size it compiles the kernel of a
`rewrite`, and prints the native code's reports as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from typing import Any


class Tensor:
    """The part of torch.Tensor that warm-up reads."""

    layout = "torch.strided"
    device = types.SimpleNamespace(type="cpu")
    dtype = "torch.float32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def stride(self) -> list[int]:
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]


def main(native: str, torch: str, architecture: str, *sizes: str) -> None:
    stand_in: Any = types.ModuleType("torch")
    stand_in.Tensor, stand_in.__file__ = Tensor, torch  # NVRTC is looked for beside this file
    sys.modules["torch"] = stand_in
    spec = importlib.util.spec_from_file_location("_native", native)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    gpu = architecture.partition("cuda:")[2]
    module.begin_warmup(None if gpu else architecture, int(gpu or 0))
    for d in map(int, sizes):
        state, outputs = (
            Tensor(1, d, 1),
            (Tensor(1, d, 1), Tensor(1, 2), None, None, None, None, None),
        )
        rewrite = (Tensor(1, d), Tensor(1, 1), Tensor(1), 0.1)
        module.rewrite_read(state, rewrite, None, outputs, 1)
    print(json.dumps(module.end_warmup(True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
