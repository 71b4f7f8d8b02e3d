"""`ddl compare --json`: strict JSON, the validation curves and the ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddl.lab.analysis.compare import compare
from ddl.lab.analysis.document import curve, document, ranking
from ddl.lab.analysis.runs import Run
from ddl.models import flops_per_token
from tests.lab.analysis.cases import make_run


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def strict(*paths: Path) -> dict[str, Any]:
    """The document as a strict reader gets it."""
    text = json.dumps(document(compare(list(paths))), allow_nan=False)
    read: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return read


def records(path: Path, *lines: str) -> Run:
    """The run at this path with these records and no others."""
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return compare([path]).runs[0]


def test_the_keys(tmp_path: Path) -> None:
    made = strict(make_run(tmp_path / "a"))
    assert list(made) == ["format", "runs", "ranking", "notes"]
    assert made["format"] == 1
    assert set(made["runs"][0]) == {
        *("name", "path", "residual", "seed", "step", "steps", "finished", "validation_loss"),
        *("perplexity", "best_validation_loss", "best_step", "bits_per_byte", "parameters"),
        *("tokens_per_second", "speed_ratio", "peak_memory", "memory_ratio", "evaluations"),
        "curve",
    }


def test_a_curve(tmp_path: Path) -> None:
    """A step of `short` has 8 × 32 tokens; a validation between two records has no seconds."""
    run = records(
        make_run(tmp_path / "a"),
        '{"step": 2, "loss": 3.0, "tokens_per_second": 128.0}',
        '{"step": 2, "validation_loss": 2.5, "validation_bits_per_byte": 3.5}',
        '{"step": 3, "validation_loss": null}',
        '{"step": 4, "loss": 3.0, "tokens_per_second": 256.0}',
        '{"step": 4, "validation_loss": 2.0}',
        '{"step": 6, "loss": 3.0, "tokens_per_second": null}',
        '{"step": 6, "validation_loss": 1.5}',
    )
    found, per_token = curve(run), flops_per_token(run.options.model).total
    assert [list(point.values()) for point in found] == [
        [2, 512, 512 * per_token, 4.0, 2.5, 3.5],
        [3, 768, 768 * per_token, None, None, None],
        [4, 1024, 1024 * per_token, 6.0, 2.0, None],
        [6, 1536, 1536 * per_token, None, 1.5, None],
    ]
    names = ["step", "tokens", "flops", "seconds", "validation_loss", "validation_bits_per_byte"]
    assert list(found[0]) == names


def test_recorded_seconds_come_before_those_by_speed(tmp_path: Path) -> None:
    """Also at a validation between two records, and after steps that were not timed."""
    run = records(
        make_run(tmp_path / "a"),
        '{"step": 2, "loss": 3.0, "tokens_per_second": 128.0, "seconds": 5.0}',
        '{"step": 3, "validation_loss": 2.5, "seconds": 7.5}',
        '{"step": 4, "validation_loss": 2.0}',
        '{"step": 6, "loss": 3.0, "tokens_per_second": 256.0}',
        '{"step": 6, "validation_loss": 1.5}',
    )
    assert [point["seconds"] for point in curve(run)] == [7.5, None, 10.5]


def test_the_ranking_has_ties_and_missing_losses(tmp_path: Path) -> None:
    losses: dict[str, list[Any]] = {
        "none": [],
        "worst": [3.0, 2.75],
        "first": [2.0, 2.5],
        "lost": [None],
        "tied": [2.5, 2.0],
    }
    paths = [make_run(tmp_path / name, losses=found) for name, found in losses.items()]
    found = [tuple(row.values()) for row in ranking(compare(paths).runs)]
    assert found == [
        (1, "first", 2.0, 0.0),
        (1, "tied", 2.0, 0.0),
        (3, "worst", 2.75, 0.75),
        (None, "none", None, None),
        (None, "lost", None, None),
    ]
    assert list(ranking(compare(paths).runs)[0]) == [
        *("rank", "name", "best_validation_loss", "difference")
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 6, "validation_loss": NaN}',
        '{"step": 6, "validation_loss": 1e308, "validation_bits_per_byte": Infinity}',
        '{"step": 6, "validation_loss": -1e308, "peak_memory": -Infinity}',
        '{"step": 6, "tokens_per_second": 1e-320, "peak_memory": 5e-324}',
        '{"step": 6, "validation_loss": 1e400, "tokens_per_second": 0}',
        '{"step": 6, "validation_loss": true, "tokens_per_second": "x"}',
    ],
)
def test_odd_numbers_are_strict_json(tmp_path: Path, line: str) -> None:
    odd, other = make_run(tmp_path / "odd"), make_run(tmp_path / "other", losses=[1e308])
    for paths in ((odd, other), (other, odd)):
        records(odd, '{"step": 6, "validation_loss": 2.0, "tokens_per_second": 1e300}', line)
        made = strict(*paths)
        assert {run["name"] for run in made["runs"]} == {"odd", "other"}
        assert len(made["ranking"]) == 2
