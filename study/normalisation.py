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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ddl.lab.config.sweeps import parse_sweep
from ddl.nn.residual import DeltaResidual
from ddl.results import Write

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


def install(kind: str) -> None:
    """Make every DeltaResidual normalise its direction in this way."""
    normalise = KINDS[kind]
    if normalise is None:
        return
    original = DeltaResidual.write

    def write(self: DeltaResidual, *args: Any, **options: Any) -> Write:
        k, value, gate, eps = original(self, *args, **options)
        return Write(*rounded(normalise, k, value, gate, eps), eps)

    DeltaResidual.write = write  # type: ignore[method-assign]


def main(arguments: list[str] | None = None) -> int:
    from rich.console import Console

    from ddl.lab.train.sweep import train_sweep

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args(arguments).kind
    values = tomllib.loads(FILE.read_text(encoding="utf-8"))
    sweep = parse_sweep(values | {"out": f"runs/study/normalisation-{kind}"})
    install(kind)
    return train_sweep(sweep, Console()).status


if __name__ == "__main__":
    sys.exit(main())
