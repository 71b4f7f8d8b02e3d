"""Operators beside a copy, with a stored state or one made from a chain; kernels; launches.

Nothing is timed before it agrees with `ddl.reference` in float64 at the size to be timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddl.cuda
from common import record
from ddl import functional
from ddl.lab import machine as this_machine
from ddl.lab.bench import clock as clocks
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError, interleave
from ddl.lab.bench.ops import Form, stages, time_forms
from ddl.lab.bench.problems import Case, Operator, Problem, build, check, cotangents
from ddl.lab.bench.row import time_stages
from ddl.results import Chain
from gpu.log import Line

BF16 = torch.bfloat16
# By the name of the state's dtype: the dtypes of the state (and parameters) and of k and h. A
# float32 model under bfloat16 autocast has the second pair.
STORAGE = {"bfloat16": (BF16, BF16), "float32": (torch.float32, BF16)}
ARCHITECTURE = "sm_90"  # an H100's and an H200's, if there is no GPU
FORMS = {"rewrite_read": "channel", "rewrite": "", "read": "channel", "expand": "conv"}
D, M, TOKENS = 64, 4, 8


def machine(clock: Clock, commit: str | None) -> list[Line]:
    """Device, driver and clocks; fails if the operators cannot use the device."""
    if clock.device.type == "cuda" and (reason := ddl.cuda.why_unavailable(clock.device)):
        raise RuntimeError(reason)
    where = record.environment() | clocks.describe(clock.device)
    if commit is not None:
        where["commit"] = {"hash": commit, "dirty": False}
    where["clocks"] = this_machine.nvidia_smi("clocks.sm", "clocks.mem", "temperature.gpu")
    return [{"what": where["device"], "summary": record.describe(where), **where}]


def case_of(fields: Line) -> Case:
    state, features = STORAGE[fields["state"]]
    return Case(**(fields | {"state": state, "features": features}))


def describe(case: Case) -> Line:
    state = str(case.state).removeprefix("torch.")
    return {"what": f"{case.name} {state}", **case.sizes(), "state": state}


def operators(clock: Clock, case: Line, rounds: int) -> list[Line]:
    """Times of an operator under this process's plan. rounds: 0 to compare alone."""
    chosen = case_of(case)
    forms = time_forms(chosen, {"fused": getattr(functional, chosen.op)}, clock, rounds)
    line = describe(chosen) | forms["fused"].to_json()
    if clock.device.type == "cuda":  # in the cache by now
        line["kernels"] = kernels(clock, case)[0]["kernels"]
    return [line]


def chains(clock: Clock, case: Line, rounds: int, links: Sequence[int]) -> Iterator[Line]:
    """Times of a backward that makes its state from an anchor and so many links, if its gradients
    have the bits of those from a stored state and the longest chain's agree with the reference."""
    chosen, forms, timed = case_of(case), {}, {}
    for count, state, chain in states(chosen, max(links), clock.device):
        if count not in links:
            continue
        problem = build(chosen, clock.device)
        problem.inputs["state"] = state.requires_grad_()
        directions = count * problem.inputs["direction"].nbytes
        moved = (problem.forward_bytes, problem.backward_bytes + directions)
        form = forms[count] = Form((clock.copied_bytes, *moved))
        operator = partial(chained, chain)
        try:
            if count == max(links):
                form.worst = check(chosen, problem, operator)
            incoming = cotangents(problem.outputs(operator))
            stored = gradients(problem, functional.rewrite_read, incoming)
            actual = gradients(problem, operator, incoming)
            names = [name for name in stored if not torch.equal(actual[name], stored[name])]
            form.red = f"gradients with other bits: {', '.join(names)}" if names else None
        except MismatchError as difference:
            form.red = str(difference)
        if rounds and form.red is None:
            timed[str(count)] = stages([problem], operator)
    for name, taken in time_stages(timed, clock, rounds, chosen.name).items():
        forms[int(name)].seconds = taken
    on_a_gpu = clock.device.type == "cuda"
    planned = {"kernels": kernels(clock, case)[0]["kernels"]} if on_a_gpu else {}
    for count, form in forms.items():
        line = describe(chosen) | {"links": count} | form.to_json() | planned
        yield line | {"what": f"{line['what']} links={count}"}


