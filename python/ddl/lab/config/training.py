"""Options of a training run: model, data, optimizer and schedule. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from ddl.fields import (
    NAMED_BY_TEXT,
    check_counts,
    check_literals,
    expand_paths,
    plain_numbers,
    require,
)
from ddl.models.config import GPTConfig
from ddl.models.flops import flops_per_token
from ddl.optim import OptimConfig
from ddl.options import check_flag, check_positive

__all__ = ["Tracker", "TrainConfig"]

Tracker = Literal["tensorboard", "wandb", "trackio"]

MOST = 2**31  # steps and batches; their products fit 64 bits


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model."""

    model: GPTConfig = field(default_factory=GPTConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: Annotated[str | None, NAMED_BY_TEXT] = "topics"
    """Training text: a directory of `ddl prepare`, a UTF-8 text file (read as bytes), a directory
    with nanoGPT's train.bin and val.bin, or `topics`, the documentation inside every Python. The
    presets small and medium set none."""
    validation: Annotated[str | None, NAMED_BY_TEXT] = None
    """Validate on this in place of the share held out of `data`, all of which is trained on if it
    is a text: a UTF-8 text file, or tokens as for `data`, whose validation part is taken. None
    for that share."""
    init_from: Annotated[str | None, NAMED_BY_TEXT] = None
    """Start from the weights of this run directory, directory of `ddl export` or checkpoint of the
    papers' code, with its model's options and a fresh optimizer; a model of nanoGPT goes on in
    nanoGPT's train.py. None for random weights."""
    separate_documents: bool = False
    """Keep the documents of a prepared directory apart: attention, token reads and convolutions see
    one document, and no document is predicted from the one before."""
    steps: int = 100_000
    """Optimizer steps."""
    batch_size: int = 12
    """Sequences of block_size tokens in one forward pass, of one process."""
    accumulation: int = 40
    """Forward passes per optimizer step, of all processes of torchrun together."""
    eval_every: int = 1000
    """Steps between evaluations on the validation part."""
    eval_batches: int = 100
    """Batches per evaluation, spread evenly over the validation part; 0 evaluates all of it."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl; a line's loss is the mean over these steps."""
    sample_every: int | None = None
    """Steps between samples of text, which are printed and written to metrics.jsonl."""
    record_every: int | None = None
    """Steps between recordings of what the rewrites do (β, |k|, errors, writes and norms, on the
    first evaluation windows) in recordings.jsonl, which `ddl inspect` draws over training. The
    baselines have no rewrites: what their sublayers add is recorded."""
    track: tuple[Tracker, ...] = ()
    """Where else the records go: tensorboard (event files in the run directory), wandb (Weights &
    Biases), trackio. Each is an extra, as in pip install 'ddl-rs[wandb]'."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16 runs forward and backward under autocast; weights stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    recompute: bool = False
    """Compute what is inside the sublayers again in the backward pass, instead of storing it
    (torch's activation checkpointing): less memory, a third more arithmetic."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """With several processes of torchrun: ddp, each has the whole model; fsdp2, each holds a part
    of parameters, gradients and optimizer state, and sublayers are gathered when they are used."""
    process_timeout: float = 10.0
    """Minutes after which a process gives up that waits for another one: for its part of a sum, or
    for the first one to write a checkpoint."""
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
    resume: Annotated[str | None, NAMED_BY_TEXT] = None
    """Go on from the last checkpoint of this run directory, with its options. auto: go on with the
    run in --out if there is one, otherwise start it, so that a scheduler can repeat the command."""
    save_every: int | None = None
    """Steps between checkpoints; None for one after every evaluation. Besides, the last step and
    the lowest validation loss are saved."""
    save_minutes: float | None = None
    """Also save when this many minutes have passed since the last checkpoint."""
    keep_every: int | None = None
    """Checkpoints of multiples of this many steps are kept, besides the last and the best one."""

    def __post_init__(self) -> None:
        expand_paths(self)
        plain_numbers(self)
        check_literals(self)
        for name in (
            *("separate_documents", "compile", "recompute", "deterministic"),
            "overwrite",
        ):
            check_flag(name, getattr(self, name))
        for name in ("data", "validation", "init_from", "resume"):
            value = getattr(self, name)
            require(isinstance(value, str | None), name, "a path as text", value)
        require(isinstance(self.out, Path | None), "out", "a path", self.out)
        known = get_args(Tracker)
        named = isinstance(self.track, tuple) and all(name in known for name in self.track)
        require(named, "track", f"names out of {', '.join(known)}", self.track)
        least = self.model.block_size >= 2  # a block of one token predicts nothing
        require(least, "block_size", "at least 2 for training", self.model.block_size)
        check_counts(self, "steps batch_size accumulation eval_every log_every", most=MOST)
        check_counts(self, "eval_batches", least=0, most=MOST)
        check_counts(self, "seed", least=0)
        check_counts(self, "save_every keep_every sample_every record_every")
        check_positive("save_minutes", self.save_minutes, optional=True)
        check_positive("process_timeout", self.process_timeout)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step, over all accumulated batches."""
        return self.batch_size * self.accumulation * self.model.block_size

    @property
    def flops_per_step(self) -> float:
        """FLOPs of one optimizer step, forward and backward, without what is recomputed."""
        return self.tokens_per_step * flops_per_token(self.model).total

    @property
    def directory(self) -> Path:
        model = self.model
        name = f"{model.residual}-d{model.hidden_size}-L{model.num_layers}-s{self.seed}"
        return self.out if self.out is not None else Path("runs") / name
