"""Read checkpoints of nanoGPT, additive or on a delta stream, for `ddl import`.

A ckpt.pt is recognised by the names of its parameters. The options of a conversion are, in this
order, in the metadata of its state dict, where the models of `ddl.nanogpt` put them, in
`delta_args` beside `model_args`, where docs/nanogpt.md has train.py put them, and in its names and
shapes; the rest is assumed, and a line says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.errors import InputError, listed
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.finite import no_floats
from ddl.models.tokenizers import GPT2Tokenizer, Tokenizer, read_meta
from ddl.nanogpt import named_as_today, options_in

from .names import WRAPPERS
from .nanogpt_options import BLOCKS, assumptions, shown

__all__ = ["is_nanogpt", "read_model"]

MARK = ("transformer.wpe.weight", f"{BLOCKS}0.attn.c_attn.weight")  # the papers' code has neither
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
COUNT = f"{BLOCKS}0.anneal.step"
META = "meta.pkl"
LARGEST_GPT2 = 50304  # 50257 tokens, padded
ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


class Read(NamedTuple):
    """A checkpoint's configuration and state dict, and the options that had to be assumed."""

    config: NanoGPTConfig
    state: dict[str, Tensor]
    assumed: dict[str, Any]


def is_nanogpt(contents: Mapping[str, Any]) -> bool:
    """Return whether a file's contents are a checkpoint of nanoGPT, or its state dict alone."""
    inside = contents.get("model")
    state = inside if isinstance(inside, Mapping) else contents
    names = {_clean(name) for name in state if isinstance(name, str)}
    return all(name in names for name in MARK)


def read_model(
    path: Path, contents: Mapping[str, Any], variant: str, tokenizer: Path | None
) -> tuple[NanoGPT, Tokenizer | None, list[str]]:
    """Make the model of a checkpoint, in its own dtype, its tokenizer, and a report in lines.

    path: the file, beside which meta.pkl may be. variant: the residual that it must have, or
    "auto". tokenizer: a directory with meta.pkl or GPT-2's files; None to look for the dataset's
    meta.pkl. Raises InputError if the checkpoint is no nanoGPT's or not complete.
    """
    read = _read(path, contents)
    residual = read.config.residual
    if variant not in ("auto", residual):
        raise InputError("variant", f"be auto or {residual}, which {path} has", repr(variant))
    with torch.device("meta"):
        model = _make(path, read.config)
    _check_names(path, read.state, model)
    model.load_state_dict(read.state, assign=True)
    model.lm_head.weight = model.wte.weight
    if read.config.delta is not None:  # with the options that were left at their defaults
        model.config = _with_delta(read.config, model.delta_args)
    found, tokens = _tokenizer(path, contents, read.config.vocab_size, tokenizer)
    return model, found, _report(read, tokens)


# --- configuration and state dict -----------------------------------------------------------------


def _read(path: Path, contents: Mapping[str, Any]) -> Read:
    args = contents.get("model_args")
    if not isinstance(args, Mapping):
        got = f"{path} without: its number of heads is nowhere else"
        raise InputError("src", "have nanoGPT's model_args", got)
    theirs = contents["model"]
    state = _state(path, theirs)
    sizes = _sizes(path, args, state)
    if not any(".res_attn." in name for name in state):
        return Read(sizes, state, {})
    options, assumed = _options(path, theirs, contents.get("delta_args"), state, sizes)
    return Read(_with_delta(sizes, options), state, assumed)


