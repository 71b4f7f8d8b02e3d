"""Write our models as Hugging Face directories, read them back, and `ddl export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ddl.config import GPTConfig
from ddl.data.tokenizer import FileTokenizer, GPT2Tokenizer, Tokenizer
from ddl.errors import InputError, first_line
from ddl.files import (
    PathKind,
    atomic_directory,
    require_files,
    require_kind,
    require_new_directory,
    target,
    written,
)
from ddl.hf import remote
from ddl.models import GPT

from .modeling import DDLForCausalLM, from_gpt, to_gpt
from .tokenization import FastTokenizer, from_files, load_tokenizer, to_fast

__all__ = ["choose_tokenizer", "export_run", "load", "save", "save_with_tokenizer"]


def save(
    model: GPT, tokenizer: Tokenizer | None, out: str | Path, *, remote_code: bool = True
) -> None:
    """Write a directory that the Auto classes load: config, weights (safetensors), tokenizer.

    tokenizer: None writes none. remote_code: also write a small modelling file, so that
    `trust_remote_code=True` works without importing `ddl.hf` (ddl-rs must be installed).
    Parameters keep their dtype. Raises InputError if GPT-2's byte pairs cannot be fetched or `out`
    cannot be written; then nothing was written.
    """
    fast = None if tokenizer is None else to_fast(tokenizer, model.config)
    _write(model, tokenizer, fast, Path(out), remote_code)


def _write(
    model: GPT,
    tokenizer: Tokenizer | None,
    fast: PreTrainedTokenizerFast | None,
    out: Path,
    remote_code: bool = True,
    *,
    argument: str = "out",
) -> None:
    wrapped = from_gpt(model)
    if remote_code:
        wrapped.config.auto_map = dict(remote.AUTO_MAP)
    knows_end = isinstance(tokenizer, GPT2Tokenizer | FastTokenizer) or (
        isinstance(tokenizer, FileTokenizer) and tokenizer.document_token is not None
    )
    if fast is not None and knows_end:
        # These models were trained on documents with this token between them.
        ends = {f"{name}_token_id": fast.eos_token_id for name in ("bos", "eos", "pad")}
        wrapped.generation_config.update(**ends)
    with atomic_directory(target(out), argument=argument) as folder:
        wrapped.save_pretrained(folder)
        if fast is not None:
            fast.save_pretrained(folder)


def load(path: str | Path) -> tuple[GPT, Tokenizer | None]:
    """Load a model, in float32 on the CPU, and its tokenizer; None if there is no tokenizer.

    path: a directory that `save` or a DDLForCausalLM's `save_pretrained` wrote.
    Raises InputError if a file is missing, damaged, or does not fit the others.
    """
    path = Path(path)
    require_kind(path, PathKind.DDL, argument="path")
    try:
        require_files(path)
        with _quiet():
            loaded: Any = DDLForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # report them below instead of raising
            )
        tokenizer = load_tokenizer(path)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        got = first_line(error)
        raise InputError(f"`{path}` must hold a model of type ddl, got: {got}") from error
    model, found = loaded
    wrong = [
        f"{len(found[kind])} {kind.removesuffix('_keys')}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if found[kind]
    ]
    if wrong:
        raise InputError(
            f"`{path}` must hold the parameters of its config, got {' and '.join(wrong)}"
        )
    return to_gpt(model), tokenizer


def export_run(
    run: Path, hf: Path, tokenizer: Path | None = None, checkpoint: str = "last"
) -> list[str]:
    """Write a run directory's model and tokenizer for Hugging Face: `ddl export`.

    tokenizer: a directory with GPT-2's files, if tiktoken cannot fetch them. checkpoint: "last",
    "best" or a step. Returns lines for the user. Raises InputError if `run` or `hf` cannot be
    used; then nothing was written.
    """
    from ddl.train.runs import load_run

    require_new_directory(hf, argument="hf")
    model, ours = load_run(run, torch.device("cpu"), checkpoint)
    return save_with_tokenizer(
        model, choose_tokenizer(ours, tokenizer, model.config), hf, argument="hf"
    )


def choose_tokenizer(
    tokenizer: Tokenizer | None, files: Path | None, config: GPTConfig
) -> Tokenizer | None:
    """Return the model's tokenizer or, if `files` is given, GPT-2's from that directory."""
    if files is None:
        return tokenizer
    if not isinstance(tokenizer, GPT2Tokenizer):
        kind = "characters" if tokenizer is None else tokenizer.kind
        raise InputError(
            f"`tokenizer` must be left out unless the model's tokens are GPT-2's, got {files} for "
            f"{kind}"
        )
    return from_files(files, config)


def save_with_tokenizer(
    model: GPT, tokenizer: Tokenizer | None, out: Path, *, argument: str = "out"
) -> list[str]:
    """Save for a command and return lines for the user.

    If GPT-2's data cannot be fetched, no tokenizer is written, and a line says so.
    """
    fast, report = None, []
    try:
        fast = None if tokenizer is None else to_fast(tokenizer, model.config)
    except InputError as error:
        report.append(f"without a tokenizer: {error}")
    with _quiet():
        _write(model, tokenizer, fast, out, argument=argument)
    return [written(out), *report]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports: our message replaces them."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
