"""The model and tokenizer at any kind of path, and text from them.

    model, tokenizer = ddl.load.load("runs/tiny")

`ddl.files.path_kind` tells the kinds apart: a run, a Hugging Face directory, a checkpoint of the
papers' code. Hugging Face's libraries are imported only for paths that need them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddl.data.tokenizer import Tokenizer
from ddl.errors import InputError, first_line
from ddl.files import PathKind, path_kind, require_kind
from ddl.models import GPT
from ddl.train import pick_device
from ddl.train.runs import load_run

__all__ = ["Loaded", "PathKind", "complete", "load", "load_for_transformers", "path_kind"]

OURS = (PathKind.RUN, PathKind.DDL, PathKind.PAPER)
FOR_TRANSFORMERS = (PathKind.RUN, PathKind.DDL, PathKind.HUGGING_FACE)
# Nothing is fetched, and no code in the directory is run or asked about: ddl.hf is the code.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class Loaded(NamedTuple):
    """A model in evaluation mode and float32, and its tokenizer if it came with one."""

    model: GPT
    tokenizer: Tokenizer | None


def load(path: str | Path, device: str = "auto", *, argument: str = "path") -> Loaded:
    """The model in a run directory, in one that `ddl export` wrote, or in a papers' checkpoint.

    Args:
        device: "auto", "cpu" or "cuda".
        argument: the name by which a sentence calls the path.

    Raises InputError if `path` is none of these, or a file in it is missing, damaged, or does not
    fit the others.
    """
    path = Path(path)
    kind = require_kind(path, *OURS, argument=argument)
    try:
        model, tokenizer = _read(path, kind)
    except InputError as error:  # each room calls the path by its own command's name for it
        sentence = re.sub(r"^`(run|path|src)`", f"`{argument}`", str(error))
        raise InputError(sentence) from error
    place = pick_device(device, model.config.residual)
    return Loaded(model.float().to(place).eval(), tokenizer)


def _read(path: Path, kind: PathKind) -> tuple[GPT, Tokenizer | None]:
    if kind is PathKind.RUN:
        return load_run(path, torch.device("cpu"))
    if kind is PathKind.DDL:
        from ddl import hf

        return hf.load(path)
    from ddl.paper.files import read_model

    return read_model(path)[:2]


def load_for_transformers(
    path: str | Path, device: str = "auto", *, argument: str = "path"
) -> tuple[Any, Any]:
    """A transformers model in evaluation mode, and its tokenizer, from a run or a Hugging Face
    directory of any model.

    A run becomes a `DDLForCausalLM` in memory, with the tokenizer that an export would have. A
    Hugging Face model keeps the dtype that it was saved in. Raises InputError, as `load` does.
    """
    path = Path(path)
    if require_kind(path, *FOR_TRANSFORMERS, argument=argument) is PathKind.RUN:
        from ddl.hf import from_gpt, to_fast

        loaded = load(path, device, argument=argument)
        assert loaded.tokenizer is not None  # every run has one
        return from_gpt(loaded.model), to_fast(loaded.tokenizer, loaded.model.config)
    model, tokenizer = _from_pretrained(path, argument)
    place = pick_device(device, getattr(model.config, "residual", "additive"))
    return model.to(place).eval(), tokenizer


def _from_pretrained(path: Path, argument: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ddl.hf  # registers DDLForCausalLM

    auto: Any = AutoModelForCausalLM  # whose annotations know no output_loading_info
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **LOCAL)
        model, found = auto.from_pretrained(path, dtype="auto", output_loading_info=True, **LOCAL)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise InputError(
            f"`{argument}` must be a model and a tokenizer that transformers loads, got {path}: "
            + first_line(error)
        ) from error
    if found["missing_keys"]:  # transformers would draw them at random
        missing = f"no {min(found['missing_keys'])}"
        raise InputError(f"`{argument}` must have all its weights, got {path} with {missing}")
    if isinstance(model, ddl.hf.DDLForCausalLM) and found["unexpected_keys"]:
        more = f"{min(found['unexpected_keys'])}, which it lacks"
        raise InputError(
            f"`{argument}` must have the weights of its config, got {path} with {more}"
        )
    return model, tokenizer


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    progress: Callable[[], object] | None = None,
) -> str:
    """Continue `prompt` by `tokens` sampled tokens; equal seeds give equal text.

    `progress` is called after every token. Raises InputError for a prompt that cannot be continued.
    """
    start = tokenizer.encode(prompt)
    if not start:
        raise InputError("`prompt` must have at least one character, got an empty one")
    idx = torch.tensor([start], device=model.wte.weight.device)
    generator = torch.Generator().manual_seed(seed)
    try:
        out = model.generate(
            idx,
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            progress=progress,
        )
    except ValueError as error:  # its sentences name the same arguments
        raise InputError(str(error)) from error
    return tokenizer.decode(out[0].tolist())