def _state(path: Path, theirs: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The state dict under nanoGPT's names, without masks of attention."""
    state: dict[str, Tensor] = {}
    for original, tensor in theirs.items():
        name = _clean(str(original))
        if name in state:
            raise InputError("src", "have each parameter once", f"{path} with {name} twice")
        wrong = no_floats(tensor) or ("no numbers" if tensor.is_meta else None)
        if wrong is not None and (name, wrong) != (COUNT, torch.int64):
            got = f"{path} with {wrong} for {name}"
            raise InputError("src", "hold floating-point tensors", got)
        if not re.search(
            r"\.attn\.bias$", name
        ):  # a causal mask, of a torch without flash attention
            state[name] = tensor.clone()  # tensors of one file may share memory
    if EMBEDDING not in state:
        raise InputError(
            "src", "have the parameters of nanoGPT's GPT", f"{path} with no {EMBEDDING}"
        )
    # float8 is compared with nothing else
    if HEAD in state and not torch.equal(state[EMBEDDING].float(), state[HEAD].float()):
        expected = f"{HEAD} equal to {EMBEDDING}, to which nanoGPT ties it"
        raise InputError("src", f"have {expected}", f"{path} with another")
    return state


def _sizes(path: Path, args: Mapping[Any, Any], state: Mapping[str, Tensor]) -> NanoGPTConfig:
    """The configuration in model_args, compared with the shapes before anything is built."""
    missing = [name for name in ("n_layer", "n_head", "n_embd", "block_size") if name not in args]
    unknown = [str(name) for name in args if name not in ARGS]
    if missing or unknown:
        got = f"{path} without {listed(missing)}" if missing else f"{path} with {listed(unknown)}"
        raise InputError("src", f"have nanoGPT's model_args, {', '.join(ARGS)}", got)
    blocks = {name.split(".")[2] for name in state if name.startswith(BLOCKS)}
    tokens, positions = state[EMBEDDING], state[MARK[0]]
    if tokens.ndim != 2 or positions.ndim != 2:
        raise InputError("src", "have embeddings of two dimensions", f"{path} with others")
    found: dict[str, Any] = {
        "n_layer": len(blocks),
        "n_embd": tokens.shape[1],
        "block_size": positions.shape[0],
        "vocab_size": tokens.shape[0],
        "bias": f"{BLOCKS}0.ln_1.bias" in state,
    }
    for name, value in found.items():
        if args.get(name, value) != value:
            expected = f"model_args with {name} = {value!r}, as its parameters"
            raise InputError("src", f"have {expected}", f"{path} with {args[name]!r}")
    try:
        return NanoGPTConfig(n_head=args["n_head"], dropout=args.get("dropout", 0.0), **found)
    except (ValueError, TypeError) as error:
        raise InputError("src", "have nanoGPT's model_args", f"{path}: {error}") from error


def _options(
    path: Path, theirs: Any, delta_args: Any, state: dict[str, Tensor], sizes: NanoGPTConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the conversion, and those that were assumed."""
    metadata = getattr(theirs, "_metadata", None)
    options = options_in(metadata)
    assumed: dict[str, Any] = {}
    if options is None and isinstance(delta_args, Mapping):
        by_hand = named_as_today(delta_args)
        options = {name: value for name, value in by_hand.items() if name != "disable"}
    visible = shown(state)
    if options is None:
        options = visible | _by_hand(path, metadata)
        assumed = assumptions(options, sizes.n_embd)
    for name, value in visible.items():  # before modules of their sizes are built
        given = options.get(name)
        if name != "sublayers_per_compressor" and given is not None and given != value:
            expected = f"{name} = {value!r} in its delta_args, as its parameters"
            raise InputError("src", f"have {expected}", f"{path} with {given!r}")
    return _annealed(path, {**options, **assumed}, state), assumed


def _annealed(path: Path, options: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """Set `start` by the count of steps; remove both if every addition has become a rewrite."""
    count, steps = state.get(COUNT), options.get("anneal_steps")
    options = {**options, "start": None, "anneal_steps": None}
    if count is None:
        return options
    if count.numel() != 1 or count.is_floating_point():
        raise InputError("src", f"have one integer as {COUNT}", f"{path} with others")
    if not isinstance(steps, int):
        got = f"{path} with {int(count)} steps of an unknown number"
        raise InputError("src", "have delta_args with anneal_steps beside model_args", got)
    if int(count) >= steps:
        del state[COUNT]
        return options
    return {**options, "start": "additive", "anneal_steps": steps}


def _by_hand(path: Path, metadata: Any) -> dict[str, Any]:
    """The options that every DeltaResidual put into the metadata; {} if it has none."""
    noted: list[dict[str, Any]] = []
    for name, entry in metadata.items() if isinstance(metadata, Mapping) else ():
        options = entry.get("options") if isinstance(entry, Mapping) else None
        if isinstance(options, dict) and str(name).endswith((".res_attn", ".res_mlp")):
            noted.append(options)
    if any(options != noted[0] for options in noted):
        got = f"{path} with several"
        raise InputError("src", "have the same options for all its rewrites", got)
    return named_as_today(noted[0]) if noted else {}


def _with_delta(sizes: NanoGPTConfig, options: Any) -> NanoGPTConfig:
    return replace(sizes, delta=options)


def _make(path: Path, config: NanoGPTConfig) -> NanoGPT:
    try:
        return NanoGPT(config)
    except (ValueError, TypeError) as error:
        raise InputError(
            "src", "have options that ddl.nanogpt.convert takes", f"{path}: {error}"
        ) from error


def _check_names(path: Path, state: Mapping[str, Tensor], model: NanoGPT) -> None:
    """Raise InputError unless the state dict has the model's names and shapes."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    got = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [f"no {name}" for name in expected if name not in got]
    wrong += [f"{name}, which is not one" for name in got if name not in expected]
    wrong += [
        f"shape {got[name]} instead of {shape} for {name}"
        for name, shape in expected.items()
        if got.get(name, shape) != shape
    ]
    if wrong:
        hint = "" if model.config.delta is None else "; put delta_args beside model_args"
        raise InputError(
            "src", "have the parameters of nanoGPT's GPT", f"{path} with {wrong[0]}{hint}"
        )


def _clean(name: str) -> str:
    """A parameter's name without what compilation and parallel wrappers add."""
    for wrapper in (*WRAPPERS, "module."):
        name = name.replace(wrapper, "")
    return name


# --- tokens ---------------------------------------------------------------------------------------


def _tokenizer(
    path: Path, contents: Mapping[str, Any], vocabulary: int, given: Path | None
) -> tuple[Tokenizer | None, str]:
    """The tokenizer, and where it is from."""
    table = _table(path, contents, given)
    if table is not None:
        characters = read_meta(table)
        if characters.vocab_size != vocabulary:
            expected = f"{vocabulary} characters, the model's vocabulary"
            got = f"{characters.vocab_size}: `--tokenizer` names the directory of another"
            raise InputError(table, f"have {expected}", got)
        return characters, f"characters of {table}"
    if GPT2Tokenizer.vocab_size <= vocabulary <= LARGEST_GPT2:
        return GPT2Tokenizer(), "GPT-2's, by the size of the vocabulary"
    if given is not None:
        raise InputError("tokenizer", f"be a directory with {META}", f"{given} without")
    return None, f"unknown, because no {META} was found: `--tokenizer` names its directory"


def _table(path: Path, contents: Mapping[str, Any], given: Path | None) -> Path | None:
    """The meta.pkl in `given`, else beside the checkpoint, else in nanoGPT's data/<dataset>."""
    if given is not None:
        return given / META if (given / META).is_file() else None
    places = [path.parent]
    config = contents.get("config")
    dataset = config.get("dataset") if isinstance(config, Mapping) else None
    if isinstance(dataset, str) and not {"..", "/"} & set(Path(dataset).parts):
        roots = (path.resolve().parent.parent, Path())  # out/ and data/ are beside each other
        places += [root / "data" / dataset for root in roots]
    return next((place / META for place in places if (place / META).is_file()), None)


def _report(read: Read, tokens: str) -> list[str]:
    config = read.config
    sizes = f"{config.n_layer} blocks, {config.n_head} heads of {config.n_embd // config.n_head}"
    report = [
        f"nanoGPT, {config.residual}: {sizes}, hidden size {config.n_embd}, vocabulary"
        f" {config.vocab_size}"
    ]
    delta = config.delta or {}
    if delta.get("start") is not None:
        share = f"{int(read.state[COUNT])} of {delta['anneal_steps']}"
        report.append(f"on its way from additions to rewrites, after {share} steps")
    if read.assumed:
        values = ", ".join(f"{name} = {value}" for name, value in read.assumed.items())
        report.append(f"assumed, because the checkpoint does not say: {values}")
    return [*report, f"tokens: {tokens}"]
