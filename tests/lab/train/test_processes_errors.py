"""How an error that one process meets, or all of them, ends several: one sentence, and no hang."""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import signal
import string
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from ddl.errors import InputError
from ddl.lab.config import PrepareConfig, TrainConfig
from ddl.lab.data import ByteTokenizer
from ddl.lab.data.prepare import prepare
from ddl.lab.train.processes import Processes
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.saver import Saver
from tests.support.processes import Forked, together, training

from .test_processes_stop import at_step, command_status, config


def ended(run: TrainConfig, folder: Path, prepared: Any = lambda rank: None) -> Forked:
    """Two processes that have trained and ended; `prepared(rank)` was called in each before."""

    def act(rank: int) -> int:
        prepared(rank)
        return command_status(lambda: training(run)(rank))

    forked = Forked(2, folder / "out", act)
    forked.wait()
    return forked


def check_one_sentence(forked: Forked, sentence: str) -> None:
    assert list(forked.statuses.values()) == [1, 1], forked.said()
    assert sentence in forked.said(0)
    assert forked.said(0).count("ddl train: ") == 1
    assert "Traceback" not in forked.said(0)
    assert forked.said(1) == ""


@pytest.mark.table(0)
@pytest.mark.parametrize(("how", "rank"), [("ddp", 0), ("fsdp2", 0), ("fsdp2", 1)])
def test_a_process_that_cannot_write_its_tensors(tmp_path: Path, how: str, rank: int) -> None:
    """A limit of the file size stops the write in the middle, as a full disk does."""
    run = config(tmp_path, how)
    save = Saver.save

    def limited(self: Saver, *arguments: Any) -> None:
        if self.trainer.steps_done == 8 and self.trainer.processes.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        save(self, *arguments)

    def prepared(own: int) -> None:
        Saver.save = limited  # type: ignore[method-assign]

    forked = ended(run, tmp_path, prepared)
    check_one_sentence(forked, "ddl train: `--out` must be writable, got ")
    assert "File too large" in forked.said(0)
    assert RunDirectory(run.directory).steps() == [4]
    assert not list(run.directory.rglob(".*"))


@pytest.mark.table(0)
@pytest.mark.parametrize(("how", "message"), [("ddp", "gather"), ("fsdp2", "from_first")])
def test_a_process_that_hangs_while_others_wait_for_its_word(
    tmp_path: Path, how: str, message: str
) -> None:
    """Messages have the time-out of the run, as sums have; so have those of the shards' writers."""
    run = config(tmp_path, how, process_timeout=0.05)

    def hanging(self: Processes, value: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)

    def act(rank: int) -> int:
        at_step(3, 1, lambda: setattr(Processes, message, hanging))
        return command_status(lambda: training(run)(rank))

    forked = Forked(2, tmp_path / "out", act)
    try:
        assert forked.wait(30, of=[0]) == [1]
    finally:
        forked.kill()
    assert "has not answered for 0.05 minutes" in forked.said(0)


@pytest.mark.table(0)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "place",
    [
        "torch.distributed.init_process_group",
        "torch.distributed.new_group",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.distributed.fsdp.fully_shard",
        "ddl.lab.train.processes.Processes.gather",
    ],
)
def test_a_process_that_is_lost_before_training(tmp_path: Path, place: str, rank: int) -> None:
    """While the groups are made, the model is spread, or at the first message."""
    how = "fsdp2" if "fsdp" in place else "ddp"
    run = config(tmp_path, how, process_timeout=0.1)
    owner, name = pkgutil.resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def act(own: int) -> int:
        if own == rank:
            setattr(owner, name, killed)
        return command_status(lambda: training(run)(own))

    forked = Forked(2, tmp_path / "out", act)
    forked.wait()
    assert forked.statuses[1 - rank] == 1, forked.said()
    said = forked.said(1 - rank)
    assert f"process {1 - rank} of 2 ends, because another one has ended" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_processes_on_different_devices(tmp_path: Path) -> None:
    """One has a GPU; the first process says so, once."""
    run = config(tmp_path, "ddp")

    def prepared(rank: int) -> None:
        place = torch.device("cuda" if rank else "cpu")
        sys.modules["ddl.lab.train.launch"].pick_device = lambda *_: place  # type: ignore[attr-defined]

    said = "`--device` must be the same in all processes, got cpu in process 0, cuda in process 1"
    check_one_sentence(ended(run, tmp_path, prepared), said)


def test_nothing_to_predict(tmp_path: Path) -> None:
    """All see it; one says it."""
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": letter}) for letter in string.ascii_letters * 40))
    prepare(PrepareConfig((text,), out=tmp_path / "shards", tokenizer="bytes", validation=0.1))
    run = config(tmp_path, "ddp", data=str(tmp_path / "shards"), separate_documents=True)
    check_one_sentence(ended(run, tmp_path), "must leave tokens to predict")


def test_a_sample_that_cannot_be_decoded(tmp_path: Path) -> None:
    run = config(tmp_path, "ddp", sample_every=2)
    decode = ByteTokenizer.decode

    def failing(self: ByteTokenizer, tokens: Any) -> str:
        if len(tokens) > 1:
            raise InputError.sentence("the tokenizer fails")
        return decode(self, tokens)

    def prepared(rank: int) -> None:
        ByteTokenizer.decode = failing  # type: ignore[method-assign]

    check_one_sentence(ended(run, tmp_path, prepared), "ddl train: the tokenizer fails")


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    """The first process alone writes it, when the others have nothing left to do."""

    def fail(self: RunDirectory) -> Path:
        raise InputError("out", "be writable", "loss.png: No space left on device")

    def prepared(rank: int) -> None:
        RunDirectory.plot = fail  # type: ignore[method-assign]

    run = config(tmp_path, "ddp", steps=2)
    check_one_sentence(ended(run, tmp_path, prepared), "No space left on device")


def test_a_checkpoint_that_cannot_be_removed_when_a_run_goes_on(tmp_path: Path) -> None:
    run = config(tmp_path, "ddp", steps=2)
    together(2, tmp_path / "first", training(run))

    def fail(self: Saver) -> None:
        raise InputError("out", "be writable", "step-00000001: Read-only file system")

    def prepared(rank: int) -> None:
        Saver.drop_others = fail  # type: ignore[method-assign]

    check_one_sentence(ended(run, tmp_path, prepared), "Read-only file system")


def test_torchrun_starts_the_processes_again(tmp_path: Path) -> None:
    """Its store still has the addresses of those before, of which one was killed."""
    run = config(tmp_path, "ddp")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(count: int) -> Forked:
        def act(rank: int) -> int:
            os.environ.update(
                MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT=str(count),
            )
            if count == 0:
                at_step(6, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
            else:
                time.sleep(rank)  # the first one looks for the other before it is there
            return command_status(lambda: training(run)(rank))

        return Forked(2, tmp_path / "out", act)

    assert start(0).wait() == [1, -signal.SIGKILL]
    again = start(1)
    assert again.wait() == [0, 0], again.said()
    assert "Going on after step 4" in again.said(0)
    assert RunDirectory(run.directory).steps()[-1] == run.steps
