"""Load a model and its tokenizer from any supported path, and continue a prompt with them.

    model, tokenizer = ddl.lab.load.load("runs/tiny")

A path is a run directory, a Hugging Face directory or a checkpoint of nanoGPT or the papers' code;
`ddl.paths.path_kind` tells them apart. Hugging Face's libraries are imported only if needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.errors import InputError, first_line
from ddl.files import without_advice_on_pickles
from ddl.lab.device import pick_device
from ddl.lab.train.runs import LAST, load_run
from ddl.models import GPT, NanoGPT
from ddl.models.finite import require_finite
from ddl.models.sampling import Sampling
from ddl.models.tokenizers import Tokenizer, encode_prompt
from ddl.paths import PathKind, at_home, path_kind, require_kind

__all__ = [
    "Loaded",
    "PathKind",
    "complete",
    "load",
    "load_for_transformers",
    "load_or_decoder",
    "no_tokenizer",
    "path_kind",
]

OURS = (PathKind.RUN, PathKind.DDL, PathKind.CHECKPOINT)
FOR_TRANSFORMERS = (PathKind.RUN, PathKind.DDL, PathKind.DECODER, PathKind.HUGGING_FACE)
# The files of which transformers makes a tokenizer.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
# Fetch nothing, and neither run nor offer to run code in the directory: the code is ddl.hf.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class Loaded(NamedTuple):
    """A model in evaluation mode and float32, and its tokenizer; None if there is none."""

    model: GPT | NanoGPT
    tokenizer: Tokenizer | None


def load(
    path: str | Path, device: str = "auto", *, checkpoint: str = "last", argument: str = "path"
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        path: a run directory of `ddl train`, a directory that `ddl export` wrote, or a checkpoint
            of nanoGPT or the papers' code.
        device: "auto", "cpu" or "cuda"; "auto" takes a GPU if there is one.
        checkpoint: of a run directory: "last", "best" (by validation loss) or a step.
        argument: the name of the path in error messages.

    Raises InputError if `path` is none of these, or a file in it is missing, damaged, or does not
    fit the others.
    """
    path = at_home(path, argument=argument)
    kind = require_kind(path, *OURS, argument=argument)
    _check_checkpoint(checkpoint, kind)
    pick_device(device, "additive")  # refuses before the weights are read, if there is no GPU
    try:
        model, tokenizer = _read(path, kind, checkpoint)
    except InputError as error:  # each subpackage names the path as its own command does
        raise error.renamed(dict.fromkeys(("run", "path", "src"), argument)) from error
    place = pick_device(device, model.config.residual)
    return Loaded(model.float().to(place).eval(), tokenizer)


def _check_checkpoint(checkpoint: str, kind: PathKind) -> None:
    if checkpoint != LAST and kind is not PathKind.RUN:
        raise InputError(
            "checkpoint",
            f"be left at {LAST} unless the model is {PathKind.RUN.value}",
            repr(checkpoint),
        )


def _read(path: Path, kind: PathKind, checkpoint: str) -> tuple[GPT | NanoGPT, Tokenizer | None]:
    if kind is PathKind.RUN:
        return load_run(path, torch.device("cpu"), checkpoint)
    if kind is PathKind.DDL:
        from ddl import hf

        return hf.load(path)
    from ddl.paper.files import read_model

    return read_model(path)[:2]


def load_for_transformers(
    path: str | Path, device: str = "auto", *, checkpoint: str = "last", argument: str = "path"
) -> tuple[Any, Any]:
    """Load a transformers model in evaluation mode and its tokenizer.

    path: a run directory, or a Hugging Face directory of any causal language model. device,
    checkpoint, argument: as in `load`.

    A run becomes a `DDLForCausalLM` in memory, with the tokenizer that `ddl export` would write. A
    Hugging Face model keeps its saved dtype. Raises InputError, as `load` does.
    """
    path = at_home(path, argument=argument)
    kind = require_kind(path, *FOR_TRANSFORMERS, argument=argument)
    _check_checkpoint(checkpoint, kind)
    pick_device(device, "additive")  # refuses before the weights are read, if there is no GPU
    if kind is PathKind.RUN:
        from ddl.hf import from_gpt, to_fast

        model, ours = load(path, device, checkpoint=checkpoint, argument=argument)
        assert isinstance(model, GPT)  # as in every run,
        assert ours is not None  # which has a tokenizer
        return from_gpt(model), to_fast(ours, model.config)
    theirs, tokenizer = _from_pretrained(path, argument)
    place = pick_device(device, getattr(theirs.config, "residual", "additive"))
    return theirs.to(place).eval(), tokenizer


