"""Read checkpoints, and write those of the paper's code, for `ddl import`."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.errors import InputError, first_line, listed, reason_of
from ddl.files import atomic_directory, require_new_directory, without_advice_on_pickles, written
from ddl.models import GPT, NanoGPT
from ddl.models.config import GPTConfig
from ddl.models.finite import require_finite
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer
from ddl.paper import nanogpt
from ddl.paths import (
    CONFIG,
    WEIGHT_SUFFIXES,
    PathKind,
    at_home,
    path_kind,
    require_kind,
)

from .conversion import Translation, Variant, revert, translate
from .names import Layout

WEIGHTS = "pytorch_model.bin"
# Weight files in order of preference; else the directory's only file with a weight suffix.
KNOWN = (
    *("model.safetensors", WEIGHTS, "model.safetensors.index.json", f"{WEIGHTS}.index.json"),
    "ckpt.pt",  # nanoGPT's
)
INSIDE = ("model", "state_dict", "model_state_dict", "module")  # keys that may hold a state dict


class Checkpoint(NamedTuple):
    """A checkpoint's state dict, and its config; None if there is none."""

    state_dict: dict[str, Tensor]
    config: dict[str, Any] | None


def import_checkpoint(
    src: str | Path,
    out: str | Path,
    variant: Variant = "auto",
    reverse: bool = False,
    layout: Layout = "c_proj",
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Convert a checkpoint `src` to a directory `out` for the Auto classes, or back.

    src is a checkpoint of the paper's code or of nanoGPT; the names of the parameters say which.
    The tokenizer is GPT-2's for a vocabulary of 50257 to 50304. For nanoGPT's characters it is in
    the meta.pkl that `ddl.paper.nanogpt` finds. For the paper's code any other vocabulary of at
    least 256 is taken for bytes; a smaller one means characters, whose table is unknown. Without a
    tokenizer none is written.

    Args:
        src: a .pt, .bin or .safetensors file, or a directory with one.
        out: directory to write, new or empty.
        variant: residual that the checkpoint must have; "auto" recognises it by parameter names.
        reverse: convert back: `src` is a directory for the Auto classes, and `out` gets the paper's
            config.json and pytorch_model.bin. For a run there is `ddl.lab.exchange`.
        layout: parameter names for `reverse`, "c_proj" or "o_proj", as in `revert`.
        tokenizer: a directory with GPT-2's files, if tiktoken cannot fetch them, or with nanoGPT's
            meta.pkl.

    Returns lines for the user: the model, the assumptions, the written files. Raises InputError if
    `src` or `out` cannot be used; then nothing was written.
    """
    src, out = at_home(src, argument="src"), at_home(out, argument="out")
    require_new_directory(out)
    if reverse:
        return export_checkpoint(*_ours(src), out, layout)
    from ddl.hf.files import choose_tokenizer, save_with_tokenizer  # needs the `hf` extra

    files = None if tokenizer is None else at_home(tokenizer, argument="tokenizer")
    model, ours, report = read_model(src, variant, files)
    if not isinstance(ours, CharTokenizer):  # its table is in `files`, if there are any
        ours = choose_tokenizer(ours, files, model.config)
    return report + save_with_tokenizer(model, ours, out)


def load(source: str | Path) -> Checkpoint:
    """Read a checkpoint: a .pt, .bin or .safetensors file, or a directory with one or with shards.

    The config is the config.json beside the weights, else the `model_args` saved with them. Pickles
    are loaded with weights_only=True, so no code in them runs. Raises InputError if the source
    cannot be read or is no such checkpoint.
    """
    return unpack(*read_contents(at_home(source, argument="src")))


def read_contents(source: Path) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint of anybody's code; return its file, or its index, and what is in it."""
    _refuse_ours(source if source.is_dir() else source.parent)
    path = _weights(source) if source.is_dir() else source
    contents: dict[str, Any] = {}
    for file in _shards(path) if path.name.endswith(".index.json") else [path]:
        contents |= _read(file)
    return path, contents


def unpack(path: Path, contents: dict[str, Any]) -> Checkpoint:
    """Find the state dict in the contents of a file, and the config in or beside it."""
    beside = path.parent / CONFIG
    config = _json(beside) if beside.exists() else None
    while nested := [contents[key] for key in INSIDE if isinstance(contents.get(key), dict)]:
        if config is None and isinstance(contents.get("model_args"), dict):
            config = contents["model_args"]
        contents = nested[0]
    if not any(isinstance(value, Tensor) for value in contents.values()):
        keys = listed([str(key) for key in contents]) or "nothing"
        raise InputError("src", "hold a state dict", f"{path} with {keys}")
    return Checkpoint(contents, config)


# --- import and export ----------------------------------------------------------------------------


def read_model(
    source: str | Path, variant: Variant = "auto", tokenizer: Path | None = None
) -> tuple[GPT | NanoGPT, Tokenizer | None, list[str]]:
    """Read the model of a checkpoint, in its own dtypes, its tokenizer, and a report in lines.

    tokenizer: a directory with meta.pkl, if the model is nanoGPT's. Raises InputError, as `load`
    and `translate` do, also if the weights are not finite.
    """
    path, contents = read_contents(Path(source))
    model: GPT | NanoGPT
    if nanogpt.is_nanogpt(contents):
        model, ours, report = nanogpt.read_model(path, contents, variant, tokenizer)
    else:
        translation = translate(*unpack(path, contents), variant=variant)
        with torch.device("meta"):
            model = GPT(translation.config)
        model.to_empty(device="cpu")
        # Clone: tensors from one file may share memory, which safetensors refuses.
        state = {name: tensor.clone() for name, tensor in translation.state.items()}
        model.load_state_dict(state, assign=True)
        ours = _tokenizer(translation.config)
        report = _report(translation, ours)
    require_finite(model.state_dict(), path)
    return model, ours, report


def export_checkpoint(
    config: GPTConfig, state: dict[str, Tensor], out: Path, layout: Layout
) -> list[str]:
    """Write a model's parameters as the paper's code has them; return lines for the user."""
    theirs, state = revert(config, state, layout=layout)
    with atomic_directory(out) as folder:
        torch.save(state, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(theirs, indent=2), encoding="utf-8")
    return [_summary(config), written(out)]


def _ours(src: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Read config and parameters, in their own dtypes, of a directory for the Auto classes."""
    require_kind(src, PathKind.DDL, argument="src")
    from ddl.hf import load

    model, _ = load(src, dtype="auto")
    if isinstance(model, GPT):
        return model.config, model.state_dict()
    expected = "be a model with the papers' blocks for `reverse`"
    raise InputError("src", expected, f"{src} with nanoGPT's", ("reverse",))


def _tokenizer(config: GPTConfig) -> Tokenizer | None:
    if GPT2Tokenizer.vocab_size <= config.vocab_size <= GPT2Tokenizer.padded_size:
        return GPT2Tokenizer()
    return ByteTokenizer() if config.vocab_size >= ByteTokenizer.vocab_size else None


def _summary(config: GPTConfig) -> str:
    return (
        f"{config.residual}: {config.num_layers} blocks, {config.num_heads} heads of "
        f"{config.head_dim}, hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
    )


def _report(translation: Translation, tokenizer: Tokenizer | None) -> list[str]:
    kind = "characters of a table that is not known" if tokenizer is None else tokenizer.kind
    assumed = {**translation.assumed, "tokens": kind}
    values = ", ".join(f"{name} = {value}" for name, value in assumed.items())
    report = [
        _summary(translation.config),
        f"assumed, because neither the weights nor config.json say: {values}",
    ]
    if translation.unused:
        report.append(f"left out, because the model never uses them: {listed(translation.unused)}")
    return report


# --- files ----------------------------------------------------------------------------------------


def _weights(directory: Path) -> Path:
    """The file with the weights in a directory."""
    for name in KNOWN:
        if (directory / name).is_file():
            return directory / name
    files = sorted(path for path in directory.iterdir() if path.suffix.lower() in WEIGHT_SUFFIXES)
    if len(files) != 1:
        got = f"these: {listed([file.name for file in files])}" if files else "none"
        expected = "name a file with weights, or a directory with one"
        raise InputError("src", expected, f"{directory} with {got}")
    return files[0]


def _shards(index: Path) -> list[Path]:
    """The weight files that an index lists; all must be beside it."""
    listing = _json(index).get("weight_map")
    found = list(listing.values()) if isinstance(listing, dict) else []
    if not found or not all(isinstance(name, str) and Path(name).name == name for name in found):
        raise InputError(index, "map parameters to files beside it", "another content")
    return [index.parent / name for name in sorted(set(found))]


def _refuse_ours(directory: Path) -> None:
    kind = path_kind(directory)
    if kind in (PathKind.RUN, PathKind.DDL):
        ours = f"`src` must be {PathKind.CHECKPOINT.value}, got {directory}, {kind.value}"
        hint = "other commands take it as it is, and the other way round is --reverse"
        raise InputError.sentence(f"{ours}: {hint}", ("src",))


def _json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(path, "be JSON", first_line(error)) from error
    if not isinstance(contents, dict):
        raise InputError(path, "be a JSON object", type(contents).__name__)
    return contents


def _read(path: Path) -> dict[str, Any]:
    """Read a weight file; code in a pickle never runs."""
    try:
        if path.suffix.lower() == ".safetensors":
            import safetensors.torch

            return safetensors.torch.load_file(path)
        with without_advice_on_pickles():
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        # EINVAL: torch seeks to before the start of a file whose end was cut off.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            reason = reason_of(error)
            raise InputError("src", "be a file with weights", f"{path}: {reason}") from error
        reason = f"something else: {first_line(error)}"
        raise InputError(path, "hold tensors in plain dicts", reason) from error
    if not isinstance(contents, dict):
        raise InputError(path, "hold a state dict", type(contents).__name__)
    return contents
