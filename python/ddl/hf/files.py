"""Hugging Face directories: written from our models, read into them, `ddl export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ddl.config import GPTConfig
from ddl.data.tokenizer import GPT2Tokenizer, Tokenizer
from ddl.errors import InputError, first_line
from ddl.files import PathKind, atomic_directory, require_kind, require_new_directory, written
from ddl.hf import remote
from ddl.models import GPT

from .modeling import DDLForCausalLM, from_gpt, to_gpt
from .tokenization import FastTokenizer, from_files, load_tokenizer, to_fast

__all__ = ["choose_tokenizer", "export_run", "load", "save", "save_with_tokenizer"]


def save(
    model: GPT, tokenizer: Tokenizer | None, out: str | Path, *, remote_code: bool = True
) -> None:
    """Write a directory that the Auto classes load: config, weights (safetensors), tokenizer.

    tokenizer: None for none. remote_code: also write the small modelling file with which
    `trust_remote_code=True` works where ddl-rs is installed and `ddl.hf` was not imported.
    Parameters keep their dtype. Raises InputError if GPT-2's byte pairs cannot be had or `out`
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
) -> None:
    wrapped = from_gpt(model)
    if remote_code:
        wrapped.config.auto_map = dict(remote.AUTO_MAP)
    if fast is not None and isinstance(tokenizer, GPT2Tokenizer | FastTokenizer):
        # These were trained on documents that end with it.
        ends = {f"{name}_token_id": fast.eos_token_id for name in ("bos", "eos", "pad")}
        wrapped.generation_config.update(**ends)
    with atomic_directory(out) as folder:
        wrapped.save_pretrained(folder)
        if fast is not None:
            fast.save_pretrained(folder)


def load(path: str | Path) -> tuple[GPT, Tokenizer | None]:
    """Model, in float32 on the CPU, and tokenizer of a directory that `save` or a
    DDLForCausalLM's `save_pretrained` wrote; None for the tokenizer if there is none.

    Raises InputError if a file is missing, damaged, or does not fit the others.
    """
    path = Path(path)
    require_kind(path, PathKind.DDL, argument="path")
    try:
        with _quiet():
            loaded: Any = DDLForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are listed
            )
        tokenizer = load_tokenizer(path)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # a damaged file raises nearly anything
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


def export_run(run: Path, out: Path, tokenizer: Path | None = None) -> list[str]:
    """Write a run directory's model and tokenizer for Hugging Face: `ddl export`.

    tokenizer: a directory with GPT-2's files, if tiktoken cannot fetch them. Returns lines
    that report it. Raises InputError; then nothing was written.
    """
    from ddl.train.runs import load_run

    require_new_directory(out)
    model, ours = load_run(run, torch.device("cpu"))
    return save_with_tokenizer(model, choose_tokenizer(ours, tokenizer, model.config), out)


def choose_tokenizer(
    tokenizer: Tokenizer | None, files: Path | None, config: GPTConfig
) -> Tokenizer | None:
    """The model's tokenizer or, for GPT-2's, the one in a directory."""
    if files is None:
        return tokenizer
    if not isinstance(tokenizer, GPT2Tokenizer):
        kind = "characters" if tokenizer is None else tokenizer.kind
        raise InputError(
            f"`tokenizer` must be left out unless the model's tokens are GPT-2's, got {files} for "
            f"{kind}"
        )
    return from_files(files, config)


def save_with_tokenizer(model: GPT, tokenizer: Tokenizer | None, out: Path) -> list[str]:
    """`save` into a new directory, for a command: without the tokenizer, with a line that says so,
    if GPT-2's data is not to be had."""
    fast, report = None, []
    try:
        fast = None if tokenizer is None else to_fast(tokenizer, model.config)
    except InputError as error:
        report.append(f"without a tokenizer: {error}")
    with _quiet():
        _write(model, tokenizer, fast, out)
    return [written(out), *report]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports: our sentence replaces them."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
