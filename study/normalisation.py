"""Train with directions that are normalised outside the operator, in the dtype of the sublayer.

    python -m study.normalisation ours   # k̂ in float32, inside the operator
    python -m study.normalisation l2     # k / √(Σk² + ε²)
    python -m study.normalisation rms    # k / √(mean k² + ε²/d) / √d, as the papers' code does

With exact numbers all three are the same. In bfloat16 the norm s of a rounded k̂ is not 1, and the
rewrite X + β k̂ (vᵀ − k̂ᵀX) has to keep that s: it is the operator's rewrite along the unit vector
k̂/s with the gate β s² and the value v/s.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ddl.lab.config.sweeps import Sweep, parse_sweep
from ddl.nn.residual import DeltaResidual
from ddl.results import Write

from . import side_by_side
from .records import FOLDER, Record
from .side_by_side import Job

FILE = Path(__file__).with_name("normalisation.toml")


def l2(k: Tensor, eps: float) -> Tensor:
    """k̂ with every step rounded to k's dtype."""
    return k / (k.square().sum(-1, keepdim=True) + eps**2).sqrt()


def rms(k: Tensor, eps: float) -> Tensor:
    """k̂ with every step rounded to k's dtype; the intermediate k/rms(k) has elements around 1."""
    d = k.shape[-1]
    return k / (k.square().mean(-1, keepdim=True) + eps**2 / d).sqrt() / math.sqrt(d)


KINDS: dict[str, Callable[[Tensor, float], Tensor] | None] = {"ours": None, "l2": l2, "rms": rms}


def rounded(
    normalise: Callable[[Tensor, float], Tensor], k: Tensor, value: Tensor, gate: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Direction, value and gate with which the operator rewrites along `normalise(k)` as it is."""
    with torch.autocast(k.device.type, enabled=False):
        direction = normalise(k, eps)
        s = torch.linalg.vector_norm(direction.float(), dim=-1).clamp(min=1e-30)
        return direction, value / s.unsqueeze(-1), gate * s.square()


@contextmanager
def installed(kind: str) -> Iterator[None]:
    """Make every DeltaResidual normalise its direction in this way."""
    normalise, original = KINDS[kind], DeltaResidual.write

    def write(self: DeltaResidual, *args: Any, **options: Any) -> Write:
        k, value, gate, eps = original(self, *args, **options)
        assert normalise is not None
        return Write(*rounded(normalise, k, value, gate, eps), eps)

    if normalise is not None:
        DeltaResidual.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeltaResidual.write = original  # type: ignore[method-assign]


def sweep_of(kind: str) -> Sweep:
    values = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return parse_sweep(values | {"out": f"runs/study/normalisation-{kind}"})


def train_run(kind: str, index: int) -> Record:
    """Train a run of a kind, and make its record."""
    with installed(kind):
        return side_by_side.train_run(sweep_of(kind), index)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    side_by_side.arguments_of(parser)
    args = parser.parse_args(arguments)
    out = FOLDER / f"normalisation-{args.kind}.jsonl"
    jobs = [
        Job(run.name, out, partial(train_run, args.kind, at))
        for at, run in enumerate(sweep_of(args.kind).runs)
    ]
    return 1 if side_by_side.run(lambda: jobs, args.processes, 60 * args.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
