"""Options of `ddl inspect`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddl.fields import check_counts, check_literals, expand_paths


@dataclass(frozen=True)
class InspectConfig:
    """Show what the sublayers of a model do over depth."""

    run: Path
    """Run directory, a directory of `ddl export` or `ddl import`, a checkpoint of the paper's code,
    or a directory that a model of `ddl.hf.convert` was saved in."""
    checkpoint: str = "last"
    """Checkpoint of a run: last, best (by validation loss) or a step that was saved."""
    data: Path | None = None
    """Text to measure on: a UTF-8 file, which the model's tokenizer encodes, or a directory of
    tokens as in `ddl train`. None takes the held-out part of the run's own data, or Python's
    documentation if the model has no run."""
    tokens: int = 4096
    """Number of tokens to measure on, in windows of the model's length that are spread evenly over
    the text. It is rounded down to whole windows."""
    prompt: str | None = None
    """Also show the stream lens after this text: for each sublayer, the next tokens that
    final read and head would predict if the stream ended there, from all value channels and from
    each alone."""
    out: Path | None = None
    """Directory for the pictures and inspection.json, which replace earlier ones there, with the
    lens of an earlier --prompt. None takes `inspect` in the model's directory, or NAME-inspect
    beside a file."""
    json: bool = False
    """Print everything as one JSON document instead of tables. The files are written, too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_literals(self)
        check_counts(self, "tokens")
