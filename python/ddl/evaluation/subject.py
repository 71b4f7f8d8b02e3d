"""Check and identify the files of the model that `ddl eval` scores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddl.errors import InputError
from ddl.files import require_kind
from ddl.load import FOR_TRANSFORMERS

SUFFIXES = (".safetensors", ".bin")  # of weight files, in order of preference


def check(path: Path) -> None:
    """Raise InputError unless `path` holds a model with weights that `ddl eval` can score."""
    require_kind(path, *FOR_TRANSFORMERS, argument="model")
    _weights(path)


def identity(path: Path, model: Any) -> dict[str, Any]:
    """The fields of the record that identify the model."""
    return {
        "path": str(path),
        "weights_sha256": _hash(path),
        "residual": getattr(model.config, "residual", None),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _weights(path: Path) -> list[Path]:
    files: Iterator[list[Path]] = (sorted(path.glob(f"*{suffix}")) for suffix in SUFFIXES)
    found = next((names for names in files if names), None)
    if found is None:
        raise InputError(f"`model` must be a directory with *.safetensors or *.bin, got {path}")
    return found


def _hash(path: Path) -> str:
    """SHA-256 over the concatenated weight files."""
    digest = hashlib.sha256()
    for name in _weights(path):
        with name.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
