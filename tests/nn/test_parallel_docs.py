"""docs/parallel.md is true: its script and its commands run, in several processes."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ddl.lab import cli
from tests.nn.test_parallel_refused import PART, SHARD
from tests.support import ROOT
from tests.support.processes import command, together

PAGE = ROOT / "docs" / "parallel.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
SCRIPT, LOAD = (text for language, text in BLOCKS if language == "python")
COMMANDS = [
    shlex.split(line, comments=True)
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]


def script(*arguments: str) -> Callable[[int], int]:
    """A Python file in a process, as `python FILE …` runs it."""

    def act(rank: int) -> int:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
        return 0

    return act


def run(line: list[str], folder: Path) -> str:
    """Run a command; forks of this process stand in for torchrun's, which import everything."""
    if line[:3] != TORCHRUN:
        assert line[0] == "ddl"
        assert cli.main(line[1:]) == 0
        return ""
    act = command(*line[5:]) if line[3:5] == ["-m", "ddl"] else script(*line[3:])
    return together(2, folder, act).said(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        (path / "train.py").write_text(SCRIPT, encoding="utf-8")
        yield path
        sys.modules.pop("train", None)


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


@pytest.mark.exhaustive
def test_the_script(folder: Path) -> None:
    """It learns, and what FSDP2 saves is what DDP saves but for the rounding to bfloat16."""
    found = {}
    for line in COMMANDS[:2]:
        found[line[-1]] = losses(run(line, folder / "said"))
        assert len(found[line[-1]]) == 20
        assert found[line[-1]][-1] < 0.3 * found[line[-1]][0]
    (rounded, exact) = found["fsdp2"], found["train.py"]
    assert rounded != exact
    torch.testing.assert_close(torch.tensor(rounded), torch.tensor(exact), rtol=0.05, atol=0.02)
    for load in (LOAD, LOAD.replace("saved-fsdp2", "saved-ddp")):
        names: dict[str, Any] = {}
        exec(compile(load, PAGE.name, "exec"), names)
        idx = (torch.arange(3)[:, None] + torch.arange(12)) % 64
        hits = names["model"](idx).argmax(-1)[:, 4:] == (idx + 1)[:, 4:] % 64
        assert hits.float().mean() > 0.9  # it has learnt to count


@pytest.mark.parametrize("other", [{"expand": "repeat"}, {"erase": "none"}])
def test_a_checkpoint_of_another_variant_is_refused(folder: Path, other: dict[str, str]) -> None:
    """Whose parameters are more than the model's, or of the same shapes."""
    train = importlib.import_module("train")
    path = folder / "of-another"
    weights = train.Model().state_dict()
    dcp.save({"model": weights, "stream": str(train.STREAM)}, checkpoint_id=path)
    source = compile(LOAD.replace("saved-fsdp2", str(path)), PAGE.name, "exec")
    exec(source, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "STREAM", {**train.STREAM, **other})
        with pytest.raises(ValueError, match=r"^saved with "):
            exec(source, {})


@pytest.mark.exhaustive
def test_the_script_by_torchrun(folder: Path) -> None:
    for line in COMMANDS[:2]:
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone", *line[1:]]
        said = subprocess.run(started, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr
        assert losses(said.stdout)[-1] < 0.3 * losses(said.stdout)[0]


def test_ddl_train(folder: Path) -> None:
    for line in COMMANDS[2:4]:
        run(line, folder / "said")
    shutil.rmtree(folder / "runs/fsdp2/checkpoints/step-00000004")  # as if it had been stopped
    run(COMMANDS[4], folder / "said")
    assert (folder / "runs/fsdp2/checkpoints/step-00000004").is_dir()


def test_every_command_runs() -> None:
    assert [line[:3] == TORCHRUN for line in COMMANDS] == [True] * 4 + [False]


def test_the_sentences() -> None:
    (block,) = (text for language, text in BLOCKS if language == "text")
    sentences = [" ".join(part.split()) for part in block.split("\n\n")]
    assert sentences == [f"`x` must be{PART}", SHARD.format("reads[1]")]


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
