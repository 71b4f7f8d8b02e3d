"""A worker: does the jobs that come on standard input, and answers in lines of JSON.

Answers: {"line": a record} for each, then {"done": true} or {"error": a sentence, "memory": whether
there was too little of it}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from gpu.work import die_with_parent

ROOT = Path(__file__).resolve().parents[2]


def serve(device: str, message: str | None = None) -> int:
    """Do jobs until standard input ends, or one that is given."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    die_with_parent()
    import torch

    from gpu import jobs

    clock = jobs.clock_of(device)
    gc.freeze()  # imported modules are no garbage, and every gc.collect() would visit them again
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions in float32, not in TF32
    for text in [message] if message else sys.stdin:
        asked = json.loads(text)
        if asked["plan"]:
            os.environ["DDL_PLAN"] = asked["plan"]
        with place(device, asked["plan"]):
            answer(partial(jobs.JOBS[asked["job"]], clock, **asked["arguments"]), answers)
    return 0


def answer(job: Callable[[], Any], answers: Any) -> None:
    """Write the lines of a job as they come, and how it ended."""
    import torch

    def write(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        for line in job():
            write(line=line)
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).splitlines() or [""])[0]
        memory = isinstance(error, torch.OutOfMemoryError)
        write(error=f"{type(error).__name__}: {reason}", memory=memory)
    else:
        write(done=True)


def place(device: str, plan: str) -> AbstractContextManager[Any]:
    """Where the operators run: for "emulated", CPU tensors on an emulated GPU."""
    if device != "emulated":
        return nullcontext()
    sys.path.append(str(ROOT))
    from tests.support.emulated_device import emulated

    return emulated(**limits(plan))


def limits(plan: str) -> dict[str, Any]:
    """An H200's limits, from which its planner chooses, and overrides like DDL_PLAN's."""
    words = (word.split("=") for word in plan.split())
    chosen = {name: int(value) for name, value in words}
    return {"shared_per_block": 227 << 10, "cluster": 8, "plan": chosen}