def load_or_decoder(
    path: Path, device: str = "auto", *, checkpoint: str = "last", argument: str = "path"
) -> tuple[Any, Tokenizer | None]:
    """Load as `load` does, or a converted decoder of transformers, in its saved dtype."""
    if path_kind(path) is not PathKind.DECODER:
        return load(path, device, checkpoint=checkpoint, argument=argument)
    from ddl.hf.tokenization import FastTokenizer

    model, fast = load_for_transformers(path, device, checkpoint=checkpoint, argument=argument)
    return model, FastTokenizer(fast)


def _from_pretrained(path: Path, argument: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ddl.hf import OurModel  # which registers our models
    from ddl.hf.files import quiet

    auto: Any = AutoModelForCausalLM  # its annotations lack output_loading_info
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **LOCAL)
        tokenizer("")  # which fails if its config has values of other types
        with quiet(), without_advice_on_pickles():
            model, found = auto.from_pretrained(
                path, dtype="auto", output_loading_info=True, **LOCAL
            )
    except ModuleNotFoundError:
        raise
    except InputError as error:  # of an adapter, which is loaded beside its model
        raise error.renamed({"path": argument}) from error
    except Exception as error:  # a damaged file can raise nearly anything
        if not any((path / name).exists() for name in VOCABULARIES):
            raise no_tokenizer(path, argument) from error
        raise InputError(
            argument,
            "be a model and a tokenizer that transformers loads",
            f"{path}: {first_line(error)}",
        ) from error
    if found["missing_keys"]:  # transformers would initialise them at random
        missing = f"no {min(found['missing_keys'])}"
        raise InputError(argument, "have all its weights", f"{path} with {missing}")
    if isinstance(model, OurModel) and found["unexpected_keys"]:
        more = f"{min(found['unexpected_keys'])}, which it lacks"
        raise InputError(argument, "have the weights of its config", f"{path} with {more}")
    require_finite(model.state_dict(), path)
    return model, tokenizer


def no_tokenizer(path: Path, argument: str) -> InputError:
    """The error about a model without a tokenizer."""
    got = f"{path} without tokenizer.json: save the tokenizer of the model's training there"
    return InputError(argument, "have a tokenizer", f"{got}, by `tokenizer.save_pretrained`")


def complete(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None = None,
    seed: int,
    progress: Callable[[], object] | None = None,
) -> str:
    """Return `prompt` continued by `tokens` sampled tokens; equal seeds give equal text.

    Only tokens of the tokenizer are sampled: the model's vocabulary may be padded.

    model: of `load_or_decoder`.
    temperature: 0 takes the likeliest token. top_k: sample among the k likeliest; None for all.
    top_p: sample among the fewest that together have at least this probability; None for all.
    progress: called after every token. Raises InputError for a prompt that cannot be encoded or an
    option out of range.
    """
    device = next(model.parameters()).device
    idx = torch.tensor([encode_prompt(prompt, tokenizer)], device=device)
    generate = model.generate if isinstance(model, GPT | NanoGPT) else partial(_continued, model)
    try:
        out = generate(
            idx,
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            vocabulary=tokenizer.vocab_size,
            generator=torch.Generator().manual_seed(seed),
            progress=progress,
        )
    except ValueError as error:  # its message names the same arguments
        raise InputError.sentence(str(error)) from error
    return tokenizer.decode(out[0].tolist())


def _continued(
    model: Any, idx: Tensor, tokens: int, *, progress: Callable[[], object] | None, **options: Any
) -> Tensor:
    """Do as `GPT.generate`, for a model of transformers."""
    from ddl.hf.cache import CACHE

    sampling, cache, new = Sampling(**options), None, idx
    most = getattr(model.config, "max_position_embeddings", math.inf)
    for _ in range(tokens):
        if idx.shape[1] > most:  # from now on each new token costs a whole sequence
            new, cache = idx[:, -most:], None
        with torch.inference_mode():
            out = model(new, use_cache=True, **{CACHE: cache})
            new, cache = sampling.draw(out.logits[:, -1]), out[CACHE]
            idx = torch.cat((idx, new), dim=1)
        if progress is not None:
            progress()
    return idx
