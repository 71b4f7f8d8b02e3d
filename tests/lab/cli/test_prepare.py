"""`ddl prepare`: what it prints, and that neither it nor its workers load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddl.lab import cli
from tests.support.prepare_cases import as_lines, as_parquet, documents

TEXTS = documents(100)


def arguments(*inputs: Path, out: Path) -> list[str]:
    options = ["--tokenizer", "bytes", "--validation", "0.2", "--workers", "2"]
    return ["prepare", *map(str, inputs), "--out", str(out), *options]


def test_it_says_how_much_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_lines(tmp_path / "a.jsonl", TEXTS[:50])
    as_parquet(tmp_path / "b.parquet", TEXTS[50:])
    out = tmp_path / "out"
    command = arguments(tmp_path / "a.jsonl", tmp_path / "b.parquet", out=out)
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    sizes = [(out / f"{part}-00000.bin").stat().st_size for part in ("train", "validation")]
    counts = [
        (out / f"{part}-00000.starts").stat().st_size // 8 for part in ("train", "validation")
    ]
    numbers = (
        f"{sizes[0]:,} tokens of {counts[0]} documents for train, {sizes[1]:,} tokens of"
        f" {counts[1]} documents for validation\n"
    )
    assert captured.out == f"{out} has {numbers}"
    assert captured.err == ""
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"{out} was complete already: {numbers}"


def test_without_pyarrow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_parquet(tmp_path / "b.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(arguments(tmp_path / "b.parquet", out=tmp_path / "out")) == 1
    sentence = "`ddl prepare` needs the `data` extra: pip install 'ddl-rs[data]'"
    assert capsys.readouterr().err == f"ddl prepare: {sentence}\n"


def test_no_process_loads_torch(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is loaded')")
    code = "import sys; from ddl.lab.cli import main; sys.exit(main(sys.argv[1:]))"
    command = arguments(tmp_path / "a.jsonl", out=tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_control_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards so far stay, and the same command goes on."""
    as_lines(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ddl.lab.data.prepare._refuse_empty", interrupt)
        assert cli.main(arguments(tmp_path / "a.jsonl", out=out)) == 130
    assert (out / "train-00000.bin").exists()
    assert cli.main(arguments(tmp_path / "a.jsonl", out=out)) == 0
