"""Write our models as Hugging Face directories, and read them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from ddl.errors import InputError, first_line
from ddl.files import atomic_directory, without_advice_on_pickles, written
from ddl.hf import remote
from ddl.models import GPT, NanoGPT
from ddl.models.finite import require_finite
from ddl.models.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    training_tokenizer,
)
from ddl.paths import PathKind, at_home, require_kind

from .base import OurModel
from .modeling import from_gpt, to_gpt
from .tokenization import from_files, load_tokenizer, to_fast


def save(
    model: GPT | NanoGPT,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
    out: str | Path,
    *,
    remote_code: bool = True,
) -> None:
    """Write a directory that the Auto classes load: config, weights (safetensors), tokenizer.

    tokenizer: one of ours, or Hugging Face's; None writes none. remote_code: also write a small
    modelling file, so that `trust_remote_code=True` works without importing `ddl.hf` (ddl-rs must
    be installed). Parameters keep their dtype. Raises InputError if GPT-2's byte pairs cannot be
    fetched or `out` cannot be written; then nothing was written.
    """
    fast = None if tokenizer is None else to_fast(tokenizer, model.config)
    _write(model, tokenizer, fast, at_home(out, argument="out"), "out", remote_code)


def _write(
    model: GPT | NanoGPT, tokenizer: Any, fast: Any, out: Path, argument: str, remote_code: bool
) -> None:
    wrapped: OurModel = from_gpt(model)
    if remote_code:
        wrapped.config.auto_map = remote.auto_map(wrapped.config)
    trained = training_tokenizer(tokenizer)
    without_end = isinstance(trained, ByteTokenizer | CharTokenizer) or (
        isinstance(trained, FileTokenizer) and trained.document_token is None
    )
    if fast is not None and not without_end:
        # These models were trained on documents with this token between them.
        ends = {f"{name}_token_id": fast.eos_token_id for name in ("bos", "eos", "pad")}
        wrapped.generation_config.update(**ends)
    with atomic_directory(out, argument=argument) as folder:
        wrapped.save_pretrained(folder)
        if fast is not None:
            fast.save_pretrained(folder)


def load(
    path: str | Path, dtype: torch.dtype | Literal["auto"] = torch.float32
) -> tuple[GPT | NanoGPT, Tokenizer | None]:
    """Load a model, on the CPU, and its tokenizer; None if there is no tokenizer.

    path: a directory that `save` or a DDLForCausalLM's `save_pretrained` wrote. dtype: "auto" for
    the one in which it was saved.
    Raises InputError if a file is missing, damaged, or does not fit the others, or if the weights
    are not finite.
    """
    path = at_home(path, argument="path")
    require_kind(path, PathKind.DDL, argument="path")
    try:
        auto: Any = AutoModelForCausalLM
        with _quiet(), without_advice_on_pickles():
            model, keys = auto.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # report them below instead of raising
            )
        tokenizer = load_tokenizer(path)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise InputError(path, "hold a model of type ddl", first_line(error)) from error
    kinds = ("missing", "unexpected", "mismatched")
    wrong = [f"{len(keys[f'{kind}_keys'])} {kind}" for kind in kinds if keys[f"{kind}_keys"]]
    if wrong:
        raise InputError(path, "hold the parameters of its config", " and ".join(wrong))
    require_finite(model.state_dict(), path)
    return to_gpt(model), tokenizer


def choose_tokenizer(
    tokenizer: Tokenizer | None, files: Path | None, config: Any
) -> Tokenizer | None:
    """Return the model's tokenizer or, if `files` is given, GPT-2's from that directory."""
    if files is None:
        return tokenizer
    if not isinstance(tokenizer, GPT2Tokenizer):
        kind = "characters" if tokenizer is None else training_tokenizer(tokenizer).kind
        raise InputError(
            "tokenizer", "be left out unless the model's tokens are GPT-2's", f"{files} for {kind}"
        )
    return from_files(files, config)


def save_with_tokenizer(
    model: GPT | NanoGPT, tokenizer: Tokenizer | None, out: Path, *, argument: str = "out"
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
        _write(model, tokenizer, fast, out, argument, remote_code=True)
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
