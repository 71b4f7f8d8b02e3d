"""Where a command expects a file there may be a pipe, a device, a socket or a directory: it says so
in a sentence, and neither waits for a writer nor reads without end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab.analysis.runs import EVALUATIONS
from ddl.lab.cli import main
from ddl.lab.data.prepare import prepare
from ddl.lab.exchange import export_run
from ddl.lab.explore.watching import Watch
from ddl.lab.train import train
from tests.support.forks import forked
from tests.support.nanogpt_folder import write_meta
from tests.support.prepare_cases import configuration, write_tokenizer
from tests.support.train_cases import quiet, short

SECONDS, MEMORY = 30, 4 * 2**30
TEXT = "".join(f"Rewrite {i} erases what it overwrites.\n" for i in range(200))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the whole path may be too long for a socket


def directory(path: Path) -> None:
    path.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {
    "it is a pipe, not a regular file": pipe,
    "it is a device, not a regular file": device,
    "it is a socket, not a regular file": listening,
    "": directory,  # which some commands read as one, so that other sentences refuse it
}
STEP = "run/checkpoints/step-00000002"
# A command, and the files that it reads. With ? the sentence need not say what came, or another
# library ignores a directory.
CASES = {
    "compare run": f"run/metrics.jsonl run/config.json run/tokenizer.json run/{EVALUATIONS}",
    "compare run --data text.txt": "text.txt",
    "report run": "run/inspect/inspection.json run/recordings.jsonl",
    "inspect run --data text.txt": f"text.txt {STEP}/manifest.json",
    "inspect run": "prepared/index.json? prepared/train-00000.bin prepared/validation-00000.starts",
    "sample run": f"run/config.json run/tokenizer.json {STEP}/model/*.safetensors?",
    "sample hf": "hf/config.json hf/tokenizer.json hf/model.safetensors",
    "export run --hf out": "run/tokenizer.json",
    "export hf --hf out": "hf/generation_config.json?",
    "import theirs/ckpt.pt out": "theirs/ckpt.pt theirs/config.json",
    "import hf out --reverse": "hf/model.safetensors?",
    "prepare text.txt --tokenizer bytes --out out": "text.txt",
    "prepare lines.jsonl text.txt --tokenizer bytes --out out": "lines.jsonl",
    "prepare rows.parquet --tokenizer bytes --out out": "rows.parquet",
    "prepare folder --tokenizer bytes --out out": "folder/a.txt",
    "prepare text.txt --tokenizer tokenizer.json --out out": "tokenizer.json",
    "prepare text.txt --tokenizer bytes --out prepared": "prepared/index.json",
    "train tiny --out out --data text.txt": "text.txt",
    "train tiny --out out --data theirs": "theirs/train.bin theirs/meta.pkl",
    "train tiny --out out --data prepared": "prepared/tokenizer.json prepared/train-00000.starts",
    "train tiny --out out --data text.txt --validation other.txt": "other.txt",
    "train tiny --out out --data text.txt --init-from run": "run/tokenizer.json",
    "train --resume run": f"{STEP}/manifest.json {STEP}/training/*.safetensors? run/metrics.jsonl",
    "sweep sweep.toml": "sweep.toml",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each file that a command reads; no test may change it."""
    root = tmp_path_factory.mktemp("files")
    for name in ("text.txt", "other.txt", "folder/a.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(TEXT)
    (root / "lines.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (root / "rows.parquet").write_bytes(b"PAR1")
    (root / "sweep.toml").write_text("")
    write_tokenizer(root / "tokenizer.json")
    prepare(configuration(root / "text.txt", root / "prepared", separator="\n", validation=0.5))
    theirs = root / "theirs"
    theirs.mkdir()
    torch.save({"x": torch.zeros(2)}, theirs / "ckpt.pt")
    (theirs / "config.json").write_text("{}")
    for name in ("train.bin", "val.bin"):
        (theirs / name).write_bytes(bytes(1000))
    write_meta(theirs, ["a"])
    data = {"data": str(root / "prepared"), "eval_every": 2, "record_every": 1}
    config = replace(short(root, "ddl-cc", steps=2), **data)  # type: ignore[arg-type]
    train(config, quiet())
    assert main(["inspect", str(root / "run"), "--data", str(root / "other.txt")]) == 0
    (root / "run" / EVALUATIONS.replace("*", "-1")).write_text('{"runs": []}')
    export_run(root / "run", root / "hf")
    return root


def held(act: Callable[[], object]) -> tuple[object, str]:
    """The result of `act` and its errors, from a process that ends if it takes too much."""

    def limited() -> tuple[object, str]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            found = act()
        return found, said.getvalue()

    return forked(limited)


@pytest.mark.parametrize(
    ("command", "file"), [(command, file) for command in CASES for file in CASES[command].split()]
)
def test_a_sentence(
    command: str, file: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace(str(files), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    (path,) = tmp_path.glob(file.rstrip("?"))
    before = sorted(tmp_path.rglob("*"))

    def all_kinds() -> dict[str, tuple[object, str]]:
        said = {}
        for kind, make in KINDS.items():
            path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
            make(path)
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                said[kind] = main(command.split()), errors.getvalue()
        return said

    said, _ = held(all_kinds)
    assert isinstance(said, dict)
    for kind, (status, errors) in said.items():
        if file.endswith("?") and not kind and status == 0:
            shutil.rmtree(tmp_path / "out")
            continue
        assert status == 1, kind
        assert errors.count("\n") == 1
        assert path.relative_to(tmp_path).parts[0] in errors
        assert file.endswith("?") or kind in errors
    assert sorted(tmp_path.rglob("*")) == before


def test_a_watched_run(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "run", tmp_path / "run")
    names = ("recordings.jsonl", "tokenizer.json", "inspect/inspection.json")
    for name in names:
        (tmp_path / "run" / name).unlink()
        pipe(tmp_path / "run" / name)
    problems, _ = held(lambda: Watch([tmp_path / "run"]).poll().views[0].problems)
    expected = "must be readable, got: it is a pipe, not a regular file"
    assert problems == (f"recordings.jsonl {expected}", f"inspection.json {expected}")
