"""The tables and pictures of the documentation show the newest records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest
import torch

from ddl.models import GPT, GPTConfig, flops_per_token
from ddl.models.config import RESIDUALS
from docs.scripts import gpu, performance, pictures
from docs.scripts.marked import fill
from study import page

DRAWN = [(pictures.DOCS / name).read_text("utf-8") for name in pictures.PICTURES]
drawn_by_this = pytest.mark.skipif(
    not all(f"Matplotlib v{matplotlib.__version__}," in svg for svg in DRAWN),
    reason=f"the pictures were not drawn by Matplotlib {matplotlib.__version__}",
)


def test_the_pictures_are_of_the_newest_matplotlib_that_tests_use():
    """Otherwise tests of the pictures would be skipped everywhere."""
    lock = (pictures.DOCS.parent / "requirements-dev.lock").read_text("utf-8")
    *_, newest = re.findall(r"^matplotlib==(\S+)", lock, flags=re.MULTILINE)
    for svg in DRAWN:
        assert f"Matplotlib v{newest}," in svg


@pytest.mark.parametrize("script", [performance, pytest.param(pictures, marks=drawn_by_this), page])
def test_tables_and_pictures_are_current(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().out


@drawn_by_this
def test_a_changed_table_is_stale(monkeypatch, capsys):
    whole = performance.newest

    def changed(name):
        record = whole(name)
        if name == "memory":
            record["results"][1]["saved_over_additive"] += 0.1
        return record

    monkeypatch.setattr(performance, "newest", changed)
    monkeypatch.setattr(pictures, "newest", changed)
    assert performance.main(["--check"]) == 1
    assert pictures.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "docs/performance.md is not current" in out
    assert "performance-memory.svg is not current" in out
    assert "rewrite.svg" not in out


@pytest.mark.parametrize(
    "name", ["train_step", "train_step-autocast", "memory", "decode", "ops", "streams"]
)
def test_the_table_beside_a_record_is_of_it(name):
    table = (performance.RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert performance.newest(name)["commit"]["hash"][:10] in table


def test_the_record_of_streams_is_of_these_residuals():
    """Parameters and FLOPs are those of the models of today; only a time can be old."""
    record = performance.newest("streams")
    found = {result["residual"]: result for result in record["results"]}
    assert list(found) == list(RESIDUALS)
    sizes = record["config"]
    for residual, result in found.items():
        config = GPTConfig(
            residual,
            vocab_size=256,
            block_size=sizes["time"],
            num_layers=sizes["layers"],
            num_heads=sizes["heads"],
            hidden_size=sizes["hidden_size"],
        )
        if residual != "expanded":  # recorded when it was a delta stream
            assert result["flops"] == flops_per_token(config).total, residual
        with torch.device("meta"):
            assert result["parameters"] == GPT(config).num_parameters(), residual


def test_the_page_of_variants_has_every_residual():
    docs = Path(performance.__file__).parent.parent
    page = (docs / "variants.md").read_text(encoding="utf-8")
    written = re.sub(r"<!-- (.+?): begin.*?<!-- \1: end -->", "", page, flags=re.DOTALL)
    rows = re.findall(r"^\| `([a-z-]+)` \|", written, flags=re.MULTILINE)
    assert set(rows) >= set(RESIDUALS)


def test_tables_of_the_newest_run_on_a_gpu(tmp_path):
    common = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-12-01T06:00"}
    common["commit"] = {"hash": "abcdef0123"}
    step = common | {"part": "steps", "residual": "ddl-tc", "stream_dtype": "float32"}
    step |= {
        "erase": "tied",
        "default": True,
        "anchor_every": 4,
        "ratio": 0.814,
        "floor": 0.85,
        "median": 0.0791,
        "peak_bytes": 27 * 2**30,
    }
    first = step | {
        "part": "anchors",
        "default": False,
        "anchor_every": 1,
        "ratio": 0.9,
        "median": 0.075,
    }
    half = step | {"part": "bfloat16", "stream_dtype": "bfloat16", "same_ratio": 0.7, "ratio": 0.88}
    operator = common | {"part": "operators", "op": "rewrite_read", "form": "channel", "d": 768,
                         "m": 4, "state": "float32", "copy": {"gb_s": 4000.0}}  # fmt: skip
    operator |= {"forward": {"gb_s": 3600.0}, "backward": {"gb_s": 2400.0}}
    machine = common | {"part": "machine"}
    runs = [machine, step | {"ratio": 0.1}, machine, step, first, half, operator]
    text = "".join(json.dumps(line) + "\n" for line in runs)
    (tmp_path / "gpu-day.jsonl").write_text(text)
    tables = gpu.tables(tmp_path)
    steps, anchors, operators = (
        tables[f"gpu-{name}"] for name in ("steps", "anchors", "operators")
    )
    for row in (
        "| stream | N | over additions in | `ddl-tc` |",
        "| float32 | 4 (default) | float32 | 0.81 (0.85) |",
        "| float32 | 1 | float32 | 0.90 (0.85) |",
        "| bfloat16 | 4 (default) | float32 | 0.88 (0.85) |",
        "| bfloat16 | 4 (default) | bfloat16 | 0.70 |",
    ):
        assert row in steps
    assert anchors.splitlines()[2:4] == ["| 1 | 75.0 | 27.0 |", "| 4 | 79.1 | 27.0 |"]
    assert "| channel, m = 4 | float32 | 90 | 75 | 60 | 50 |" in operators
    assert steps.endswith("NVIDIA H200, torch 2.11.0, 2026-12-01, commit abcdef0: "
                          "[gpu-day.jsonl](../benchmarks/results/gpu-day.jsonl).")  # fmt: skip


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match=r"page\.md must have the marks of memory once, got 0"):
        fill("text", {"memory": "|"}, name="page.md")
