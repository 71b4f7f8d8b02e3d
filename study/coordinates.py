"""Do sizes depend on width and depth as docs/transfer.md derives?

    python -m study.coordinates --residuals ddl-cc      # minutes

A few steps of training on random tokens, at several widths and at several depths, in the standard
parameterization and in the one that should make sizes stay. For each quantity the slope of its
logarithm over that of the width or depth is compared with the derived one.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from rich.progress import MofNCompleteColumn
from rich.table import Table
from torch import Tensor

from ddl.errors import InputError
from ddl.lab.device import pick_device
from ddl.lab.output import make_console
from ddl.lab.progress import passing_bar
from ddl.models import GPT, GPTConfig
from ddl.models.config import RESIDUALS
from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite, installed
from ddl.optim import OptimConfig, make_optimizer
from ddl.recording.sublayers import hooks_of

__all__ = [
    "DEPTHS",
    "NEAR",
    "PLACES",
    "WIDTHS",
    "Slope",
    "check",
    "configurations",
    "curves",
    "derived_slope",
    "main",
    "parameterization",
    "sizes",
    "slopes",
]

WIDTHS, DEPTHS = (64, 128, 256, 512, 1024), (2, 4, 8, 16, 32)
PLACES = {"width": WIDTHS, "depth": DEPTHS}
HEAD, LAYERS, WIDTH = 16, 2, 64  # of attention; of the models that become wider, and deeper
TOKENS, BATCH, TIME = 64, 8, 32
STEPS, RATE, SEEDS = 10, 1e-3, (0, 1)
NEAR = 0.1  # how far a slope may be from the derived one

# Quantity → derived slope over the width, and over the depth, with mup and with completep. Those
# with a Δ are the changes since the first step. None: it has no slope of its own (see below).
DERIVED: dict[str, tuple[float | None, float | None]] = {
    "sublayer output": (0, 0),
    "Δ sublayer output": (0, 0),
    "logit of β": (0, 0),
    "value": (0.5, 0),
    "first write / state": (0, -1),
    "state": (0, None),  # over depth between −1/2, of writes at random, and 0, of those that agree
    "Δ state / state": (0, 0),
    "Δ logit of the label": (0, 0),
}


class Slope(NamedTuple):
    """The slope of a quantity over "width" or "depth", and the derived one."""

    residual: str
    over: str
    parameterization: str
    quantity: str
    derived: float
    found: float

    @property
    def near(self) -> bool:
        return abs(self.found - self.derived) <= NEAR


def check(
    residuals: Sequence[str],
    *,
    widths: Sequence[int] = WIDTHS,
    depths: Sequence[int] = DEPTHS,
    seeds: Sequence[int] = SEEDS,
    device: torch.device | None = None,
    progress: Callable[[], object] | None = None,
) -> Iterator[Slope]:
    """The slopes of every quantity, in both parameterizations of width and of depth."""
    for residual in residuals:
        for over, places in (("width", widths), ("depth", depths)):
            for scaled in (False, True):
                rows = curves(
                    residual,
                    over,
                    places,
                    scaled=scaled,
                    seeds=seeds,
                    device=device,
                    progress=progress,
                )
                yield from slopes(residual, over, places, rows, scaled=scaled)


def parameterization(over: str, *, scaled: bool) -> str:
    """The one that should keep sizes over "width" or "depth", or the standard one."""
    return {"width": "mup", "depth": "completep"}[over] if scaled else "standard"


def derived_slope(over: str, quantity: str) -> float | None:
    """The slope that docs/transfer.md derives; None where it derives none."""
    return DERIVED[quantity][over == "depth"]


def slopes(
    residual: str,
    over: str,
    places: Sequence[int],
    rows: Sequence[dict[str, float]],
    *,
    scaled: bool,
) -> Iterator[Slope]:
    """The slopes of what `curves` found."""
    name = parameterization(over, scaled=scaled)
    for quantity in rows[0]:
        derived = derived_slope(over, quantity)
        if derived is not None:
            found = _slope(places, [row[quantity] for row in rows])
            yield Slope(residual, over, name, quantity, derived, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the slopes; the exit status is 1 if one is not near the derived one."""
    parser = argparse.ArgumentParser(prog="python -m study.coordinates", description=__doc__)
    others = [residual for residual in RESIDUALS if residual != "additive"]
    default = ["ddl", "ddl-cc", "ddl-tc"]
    parser.add_argument("--residuals", nargs="+", choices=others, default=default)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(arguments)
    residuals = ("additive", *args.residuals)
    for residual, (over, places) in product(residuals, PLACES.items()):
        try:
            configurations(residual, over, places, scaled=True)
        except InputError as error:
            parser.error(f"--residuals: {residual} has no rules for its sizes: {error}")
    device = pick_device(args.device, "ddl")
    with passing_bar(make_console(stderr=True), MofNCompleteColumn()) as bar:
        task = bar.add_task("training", total=2 * len(residuals) * (len(WIDTHS) + len(DEPTHS)))
        advance = partial(bar.advance, task)
        found = list(check(residuals, device=device, progress=advance))
    table = Table("residual", "over", "quantity", "derived", "standard", "with mup, completep")
    scaled = [slope for slope in found if slope.parameterization != "standard"]
    plain = [slope for slope in found if slope.parameterization == "standard"]
    for with_it, without in zip(scaled, plain, strict=True):
        shown = f"{with_it.found:+.2f}{'' if with_it.near else ' not near'}"
        cells = [with_it.residual, with_it.over, with_it.quantity, f"{with_it.derived:+g}"]
        table.add_row(*cells, f"{without.found:+.2f}", shown)
    make_console().print(table)
    return 0 if all(slope.near for slope in scaled) else 1


