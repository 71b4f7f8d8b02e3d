"""Options of runs by name, for the report and the explorer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddl.lab.analysis.options import options_of
from ddl.lab.analysis.runs import Run
from ddl.lab.config import OptimConfig, TrainConfig
from ddl.lab.config.stored import options_by_name


def test_names_and_values_are_those_of_the_command_line() -> None:
    config = TrainConfig(optim=OptimConfig(betas=(0.8, 0.9)), track=())
    options = options_by_name(config)
    assert options["optim.betas"] == "0.8 0.9"
    assert options["model.residual"] == config.model.residual
    assert options["track"] == "–"
    assert options["device"] == "auto"


def test_what_differs_leaves_out_where_a_run_is_written() -> None:
    first = TrainConfig(out=Path("one"), resume="auto")
    second = replace(first, out=Path("two"), resume=None, steps=7)
    runs = [Run(Path(), "one", first), Run(Path(), "exported"), Run(Path(), "two", second)]
    found = options_of(runs)
    assert [run.name for run in found.runs] == ["one", "two"]
    assert found.different == [("steps", [str(first.steps), "7"])]
    assert dict(found.all)["out"] == ["one", "two"]
    assert options_of([]).all == []
