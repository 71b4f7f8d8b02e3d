"""What the commands beside `ddl train` take. No torch in here, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddl._fields import check_counts, check_literals, require
from ddl.config import Residual


@dataclass(frozen=True)
class SampleConfig:
    """Text from a finished run."""

    run: Path
    """Run directory."""
    prompt: str = "\n"
    """Text to continue."""
    tokens: int = 300
    """Tokens to add."""
    temperature: float = 0.8
    """0 always takes the likeliest token, 1 samples as the model believes."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens; None among all."""
    seed: int = 1337
    """Equal seeds give equal text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "tokens seed", least=0)
        require(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        if self.top_k is not None:
            check_counts(self, "top_k")


@dataclass(frozen=True)
class DemoConfig:
    """The additive residual and a DDL residual, side by side."""

    residual: Residual = "ddl-cc"
    """What to compare with the additive residual."""
    steps: int | None = None
    """Optimizer steps of each; None is the `demo` preset's number."""
    seed: int = 1337
    """Seed of backbone, batches and samples."""
    out: Path = Path("runs/demo")
    """Where the two run directories and the plot go; an earlier demo there is replaced."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "seed", least=0)
        if self.steps is not None:
            check_counts(self, "steps")
        require(self.residual != "additive", "residual", "another than additive", self.residual)
