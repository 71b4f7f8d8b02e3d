"""What `ddl eval` scores: the model and tokenizer of a run, or of a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddl.errors import InputError, first_line
from ddl.train import pick_device
from ddl.train.runs import CONFIG, load_config, load_run

SUFFIXES = (".safetensors", ".bin")  # of weights, in the order of preference
# Nothing is fetched, and no code in the directory is run or asked about: ddl.hf is the code.
HERE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def check(path: Path) -> None:
    """Raise InputError unless `path` holds a config.json and weights."""
    _config(path)
    _weights(path)


def load(path: Path, device: str) -> tuple[Any, Any]:
    """A transformers model in evaluation mode, and its tokenizer.

    A run becomes a `DDLForCausalLM` in memory, with the tokenizer that an export would have. A
    Hugging Face model keeps the dtype that it was saved in. device: "auto", "cpu" or "cuda".
    Raises InputError.
    """
    if not _is_hugging_face(path):
        from ddl.hf import from_gpt, to_fast

        place = pick_device(device, load_config(path).model.residual)
        model, tokenizer = load_run(path, place)
        return from_gpt(model), to_fast(tokenizer, model.config)
    return _load_hugging_face(path, pick_device(device, _config(path).get("residual", "additive")))


def _load_hugging_face(path: Path, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ddl.hf  # registers DDLForCausalLM

    auto: Any = AutoModelForCausalLM  # whose annotations know no output_loading_info
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **HERE)
        model, found = auto.from_pretrained(path, dtype="auto", output_loading_info=True, **HERE)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise InputError(
            f"`model` must be a model and a tokenizer that transformers loads, got {path}: "
            + first_line(error)
        ) from error
    if found["missing_keys"]:  # transformers would draw them at random
        missing = f"no {min(found['missing_keys'])}"
        raise InputError(f"`model` must have all its weights, got {path} with {missing}")
    if isinstance(model, ddl.hf.DDLForCausalLM) and found["unexpected_keys"]:
        more = f"{min(found['unexpected_keys'])}, which it lacks"
        raise InputError(f"`model` must have the weights of its config, got {path} with {more}")
    model.to(device).eval()
    return model, tokenizer


def identity(path: Path, model: Any) -> dict[str, Any]:
    """What tells this model from another, for the record of its scores."""
    return {
        "path": str(path),
        "weights_sha256": _hash(path),
        "residual": getattr(model.config, "residual", None),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _is_hugging_face(path: Path) -> bool:
    return "model_type" in _config(path)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(
            f"`model` must be a run directory or a Hugging Face model's, with {CONFIG},"
            f" got {path}: {reason}"
        ) from error
    return config if isinstance(config, dict) else {}


def _weights(path: Path) -> list[Path]:
    files: Iterator[list[Path]] = (sorted(path.glob(f"*{suffix}")) for suffix in SUFFIXES)
    found = next((names for names in files if names), None)
    if found is None:
        raise InputError(f"`model` must be a directory with *.safetensors or *.bin, got {path}")
    return found


def _hash(path: Path) -> str:
    """SHA-256 over the weight files, one after the other."""
    digest = hashlib.sha256()
    for name in _weights(path):
        with name.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
