"""Options of a training run: model, data, optimizer and schedule. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddl.options import check_least, check_positive

from .fields import check_counts, check_literals, plain_numbers, require
from .model import GPTConfig

__all__ = ["OptimConfig", "TrainConfig"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up, cosine decay and gradient clipping, as in arXiv 2601.00417."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    warmup_steps: int = 2000
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    weight_decay: float = 0.1
    """Weight decay of the sublayers' matrices and the embedding; nothing else is decayed."""
    clip: float = 1.0
    """Gradient norm above which gradients are clipped; 0 switches clipping off."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        check_positive("lr", self.lr)
        check_counts(self, "warmup_steps", least=0)
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1", self.min_lr_ratio)
        two = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        numbers = two and all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas)
        require(numbers, "betas", "two numbers in [0, 1)", self.betas)
        check_least("weight_decay", self.weight_decay)
        check_least("clip", self.clip)


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model."""

    model: GPTConfig = field(default_factory=GPTConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: str | None = "topics"
    """Training text: a directory of `ddl prepare`, a UTF-8 text file (read as bytes), a directory
    with nanoGPT's train.bin and val.bin, or `topics`, the documentation inside every Python. The
    presets small and medium set none."""
    steps: int = 100_000
    """Optimizer steps."""
    batch_size: int = 12
    """Sequences of block_size tokens in one forward pass."""
    accumulation: int = 40
    """Forward passes per optimizer step."""
    eval_every: int = 1000
    """Steps between evaluations on the validation part."""
    eval_batches: int = 100
    """Batches per evaluation, spread evenly over the validation part; 0 evaluates all of it."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl; a line's loss is the mean over these steps."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16 runs forward and backward under autocast; weights stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    deterministic: bool = False
    """On a GPU, use deterministic algorithms, which may be slower, so that a repeated run has the
    same losses. On a CPU it always has."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    seed: int = 1337
    """Seed of the initial weights and of the batches."""
    out: Path | None = None
    """Run directory, new or empty; by default runs/RESIDUAL-dHIDDEN-LLAYERS-sSEED."""
    overwrite: bool = False
    """Replace the run in an existing run directory; other files in it stay."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        check_literals(self)
        check_counts(self, "steps batch_size accumulation eval_every log_every")
        check_counts(self, "eval_batches seed", least=0)

    @property
    def directory(self) -> Path:
        model = self.model
        name = f"{model.residual}-d{model.hidden_size}-L{model.num_layers}-s{self.seed}"
        return self.out if self.out is not None else Path("runs") / name
