"""`ddl export` and `ddl import`: to directories of other libraries, and from them."""

from __future__ import annotations

from pathlib import Path

import torch

from ddl import paper
from ddl.errors import InputError
from ddl.files import require_new_directory
from ddl.models import GPT, NanoGPT
from ddl.paper.files import export_checkpoint
from ddl.paths import PathKind, at_home, require_kind

from .train.runs import LAST, load_run


def export_run(
    run: Path, hf: Path, tokenizer: Path | None = None, checkpoint: str = "last"
) -> list[str]:
    """Write the model and tokenizer of a run, or of such a directory, for Hugging Face.

    This is `ddl export`. tokenizer: a directory with GPT-2's files, if tiktoken cannot fetch them.
    checkpoint: of a run: "last", "best" or a step. Returns lines for the user. Raises InputError if
    `run` or `hf` cannot be used; then nothing was written.
    """
    from ddl.hf.files import choose_tokenizer, load, save_with_tokenizer  # needs the `hf` extra

    require_new_directory(hf, argument="hf")
    model: GPT | NanoGPT
    if require_kind(run, PathKind.RUN, PathKind.DDL, argument="run") is PathKind.DDL:
        if checkpoint != LAST:
            expected = f"be left at {LAST} unless `run` is {PathKind.RUN.value}"
            raise InputError("checkpoint", expected, repr(checkpoint), ("run",))
        model, ours = load(run, "auto")
    else:
        model, ours = load_run(run, torch.device("cpu"), checkpoint)
    return save_with_tokenizer(
        model, choose_tokenizer(ours, tokenizer, model.config), hf, argument="hf"
    )


def import_checkpoint(
    src: str | Path,
    out: str | Path,
    variant: paper.Variant = "auto",
    reverse: bool = False,
    layout: paper.Layout = "c_proj",
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Convert a checkpoint as `ddl.paper.import_checkpoint` does; with `reverse` a run, too."""
    source, target = at_home(src, argument="src"), at_home(out, argument="out")
    if not reverse:
        return paper.import_checkpoint(source, target, variant, tokenizer=tokenizer)
    require_new_directory(target)
    if require_kind(source, PathKind.RUN, PathKind.DDL, argument="src") is PathKind.RUN:
        model, _ = load_run(source, torch.device("cpu"))
        return export_checkpoint(model.config, model.state_dict(), target, layout)
    return paper.import_checkpoint(source, target, reverse=True, layout=layout)
