"""Where a command expects a file there may be a directory: it says so in a sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab.analysis.runs import EVALUATIONS
from ddl.lab.cli import main
from ddl.lab.data.prepare import prepare
from ddl.lab.exchange import export_run
from ddl.lab.train import train
from tests.support.nanogpt_folder import write_meta
from tests.support.prepare_cases import configuration, write_tokenizer
from tests.support.train_cases import quiet, short

TEXT = "".join(f"Rewrite {i} erases what it overwrites.\n" for i in range(200))
STEP = "run/checkpoints/step-00000002"
# A command, and the files that it reads. With ? another library ignores a directory.
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


@pytest.mark.parametrize(
    ("command", "file"), [(command, file) for command in CASES for file in CASES[command].split()]
)
def test_a_sentence(
    command: str,
    file: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace(str(files), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    (path,) = tmp_path.glob(file.rstrip("?"))
    path.unlink()
    path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    status, errors = main(command.split()), capsys.readouterr().err
    if file.endswith("?") and status == 0:
        return
    assert status == 1
    assert errors.count("\n") == 1
    assert path.relative_to(tmp_path).parts[0] in errors
    assert sorted(tmp_path.rglob("*")) == before
