"""The jobs of a worker, by name. Every job returns or yields records.

Arguments are JSON: a case of an operator is a dict with the fields of
`ddl.lab.bench.problems.Case`, the models of a training step a dict for `setting_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import ddl.cuda
from common import record
from ddl import functional
from ddl.lab.bench.clock import Clock, describe
from ddl.lab.bench.measure import MismatchError, gb_per_second, interleave
from ddl.lab.bench.problems import Case, build, check
from ddl.lab.config import PRESETS, PUBLISHED
from ddl.lab.machine import nvidia_smi
from gpu.beside import compare
from gpu.compile import compile_models, compile_ops, kernels_of
from gpu.launch import launches
from gpu.log import Line
from gpu.models import Setting
from gpu.ops import STORAGE, full_name, interleave_forms, plain_forms
from gpu.trace import trace
from gpu.train import decode, prefill, train

Fields = dict[str, Any]
MAIN = ("additive", "ddl", "ddl-cc", "ddl-tc")


def clocks() -> dict[str, str]:
    """The clocks, power and reasons for lower clocks that nvidia-smi reports; {} without it."""
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu",
             "clocks_throttle_reasons.active")  # fmt: skip
    found = nvidia_smi(*names)
    return {} if not found else dict(zip(names, found.split(", "), strict=False))


def clock_of(device: str) -> Clock:
    if device == "cuda":
        return Clock(torch.device("cuda", 0), 2**31)
    return Clock(torch.device("cpu"), 2**20)


def case_of(fields: Fields) -> Case:
    state, features = STORAGE[fields["state"]]
    return Case(**(fields | {"state": state, "features": features}))


def setting_of(fields: Fields) -> Setting:
    """layers, block_size: instead of the preset's, if given."""
    changes = {"num_layers": fields.get("layers"), "block_size": fields.get("block_size")}
    config = PRESETS[fields["preset"]].model
    config = replace(config, **{name: x for name, x in changes.items() if x is not None})
    return Setting(
        preset=fields["preset"],
        config=config,
        residuals=MAIN if fields.get("main") else tuple(fields.get("residuals", PUBLISHED)),
        precision=fields["precision"],
        mode=fields.get("mode", "eager"),
        batch=fields["batch"],
        backend=fields.get("backend", "inductor"),
    )


def machine(clock: Clock, commit: str | None = None) -> list[Line]:
    """Device, driver and clocks; fails if the operators cannot use the device."""
    if clock.device.type == "cuda" and (reason := ddl.cuda.why_unavailable(clock.device)):
        raise RuntimeError(reason)
    where = record.environment() | describe(clock.device)
    if commit is not None:
        where["commit"] = {"hash": commit, "dirty": False}
    return [{"what": where["device"], "summary": record.describe(where), **where, **clocks()}]


def smoke(clock: Clock, case: Fields) -> list[Line]:
    """One call and its backward against the reference in float64, without a time."""
    chosen = case_of(case)
    line: Line = {"what": full_name(chosen), **chosen.sizes(), "gate": {"red": None}}
    try:
        op = getattr(functional, chosen.op)
        line["gate"]["worst"] = check(chosen, build(chosen, clock.device), op)
    except MismatchError as difference:
        line["gate"]["red"] = str(difference)
    return [line]


def capture(clock: Clock, case: Fields) -> list[Line]:
    """The first launches of a process, captured in a CUDA graph, give the bits of eager calls."""
    chosen = case_of(case)
    problem, op = build(chosen, clock.device), getattr(functional, chosen.op)

    def both() -> list[torch.Tensor]:
        outputs = problem.outputs(op)
        given = [torch.ones_like(output) for output in outputs]
        return [*outputs, *torch.autograd.grad(outputs, problem.leaves, given)]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    pairs = zip(captured, both(), strict=True)
    wrong = [
        str(i) for i, (found, expected) in enumerate(pairs) if not torch.equal(found, expected)
    ]
    red = f"tensors {', '.join(wrong)} differ from an eager call's" if wrong else None
    return [{"what": full_name(chosen), **chosen.sizes(), "gate": {"red": red}}]


def copies(clock: Clock, rounds: int) -> Iterator[Line]:
    """GB/s, read and written, of copies of three sizes. The largest is the clock's own."""
    for shift in (4, 2, 0):
        part = Clock(clock.device, clock.copy_bytes >> shift)
        seconds = interleave({"copy": part.timed()}, 3 * rounds, what="copy")["copy"]
        rate = gb_per_second(part.copied_bytes, [taken for (taken,) in seconds])
        moved = part.copied_bytes
        yield {"what": f"copy of {moved // 2} bytes", "bytes": moved, "gb_s": rate}


def operators(clock: Clock, case: Fields, forms: str, rounds: int, backend: str) -> list[Line]:
    """Times of an operator beside a copy. forms: "fused", or beside it "eager" or "compiled"."""
    chosen = case_of(case)
    others = {"fused": [], "eager": plain_forms(chosen), "compiled": ["compiled broadcasts"]}[forms]
    return interleave_forms(chosen, ["fused", *others], clock, rounds, backend)


def planned(clock: Clock, case: Fields, rounds: int, aim: str) -> list[Line]:
    """Times of an operator under this process's DDL_PLAN. aim: the half that the plan is for."""
    (line,) = operators(clock, case, "fused", rounds, "")
    if clock.device.type == "cuda":  # in the cache by now
        line["kernels"] = kernels_of([case_of(case)], clock.device)
    return [line | {"aim": aim}]


def kernels(clock: Clock, case: Fields) -> list[Line]:
    """Plan, registers and spills of the kernels of a case under this process's DDL_PLAN."""
    chosen = case_of(case)
    found = kernels_of([chosen], torch.device("cuda", 0))
    return [{"what": full_name(chosen), "kernels": found}]


def compiled(clock: Clock, cases: Sequence[Fields]) -> list[Line]:
    return compile_ops([case_of(case) for case in cases], clock.device)


def compiled_models(clock: Clock, settings: Sequence[Fields]) -> list[Line]:
    return compile_models([setting_of(setting) for setting in settings], clock.device)


def training(clock: Clock, setting: Fields, rounds: int) -> list[Line]:
    return train(setting_of(setting), clock, rounds)


def prompts(clock: Clock, setting: Fields, rounds: int, batches: Sequence[int]) -> Iterable[Line]:
    return prefill(setting_of(setting), clock, rounds, batches)


def generation(
    clock: Clock, setting: Fields, rounds: int, batches: Sequence[int], prompt: int, tokens: int
) -> Iterable[Line]:
    return decode(setting_of(setting), clock, rounds, batches, prompt, tokens)


def split(clock: Clock, case: Fields, calls: int) -> list[Line]:
    return trace(case_of(case), clock, calls)


def launch(clock: Clock, calls: int, rounds: int) -> list[Line]:
    return launches(clock, calls, rounds)


def between(
    clock: Clock, cases: Sequence[Fields], library: str, rounds: int, calls: int, folder: str | None
) -> Iterator[Line]:
    """Our operator and a library's, of one boundary between sublayers, at every width."""
    for case in cases:
        yield from compare(clock, case_of(case), library, rounds, calls, folder)


JOBS: dict[str, Callable[..., Iterable[Line]]] = {
    job.__name__: job
    for job in (
        machine, smoke, capture, copies, operators, planned, kernels, compiled, compiled_models,
        training, prompts, generation, split, launch, between,
    )
}  # fmt: skip
