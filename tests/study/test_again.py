"""A run that is drawn and trained again has the numbers of its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.lab.config.sweeps import SweepRun
from ddl.lab.train import train
from study import again, records
from study.collect import collect
from tests.support.train_cases import quiet, short


def write(folder: Path, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(f'{{"name": "{name}", "loss": 1.0}}\n' for name in names)
    (folder / "main.jsonl").write_text(text)


def test_the_records_decide_the_draw(tmp_path: Path) -> None:
    """Every run that can be trained can be drawn, and the same records give the same one."""
    names = [f"{variant}-s{seed}" for variant in ("a", "b") for seed in (1, 2)]
    drawn = set()
    for number in range(40):
        write(tmp_path, [*names, "tc-separate-s1", f"c-s{number}"])
        found = again.draw(tmp_path).record["name"]
        assert again.draw(tmp_path).record["name"] == found
        drawn.add(found)
    assert drawn >= set(names)
    assert "tc-separate-s1" not in drawn


@pytest.mark.exhaustive
def test_another_run_of_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "FOLDER", tmp_path / "again")
    config = short(tmp_path, "ddl-cc", out=tmp_path / "cc-s1", record_every=3)
    train(config, quiet())
    recorded = collect(config.out)
    assert recorded is not None
    for seed in (config.seed, config.seed + 1):
        run = SweepRun("cc-s1", "cc", replace(config, seed=seed))
        found = again.repeat(run, recorded)
        same = seed == config.seed
        assert found["equal"] == {"validation": same, "training": same, "depth": same}
        assert (found["loss"]["again"] == found["loss"]["recorded"]) is same


def test_the_committed_repetition_is_of_the_newest_draw() -> None:
    """Another record moves the draw, and then `python -m study.again` has to be run anew."""
    made = json.loads(again.OUT.read_text(encoding="utf-8"))
    recorded = again.draw().record
    assert made["records"] == records.digest("main")
    assert made["name"] == recorded["name"]
    loss, on = made["loss"], made["processor"]
    assert loss["recorded"] == recorded["loss"]
    assert on["recorded"] == recorded["processor"]
    assert loss["again"] == pytest.approx(loss["recorded"], abs=0.005)
    if on["again"] == on["recorded"]:
        assert loss["again"] == loss["recorded"]
        assert all(made["equal"].values())
