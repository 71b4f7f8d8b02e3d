"""`ddl bench models`: training steps and cached generation, against the additive residual."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ddl.models import GPT

from .agreement import TOLERANCE, check, check_cache, check_drift, drift, make, results
from .blocks import against_additive, mark
from .clock import Clock
from .measure import MismatchError
from .oracle import exact
from .row import Row, Stages, time_stages
from .setting import VOCABULARY, Setting


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """A training step and a generation of each residual."""
    shape = (setting.batch, setting.time)
    g = torch.Generator().manual_seed(0)
    idx = torch.randint(VOCABULARY, shape, generator=g).to(clock.device)
    steps: dict[str, list[Row]] = {}
    generations: dict[str, list[Row]] = {}
    trained: dict[str, Stages] = {}
    generated: dict[str, Stages] = {}
    for residual in ("additive", *setting.residuals):
        model = make(setting.model(residual, setting.layers), clock.device)
        tokens = setting.batch * setting.tokens
        steps[residual] = [Row("models", f"{residual} step", "additive")]
        generations[residual] = [Row("models", f"{residual} generate", "additive", tokens=tokens)]
        both = steps[residual] + generations[residual]
        try:
            worst = check_model(model, idx, setting)
        except MismatchError as difference:
            mark(both, f"{residual}: {difference}")
            continue
        for row in both:
            row.worst = worst
        trained[residual] = training(model, idx, setting)
        generated[residual] = generation(model, idx, setting)
    taken = time_stages(trained, clock, setting.repeats, "training steps")
    yield from against_additive(steps, taken, first=2)
    taken = time_stages(generated, clock, setting.repeats, "generation")
    yield from against_additive(generations, taken)


def check_model(model: GPT, idx: Tensor, setting: Setting) -> float:
    """Compare logits, loss and gradients with the reference in float64, and a cached step.

    Returns the largest error, 1 being what is allowed. Under autocast the gradients must also stay
    near the reference's. Raises MismatchError.
    """
    expected = results(exact(model), idx)
    worst = check(results(model, idx), expected) / TOLERANCE
    if setting.dtype == "bfloat16":
        with setting.autocast(idx.device):
            check_drift(drift(results(model, idx), expected))
    check_cache(model, idx)
    return worst


def training(model: GPT, idx: Tensor, setting: Setting) -> Stages:
    """The same step twice; the second is timed.

    The first one restores the memory and caches that a model would have if it trained alone.
    """

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with setting.autocast(idx.device):
            loss = model(idx, labels=idx).loss
        assert loss is not None
        loss.backward()

    return [step, step]


def generation(model: GPT, idx: Tensor, setting: Setting) -> Stages:
    """Half a sequence as the prompt, then new tokens one at a time, all by one call."""
    prompt = idx[:, : max(1, setting.time // 2)]

    def generate() -> Tensor:
        with setting.autocast(idx.device):
            return model.generate(prompt, setting.tokens, temperature=0.0)

    return [generate]
