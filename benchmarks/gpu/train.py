"""Times training steps, prefill and decoding of whole models, and a step's peak memory."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.candidates import Candidate, quartiles
from common.floor import boundary_features, floor
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import Timed, gb_per_second, interleave, ratio, ratio_interval
from gpu.log import Line
from gpu.models import Setting, check_compiled, checked_candidates
from gpu.trace import step_kernels


def train(setting: Setting, clock: Clock, rounds: int) -> list[Line]:
    """Tokens per second, ratio to the additive residual and peak memory of every model."""
    clock.release()
    with checked_candidates(setting, clock.device) as candidates:
        passed = [c for c in candidates if c.red is None]
        size = fit(passed, setting, clock)
        batch = setting.tokens(size, clock.device)
        if setting.mode == "compiled":
            for candidate in passed:
                check_compiled(candidate, setting, batch)
        passed = [c for c in passed if c.red is None]
        memory = {c.name: peak_bytes(c, stages(c, batch, setting), clock) for c in passed}
        kernels = {c.name: step_kernels(stages(c, batch, setting), clock) for c in passed}
        steps = {c.name: clock.timed(*stages(c, batch, setting)) for c in passed}
        seconds = interleave(steps, rounds, warmup=1, what=setting.name) if steps else {}
    base = additive_of(passed)
    lines = []
    for candidate in candidates:
        line = describe(candidate, setting, size)
        if candidate.name in seconds:
            line |= speeds(seconds[candidate.name], batch.numel())
            line["peak_bytes"] = memory[candidate.name]
            line["kernels_ms"] = kernels[candidate.name]
            if base is not None:
                line |= compare(seconds, candidate.name, base)
                line["floor"] = bound(candidate.residual, setting, seconds[base], batch, clock)
                if memory[base]:
                    line["memory_factor"] = memory[candidate.name] / memory[base]
        lines.append(line)
    return lines


def bound(
    residual: str,
    setting: Setting,
    additive: list[tuple[float, ...]],
    batch: Tensor,
    clock: Clock,
) -> float:
    """The ratio to the additive model if every boundary moved its bytes at the copy's rate."""
    config = setting.config
    features = boundary_features(config.num_layers, batch.numel(), config.hidden_size)
    rate = gb_per_second(clock.copied_bytes, [taken[0] for taken in additive])
    step = statistics.median(taken[1] for taken in additive)
    return floor(residual, features, step, rate, **setting.bytes)


def stages(candidate: Candidate, batch: Tensor, setting: Setting) -> list[Callable[[], None]]:
    """Two stages: forward with loss and backward; then AdamW and zero_grad."""

    def forward_backward() -> None:
        with setting.autocast(batch.device):
            loss = candidate.model(batch, labels=batch).loss
        loss.backward()

    def update() -> None:
        assert candidate.optimizer is not None
        candidate.optimizer.step()
        candidate.optimizer.zero_grad(set_to_none=True)

    return [forward_backward, update]


def fit(candidates: list[Candidate], setting: Setting, clock: Clock) -> int:
    """The largest batch that all models have memory for, found by halving."""
    size = setting.batch
    while True:
        try:
            for candidate in candidates:
                for stage in stages(candidate, setting.tokens(size, clock.device), setting):
                    stage()
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        else:
            return size
        for candidate in candidates:
            candidate.model.zero_grad(set_to_none=True)
        gc.collect()
        clock.release()
        size //= 2


def peak_bytes(candidate: Candidate, step: list[Callable[[], None]], clock: Clock) -> int | None:
    """Peak memory of a step if this model were alone on the device. None on a CPU.

    Other models hold memory at the same time. The step's rise above the memory held before is
    measured, and this model's own parameters, buffers and optimizer state are added.
    """
    if clock.device.type != "cuda":
        return None
    own = [*candidate.oracle.parameters(), *candidate.oracle.buffers()]
    assert candidate.optimizer is not None
    for state in candidate.optimizer.state.values():
        own += [tensor for tensor in state.values() if isinstance(tensor, Tensor)]
    before = torch.cuda.memory_allocated(clock.device)
    torch.cuda.reset_peak_memory_stats(clock.device)
    for stage in step:
        stage()
    most = torch.cuda.max_memory_allocated(clock.device)
    return most - before + sum(tensor.nbytes for tensor in own)


