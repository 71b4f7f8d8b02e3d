"""Check and identify the files of the model that `ddl eval` scores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddl.errors import InputError
from ddl.lab.load import FOR_TRANSFORMERS
from ddl.paths import is_run, require_kind

SUFFIXES = (".safetensors", ".bin")  # of weight files, in order of preference


def check(path: Path, checkpoint: str = "last") -> None:
    """Raise InputError unless `path` holds a model with weights that `ddl eval` can score."""
    require_kind(path, *FOR_TRANSFORMERS, argument="model")
    _weights(path, checkpoint)


def identity(path: Path, checkpoint: str, model: Any) -> dict[str, Any]:
    """The fields of the record that identify the model."""
    return {
        "path": str(path),
        "checkpoint": checkpoint,
        "weights_sha256": _hash(_weights(path, checkpoint)),
        "residual": getattr(model.config, "residual", None),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _weights(path: Path, checkpoint: str) -> list[Path]:
    if is_run(path):
        from ddl.lab.train.runs import weights_folder  # needs the `train` extra

        path = weights_folder(path, checkpoint)
    files: Iterator[list[Path]] = (sorted(path.glob(f"*{suffix}")) for suffix in SUFFIXES)
    found = next((names for names in files if names), None)
    if found is None:
        raise InputError("model", "be a directory with *.safetensors or *.bin", path)
    return found


def _hash(files: list[Path]) -> str:
    """SHA-256 over the concatenated weight files."""
    digest = hashlib.sha256()
    for name in files:
        with name.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
