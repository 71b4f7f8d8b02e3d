"""A run directory may lie behind a link. Through a link in it, nothing is written or removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.errors import InputError
from ddl.lab.analysis.inspect_path import inspect_path
from ddl.lab.config import InspectConfig, TrainConfig
from ddl.lab.train import Trainer, train
from ddl.lab.train.runs import FILES, RunDirectory
from ddl.lab.train.trackers import Tracked, open_trackers
from tests.support.train_cases import quiet


def contents(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(f.relative_to(folder)): f.read_bytes() if f.is_file() else None for f in found}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may change after the test's `move`."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    yield folder
    assert contents(folder) == before.pop(folder)


before: dict[Path, dict[str, bytes | None]] = {}


def move(inside: Path, elsewhere: Path) -> None:
    """Move a file or folder elsewhere, or make one there, and leave a link to it."""
    moved = elsewhere / inside.name
    if inside.exists():
        inside.rename(moved)
    elif inside.suffix:
        moved.write_text("")
    else:
        moved.mkdir()
        (moved / "a file").write_text("of mine")
    inside.symlink_to(moved)
    before[elsewhere] = contents(elsewhere)


def refused(link: Path) -> str:
    return f"must have no link where it is written, got {re.escape(str(link))}, a link to"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "tokenizer.json", "loss.png"])
def test_files(stopped: TrainConfig, elsewhere: Path, name: str) -> None:
    """Those that a resumed run writes become files of its own."""
    run = RunDirectory(stopped.directory)
    move(run.path / name, elsewhere)
    train(stopped, quiet())
    assert (run.path / name).is_symlink() == (name in ("config.json", "tokenizer.json"))
    assert [record["step"] for record in run.metrics.read()][-1] == 6


def test_the_folder_of_the_checkpoints(stopped: TrainConfig, elsewhere: Path) -> None:
    folder = stopped.directory / "checkpoints"
    move(folder, elsewhere)
    with pytest.raises(InputError, match=f"^`resume` {refused(folder)}"):
        train(stopped, quiet())


def test_a_folder_that_is_moved_while_training(
    stopped: TrainConfig, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.step

    def moving(self: Trainer, *flags: object) -> object:
        if not before:
            move(stopped.directory / "checkpoints", elsewhere)
        return original(self, *flags)

    monkeypatch.setattr(Trainer, "step", moving)
    with pytest.raises(InputError, match=f"^`out` {refused(stopped.directory / 'checkpoints')}"):
        train(stopped, quiet())


def test_a_checkpoint_that_is_not_kept(stopped: TrainConfig, elsewhere: Path) -> None:
    run = RunDirectory(stopped.directory)
    move(run.checkpoint_path(3), elsewhere)
    train(stopped, quiet())
    assert run.steps() == [6]
    assert not run.checkpoint_path(3).is_symlink()


def test_a_checkpoint_that_is_saved_again(
    stopped: TrainConfig, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written in the place of the link."""
    run = RunDirectory(stopped.directory)
    original = Trainer.step

    def moving(self: Trainer, *flags: object) -> object:
        found = original(self, *flags)
        if self.steps_done == 6:
            move(run.checkpoint_path(6), elsewhere)
        return found

    monkeypatch.setattr(Trainer, "step", moving)
    train(stopped, quiet())
    assert not run.checkpoint_path(6).is_symlink()
    assert (run.checkpoint_path(6) / "manifest.json").is_file()


def test_overwrite(stopped: TrainConfig, elsewhere: Path) -> None:
    """The links of an earlier run vanish; a tracker's folder stays where it leads."""
    for name in FILES:
        move(stopped.directory / name, elsewhere)
    train(replace(stopped, resume=None, overwrite=True), quiet())
    found = {path.name for path in stopped.directory.iterdir()}
    assert found == {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "loss.png"}
    assert not any(path.is_symlink() for path in stopped.directory.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_the_folder_of_a_tracker(stopped: TrainConfig, elsewhere: Path, name: str) -> None:
    folder = stopped.directory / name
    move(folder, elsewhere)
    with pytest.raises(InputError, match=f"^`out` {refused(folder)}"):
        open_trackers([name], Tracked(stopped.directory, stopped, 0, 0))


@pytest.mark.exhaustive
def test_an_inspection(stopped: TrainConfig, elsewhere: Path) -> None:
    """A folder that the user names may be a link; a picture in it is replaced."""
    folder, run = stopped.directory / "inspect", stopped.directory
    move(folder, elsewhere)
    config = InspectConfig(run, data=Path(stopped.data or ""), device="cpu")
    with pytest.raises(InputError, match=f"^`run` {refused(folder)}"):
        inspect_path(config, quiet())
    folder.unlink()
    folder.mkdir()
    move(folder / "inspection.json", elsewhere)
    link = run / "link"
    link.symlink_to(folder)
    inspect_path(replace(config, out=link), quiet())
    assert (folder / "inspection.json").stat().st_size > 0


def test_a_run_behind_a_link(stopped: TrainConfig, tmp_path: Path) -> None:
    stopped.directory.rename(tmp_path / "moved")
    stopped.directory.symlink_to(tmp_path / "moved")
    train(stopped, quiet())
    assert stopped.directory.is_symlink()
    assert RunDirectory(tmp_path / "moved").steps() == [6]