def prefill(setting: Setting, clock: Clock, rounds: int, batches: Sequence[int]) -> Iterator[Line]:
    """Milliseconds from a prompt of block_size tokens to the first new one."""
    clock.release()
    with checked_candidates(setting, clock.device) as candidates:
        passed = [c for c in candidates if c.red is None]
        for size in batches:
            prompt = setting.tokens(size, clock.device)
            steps = {c.name: clock.timed(new_tokens(c, prompt, 1)) for c in passed}
            seconds = interleave(steps, rounds, what=f"prefill {setting.name}") if steps else {}
            yield from compared(candidates, setting, seconds, prompt.numel(), size)


def decode(
    setting: Setting,
    clock: Clock,
    rounds: int,
    batches: Sequence[int],
    prompt: int,
    tokens: int,
) -> Iterator[Line]:
    """Milliseconds of `tokens` cached steps, each one token of every sequence, after a prompt.

    They are the difference between generating tokens + 1 and one. The times are the GPU's, which
    waits for the host between small kernels.
    """
    clock.release()
    with checked_candidates(setting, clock.device, cached=True) as candidates:
        passed = [c for c in candidates if c.red is None]
        for size in batches:
            given = setting.tokens(size, clock.device)[:, :prompt]
            steps = {c.name: decoding(c, given, tokens, clock) for c in passed}
            seconds = interleave(steps, rounds, what=f"decode {setting.name}") if steps else {}
            yield from compared(candidates, setting, seconds, size * tokens, size)


def decoding(candidate: Candidate, prompt: Tensor, tokens: int, clock: Clock) -> Timed:
    """Times the copy and the steps after the first token."""
    both = clock.timed(new_tokens(candidate, prompt, 1), new_tokens(candidate, prompt, tokens + 1))

    def run() -> tuple[float, ...]:
        copy, first, whole = both()
        return copy, whole - first

    return run


def compared(
    candidates: list[Candidate],
    setting: Setting,
    seconds: dict[str, list[tuple[float, ...]]],
    tokens: int,
    size: int,
) -> Iterator[Line]:
    """A line for each candidate, with its times if it has any."""
    base = additive_of([c for c in candidates if c.name in seconds])
    for candidate in candidates:
        line = describe(candidate, setting, size)
        if candidate.name in seconds:
            line |= speeds(seconds[candidate.name], tokens)
            if base is not None:
                line |= compare(seconds, candidate.name, base)
        yield line


def new_tokens(candidate: Candidate, prompt: Tensor, count: int) -> Callable[[], Tensor]:
    return lambda: candidate.model.generate(prompt, count, temperature=0.0)


def additive_of(candidates: list[Candidate]) -> str | None:
    """The name of the additive model, if it is among those timed."""
    return next((c.name for c in candidates if c.residual == "additive"), None)


def describe(candidate: Candidate, setting: Setting, batch: int) -> Line:
    return {
        "what": f"{setting.name} {candidate.residual}, batch {batch}",
        "preset": setting.preset,
        "precision": setting.precision,
        "mode": setting.mode,
        "residual": candidate.residual,
        "form": candidate.form,
        "batch": batch,
        "time": setting.config.block_size,
        "gate": {"red": candidate.red, "worst": candidate.error, "drift": candidate.drift},
    }


def speeds(taken: list[tuple[float, ...]], tokens: int) -> Line:
    """Times of the first stage alone and of all stages after the copy."""
    _, first, *rest = zip(*taken, strict=True)
    whole = [sum(stages) for stages in zip(first, *rest, strict=True)]
    return {
        "median": statistics.median(first),
        "quartiles": quartiles(list(first)),
        "seconds": list(first),
        "whole_median": statistics.median(whole),
        "tokens_per_s": tokens / statistics.median(whole),
    }


def compare(seconds: dict[str, list[tuple[float, ...]]], name: str, base: str) -> Line:
    """Ratios to the additive model, of the first stage alone and of all stages."""
    first = {n: [taken[1] for taken in seconds[n]] for n in (name, base)}
    whole = {n: [sum(taken[1:]) for taken in seconds[n]] for n in (name, base)}
    return {
        "ratio": ratio(first[base], first[name]),
        "interval": ratio_interval(first[base], first[name]),
        "whole_ratio": ratio(whole[base], whole[name]),
    }
