"""Paths that users name: the home directory, and the kind of model that lies at one."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path

from ddl.errors import InputError, first_line, reason_of

CONFIG = "config.json"
RUN_METRICS = "metrics.jsonl"  # every run of `ddl train` has one
# `model_type` in ddl.hf's config.json; a run's config.json has none.
MODEL_TYPE, NANOGPT_MODEL_TYPE = "ddl", "ddl-nanogpt"
DECODER_MODEL_TYPE = "ddl-decoder"  # that of a converted decoder of transformers
# `model_type` in the papers' code, by the layout of its parameters.
PAPER_MODEL_TYPES = {"c_proj": "nanogpt-pro", "o_proj": "nanogptpro"}
WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
WEIGHTS = (*WEIGHT_SUFFIXES, ".index.json")  # of files with weights, or with the names of these


def at_home(path: str | Path, *, argument: str) -> Path:
    """The path, with `~` or `~user` at its beginning replaced by that home directory.

    Raises InputError, which names the argument, if there is no such directory, or no path.
    """
    try:
        if path == "":
            raise InputError(argument, "be a path", "''")
        return Path(path).expanduser()
    except RuntimeError as error:
        expected = "begin with the ~ of a user whose home directory is known"
        raise InputError(argument, expected, f"{path}: write the whole path") from error


class PathKind(Enum):
    """Kinds of paths that hold a model; the values name them in error messages."""

    RUN = "a run directory of `ddl train`"
    DDL = "a Hugging Face directory with a model of ddl"
    DECODER = "a Hugging Face directory with a converted decoder"
    HUGGING_FACE = "a Hugging Face directory with another model"
    CHECKPOINT = "a checkpoint of nanoGPT or of the paper's code"


def path_kind(path: Path) -> PathKind | None:
    """The kind of model at `path`, judged by file names and config.json; None if there is none."""
    kind = _recognise(path)
    return kind if isinstance(kind, PathKind) else None


def is_run(path: Path) -> bool:
    return path_kind(path) is PathKind.RUN


def require_kind(
    path: Path, *expected: PathKind, argument: str, checkpoint: str = PathKind.CHECKPOINT.value
) -> PathKind:
    """Return the kind of model at `path`; raise InputError if it is none of `expected`.

    checkpoint: what the message calls a checkpoint that the caller can use.
    """
    kind = _recognise(path)
    if isinstance(kind, PathKind) and kind in expected:
        return kind
    *others, last = [checkpoint if kind is PathKind.CHECKPOINT else kind.value for kind in expected]
    must = f"{', '.join(others)} or {last}" if others else last
    got = f", {kind.value}" if isinstance(kind, PathKind) else f": {kind}"
    hint = ", for `ddl import`" if kind is PathKind.CHECKPOINT else ""
    raise InputError(argument, f"be {must}", f"{path}{got}{hint}")


def _recognise(path: Path) -> PathKind | str:
    """The kind of model at `path`, or a sentence part that says why there is none."""
    try:
        if path.is_file():
            around = _recognise(path.parent)
            if around in (PathKind.RUN, PathKind.DDL):
                return f"a file in {PathKind(around).value}"
            if path.name.lower().endswith(WEIGHTS):
                return PathKind.CHECKPOINT
            return f"a file whose name ends in none of {', '.join(WEIGHTS)}"
        names = os.listdir(path)
        text = (path / CONFIG).read_text(encoding="utf-8") if CONFIG in names else "{}"
        config = json.loads(text)
    except OSError as error:
        return reason_of(error)
    except (ValueError, RecursionError) as error:
        return f"its {CONFIG} cannot be read: {first_line(error)}"
    fields = config if isinstance(config, dict) else {}
    model, model_type = fields.get("model"), fields.get("model_type")
    if model_type in (MODEL_TYPE, NANOGPT_MODEL_TYPE):
        return PathKind.DDL
    if model_type == DECODER_MODEL_TYPE:
        return PathKind.DECODER
    if model_type is not None and model_type not in PAPER_MODEL_TYPES.values():
        return PathKind.HUGGING_FACE
    if isinstance(model, dict) and "residual" in model:
        return PathKind.RUN
    if CONFIG not in names and RUN_METRICS in names:
        return f"a run that has lost its {CONFIG}"
    if any(name.lower().endswith(WEIGHTS) for name in names):
        return PathKind.CHECKPOINT
    run = next((name for name in sorted(names) if (path / name / RUN_METRICS).is_file()), None)
    if run is not None:
        return f"a directory with runs in it: name one of them, such as {path / run}"
    return f"neither weights nor the {CONFIG} of a model in it"
