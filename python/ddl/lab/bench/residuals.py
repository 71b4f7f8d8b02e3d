"""`ddl bench blocks` and `ddl bench models`: every residual on one backbone, against additions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddl.models import GPT

from .agreement import TOLERANCE, check, check_cache, check_drift, drift, make, results
from .clock import Clock
from .measure import MismatchError
from .oracle import exact
from .row import Row, Stages, time_stages
from .setting import VOCABULARY, Setting

# Names of what is timed, and the stages of a model. Stages before the last ones are not timed.
Groups = Mapping[tuple[str, ...], Callable[[GPT, Tensor, Setting], Stages]]


def blocks(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Forward and backward of one layer, attention and MLP, without embedding and head."""
    return _rows("blocks", 1, {("forward", "backward"): block}, setting, clock)


def models(setting: Setting, clock: Clock) -> Iterator[Row]:
    """A training step and cached generation."""
    groups: Groups = {("step",): training, ("generate",): generation}
    return _rows("models", setting.layers, groups, setting, clock)


def _rows(part: str, layers: int, groups: Groups, setting: Setting, clock: Clock) -> Iterator[Row]:
    """The rows of all residuals but the additive one, each with its times and the additive's."""
    g = torch.Generator().manual_seed(0)
    idx = torch.randint(VOCABULARY, (setting.batch, setting.time), generator=g).to(clock.device)
    built = {
        residual: make(setting.model(residual, layers), clock.device)
        for residual in ("additive", *setting.residuals)
    }
    worst: dict[str, float] = {}
    red: dict[str, str] = {}
    for residual, model in built.items():
        try:
            worst[residual] = check_model(model, idx, setting)
        except MismatchError as difference:
            red[residual] = f"{residual}: {difference}"
    for names, stages_of in groups.items():
        timed = {name: stages_of(built[name], idx, setting) for name in worst}
        taken = time_stages(timed, clock, setting.repeats, part)
        for residual in setting.residuals:
            for at, name in enumerate(names, start=-len(names)):
                reason = red.get(residual) or red.get("additive")
                row = Row(part, f"{residual} {name}", "additive", reason, worst.get(residual))
                if row.red is None:
                    row.tokens = setting.batch * setting.tokens if name == "generate" else None
                    row.seconds = [times[at] for times in taken[residual]]
                    row.baseline_seconds = [times[at] for times in taken["additive"]]
                yield row


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


def block(model: GPT, idx: Tensor, setting: Setting) -> Stages:
    """The forward of a block from random embeddings, and its backward to x and parameters."""
    shape = (*idx.shape, setting.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(idx.device)
    leaves = [x.requires_grad_(), *model.trunk.parameters()]
    outputs: list[Tensor] = []

    def forward() -> None:
        with setting.autocast(x.device):
            outputs.append(model.hidden_states(x))

    def backward() -> Any:
        h = outputs.pop()
        return torch.autograd.grad(h, leaves, torch.ones_like(h))

    return [forward, backward]


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
    generate = partial(model.generate, prompt, setting.tokens, temperature=0.0)

    def run() -> Tensor:
        with setting.autocast(idx.device):
            return generate()

    return [run]
