"""Pickles of more than tensors: every command refuses them in a sentence of its own."""

from __future__ import annotations

import argparse
import pickle
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lm_eval")

import ddl.hf
from ddl.lab.cli import main
from ddl.models import GPT
from ddl.models.tokenizers import ByteTokenizer
from tests.support.decoder_cases import plain
from tests.support.eval_cases import datasets_in
from tests.support.eval_reference import TASKS
from tests.support.hf_cases import small

OTHER = "it holds more than tensors, or is of another format"
CLASS = argparse.Namespace(a=1)
EVAL = f"--tasks local_arc --include-path {TASKS} --device cpu --out scores.json"
COMMANDS = [
    "sample x.pt --device cpu",
    "inspect x.pt --data topics --device cpu",
    "import x.pt out",
    "sample hf --device cpu",
    "export hf --hf out",
    f"eval hf {EVAL}",
    f"eval decoder {EVAL}",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


def in_a_tar(path: Path) -> None:
    """As torch wrote files before version 0.1.10."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            part = path.with_name(name)
            part.write_bytes(pickle.dumps(1))
            archive.add(part, name)


FILES: dict[str, tuple[Any, str]] = {
    "a class": (lambda path: torch.save({"model": CLASS}, path), "refers to argparse.Namespace"),
    "a class, legacy": (
        lambda path: torch.save({"a": CLASS}, path, _use_new_zipfile_serialization=False),
        "refers to argparse.Namespace",
    ),
    "a model": (
        lambda path: torch.save(nn.Linear(2, 2), path),
        "refers to torch.nn.modules.linear.Linear",
    ),
    "pickle, protocol 4": (lambda path: path.write_bytes(pickle.dumps({"a": CLASS}, 4)), OTHER),
    "no pickle": (lambda path: path.write_text("hello world\n" * 20), OTHER),
    "TorchScript": (lambda path: torch.jit.script(nn.Linear(2, 2)).save(str(path)), OTHER),
    "tar": (in_a_tar, OTHER),
}


@pytest.mark.parametrize("write", FILES)
def test_one_sentence(
    write: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.chdir(tmp_path)
    ddl.hf.save(GPT(small()), ByteTokenizer(), Path("hf"))
    plain(vocab_size=300).save_pretrained("decoder")
    ddl.hf.to_fast(ByteTokenizer()).save_pretrained("decoder")
    written, reason = FILES[write]
    written(Path("x.pt"))
    for folder in ("hf", "decoder"):
        Path(folder, "model.safetensors").unlink()
        written(Path(folder, "pytorch_model.bin"))
    for command in COMMANDS:
        capfd.readouterr()
        assert main(command.split()) == 1
        out, said = capfd.readouterr()
        assert out == ""
        said = re.sub(r"(\r?Generating .*\n?)+", "", said)  # from `datasets`
        assert said.count("\n") == 1, said
        assert re.search(rf"^ddl {command.split()[0]}: .*{reason}\n", said), said
        assert not re.search(r"weights_only|arbitrary|trust|\\x1b", said)
    assert not Path("out").exists()
    assert [str(each.message) for each in recwarn if "torch.load" in str(each.message)] == []