def curves(
    residual: str,
    over: str,
    places: Sequence[int],
    *,
    scaled: bool,
    seeds: Sequence[int] = SEEDS,
    device: torch.device | None = None,
    progress: Callable[[], object] | None = None,
) -> list[dict[str, float]]:
    """The sizes at each width or depth; the first is the base."""
    found = []
    for config in configurations(residual, over, places, scaled=scaled):
        found.append(sizes(config, seeds, device))
        if progress is not None:
            progress()
    return found


def configurations(
    residual: str, over: str, places: Sequence[int], *, scaled: bool
) -> list[GPTConfig]:
    """The models of `curves`. Raises InputError for a residual whose sizes have no rules."""
    base: dict[str, Any] = {"parameterization": parameterization(over, scaled=scaled)}
    if over == "width":
        base |= {"base_width": places[0]}
    else:
        base |= {"base_width": WIDTH, "base_layers": places[0]}
    made = []
    for place in places:
        width, layers = (place, LAYERS) if over == "width" else (WIDTH, place)
        config = GPTConfig(
            residual=residual,  # type: ignore[arg-type]
            vocab_size=TOKENS,
            block_size=TIME,
            num_layers=layers,
            hidden_size=width,
            num_heads=width // HEAD,
        )
        made.append(replace(config, **base) if scaled else config)
    return made


def sizes(
    config: GPTConfig, seeds: Sequence[int] = SEEDS, device: torch.device | None = None
) -> dict[str, float]:
    """The geometric mean over seeds of every quantity's root mean square after a few steps."""
    each = [_sizes(config, seed, device or torch.device("cpu")) for seed in seeds]
    return {name: statistics.geometric_mean([found[name] for found in each]) for name in each[0]}


def _sizes(config: GPTConfig, seed: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(seed)
    model = GPT(config).to(device)
    idx = torch.randint(TOKENS, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))
    idx = idx.to(device)
    options = OptimConfig(lr=RATE, warmup_steps=0, weight_decay=0.0)
    optimizer = make_optimizer(model, options)
    before = _seen(model, idx)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss: Any = model(idx, labels=idx).loss
        loss.backward()
        optimizer.step()
    after = _seen(model, idx)
    changes = {name: _rms(after[name] - before[name]) for name in after}
    found = {name: _rms(tensor) for name, tensor in after.items()}
    return {
        "sublayer output": found["output"],
        "Δ sublayer output": changes["output"],
        **({"logit of β": changes["gate"], "value": found["value"]} if "gate" in found else {}),
        "first write / state": _rms(after["first write"]) / _rms(after["first state"]),
        "state": found["last state"],
        "Δ state / state": changes["last state"] / found["last state"],
        "Δ logit of the label": changes["label"],
    }


def _seen(model: GPT, idx: Tensor) -> dict[str, Tensor]:
    """The tensors of a pass by name: of all sublayers, of the first, of the last, of the head."""
    steps: list[Rewrite | Addition] = []
    with torch.no_grad(), installed(hooks_of(model, lambda name, step: steps.append(step))):
        logits = model(idx).logits
    first = steps[0].after() - steps[0].state
    found = {
        "first state": steps[0].state,
        "first write": first,
        "last state": steps[-1].after(),
        "label": _of_labels(logits, idx),
    }
    rewrites = [step for step in steps if isinstance(step, Rewrite)]
    if rewrites:
        found["output"] = torch.stack([step.direction for step in rewrites])
        found["gate"] = torch.stack([torch.logit(step.gate / 2) for step in rewrites])
        found["value"] = torch.stack([step.value for step in rewrites])
    else:
        scale = model.config.times_as_deep  # the additions have been divided by it
        additions = [step.written for step in steps if isinstance(step, Addition)]
        found["output"] = scale * torch.stack(additions)
    return found


def _of_labels(logits: Tensor, idx: Tensor) -> Tensor:
    """The logit of each next token over the mean of its row: the part that training moves."""
    label = logits[:, :-1].gather(-1, idx[:, 1:, None]).squeeze(-1)
    return label - logits[:, :-1].mean(-1)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _slope(places: Sequence[int], values: Sequence[float]) -> float:
    """Of the logarithms, by least squares."""
    x, y = [math.log(place) for place in places], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


if __name__ == "__main__":
    raise SystemExit(main())
