"""Options of `ddl inspect`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .fields import check_counts, check_literals


@dataclass(frozen=True)
class InspectConfig:
    """Show what the rewrites of a model do over depth."""

    run: Path
    """Run directory, a directory that `ddl export` wrote, or a checkpoint of the paper's code."""
    checkpoint: str = "last"
    """Checkpoint of a run: last, best (by validation loss) or a step that was saved."""
    data: Path | None = None
    """Text to measure on: a UTF-8 file, which the model's tokenizer encodes, or a directory of
    tokens as in `ddl train`. None: the held-out part of the run's own data; without a run, Python's
    documentation."""
    tokens: int = 4096
    """Tokens to measure on, in whole windows of the model's length, spread evenly over the text."""
    prompt: str | None = None
    """Also show the stream lens after this text: the next tokens that readout and head would name
    if the stream ended after each sublayer, and for each value channel alone."""
    out: Path | None = None
    """Directory for the pictures and inspection.json; replaces earlier ones there, with
    the lens of an earlier --prompt. By default `inspect` in the model's directory, or NAME-inspect
    beside a file."""
    json: bool = False
    """Print everything as one JSON document instead of tables. The files are written, too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "tokens")
