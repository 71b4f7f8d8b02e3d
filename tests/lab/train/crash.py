"""Kill training with SIGKILL, resume it, and compare with the run that was not killed.

    python -m tests.lab.train.crash --kills 200    # make crashtest
    python -m tests.lab.train.crash --kills 50 --processes 2 --parallel fsdp2

A process that has trained once forks every training process, so that a kill costs no import. Half
of them are killed at a random moment, the others at a random change of the disk: before a file is
flushed, before a rename, before a removal. A killed run is resumed until it ends. Of several
processes one is killed, and the others have to end by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ddl.errors import OtherProcessError, ProcessError
from ddl.lab.config import TrainConfig
from ddl.lab.train import train
from ddl.lab.train.metrics import MEASURED
from ddl.lab.train.runs import RunDirectory
from tests.support.processes import Forked
from tests.support.train_cases import quiet, short

LEFT_ALONE = 3  # the exit status of a process that has lost another one
DISK = ("fsync", "rename", "replace", "unlink", "rmdir")  # of os


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for the runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(crash(args.folder, args.kills, args.seed, args.processes, args.parallel))
    return 0


def crash(folder: Path, kills: int, seed: int, processes: int = 1, parallel: Any = "ddp") -> str:
    """Kill `kills` training processes; raise AssertionError if a resumed run differs."""

    def configuration(name: str) -> TrainConfig:
        return short(
            folder, "ddl-cc", out=folder / name, data=str(text), resume="auto", parallel=parallel,
            steps=24, eval_every=5, log_every=4, save_every=2, keep_every=8,
        )  # fmt: skip

    text = folder / "text.txt"
    text.write_text("The delta rule erases what it overwrites. " * 200, encoding="utf-8")
    rng = random.Random(seed)
    # This imports what training imports late, and times and asks git for what a process keeps.
    train(configuration("first"), quiet())
    started = time.monotonic()
    whole = configuration("whole")
    assert run(whole, processes) == 0
    seconds = time.monotonic() - started
    expected, end = curve(whole), tensors(whole)
    done, ended, unfinished = 0, 0, 0
    while done < kills:
        config = configuration("killed")
        while done < kills:
            at_random = rng.random() < 0.5
            delay = rng.uniform(0, seconds) if at_random else None
            change = None if at_random else rng.randrange(60)
            victim = rng.randrange(processes)
            if run(config, processes, victim=victim, delay=delay, change=change) == 0:
                break
            done += 1
            unfinished += any(config.directory.glob("checkpoints/.*.tmp"))
        assert run(config, processes) == 0
        assert curve(config) == expected
        assert_same(tensors(config), end)
        assert not list(config.directory.rglob(".*")), "something unfinished was left"
        ended += 1
        shutil.rmtree(config.directory)
    return (
        f"{done} kills, {unfinished} of them inside a checkpoint, {ended} runs resumed to the end"
    )


def run(
    config: TrainConfig,
    processes: int,
    *,
    victim: int = 0,
    delay: float | None = None,
    change: int | None = None,
) -> int:
    """Train in forked processes, one killed after `delay` seconds or at a change of the disk.

    Returns its exit status, −9 if it was killed.
    """

    def act(rank: int) -> int:
        if change is not None and rank == victim:
            kill_at(change)
        try:
            return train(config, quiet()).status
        except (ProcessError, OtherProcessError):
            return LEFT_ALONE

    forked = Forked(processes, config.directory.parent / "said", act)
    if delay is not None:
        time.sleep(delay)
        if victim not in forked.statuses:
            os.kill(forked.pids[victim], signal.SIGKILL)
    statuses = forked.wait()
    status = statuses.pop(victim)
    others = {0} if status == 0 else {0, LEFT_ALONE}
    assert status in (0, -signal.SIGKILL), forked.said()
    assert set(statuses) <= others, forked.said()
    return status


def kill_at(change: int) -> None:
    """Kill this process before its change number `change` of the disk."""
    count = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal count
            if count == change:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **options)

        return wrapped

    for name in DISK:
        setattr(os, name, wrap(getattr(os, name)))


def curve(config: TrainConfig) -> list[dict[str, Any]]:
    """The records of a run, timings excepted."""
    records = RunDirectory(config.directory).metrics.read()
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in records]


def tensors(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Every tensor of every checkpoint that was kept, the optimizer's included."""
    folder = config.directory / "checkpoints"
    return {
        f"{file.parent.relative_to(folder)} {name}": tensor
        for file in sorted(folder.glob("step-*/*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


if __name__ == "__main__":
    raise SystemExit(main())
