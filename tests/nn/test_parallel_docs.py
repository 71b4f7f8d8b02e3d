"""docs/parallel.md is true: its scripts and its commands run, in several processes.

tests/hf/test_tensor_parallel.py runs its lines with transformers.
"""

from __future__ import annotations

import copy
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
from torch import nn
from torch.distributed.tensor import DTensor

from ddl.lab import cli
from ddl.models import GPT, Cache, GPTConfig
from tests.nn.test_parallel import named
from tests.support import ROOT
from tests.support.helpers import assert_same_gradients, randomise_
from tests.support.processes import command, together

PAGE = ROOT / "docs" / "parallel.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
SCRIPT, LOAD, TENSOR, _ = (text for language, text in BLOCKS if language == "python")
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
        for name, text in (("train", SCRIPT), ("train_tensor", TENSOR)):
            (path / f"{name}.py").write_text(text, encoding="utf-8")
        yield path
        for name in ("train", "train_tensor"):
            sys.modules.pop(name, None)


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
    for line in COMMANDS[:3]:
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone", *line[1:]]
        said = subprocess.run(started, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr
        assert losses(said.stdout)[-1] < 0.3 * losses(said.stdout)[0]


def test_the_tensor_parallel_script(folder: Path) -> None:
    """It learns, with the losses of one process."""
    line = COMMANDS[2]
    alone = together(1, folder / "said", script(*line[3:])).said(0)
    torch.testing.assert_close(
        losses(run(line, folder / "said")), losses(alone), rtol=0, atol=0.002
    )
    assert losses(alone)[-1] < 0.3 * losses(alone)[0]


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, False),
        ({"mixer": "deltanet", "mixer_layers": (1,)}, False),
        pytest.param({}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_tensor_parallel_gradients(folder: Path, options: dict[str, Any], compiled: bool) -> None:
    """Of two backwards, clipped, also with a mixer that every process computes; then a cache."""
    page = importlib.import_module("train_tensor")
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_size": 24, "vocab_size": 11}
    alone = GPT(GPTConfig(residual="ddl-tc", block_size=9, **sizes, **options)).double()
    randomise_(alone)

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        page.split(model, mesh)
        called = model
        if compiled:
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
        for seed in range(2):
            idx = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(seed))
            for each in (called, alone):
                each(idx, labels=idx).loss.backward()
        page.clip(model, 0.01)
        nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        assert sum(isinstance(p, DTensor) for p in model.parameters()) == (10 if options else 14)
        assert_same_gradients(named(model), named(alone), torch.float64, depth=9)
        with torch.inference_mode():
            cache = Cache(alone.config)
            parts = [model(part, cache=cache).logits for part in idx.split([4, 1, 4], dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), alone(idx).logits)

    together(2, folder / "said", act)


def test_heads_that_cannot_be_split(folder: Path) -> None:
    page = importlib.import_module("train_tensor")

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        model = GPT(GPTConfig(num_layers=1, num_heads=1, hidden_size=24, vocab_size=11))
        page.split(model, torch.distributed.init_device_mesh("cpu", (2,)))
        with pytest.raises(
            ValueError, match=r"^`c_q` must have whole heads of 24 features in .*, got 12"
        ):
            model(torch.zeros(1, 2, dtype=torch.int64))

    together(2, folder / "said", act)


def test_ddl_train(folder: Path) -> None:
    for line in COMMANDS[3:5]:
        run(line, folder / "said")
    shutil.rmtree(folder / "runs/fsdp2/checkpoints/step-00000004")  # as if it had been stopped
    run(COMMANDS[5], folder / "said")
    assert (folder / "runs/fsdp2/checkpoints/step-00000004").is_dir()


def test_every_command_runs() -> None:
    assert [line[:3] == TORCHRUN for line in COMMANDS] == [True] * 5 + [False]


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
