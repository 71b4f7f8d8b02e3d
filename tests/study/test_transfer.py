"""The study of learning rates over sizes: what it trains, and what it makes of the records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddl.models import GPT
from study import records, sizes, transfer, transfer_page
from study.coordinates import DERIVED, PLACES, derived_slope
from study.transfer import DEPTH, WIDTH, Curve, Question, Run, Size


@pytest.mark.parametrize("question", [WIDTH, DEPTH], ids=["width", "depth"])
@pytest.mark.parametrize("residual", transfer.RESIDUALS)
def test_at_the_base_both_parameterizations_are_one_model(
    question: Question, residual: str
) -> None:
    plain = question.models(residual, standard=True)
    scaled = question.models(residual, standard=False)
    assert plain[0] == scaled[0]
    assert all(model.parameterization == "standard" for model in plain)
    assert all(model.parameterization == question.parameterization for model in scaled[1:])
    assert [Curve.of(model).size for model in scaled] == list(question.sizes)


def test_small_models_are_trained_first_and_each_once() -> None:
    planned = transfer.planned([])
    names = [run.name for run in planned]
    assert len(set(names)) == len(names)
    models = 2 * (3 + 2 + 3 + 3)  # d64-L4 serves both questions
    further_seeds = 2 * len(DEPTH.sizes)
    assert len(names) == (models + further_seeds) * len(transfer.RATES)
    weights = [run.model.hidden_size**2 * run.model.num_layers for run in planned]
    assert weights == sorted(weights)


def a_record(lr: float, loss: float) -> dict[str, Any]:
    return {
        "name": f"{lr:g}",
        "residual": "additive",
        "parameterization": "mup",
        "width": 128,
        "layers": 4,
        "lr": lr,
        "seed": 1,
        "loss": loss,
    }


def test_the_best_rate_lies_between_others() -> None:
    curve = Curve("additive", "mup", Size(128, 4))
    kept = [a_record(lr, loss) for lr, loss in zip(transfer.RATES, (4, 3, 2, 1), strict=True)]
    assert transfer.best(curve, kept) == ([*transfer.RATES, 3.2e-2], None)
    kept.append(a_record(3.2e-2, 1.5))
    assert transfer.best(curve, kept)[1] == 1.6e-2
    assert transfer.best(curve._replace(parameterization="standard"), kept)[1] is None


def test_a_rate_is_tried_once_each_seed_has_a_run_and_counts_by_their_mean() -> None:
    curve = Curve("ddl-cc", "completep", Size(64, 8))
    assert curve.seeds == (1, 2, 3)
    assert curve._replace(parameterization="standard").seeds == (1,)
    assert curve._replace(parameterization="standard", size=Size(64, 2)).seeds == (1, 2, 3)
    of = {"residual": "ddl-cc", "parameterization": "completep", "width": 64, "layers": 8}
    kept = [
        a_record(lr, loss + seed) | of | {"seed": seed}
        for lr, loss in zip(transfer.RATES, (4, 3, 2, 5), strict=True)
        for seed in curve.seeds
    ]
    assert transfer.losses(curve, kept)[8e-3] == 4
    assert transfer.best(curve, kept)[1] == 8e-3
    assert 8e-3 not in transfer.losses(curve, [r for r in kept if r["seed"] != 3])


def test_a_record_has_the_loss_of_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("abcd" * 5000)
    monkeypatch.setattr(transfer, "STEPS", 40)
    monkeypatch.setattr(transfer, "SCORED", 2)
    model = replace(
        WIDTH.model("ddl-cc", Size(128, 4), standard=False), num_layers=1, block_size=32
    )
    run = Run(model, 4e-3)
    config = replace(run.config, data=str(text), steps=40)
    monkeypatch.setattr(Run, "config", config)
    record = transfer.record_of(run)
    assert record["name"] == "ddl-cc-mup-d128-L1-lr0.004"
    assert record["loss"] < 1.0, "of 5.5, that of random letters"
    assert record["parameters"] == GPT(model).num_parameters()


def records_of_everything() -> list[dict[str, Any]]:
    """As if the best rate were 4e-3 everywhere, but 8e-3 at width 256 in the standard one."""
    kept = []
    for run in transfer.planned([]):
        curve = Curve.of(run.model)
        moved = curve.parameterization == "standard" and curve.size.width == 256
        kept.append(
            a_record(run.lr, 1.5 + abs(math.log2(run.lr / (8e-3 if moved else 4e-3))) / 10)
            | {"name": run.name, "residual": curve.residual, "processor_seconds": 60}
            | {"parameterization": curve.parameterization, "processor": "a processor"}
            | {"width": curve.size.width, "layers": curve.size.layers, "seed": run.seed}
        )
    return kept


def test_the_table_has_a_row_for_every_curve_with_its_best_in_bold() -> None:
    shown, _, head, _, *rows, _, end = transfer_page.table(records_of_everything()).splitlines()
    assert shown == "![Loss over the learning rate](transfer.png)"
    assert head == "| | size | seeds | 0.002 | 0.004 | 0.008 | 0.016 |"
    assert "| ddl-cc, mup | d 256 | 1 | 1.6000 | **1.5000** | 1.6000 | 1.7000 |" in rows
    assert "| additive, standard | d 256 | 1 | 1.7000 | 1.6000 | **1.5000** | 1.6000 |" in rows
    assert "| ddl-cc, completep | 16 layers | 3 | 1.6000 | **1.5000** | 1.6000 | 1.7000 |" in rows
    assert len(rows) == 2 * (3 + 3 + 4 + 4)
    assert "120 runs" in end
    assert "2.0 hours" in end
    assert transfer_page.table([]) == "Not trained yet."


def sizes_of_everything(off: float = 0.0) -> list[dict[str, Any]]:
    """As if all sizes had the derived slopes, and some other one in the standard case."""
    kept = []
    for job in sizes.jobs():
        residual, over, scaled = job.work.args[0], job.work.args[1], job.work.keywords["scaled"]
        quantities = [
            name
            for name in DERIVED
            if residual != "additive" or name not in ("value", "logit of β")
        ]
        slope = {name: derived_slope(over, name) or 0 for name in quantities}
        more = off if scaled else 1.0
        rows = [{q: place ** (slope[q] + more) for q in quantities} for place in PLACES[over]]
        kept.append(
            {"name": job.name, "places": PLACES[over], "sizes": rows} | {"processor": "a processor"}
        )
    return kept


def test_a_slope_that_is_not_the_derived_one_is_bold() -> None:
    _, _, head, _, *rows, _, end = sizes.table(sizes_of_everything()).splitlines()
    assert head == "| | over | size | derived | standard | mup, completep |"
    assert "| ddl-cc | width | value | +0.5 | **+1.50** | +0.50 |" in rows
    assert "| additive | depth | first write / state | -1 | **+0.00** | -1.00 |" in rows
    assert not any("| state |" in row for row in rows if "| depth |" in row)
    assert end.endswith("(a processor).")
    scaled = [
        row.rpartition(" | ")[2] for row in sizes.table(sizes_of_everything(off=0.2)).splitlines()
    ]
    assert "**+0.70** |" in scaled
    assert sizes.table([]) == "Not measured yet."


def test_a_missing_run_leaves_a_dash_and_nothing_bold() -> None:
    kept = [each for each in records_of_everything() if each["lr"] != 2e-3]
    assert "**" not in transfer_page.table(kept)


def test_the_page_is_written_and_found_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PAGE", "PICTURE", "SIZES"):
        file = getattr(transfer_page, name)
        monkeypatch.setattr(transfer_page, name, tmp_path / file.name)
    marks = [f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("transfer", "sizes")]
    transfer_page.PAGE.write_text("".join(marks))
    monkeypatch.setattr(transfer, "OUT", tmp_path / "text.jsonl")
    monkeypatch.setattr(sizes, "OUT", tmp_path / "sizes.jsonl")
    for record in records_of_everything():
        records.keep(transfer.OUT, record)
    for record in sizes_of_everything():
        records.keep(sizes.OUT, record)
    assert transfer_page.main([]) == 0
    assert transfer_page.main(["--check"]) == 0
    records.keep(transfer.OUT, records_of_everything()[0] | {"loss": 1.0})
    assert transfer_page.main(["--check"]) == 1
    found = capsys.readouterr().err
    assert "transfer.md is stale" in found
    assert "transfer.png is stale" in found
    assert "transfer-sizes.png" not in found
    records.keep(sizes.OUT, sizes_of_everything(off=0.2)[1])
    assert transfer_page.main(["--check"]) == 1
    assert "transfer-sizes.png is stale" in capsys.readouterr().err


def test_the_committed_page_is_current() -> None:
    assert transfer_page.main(["--check"]) == 0
