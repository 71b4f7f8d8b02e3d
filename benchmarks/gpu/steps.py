"""A compiled training step in a process of its own: checked, compiled, then timed in turns.

The processes of a call compile side by side while nothing is timed. Then each keeps its parameters
alone on the device and waits for the rounds that rounds.py gives it.
"""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from common.floor import boundary_features
from ddl.lab.bench import agreement
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError
from ddl.lab.bench.oracle import peer
from ddl.lab.bench.traffic import boundary
from ddl.lab.config import PRESETS
from ddl.models import GPT
from ddl.nn.trunk import as_stream
from ddl.options import spread_anchors
from gpu.log import Line
from gpu.ops import warm

BYTES = {"float32": 4, "bfloat16": 2}
COPIES_AHEAD = 24  # of a profiled step, so that no gap in it is a wait for the host
TURN = 60  # seconds; a process that has the device for longer is killed, so that others get it
NAME, MOST_NAMED, MOST_GAPS = 100, 12, 6  # characters of a kernel's name; the longest ones
OURS = ("rewrite_read", "parameters_bwd", "reduce", "expand")  # extern "C"


class HalfAdditive(GPT):
    """The additive model whose additions are in bfloat16 under autocast, as nanochat's are.

    Embeddings in bfloat16 suffice: a sublayer's output is bfloat16 already, and so is the sum.
    """

    def hidden_states(self, x: Tensor, **options: Any) -> Tensor:
        return super().hidden_states(as_stream(x, "bfloat16"), **options)


def backend_in_turn(name: str, turn: IO[str]) -> Callable[..., Any]:
    """A backend of torch.compile whose code takes its turn before it first runs.

    Until its step is ready and the file is closed, one process at a time uses the device: there is
    memory for it, and inductor's own timing of kernels is undisturbed.
    """
    # Otherwise the backward is compiled after the forward has run, while it holds the device.
    torch._functorch.config.force_non_lazy_backward_lowering = True

    def call(run: Callable[..., Any], *arguments: Any) -> Any:
        if not turn.closed:
            fcntl.flock(turn, fcntl.LOCK_EX)
            signal.alarm(TURN)
        return run(*arguments)

    return lambda graph, inputs: partial(call, lookup_backend(name)(graph, inputs))


READY: list[tuple[GPT, Callable[[], None]]] = []  # this process's model and its step


def make(case: Line, sizes: Line, device: torch.device) -> GPT:
    """The model of a case; all have the same backbone. sizes: a preset, and changes of it."""
    additive, half = case["residual"] == "additive", case["stream_dtype"] == "bfloat16"
    changes = {"residual": case["residual"]} | sizes.get("changes", {})
    if not additive:
        changes |= {"anchor_every": case["anchor_every"], "erase": case["erase"]}
        changes["stream_dtype"] = "bfloat16" if half else None
    config = replace(PRESETS[sizes["preset"]].model, **changes)
    torch.manual_seed(0)
    with torch.device(device):
        model = HalfAdditive(config) if additive and half else GPT(config)
    agreement.perturb_(model)
    return model


def random_tokens(model: GPT, batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, model.config.block_size)
    return torch.randint(model.config.vocab_size, shape, generator=generator).to(device)


def kernels_of_step(clock: Clock, case: Line, sizes: Line) -> list[Line]:
    """Compile the kernels of a step; one layer has all that many have."""
    cpu, lines = torch.device("cpu"), []
    model = make(case, sizes | {"changes": {"num_layers": 1}}, cpu)
    idx = random_tokens(model, 1, cpu)
    for autocast in (False, True):  # the check is in float32
        with torch.autocast(clock.device.type, torch.bfloat16, enabled=autocast):
            lines.append({"what": case["residual"]} | warm(clock, model, idx, labels=idx))
    return lines


def compiled_step(clock: Clock, case: Line, sizes: Line, lock: str) -> list[Line]:
    """Check a step eagerly and compiled, measure its peak memory, and keep it ready."""
    gate: Line = {"red": None}
    model = make(case, sizes, clock.device)
    batch = random_tokens(model, sizes["batch"], clock.device)
    line = case | describe(model, case, batch.numel(), clock) | {"gate": gate}
    with open(lock, "w") as turn:
        backend = backend_in_turn(sizes["backend"], turn)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        try:
            gate |= check(model, batch[:2, :256])
            actual = under_autocast(compiled, batch)
            clock.release()
            gate["compiled_drift"] = agreement.drift(actual, under_autocast(model, batch))
            agreement.check_drift(gate["compiled_drift"])
        except MismatchError as difference:
            gate["red"] = str(difference)
            return [line]
        READY.append((model, partial(step, compiled, batch)))
        if clock.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(clock.device)
            step(compiled, batch)
            model.zero_grad()
            moments = 2 * sum(parameter.nbytes for parameter in model.parameters())  # AdamW's
            line["peak_bytes"] = torch.cuda.max_memory_allocated(clock.device) + moments
        clock.release()
    signal.alarm(0)
    return [line]