def states(case: Case, last: int, device: torch.device) -> Iterator[tuple[int, Tensor, Chain]]:
    """The anchor and the states after it, with their numbers and the chains that lead to them."""
    chain, state = Chain(last + 1), build(case, device).inputs["state"].detach()
    for count in range(last + 1):
        yield count, state, chain
        problem = build(case, device, seed=count)
        inputs = {name: tensor.detach() for name, tensor in problem.inputs.items()}
        arguments = inputs | problem.numbers | {"state": state.detach()}
        (state, *_), chain = functional.rewrite_read_chained(**arguments, chain=chain)


def chained(chain: Chain, **arguments: Any) -> Any:
    return functional.rewrite_read_chained(**arguments, chain=chain)[0]


def gradients(problem: Problem, operator: Operator, incoming: list[Tensor]) -> dict[str, Tensor]:
    values = torch.autograd.grad(problem.outputs(operator), problem.leaves, incoming)
    return dict(zip(problem.inputs, values, strict=True))


class Calls(nn.Module):
    """Calls rewrite_read twice. The backward of the second has a chain, and a kernel of its own."""

    def forward(self, arguments: dict[str, Any]) -> list[Any]:
        first, chain = functional.rewrite_read_chained(**arguments, chain=Chain(2))
        return [first, functional.rewrite_read_chained(**arguments, chain=chain)]


def kernels(clock: Clock, case: Line, **others: Any) -> list[Line]:
    """The kernels of a case, with plan, registers and spills. others: arguments of its job."""
    problem = build(replace(case_of(case), batch=1, time=8))
    return [describe(case_of(case)) | warm(clock, Calls(), problem.inputs | problem.numbers)]


def warm(clock: Clock, module: nn.Module, *args: Any, **options: Any) -> Line:
    on_a_gpu = clock.device.type == "cuda" or "DDL_PLAN" in os.environ  # which needs a driver
    architecture = None if on_a_gpu else ARCHITECTURE
    plans = [
        f"{kernel.name}{' with a chain' * (' CHAIN=1 ' in kernel.macros)} "
        f"{kernel.macros[kernel.macros.index('CLUSTER=') :]}, "
        f"{kernel.registers} registers, {kernel.spilled} bytes spilled"
        for kernel in ddl.cuda.warmup(module, *args, **options, architecture=architecture)
    ]
    return {"kernels": plans}


def launch(clock: Clock, calls: int, rounds: int) -> list[Line]:
    """Microseconds of the host, which does not wait for the device, per call; and of PyTorch's own
    addition and RMS norm in the same rounds."""
    x = torch.randn(1, TOKENS, D, device=clock.device, dtype=BF16)
    weight = torch.ones(D, device=clock.device, dtype=BF16)
    steps: dict[tuple[str, str], Callable[[], Any]] = {
        ("add", "torch"): lambda: x + x,
        ("rms_norm", "torch"): lambda: F.rms_norm(x, (D,), weight),
    }
    for op, form in FORMS.items():
        problem = build(Case(op, form, D, M, 1, TOKENS, BF16, BF16), clock.device)
        operator = getattr(functional, op)
        forward, incoming = (
            partial(problem.outputs, operator),
            cotangents(problem.outputs(operator)),
        )
        steps[op, "no grad"] = torch.no_grad()(forward)
        steps[op, "forward"] = forward
        steps[op, "forward + backward"] = partial(gradients, problem, operator, incoming)

    def host_seconds(call: Callable[[], Any]) -> tuple[float]:
        clock.wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - started
        clock.wait()
        return (elapsed / calls,)

    timed = {" ".join(key): partial(host_seconds, call) for key, call in steps.items()}
    seconds = interleave(timed, rounds, what="launch")
    medians = {name: statistics.median(x for (x,) in taken) for name, taken in seconds.items()}
    return [
        {"what": f"{op} {kind}", "op": op, "kind": kind, "us": 1e6 * medians[f"{op} {kind}"]}
        for op, kind in steps
    ]
