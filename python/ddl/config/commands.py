"""Options of the commands beside `ddl train`. No torch in here: `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddl.options import Residual, check_count, check_least

from .fields import check_counts, check_literals, require


@dataclass(frozen=True)
class SampleConfig:
    """Text from a finished run."""

    run: Path
    """Run directory, a directory that `ddl export` wrote, or a checkpoint of the paper's code."""
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
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "tokens seed", least=0)
        check_least("temperature", self.temperature)
        check_counts(self, "top_k")


@dataclass(frozen=True)
class DemoConfig:
    """The additive residual and a DDL residual, side by side."""

    residual: Residual = "ddl-cc"
    """The residual to compare with the additive one."""
    steps: int | None = None
    """Optimizer steps of each; None is the `demo` preset's number."""
    seed: int = 1337
    """Seed of backbone, batches and samples."""
    out: Path = Path("runs/demo")
    """Directory for the two run directories and the plot; an earlier demo in it is replaced."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "seed", least=0)
        check_counts(self, "steps")
        require(self.residual != "additive", "residual", "another than additive", self.residual)


@dataclass(frozen=True)
class EvalConfig:
    """Scores on the tasks of lm-evaluation-harness."""

    model: Path
    """Run directory, or directory of a Hugging Face model."""
    tasks: tuple[str, ...] = ("paper",)
    """Tasks, groups or tags of lm-eval, or patterns like arc_*. paper: the eight of the papers."""
    num_fewshot: int | None = None
    """Worked examples before a question; None is the task's own number, for paper both 0 and 1."""
    include_path: Path | None = None
    """Directory with tasks of your own, as YAML files."""
    limit: int | None = None
    """Examples per task, the first of each; None takes all."""
    batch_size: int | Literal["auto"] = 8
    """Sequences per forward pass; auto tries how many fit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    out: Path | None = None
    """New file for the results as JSON; by default eval-DATE-TIME.json in the model's directory."""

    def __post_init__(self) -> None:
        check_literals(self)
        named = any(entry.strip(",") for entry in self.tasks)
        require(named, "tasks", "at least one name", " ".join(self.tasks))
        check_counts(self, "num_fewshot", least=0)
        check_counts(self, "limit")
        if self.batch_size != "auto":
            check_count("batch_size", self.batch_size)


@dataclass(frozen=True)
class ExportConfig:
    """A run for Hugging Face's classes."""

    run: Path
    """Run directory."""
    hf: Path | None = None
    """Directory to write, new or empty. AutoModelForCausalLM and AutoTokenizer load it."""
    tokenizer: Path | None = None
    """Directory with GPT-2's tokenizer.json, or its vocab.json and merges.txt, for a run on GPT-2's
    tokens if tiktoken is missing or cannot fetch its data."""

    def __post_init__(self) -> None:
        require(self.hf is not None, "hf", "the directory to write", None)


@dataclass(frozen=True)
class ImportConfig:
    """A checkpoint of the paper's code for Hugging Face's classes, or back."""

    src: Path
    """Checkpoint: a .pt, .bin or .safetensors file or a directory with one, config.json beside it
    if there is one. With --reverse a run directory, or one that `ddl export` or this wrote."""
    out: Path
    """Directory to write, new or empty."""
    variant: Literal["auto"] | Residual = "auto"
    """Required variant of the checkpoint; auto recognises it by the names of its parameters."""
    reverse: bool = False
    """Write the paper's config.json and pytorch_model.bin."""
    layout: Literal["c_proj", "o_proj"] = "c_proj"
    """Names that --reverse writes: of the code of the papers, or of its newest version."""
    tokenizer: Path | None = None
    """As in `ddl export`."""

    def __post_init__(self) -> None:
        check_literals(self)
        unused = self.reverse or self.layout == "c_proj"
        require(unused, "layout", "left at c_proj without `reverse`", self.layout)
        require(
            self.variant == "auto" or not self.reverse,
            "variant",
            "left at auto with `reverse`",
            self.variant,
        )