def step(compiled: Any, batch: Tensor) -> None:
    with torch.autocast(batch.device.type, torch.bfloat16):
        loss = compiled(batch, labels=batch).loss
    loss.backward()


def check(model: GPT, batch: Tensor) -> Line:
    """In float32 the model must agree with plain PyTorch; under autocast it must stay near."""
    oracle = model if model.config.residual == "additive" else peer(model)
    exact = agreement.results(oracle, batch)
    worst = agreement.check(agreement.results(model, batch), exact)
    drift = agreement.drift(under_autocast(model, batch), exact)
    agreement.check_drift(drift)
    return {"worst": worst, "drift": drift}


def under_autocast(model: Any, batch: Tensor) -> dict[str, Tensor]:
    """Gradients. The logits, several GB, are not kept."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        numbers = agreement.results(model, batch)
    return {name: tensor for name, tensor in numbers.items() if name != "logits"}


def describe(model: GPT, case: Line, tokens: int, clock: Clock) -> Line:
    """Fields of a record. beyond: bytes of all boundaries, beyond float32 additions', in copies."""
    config, default = model.config, case["anchor_every"] is None
    line: Line = {"default": default, "tokens": tokens}
    if default and case["residual"] in ("ddl-cc", "ddl-tc"):
        m, sublayers = config.value_channels, 2 * config.num_layers
        line["anchor_every"] = spread_anchors(sublayers, m, device_type=clock.device.type)
    more = boundary(case["residual"], state=BYTES[case["stream_dtype"]], features=2)
    more -= boundary("additive", state=4, features=2)
    more *= boundary_features(config.num_layers, tokens, config.hidden_size)
    return line | {"beyond": more / clock.copied_bytes}


def timed_step(clock: Clock, rounds: int) -> list[Line]:
    """Seconds of a copy and of the step behind it, after one step that is not timed."""
    ((model, run),) = READY
    timed, taken = clock.timed(run), []
    for _ in range(1 + rounds):
        taken.append(timed())
        model.zero_grad()
    copies, seconds = map(list, zip(*taken[1:], strict=True))
    return [{"copies": copies, "seconds": seconds}]


def profiled_step(clock: Clock) -> list[Line]:
    """Milliseconds of a step by kernel, and the device's idle time in it; nothing on a CPU."""
    ((model, run),) = READY
    if clock.device.type != "cuda":
        return [{}]
    run()
    model.zero_grad()
    clock.target.copy_(clock.source)
    clock.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(COPIES_AHEAD):
            clock.target.copy_(clock.source)
        run()
        clock.wait()
    model.zero_grad()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = sorted((x.time_range.start, x.time_range.end, x.name[:NAME]) for x in events)
    copies = [name.startswith("Memcpy DtoD") for *_, name in spans[:COPIES_AHEAD]]
    if len(spans) <= COPIES_AHEAD or not all(copies):
        return [{"profile": f"{len(spans)} kernels, {sum(copies)} of {COPIES_AHEAD} copies"}]
    return [idle_time(spans[COPIES_AHEAD:])]


def idle_time(spans: Sequence[tuple[float, float, str]]) -> Line:
    """Sums over kernels (start, end, name) in order of their start, in microseconds.

    kernels_ms: the longest, all of ours, and the rest as one. gaps: the longest, each with the
    kernels before and after it.
    """
    spent: dict[str, float] = {}
    gaps: list[tuple[float, str, str]] = []
    end, before = spans[0][0], ""
    for start, stop, name in spans:
        spent[name] = spent.get(name, 0.0) + (stop - start) / 1e3
        if start > end:
            gaps.append((round(start - end, 1), before, name))
        end, before = max(end, stop), name
    longest = sorted(spent, key=lambda name: -spent[name])
    kept = [n for at, n in enumerate(longest) if at < MOST_NAMED or n.startswith(OURS)]
    rest = sum(ms for name, ms in spent.items() if name not in kept)
    return {
        "kernels_ms": {n: round(spent[n], 3) for n in kept} | {"rest": round(rest, 3)},
        "kernel_ms": round(sum(spent.values()), 3),
        "idle_ms": round(sum(gap for gap, *_ in gaps) / 1e3, 3),
        "gaps": sorted(gaps, reverse=True)[:MOST_GAPS],
    }
