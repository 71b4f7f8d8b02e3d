"""Directories of Hugging Face's: written from our models, read into them, `ddl export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ddl.config import GPTConfig
from ddl.data.tokenizer import GPT2Tokenizer, Tokenizer
from ddl.errors import InputError, first_line
from ddl.files import MODEL_TYPE, all_or_nothing, is_hf, refuse_used, written
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
    Parameters keep their dtype. Raises InputError where GPT-2's byte pairs cannot be had; then
    nothing was written.
    """
    out = Path(out)
    fast = None if tokenizer is None else to_fast(tokenizer, model.config)
    wrapped = from_gpt(model)
    if remote_code:
        wrapped.config.auto_map = dict(remote.AUTO_MAP)
    if fast is not None and isinstance(tokenizer, GPT2Tokenizer | FastTokenizer):
        # These were trained on documents that end with it.
        ends = {f"{name}_token_id": fast.eos_token_id for name in ("bos", "eos", "pad")}
        wrapped.generation_config.update(**ends)
    wrapped.save_pretrained(out)
    if fast is not None:
        fast.save_pretrained(out)


def load(path: str | Path) -> tuple[GPT, Tokenizer | None]:
    """Model, in float32 on the CPU, and tokenizer of a directory that `save` or a
    DDLForCausalLM's `save_pretrained` wrote; no tokenizer where there is none.

    Raises InputError when a file is missing, damaged, or does not fit the others.
    """
    path = Path(path)
    if not is_hf(path):
        raise InputError(
            f"`path` must be a directory with a model of type {MODEL_TYPE}, got {path}"
        )
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

    tokenizer: a directory with GPT-2's files, for where tiktoken cannot fetch them. Returns lines
    that say what was done. Raises InputError; then nothing was written.
    """
    from ddl.train.runs import load_run

    refuse_used(out)
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
    """`save` into a new directory; without a tokenizer, and saying so, where GPT-2's data is not to
    be had."""
    report = []
    with all_or_nothing(out) as folder, _quiet():
        try:
            save(model, tokenizer, folder)
        except InputError as error:
            save(model, None, folder)
            report.append(f"without a tokenizer: {error}")
    return [written(out), *report]


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no reports of transformers' in here: the sentence says it all."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
