"""A worker: answers a job with (record, None) for each record, then (None, an error or None)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have Linux kill this process when its parent is killed; elsewhere it runs to its end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(pipe: Any, device: str) -> None:
    """Do jobs until the pipe is closed."""
    die_with_parent()
    with contextlib.suppress(EOFError):
        while True:
            job, arguments, plan = pipe.recv()
            try:
                for line in run(device, job, arguments, plan):
                    pipe.send((line, None))
            except Exception as error:
                traceback.print_exc()
                reason = (str(error).splitlines() or [""])[0]
                pipe.send((None, f"{type(error).__name__}: {reason}"))
            else:
                pipe.send((None, None))


def run(device: str, job: str, arguments: dict[str, Any], plan: str = "") -> Iterator[Any]:
    """The lines of a job: a function of ops.py, roof.py, steps.py or decoding.py."""
    import torch

    from ddl.lab.bench.clock import Clock
    from gpu import decoding, ops, roof, steps

    cuda = device == "cuda"
    clock = Clock(torch.device("cuda", 0), 2**31) if cuda else Clock(torch.device("cpu"), 2**20)
    gc.freeze()  # otherwise every gc.collect() visits the imported modules again
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions in float32, not in TF32
    if plan:
        os.environ["DDL_PLAN"] = plan
    function = next(getattr(x, job) for x in (ops, roof, steps, decoding) if hasattr(x, job))
    with place(device, plan):
        yield from function(clock, **arguments)
    del clock  # and the buffers of its copies
    torch.cuda.empty_cache()


def place(device: str, plan: str) -> AbstractContextManager[Any]:
    """Where the operators run: for "emulated", CPU tensors on an emulated GPU."""
    if device != "emulated":
        return nullcontext()
    sys.path.append(str(ROOT))
    from tests.support.emulated_device import emulated

    return emulated(**limits(plan))


def limits(plan: str) -> dict[str, Any]:
    """An H200's limits, from which its planner chooses, and overrides like DDL_PLAN's."""
    choices = {name: int(value) for name, value in (word.split("=") for word in plan.split())}
    return {"shared_per_block": 227 << 10, "cluster": 8, "plan": choices}
