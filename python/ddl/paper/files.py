"""Checkpoint files of the paper's code, and `ddl import`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.config import GPTConfig, InputError, TrainConfig
from ddl.models import GPT
from ddl.tokenizer import ByteTokenizer, GPT2Tokenizer, Tokenizer

from .exporting import revert
from .importing import Translation, Variant, translate
from .names import Layout, listed

CONFIG, WEIGHTS = "config.json", "pytorch_model.bin"
# What a directory may hold, in the order of preference; else its only file with such a suffix.
KNOWN = ("model.safetensors", WEIGHTS, "model.safetensors.index.json", f"{WEIGHTS}.index.json")
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
INSIDE = ("model", "state_dict", "model_state_dict", "module")  # keys around a state dict
PADDED_VOCABULARY = 50304


class Checkpoint(NamedTuple):
    """What `load` read: a state dict, and the config that came with it, if any."""

    state_dict: dict[str, Tensor]
    config: dict[str, Any] | None


def import_checkpoint(
    src: str | Path,
    out: str | Path,
    variant: Variant = "auto",
    reverse: bool = False,
    layout: Layout = "c_proj",
) -> list[str]:
    """Write the paper's checkpoint `src` as our run directory `out`, or the other way round.

    variant: what the checkpoint must be; "auto" takes what its names tell. reverse: `src` is a run
    directory, and `out` gets the paper's config.json and pytorch_model.bin, in the names of
    `layout`. Returns sentences: what it was and what was assumed. Raises InputError; then nothing
    was written.
    """
    src, out = Path(src), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = "a directory with files" if out.is_dir() else "a file"
        raise InputError(f"`out` must be a new or empty directory, got {out}, {got}")
    return _export(src, out, layout) if reverse else _import(src, out, variant)


def load(source: str | Path) -> Checkpoint:
    """Read a checkpoint: a .pt, .bin or .safetensors file, or a directory with one or with shards.

    The config is the config.json beside the weights, else the `model_args` saved with them. Pickles
    are loaded with weights_only=True: nothing in them is executed. Raises InputError.
    """
    source = Path(source)
    path = _weights(source) if source.is_dir() else source
    contents: dict[str, Any] = {}
    for file in _shards(path) if path.name.endswith(".index.json") else [path]:
        contents |= _read(file)
    config = _config(path.parent / CONFIG)
    for _ in range(len(INSIDE)):
        inside = next(
            (contents[key] for key in INSIDE if isinstance(contents.get(key), dict)), None
        )
        if inside is None:
            break
        if config is None and isinstance(contents.get("model_args"), dict):
            config = contents["model_args"]
        contents = inside
    if not any(isinstance(value, Tensor) for value in contents.values()):
        keys = listed([str(key) for key in contents]) or "nothing"
        raise InputError(f"`src` must hold a state dict, got {path} with {keys}")
    return Checkpoint(contents, config)


# --- one way and the other ------------------------------------------------------------------------


def _import(src: Path, out: Path, variant: Variant) -> list[str]:
    from ddl.runs import RunDirectory  # needs the `train` extra

    checkpoint = load(src)
    translation = translate(*checkpoint, variant=variant)
    config = translation.config
    with torch.device("meta"):
        model = GPT(config)
    # Copies: what came from one file may share its memory, which safetensors refuses.
    state = {name: tensor.clone() for name, tensor in translation.state.items()}
    model.load_state_dict(state, assign=True)
    tokenizer = _tokenizer(config)
    with _all_or_nothing(out):
        training = TrainConfig(model=config, data=None, out=out)
        RunDirectory.create(training, tokenizer).save(model)
    return _report(translation, tokenizer)


def _export(src: Path, out: Path, layout: Layout) -> list[str]:
    import safetensors.torch

    from ddl import runs

    config = runs.load_config(src).model
    try:
        state = safetensors.torch.load_file(src / runs.WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            f"`{src / runs.WEIGHTS}` must hold weights, got: {_line(error)}"
        ) from error
    theirs, state = revert(config, state, layout=layout)
    with _all_or_nothing(out):
        out.mkdir(parents=True, exist_ok=True)
        torch.save(state, out / WEIGHTS)
        (out / CONFIG).write_text(json.dumps(theirs, indent=2), encoding="utf-8")
    return [_summary(config)]


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Leaves no half of a directory behind; it was new or empty."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise InputError(f"`out` must be writable, got {out}: {reason}") from error
        raise


def _tokenizer(config: GPTConfig) -> Tokenizer:
    gpt2 = GPT2Tokenizer()
    padded = gpt2.vocab_size <= config.vocab_size <= PADDED_VOCABULARY
    return gpt2 if padded else ByteTokenizer()


def _summary(config: GPTConfig) -> str:
    return (
        f"{config.residual}: {config.num_layers} blocks, {config.num_heads} heads of "
        f"{config.head_dim}, hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
    )


def _report(translation: Translation, tokenizer: Tokenizer) -> list[str]:
    assumed = {**translation.assumed, "tokens": tokenizer.kind}
    told = ", ".join(f"{name} = {value}" for name, value in assumed.items())
    report = [
        _summary(translation.config),
        f"assumed, because neither the weights nor config.json say: {told}",
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
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    if len(files) != 1:
        got = f"these: {listed([file.name for file in files])}" if files else "none"
        raise InputError(
            f"`src` must name a file with weights, or a directory with one, got {directory} with "
            f"{got}"
        )
    return files[0]


def _shards(index: Path) -> list[Path]:
    """The files that an index lists, all of them beside it."""
    listing = _json(index).get("weight_map")
    found = set(listing.values()) if isinstance(listing, dict) else set()
    if not found or not all(isinstance(name, str) and Path(name).name == name for name in found):
        raise InputError(f"`{index}` must map parameters to files beside it, got another content")
    return [index.parent / name for name in sorted(found)]


def _config(path: Path) -> dict[str, Any] | None:
    """The published config.json, None where there is none."""
    if not path.exists():
        return None
    config = _json(path)
    if isinstance(config.get("model"), dict) and "residual" in config["model"]:
        raise InputError(
            f"`src` must be a checkpoint of the paper's code, got {path.parent}, which is a run "
            "directory of ddl: the other way round is --reverse"
        )
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"`{path}` must be JSON, got: {_line(error)}") from error
    if not isinstance(contents, dict):
        raise InputError(f"`{path}` must be a JSON object, got {type(contents).__name__}")
    return contents


def _read(path: Path) -> dict[str, Any]:
    """What a file of weights holds. A pickle is never executed."""
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            return safetensors.torch.load_file(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        reason = error.strerror or _line(error)
        raise InputError(f"`src` must be a file with weights, got {path}: {reason}") from error
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it refers to {refused[1]}" if refused else _line(error)
        raise InputError(
            f"`{path}` must hold tensors in plain dicts, got something else: {reason}"
        ) from error
    if not isinstance(contents, dict):
        raise InputError(f"`{path}` must hold a state dict, got {type(contents).__name__}")
    return contents


def _line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
