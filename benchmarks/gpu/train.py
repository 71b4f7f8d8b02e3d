"""Training steps and prefill of whole models on a device: speed, memory, ratio to the additive."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from common.candidates import Contestant
from common.measure import gb_per_second, interleave, quartiles, ratio, ratio_interval
from common.traffic import boundary_features, floor
from gpu.clock import Clock
from gpu.log import Line
from gpu.models import Setting, check_compiled, entered


def train(setting: Setting, clock: Clock, rounds: int, goals: dict[str, float]) -> list[Line]:
    """Tokens per second, ratio to the additive residual and peak memory of every model."""
    clock.release()
    with entered(setting, clock.device) as contestants:
        racing = [c for c in contestants if c.red is None]
        size = fit(racing, setting, clock)
        batch = setting.tokens(size, clock.device)
        if setting.mode == "compiled":
            for contestant in racing:
                check_compiled(contestant, setting, batch)
        racing = [c for c in racing if c.red is None]
        memory = {c.name: peak_bytes(c, stages(c, batch, setting), clock) for c in racing}
        steps = {c.name: clock.timed(*stages(c, batch, setting)) for c in racing}
        seconds = interleave(steps, rounds, warmup=1, what=setting.name) if steps else {}
    base = additive_of(racing)
    lines = []
    for contestant in contestants:
        line = describe(contestant, setting, size)
        line["goal"] = goals.get(contestant.residual.removesuffix("-noec"))
        if contestant.name in seconds:
            line |= speeds(seconds[contestant.name], batch.numel())
            line["peak_bytes"] = memory[contestant.name]
            if base is not None:
                line |= compare(seconds, contestant.name, base)
                line["floor"] = bound(contestant.residual, setting, seconds[base], batch, clock)
                if memory[base]:
                    line["memory_factor"] = memory[contestant.name] / memory[base]
        lines.append(line)
    return lines


def bound(
    residual: str,
    setting: Setting,
    additive: list[tuple[float, ...]],
    batch: Tensor,
    clock: Clock,
) -> float:
    """The ratio if every boundary moved its bytes at the speed of the copy."""
    config = setting.config
    features = boundary_features(config.num_layers, batch.numel(), config.hidden_size)
    rate = gb_per_second(clock.copied_bytes, [taken[0] for taken in additive])
    step = statistics.median(taken[1] for taken in additive)
    return floor(residual, features, step, rate, **setting.bytes)


def stages(contestant: Contestant, batch: Tensor, setting: Setting) -> list[Callable[[], None]]:
    """Forward with loss and backward; then AdamW, which also drops the gradients."""

    def forward_backward() -> None:
        with setting.autocast(batch.device):
            loss = contestant.model(batch, labels=batch).loss
        loss.backward()

    def update() -> None:
        assert contestant.optimizer is not None
        contestant.optimizer.step()
        contestant.optimizer.zero_grad(set_to_none=True)

    return [forward_backward, update]


def fit(contestants: list[Contestant], setting: Setting, clock: Clock) -> int:
    """The largest batch that every model has memory for, found by halving."""
    size = setting.batch
    while True:
        try:
            for contestant in contestants:
                for stage in stages(contestant, setting.tokens(size, clock.device), setting):
                    stage()
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        else:
            return size
        for contestant in contestants:
            contestant.model.zero_grad(set_to_none=True)
        gc.collect()
        clock.release()
        size //= 2


def peak_bytes(contestant: Contestant, step: list[Callable[[], None]], clock: Clock) -> int | None:
    """Most memory during a step with this model alone: others are taken off. None on a CPU."""
    if clock.device.type != "cuda":
        return None
    own = [*contestant.oracle.parameters(), *contestant.oracle.buffers()]
    assert contestant.optimizer is not None
    for state in contestant.optimizer.state.values():
        own += [tensor for tensor in state.values() if isinstance(tensor, Tensor)]
    before = torch.cuda.memory_allocated(clock.device)
    torch.cuda.reset_peak_memory_stats(clock.device)
    for stage in step:
        stage()
    most = torch.cuda.max_memory_allocated(clock.device)
    return most - before + sum(tensor.nbytes for tensor in own)


def prefill(setting: Setting, clock: Clock, rounds: int, batches: tuple[int, ...]) -> list[Line]:
    """Milliseconds from a prompt of block_size tokens to the first new one."""
    lines = []
    clock.release()
    with entered(setting, clock.device) as contestants:
        racing = [c for c in contestants if c.red is None]
        for size in batches:
            prompt = setting.tokens(size, clock.device)
            steps = {c.name: clock.timed(first_token(c, prompt)) for c in racing}
            seconds = interleave(steps, rounds, what=f"prefill {setting.name}") if steps else {}
            base = additive_of(racing)
            for contestant in contestants:
                line = describe(contestant, setting, size)
                if contestant.name in seconds:
                    line |= speeds(seconds[contestant.name], prompt.numel())
                    if base is not None:
                        line |= compare(seconds, contestant.name, base)
                lines.append(line)
    return lines


def first_token(contestant: Contestant, prompt: Tensor) -> Callable[[], Tensor]:
    return lambda: contestant.model.generate(prompt, 1, temperature=0.0)


def additive_of(contestants: list[Contestant]) -> str | None:
    """The name of the additive model, if it is among those timed."""
    return next((c.name for c in contestants if c.residual == "additive"), None)


def describe(contestant: Contestant, setting: Setting, batch: int) -> Line:
    return {
        "what": f"{setting.name} {contestant.residual}, batch {batch}",
        "preset": setting.preset,
        "precision": setting.precision,
        "mode": setting.mode,
        "residual": contestant.residual,
        "form": contestant.form,
        "batch": batch,
        "time": setting.config.block_size,
        "gate": {"red": contestant.red, "worst": contestant.error, "drift": contestant.drift},
    }


def speeds(taken: list[tuple[float, ...]], tokens: int) -> Line:
    """Of the stages behind the copy: the first alone, and all of them."""
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
    """Ratios to the additive model: of the first stage alone, and of all of them."""
    first = {n: [taken[1] for taken in seconds[n]] for n in (name, base)}
    whole = {n: [sum(taken[1:]) for taken in seconds[n]] for n in (name, base)}
    return {
        "ratio": ratio(first[base], first[name]),
        "interval": ratio_interval(first[base], first[name]),
        "whole_ratio": ratio(whole[base], whole[name]),
    }
