"""Read checkpoints of nanoGPT, additive or on a delta stream, for `ddl import`.

A ckpt.pt is recognised by the names of its parameters. The options of a conversion are in the
metadata of its state dict, where the models of `ddl.nanogpt` and every DeltaResidual put them, or
in `delta_args` beside `model_args`, where docs/nanogpt.md has train.py put them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl.errors import InputError, listed
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.scaling import without_wrappers
from ddl.models.tokenizers import GPT2Tokenizer, Tokenizer, read_meta
from ddl.nanogpt import named_as_today, options_in

from .names import COUNT, EMBEDDING, HEAD, check_state, cleaned

# The papers' code has neither.
MARK = ("transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight")
META = "meta.pkl"


def is_nanogpt(contents: Mapping[str, Any]) -> bool:
    """Return whether a file's contents are a checkpoint of nanoGPT, or its state dict alone."""
    inside = contents.get("model")
    state = inside if isinstance(inside, Mapping) else contents
    names = {without_wrappers(name) for name in state if isinstance(name, str)}
    return all(name in names for name in MARK)


def read_model(
    path: Path, contents: Mapping[str, Any], variant: str, tokenizer: Path | None
) -> tuple[NanoGPT, Tokenizer | None, list[str]]:
    """Make the model of a checkpoint, in its own dtype, its tokenizer, and a report in lines.

    path: the file, beside which meta.pkl may be. variant: the residual that it must have, or
    "auto". tokenizer: a directory with meta.pkl or GPT-2's files; None to look for the dataset's
    meta.pkl. Raises InputError if the checkpoint is not nanoGPT's or not complete.
    """
    args: Any = contents.get("model_args")
    needed = ("n_layer", "n_head", "n_embd", "block_size")
    missing = [name for name in needed if not isinstance(args, Mapping) or name not in args]
    if missing:
        got = f"{path} without {listed(missing)}"
        raise InputError("src", "have nanoGPT's model_args", got)
    state = _state(path, contents["model"])
    delta = _options(path, contents, state)
    try:
        bias = "transformer.h.0.ln_1.bias" in state
        config = NanoGPTConfig(**{"bias": bias, **args}, delta=delta)
        with torch.device("meta"):
            model = NanoGPT(config)
    except (ValueError, TypeError) as error:
        expected = "have options in model_args and delta_args that its model takes"
        raise InputError("src", expected, f"{path}: {error}") from error
    if variant not in ("auto", config.residual):
        expected = f"be auto or {config.residual}, which {path} has"
        raise InputError("variant", expected, repr(variant))
    what = "nanoGPT's GPT with its " + ("model_args" if delta is None else "delta_args")
    check_state("src", what, state, model.state_dict())
    model.load_state_dict(state, assign=True)
    model.lm_head.weight = model.wte.weight
    if delta is not None:
        every: Any = model.delta_args  # also those that were left at their defaults
        model.config = replace(config, delta=every)
    ours, tokens = _tokenizer(path, contents, config.vocab_size, tokenizer)
    return model, ours, [*_report(model.config, state), f"tokens: {tokens}"]


def _state(path: Path, theirs: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The state dict under nanoGPT's names, without masks of attention."""
    state = {
        name: tensor.clone()  # tensors of one file may share memory
        for name, (_, tensor) in cleaned("src", theirs).items()
        if not name.endswith(".attn.bias")  # a causal mask, of a torch without flash attention
    }
    # float8 is compared with nothing else
    tied = [state[name].float() for name in (EMBEDDING, HEAD) if name in state]
    if len(tied) == 2 and not torch.equal(*tied):
        expected = f"{HEAD} equal to {EMBEDDING}, to which nanoGPT ties it"
        raise InputError("src", f"have {expected}", f"{path} with another")
    return state


def _options(
    path: Path, contents: Mapping[str, Any], state: dict[str, Tensor]
) -> dict[str, Any] | None:
    """The options of the conversion; None if there was none."""
    if not any(".res_attn." in name for name in state):
        return None
    metadata, args = getattr(contents["model"], "_metadata", None), contents.get("delta_args")
    options = options_in(metadata)
    if options is None and isinstance(args, Mapping):
        options = {n: value for n, value in named_as_today(args).items() if n != "disable"}
    if options is None:
        options = _by_hand(path, metadata)
    # Set `start` by the count of steps; remove both if every addition has become a rewrite.
    steps, count = options.get("anneal_steps"), state.get(COUNT)
    options |= {"start": None, "anneal_steps": None}
    if count is not None and isinstance(steps, int) and int(count) >= steps:
        del state[COUNT]
    elif count is not None:
        options |= {"start": "additive", "anneal_steps": steps}
    return options


def _by_hand(path: Path, metadata: Any) -> dict[str, Any]:
    """The options that every DeltaResidual put into the metadata."""
    noted = [
        entry["options"]
        for name, entry in (metadata or {}).items()
        if name.endswith((".res_attn", ".res_mlp")) and "options" in entry
    ]
    if not noted or any(options != noted[0] for options in noted):
        got = f"{path} with {'several' if noted else 'unknown'} options of its rewrites"
        raise InputError("src", "have delta_args beside model_args", got)
    return named_as_today(noted[0])


# --- tokens and report ----------------------------------------------------------------------------


def _tokenizer(
    path: Path, contents: Mapping[str, Any], vocabulary: int, given: Path | None
) -> tuple[Tokenizer | None, str]:
    """The tokenizer, and where it is from.

    meta.pkl is in `given`, else beside the checkpoint, else in nanoGPT's data/<dataset>.
    """
    places = [path.parent if given is None else given]
    config = contents.get("config")
    dataset = config.get("dataset") if isinstance(config, Mapping) else None
    if given is None and isinstance(dataset, str):
        roots = (path.resolve().parent.parent, Path())  # out/ and data/ are beside each other
        places += [root / "data" / dataset for root in roots]
    for table in (place / META for place in places):
        if table.is_file():
            characters = read_meta(table)
            if characters.vocab_size != vocabulary:
                expected = f"{vocabulary} characters, the model's vocabulary"
                got = f"{characters.vocab_size}: `--tokenizer` names the directory of another"
                raise InputError(table, f"have {expected}", got)
            return characters, f"characters of {table}"
    if GPT2Tokenizer.vocab_size <= vocabulary <= GPT2Tokenizer.padded_size:
        return GPT2Tokenizer(), "GPT-2's, by the size of the vocabulary"
    if given is not None:
        raise InputError("tokenizer", f"be a directory with {META}", f"{given} without")
    return None, f"unknown, because no {META} was found: `--tokenizer` names its directory"


def _report(config: NanoGPTConfig, state: Mapping[str, Tensor]) -> list[str]:
    sizes = f"{config.n_layer} blocks, {config.n_head} heads of {config.n_embd // config.n_head}"
    report = [
        f"nanoGPT, {config.residual}: {sizes}, hidden size {config.n_embd}, vocabulary"
        f" {config.vocab_size}"
    ]
    delta = config.delta or {}
    if delta.get("start") is not None:
        share = f"{int(state[COUNT])} of {delta['anneal_steps']}"
        report.append(f"on its way from additions to rewrites, after {share} steps")
    return report
