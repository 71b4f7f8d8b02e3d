"""Times the operators on a device: fused and plain PyTorch, forward and backward, and a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ddl import functional
from ddl.lab.bench import plain_ops
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.ops import plain_styles, time_forms
from ddl.lab.bench.problems import Case, Operator
from gpu.log import Line

# By the name of the state's dtype: the dtypes of the state (and parameters) and of k and h. A
# float32 model under bfloat16 autocast has the second pair.
STORAGE = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.bfloat16),
}


def full_name(case: Case) -> str:
    return f"{case.name} {storage(case)}"


def storage(case: Case) -> str:
    return str(case.state).removeprefix("torch.")


def plain_forms(case: Case) -> list[str]:
    """Both styles of plain PyTorch if they differ. The report takes the faster one."""
    return [f"eager {style}" for style in plain_styles(case)]


def operator(case: Case, form: str, backend: str) -> Operator:
    """The operator in one form: "fused", or "eager" or "compiled" with a style."""
    if form == "fused":
        return getattr(functional, case.op)
    mode, _, style = form.partition(" ")
    op = getattr(plain_ops, case.op)
    if mode == "compiled":
        op = torch.compile(op, fullgraph=True, dynamic=False, backend=backend)
    return partial(op, style=style)


def interleave_forms(
    case: Case, forms: Sequence[str], clock: Clock, rounds: int, backend: str
) -> list[Line]:
    """A line for each form, with its times if it agreed with the reference."""
    made = {form: operator(case, form, backend) for form in forms}
    timed = time_forms(case, made, clock, rounds)
    if any(form.startswith("compiled") for form in forms):
        torch._dynamo.reset()  # the next case cannot reuse it
    return [
        {
            "what": f"{full_name(case)} {name}",
            **case.sizes(),
            "state": storage(case),
            "candidate": name,
            "check_s": round(form.check_seconds, 3),
            **form.to_json(),
        }
        for name, form in timed.items()
    ]
