"""Options of `ddl doctor` and `ddl bench`, which look at the installation. Imports no torch, so
`--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ddl.fields import check_counts, check_literals, expand_paths, require, require_given
from ddl.models.config import RESIDUALS
from ddl.options import Residual, check_choice, check_least

Part = Literal["ops", "blocks", "models", "norm"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class DoctorConfig:
    """Examine the installation."""

    json: bool = False
    """Print one JSON document instead of text."""
    whole_cache: bool = False
    """Check every kernel in the cache directory for damage; otherwise for about two seconds, the
    newest first."""


@dataclass(frozen=True)
class BenchConfig:
    """Measure this installation on this machine."""

    parts: tuple[Part, ...]
    """Parts to measure; without any, all of it.
    ops: each operator against plain PyTorch.
    blocks: attention and MLP with each residual, against the additive one.
    models: training steps and cached generation, against the additive residual.
    norm: the fused norm, and a LayerNorm outside the operator, against the additive residual."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the tensors of `ops` and `norm`. With bfloat16, blocks and models keep float32
    parameters and run under autocast, with their states in bfloat16."""
    residuals: tuple[Residual, ...] = ("ddl", "ddl-cc", "ddl-tc")
    """Residuals of the parts `blocks` and `models`; each is compared with additive."""
    hidden_size: int | None = None
    """d, a multiple of 32; None for 384 on a CPU and 1024 on a GPU."""
    value_channels: int = 4
    """m of the residuals that have value channels or several streams."""
    layers: int = 2
    """Blocks of a model."""
    time: int | None = None
    """Tokens per sequence; None for 256 on a CPU and 1024 on a GPU."""
    batch: int | None = None
    """Sequences per batch; None for 4 on a CPU and 16 on a GPU."""
    tokens: int = 32
    """New tokens per sequence in cached generation."""
    repeats: int = 15
    """Timed rounds. In each of them everything that is compared runs once."""
    threads: int | None = None
    """Threads of torch and of the operators on a CPU; None leaves torch's number."""
    out: Path | None = None
    """File to which the record of this run is appended, as a line of JSON."""
    baseline: Path | None = None
    """File that --out wrote: the last record in it is compared with this run, and the exit status
    is 1 if a row is slower than --min-ratio and --max-p95 allow."""
    min_ratio: float = 0.9
    """Smallest allowed ratio of a row, as a share of its ratio in the baseline."""
    max_p95: float = 1.2
    """Largest allowed 95th percentile of a row, as a multiple of that in the baseline. Both are
    first divided by the median of what the row is compared with, so that the machine's speed does
    not matter."""
    json: bool = False
    """Print one JSON document instead of a table."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_literals(self)
        for part in self.parts:
            check_choice("parts", part, get_args(Part))
        for residual in self.residuals:
            check_choice("residuals", residual, tuple(r for r in RESIDUALS if r != "additive"))
        require_given(len(self.residuals) > 0, "residuals", "at least one residual")
        check_counts(self, "hidden_size value_channels layers batch tokens repeats threads")
        check_counts(self, "time", least=2)
        d = self.hidden_size
        require(d is None or d % 32 == 0, "hidden_size", "a multiple of 32", d)
        for name, default in (("min_ratio", 0.9), ("max_p95", 1.2)):
            given = getattr(self, name)
            check_least(name, given)
            unused = self.baseline is not None or given == default
            require(unused, name, f"left at {default} without `baseline`", given, ("baseline",))
