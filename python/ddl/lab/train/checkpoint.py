"""A checkpoint: the state of a training run after a step, in a directory that is whole or absent.

    step-00000500/
        manifest.json    format, position, configuration, data, versions, checksums
        model/           the weights, as safetensors
        training/        optimizer, random states and partial sums, as safetensors

torch.distributed.checkpoint writes and reads the tensors; importing it takes half a second, so the
functions do that. Nothing here is a pickle.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import safetensors

from ddl.errors import NEWER, InputError, check_fields, first_line, reason_of
from ddl.files import atomic_directory, atomic_file, checksum, writing

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, TRAINING = "model", "training"  # the two directories of tensors

# torch warns of this at every checkpoint that a single process writes.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")

if TYPE_CHECKING:
    from torch import Tensor

    from .processes import Processes

Tensors: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description of itself.

    step: optimizer steps done. validation_loss: nats per token at this step; None if it was not
    evaluated. summed: steps whose losses wait for the next record. records: lines of metrics.jsonl
    so far. config: the run's configuration. data: a checksum of the corpus. versions: of ddl, torch
    and Python, and the commit of ddl if that is known. files: bytes and SHA-256 of each file.
    tokenizer: the checksum of the run's. seconds: of training so far, as in metrics.jsonl.
    parameters: of the model. These three are None if an earlier version wrote the checkpoint.
    """

    step: int
    validation_loss: float | None
    summed: int
    records: int
    config: dict[str, Any]
    data: str
    versions: dict[str, str | None]
    files: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None
    seconds: float | None = None
    parameters: int | None = None
    format: int = FORMAT


def write(
    path: Path,
    manifest: Manifest,
    *,
    model: Tensors,
    training: Tensors,
    processes: Processes | None = None,
) -> None:
    """Write a checkpoint: beside `path` first, flushed to the disk, then renamed.

    processes: those that write together, each its parts of the tensors, on a file system that all
    see; None for this one alone. Raises InputError if it cannot be written; then `path` does not
    exist.
    """
    from .processes import ALONE

    processes = processes or ALONE
    with _shared_directory(path, processes) as folder:
        with writing(path):
            _write_tensors(folder / MODEL, model, processes)
            _write_tensors(folder / TRAINING, training, processes)
        if processes.first:
            names = _files(folder, MODEL) + _files(folder, TRAINING)
            files = {name: _fingerprint(folder / name) for name in names}
            _write_manifest(folder / MANIFEST, dataclasses.replace(manifest, files=files))


def _write_tensors(folder: Path, tensors: Tensors, processes: Processes) -> None:
    """Write tensors, in all processes together. An error of one of them is raised in all."""
    from torch.distributed.checkpoint import api, hf_storage, state_dict_saver

    distributed = not processes.alone
    try:
        state_dict_saver.save(
            tensors,
            storage_writer=hf_storage.HuggingFaceStorageWriter(
                str(folder), save_distributed=distributed
            ),
            process_group=processes.group,
            no_dist=not distributed,
        )
    except api.CheckpointException as error:  # a BaseException, with a traceback as text
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


@contextmanager
def _shared_directory(path: Path, processes: Processes) -> Iterator[Path]:
    """As `atomic_directory`, made by the first process for all; if one fails, nothing is left."""
    with ExitStack() as made:
        folder = processes.from_first(lambda: made.enter_context(atomic_directory(path)))
        with processes.together():
            yield folder


def update(path: Path, manifest: Manifest) -> None:
    """Replace what the manifest of a checkpoint says, except about its files."""
    files = read_manifest(path).files
    with atomic_file(path / MANIFEST) as temporary:
        _write_manifest(temporary, dataclasses.replace(manifest, files=files))


def read_manifest(path: Path) -> Manifest:
    """Read what a checkpoint says about itself; raise InputError if that is damaged or unknown."""
    file = path / MANIFEST
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            got = f"format {values['format']!r}, which this version does not know; {NEWER}"
            raise InputError(file, f"have format {FORMAT}", got)
        check_fields(Manifest, values)
        manifest = Manifest(**values)
        _check_types(manifest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(file, "be the manifest of a checkpoint", reason_of(error)) from error
    return manifest


def read(path: Path, manifest: Manifest, part: str, into: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a part, "model" or "training", into existing ones of the same names.

    Raises InputError, before anything is copied, if a file is missing, has other bytes than when it
    was saved, or holds other tensors.
    """
    from torch.distributed.checkpoint import api, hf_storage, state_dict_loader

    _check_files(path, manifest, part)
    try:
        reader = hf_storage.HuggingFaceStorageReader(str(path / part))
        _check_names(path / part, reader.read_metadata().state_dict_metadata, into)
        state_dict_loader.load(dict(into), storage_reader=reader, no_dist=True)
    except (
        OSError,
        RuntimeError,
        ValueError,
        LookupError,  # of tensors that the writer's description lacks
        safetensors.SafetensorError,
        api.CheckpointException,
    ) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(path / part, "hold the tensors of this run", first_line(error)) from error


def _check_files(path: Path, manifest: Manifest, part: str) -> None:
    saved = {name: of for name, of in manifest.files.items() if name.startswith(f"{part}/")}
    found = {name: _fingerprint_found(path / name) for name in _files(path, part)}
    for name in sorted({f"{part}/"} if not saved else saved.keys() | found.keys()):
        if not saved or saved.get(name) != found.get(name):
            got = (
                "a missing" if name not in found else "a damaged" if name in saved else "a foreign"
            )
            raise InputError(
                path,
                "be as it was saved",
                f"{got} {name}: delete this checkpoint to go on from the one before it",
            )


def _check_names(path: Path, found: Mapping[str, Any], into: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() ^ into.keys()):
        got = "without it" if name in into else "with it"
        raise InputError(path, "hold the tensors of this run", f"one {got}: {name}")
    for name, tensor in into.items():
        saved = (tuple(found[name].size), found[name].properties.dtype)
        if saved != (tuple(tensor.shape), tensor.dtype):
            expected = f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise InputError(path, f"hold {name} as {expected}", f"{saved[0]}, {saved[1]}")


def _check_types(manifest: Manifest) -> None:
    for name in ("step", "summed", "records"):
        number = getattr(manifest, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise TypeError(f"`{name}` is {number!r}")
    for name, kind in (
        ("config", dict),
        ("versions", dict),
        ("files", dict),
        ("data", str),
        ("tokenizer", str | None),
        ("parameters", int | None),
    ):
        if not isinstance(getattr(manifest, name), kind):
            raise TypeError(f"`{name}` is {getattr(manifest, name)!r}")
    for name in ("validation_loss", "seconds"):
        number = getattr(manifest, name)
        if not (number is None or (isinstance(number, float) and math.isfinite(number))):
            raise TypeError(f"`{name}` is {number!r}")


def _write_manifest(temporary: Path, manifest: Manifest) -> None:
    temporary.write_text(json.dumps(dataclasses.asdict(manifest), indent=2), encoding="utf-8")


def _files(folder: Path, part: str) -> list[str]:
    return sorted(f"{part}/{file.name}" for file in (folder / part).glob("*"))


def _fingerprint(file: Path) -> list[Any]:
    """Size in bytes and SHA-256 of a file."""
    return [file.stat().st_size, checksum(file)]


def _fingerprint_found(path: Path) -> list[Any]:
    """The fingerprint of whatever a directory holds; empty if that is no readable file."""
    try:
        return _fingerprint(path)
    except OSError:
        return []


def staged(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies in the CPU's memory, so that training may go on while they are written."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
