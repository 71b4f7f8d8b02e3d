"""Options of commands without a file here. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ddl.fields import (
    NAMED_BY_TEXT,
    check_counts,
    check_literals,
    expand_paths,
    require,
    require_given,
)
from ddl.options import Residual, check_count, check_least, check_share


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into shards of tokens."""

    inputs: tuple[Path, ...]
    """Files, or directories with them: text (.txt), JSON lines (.jsonl, .ndjson), each also
    compressed as .gz, .bz2, .xz or .zip, or as .zst with its package, and .parquet, in any case.
    A file that is named itself may have another suffix: .json is JSON lines, any other a text."""
    out: Path | None = None
    """Directory to write: new, empty, or one that the same command began."""
    tokenizer: Annotated[str | None, NAMED_BY_TEXT] = None
    """bytes, gpt2 (needs tiktoken), or a tokenizer.json of Hugging Face."""
    text_field: str = "text"
    """Field of a JSON line, or column of a parquet file, with the text of a document."""
    separator: str | None = None
    """Comes between the documents of a text file; \\n is a line end, \\r\\n one of Windows. None:
    each file is one."""
    document_token: str = "auto"
    """Token before each document: the text of a token, none, or auto, which is <|endoftext|> if the
    vocabulary has it. Where documents start is stored in any case."""
    validation: float = 0.01
    """Share of the documents that are held out, chosen by a hash of their text."""
    shard_tokens: int = 100_000_000
    """Training tokens after which a shard ends."""
    workers: int | None = None
    """Processes that encode; None takes one for each core. The files do not depend on it."""

    def __post_init__(self) -> None:
        expand_paths(self)
        require_given(len(self.inputs) > 0, "inputs", "at least one file or directory")
        out = "the directory to write, as in `--out data/notes`"
        require_given(self.out is not None, "out", out)
        tokenizer = "bytes, gpt2 or a tokenizer.json, as in `--tokenizer bytes`"
        require_given(self.tokenizer is not None, "tokenizer", tokenizer)
        require(self.separator != "", "separator", "at least one character", self.separator)
        check_share("validation", self.validation)
        check_counts(self, "shard_tokens workers")


@dataclass(frozen=True)
class SampleConfig:
    """Sample text from a trained model."""

    run: Path
    """Run directory, a directory of `ddl export`, `ddl import` or a converted decoder, or a
    checkpoint of the paper's code."""
    checkpoint: str = "last"
    """Checkpoint of a run: last, best (by validation loss) or a step that was saved."""
    prompt: str = "\n"
    """Text to continue."""
    tokens: int = 300
    """Tokens to add."""
    temperature: float = 0.8
    """Divides the logits: 1 samples from the model's distribution, 0 takes the likeliest token."""
    top_k: int | None = 40
    """Sample among this many of the likeliest tokens; None samples among all."""
    top_p: float | None = None
    """Sample among the fewest tokens, the likeliest first, that together have at least this
    probability, after temperature and top_k; None samples among all."""
    seed: int = 1337
    """Equal seeds give equal text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_literals(self)
        check_counts(self, "tokens seed", least=0)
        check_least("temperature", self.temperature)
        check_count("top_k", self.top_k, optional=True)
        check_share("top_p", self.top_p, optional=True)


@dataclass(frozen=True)
class DemoConfig:
    """Train the additive residual and a DDL residual side by side."""

    residual: Residual = "ddl-tc"
    """The residual to compare with the additive one."""
    steps: int | None = None
    """Optimizer steps of each model; None takes the number of the `demo` preset."""
    seed: int = 1337
    """Seed of the initial weights, the batches and the samples."""
    out: Path = Path("runs/demo")
    """Directory for both run directories and the plot; replaces an earlier demo there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_literals(self)
        check_counts(self, "seed", least=0)
        check_counts(self, "steps")
        require(self.residual != "additive", "residual", "another than additive", self.residual)


@dataclass(frozen=True)
class EvalConfig:
    """Score a model on tasks of lm-evaluation-harness."""

    model: Path
    """Run directory, or directory of a Hugging Face model."""
    checkpoint: str = "last"
    """Checkpoint of a run: last, best (by validation loss) or a step that was saved."""
    tasks: Annotated[tuple[str, ...], NAMED_BY_TEXT] = ("paper",)
    """Tasks, groups or tags of lm-eval, or patterns like arc_*. paper: the papers' eight tasks."""
    num_fewshot: int | None = None
    """Worked examples before each question. None: the task's default; for paper, both 0 and 1."""
    include_path: Path | None = None
    """Directory with your own tasks as YAML files."""
    limit: int | None = None
    """Score only the first examples of each task, this many; None scores all."""
    batch_size: int | Literal["auto"] = 8
    """Sequences per forward pass; auto tries how many fit in memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    out: Path | None = None
    """New JSON file for the results; by default eval-DATE-TIME.json in the model's directory."""

    def __post_init__(self) -> None:
        named = any(entry.strip(",") for entry in self.tasks)
        require(named, "tasks", "at least one name", " ".join(self.tasks))
        expand_paths(self)
        check_literals(self)
        check_counts(self, "num_fewshot", least=0)
        check_counts(self, "limit")
        if self.batch_size != "auto":
            check_count("batch_size", self.batch_size)


@dataclass(frozen=True)
class ExportConfig:
    """Export a run for Hugging Face's Auto classes."""

    run: Path
    """Run directory."""
    hf: Path | None = None
    """Directory to write, new or empty. AutoModelForCausalLM and AutoTokenizer can load it."""
    checkpoint: str = "last"
    """Checkpoint of a run: last, best (by validation loss) or a step that was saved."""
    tokenizer: Path | None = None
    """Directory with GPT-2's tokenizer.json, or its vocab.json and merges.txt. Needed for a run on
    GPT-2's tokens if tiktoken is missing or cannot fetch its data."""

    def __post_init__(self) -> None:
        expand_paths(self)
        out = "the directory to write, as in `--hf exported`"
        require_given(self.hf is not None, "hf", out)


@dataclass(frozen=True)
class ImportConfig:
    """Convert a checkpoint of nanoGPT or of the paper's code for Hugging Face's Auto classes."""

    src: Path
    """Checkpoint: a .pt, .bin or .safetensors file, or a directory with one; a config.json beside
    it is read. With --reverse: a run directory, or one that `ddl export` or `ddl import` wrote."""
    out: Path
    """Directory to write, new or empty."""
    variant: Literal["auto"] | Residual = "auto"
    """Residual that the checkpoint must have; auto recognises it by the parameters' names."""
    reverse: bool = False
    """Write the format of the paper's code: config.json and pytorch_model.bin."""
    layout: Literal["c_proj", "o_proj"] = "c_proj"
    """Parameter names for --reverse: c_proj for the papers' code, o_proj for its newest version."""
    tokenizer: Path | None = None
    """As in `ddl export`."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_literals(self)
        unused = self.reverse or self.layout == "c_proj"
        require(unused, "layout", "left at c_proj without `reverse`", self.layout, ("reverse",))
        require(
            self.variant == "auto" or not self.reverse,
            "variant",
            "left at auto with `reverse`",
            self.variant,
            ("reverse",),
        )
