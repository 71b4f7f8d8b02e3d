"""`ddl report`: what the page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("plotly", reason="needs the extra `report`")

from ddl.lab.analysis.cost import CAPTION
from ddl.lab.analysis.inspection import inspect
from ddl.lab.analysis.recordings import SCALARS
from ddl.lab.analysis.report.rewrites import read_depth
from ddl.lab.train.plots import COLOURS
from ddl.lab.train.runs import load_config
from ddl.models import GPT
from ddl.recording import QUANTITIES
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.analysis.conftest import Write
from tests.lab.analysis.report_cases import add_records, three_runs
from tests.support.train_cases import short


def test_the_comparison_is_that_of_ddl_compare(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    heading, *rows = page.rows(0)
    best = [dict(zip(heading, row, strict=True))["best"] for row in rows]
    assert [row[0] for row in rows] == ["plain-s1", "full-s1", "half-s1"]
    assert best == ["2.5000", "2.2500", "2.4000"]
    assert heading[-4:] == ["tokens/s", "speed ratio", "peak memory", "memory ratio"]
    assert rows[1][-4:] == ["1,500", "1.000", "1.00 GB", "1.000"]
    assert "Not a fair comparison with plain-s1: half-s1 with 8 steps, not 6." in page.texts("li")


def test_seed_by_seed_and_accuracies(tmp_path: Path, write: Write) -> None:
    runs = [
        make_run(tmp_path / f"{residual}-s{seed}", residual, seed=seed, losses=[loss])
        for residual, loss in (("additive", 2.0), ("ddl", 1.5))
        for seed in (1, 2)
    ]
    write_evaluation(runs[0], {0: {"piqa": 60.0}})
    page = write(*runs, paired=True, baseline="ddl")
    assert page.texts("caption")[0] == "Newest evaluation, accuracy in percent, 0-shot"
    assert page.texts("caption")[1].startswith("Final validation loss, and its difference from")
    row = ["additive", "2", "2.0000", "+0.5000", "+0.5000 to +0.5000"]
    assert page.rows(2)[2] == [*row, page.rows(2)[2][5], "1.000×"]
    assert [key.text for key in page.all("button")] == ["●\ufe0eadditive", "■\ufe0eddl"]
    groups = [trace["legendgroup"] for trace in page.charts["losses"]["data"]]
    assert groups == ["0", "0", "0", "0", "1", "1", "1", "1"]


def test_the_loss_curves(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    chart = page.charts["losses"]
    training, validation = chart["data"][2:4]
    assert [training["name"], training["mode"], training["y"]] == ["full-s1", "lines", [2.9, 2.25]]
    assert [validation["x"], validation["y"]] == [[3, 6], [2.9, 2.25]]
    assert [validation["mode"], validation["marker"]["symbol"]] == ["lines+markers", "square"]
    assert training["line"]["color"] == validation["marker"]["color"] == COLOURS[1]
    assert training["line"]["width"] < validation["line"]["width"]
    assert chart["layout"]["yaxis"]["range"] == pytest.approx([2.25 - 0.0675, 3.6], abs=1e-3)
    assert [key.attributes["data-group"] for key in page.all("button")] == ["0", "1", "2"]


def test_the_losses_over_steps_tokens_flops_or_seconds(tmp_path: Path, write: Write) -> None:
    """Every trace has its place on every axis; a run that was not timed has none in seconds."""
    paths = three_runs(tmp_path)
    lines = (paths[2] / "metrics.jsonl").read_text().replace("tokens_per_second", "speed")
    (paths[2] / "metrics.jsonl").write_text(lines)
    page = write(*paths)
    chart = page.charts["losses"]
    steps, tokens, flops, seconds = chart["over"]
    titles = [axis["title"] for axis in chart["over"]]
    assert titles == ["step", "tokens", "FLOPs", "seconds of training"]
    assert page.texts("option")[:4] == titles
    count = len(chart["data"])
    assert steps["scales"] == [1] * count
    assert tokens["scales"] == [256] * count  # 8 × 32 in a step of these runs
    configs = [load_config(path) for path in paths]
    assert set(flops["scales"]) == {config.flops_per_step for config in configs}
    assert [len(x) for x in seconds["x"]] == [len(t["x"]) for t in chart["data"][:4]] + [0, 0]
    assert seconds["x"][2] == pytest.approx([3 * 256 / 1000, 3 * 256 * (1 / 1000 + 1 / 2000)])
    without = "Without seconds of training, which are not recorded: half-s1."
    assert without in page.texts("p")
    (below,) = (text for text in page.texts("p") if text.startswith("Validation losses have"))
    assert below.endswith(" ".join(CAPTION.split()))


def test_the_heat_maps_over_depth(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    eigenvalues, survival, coherence, channels = (
        page.charts[f"depth-1-{number}"]["data"][0] for number in range(4)
    )
    names = ["0 attn", "0 mlp", "1 attn", "1 mlp"]
    assert eigenvalues["y"] == coherence["x"] == coherence["y"] == names
    assert eigenvalues["x"][:2] == pytest.approx([-0.975, -0.925])
    assert [row.index(1.0) for row in eigenvalues["z"]] == [0, 1, 2, 3]
    assert survival["y"] == ["embedding", *names]
    assert survival["x"] == ["start", *names]
    assert survival["z"][1] == [None, 1.0, 0.5, 0.3333, 0.25]
    assert coherence["z"][0] == [1.0, 0.5, 0.3333, 0.25]
    assert channels["y"] == [*names, "end"]
    assert channels["z"] == [[0.0, 0.1], [1.0, 1.1], [2.0, 2.1], [3.0, 3.1], [4.0, 4.1]]
    assert all(chart["layout"]["yaxis"]["autorange"] == "reversed"
               for id, chart in page.charts.items() if id != "losses")  # fmt: skip
    sentence = "Over depth: measured by ddl inspect on 10 tokens of the held-out part of a text."
    assert sentence in page.texts("p")


def test_a_choice_of_quantities_over_training(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    over, first, second = page.all("select")
    assert over.attributes["data-chart"] == "losses"
    assert first.attributes["data-chart"] == "training-1"
    assert second.attributes["data-chart"] == "training-2"
    options = page.texts("option")[4 : 4 + len(SCALARS)]
    assert options[:3] == [SCALARS["beta"], SCALARS["error"], SCALARS["write_norm"]]
    chart = page.charts["training-1"]
    assert chart["data"][0]["x"] == ["2", "4", "6"]
    assert chart["data"][0]["z"] == chart["choices"][0]
    assert chart["choices"][0][1] == [2.1, 4.1, 6.1]
    error = 100 * list(QUANTITIES).index("error")
    assert chart["choices"][1][1] == pytest.approx([error + step for step in (2.1, 4.1, 6.1)])
    assert len(chart["choices"]) == len(options)


def test_samples_by_step(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    steps = [details for details in page.all("details") if "step" in details.text[:4]]
    assert [details.text for details in steps] == [
        "step 3 plain-s1 early text of plain-s1 full-s1 early text of full-s1",
        "step 6 plain-s1 late text of plain-s1 full-s1 late text of full-s1",
    ]
    assert ["open" in details.attributes for details in steps] == [False, True]


def test_of_many_samples_some_are_shown(tmp_path: Path, write: Write) -> None:
    run = make_run(tmp_path / "a")
    add_records(run, *({"step": step, "sample": f"text {step}"} for step in range(1, 101)))
    page = write(run)
    steps = [text for text in page.texts("summary") if text.startswith("step")]
    assert len(steps) == 30
    assert (steps[0], steps[-1]) == ("step 1", "step 100")
    assert "70 more steps with samples are in the runs' metrics.jsonl." in page.texts("p")


def test_options_that_differ_come_first(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    assert page.rows(1) == [
        ["option", "plain-s1", "full-s1", "half-s1"],
        ["model.residual", "additive", "ddl-cc", "ddl"],
        ["steps", "6", "6", "8"],
    ]
    everything = {row[0]: row[1:] for row in page.rows(2)}
    assert everything["optim.lr"] == ["0.003"] * 3
    assert everything["out"][0] == str(tmp_path / "plain-s1")
    assert page.texts("details")[-1].startswith("All options option")
    page = write(tmp_path / "plain-s1")
    assert "What differs" not in page.texts("h3")


def test_contents_link_to_what_is_there(tmp_path: Path, write: Write) -> None:
    page = write(*three_runs(tmp_path))
    links = {link.attributes["href"]: link.text for link in page.all("a")}
    ids = {f"#{e.attributes['id']}" for e in page.all("section")}
    assert set(links) == ids - {"#without"}
    assert links["#run-1"] == "Inside full-s1"
    assert len(page.texts("h1")) == 1


def test_the_charts_are_valid_for_plotly(tmp_path: Path, write: Write) -> None:
    """plotly.js ignores what it does not know, silently; plotly's classes refuse it."""
    from plotly import graph_objects

    for chart in write(*three_runs(tmp_path)).charts.values():
        graph_objects.Figure(data=chart["data"], layout=chart["layout"])
        with pytest.raises(ValueError, match="Invalid property"):
            graph_objects.Figure(data=chart["data"], layout=chart["layout"] | {"highness": 3})


def test_an_inspection_as_ddl_inspect_writes_it(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl-cc").model
    found = inspect(GPT(config), [torch.randint(256, (1, 16))])
    (tmp_path / "inspect").mkdir()
    (tmp_path / "inspect" / "inspection.json").write_text(
        json.dumps({"text": "noise", **found.summary()})
    )
    depth = read_depth(tmp_path)
    assert depth is not None
    assert (depth.text, depth.tokens) == ("noise", 16)
    assert depth.coherence == found.coherence.tolist()
    assert depth.survival[0] == found.survival[0].tolist()
    assert depth.survival[2][:2] == [None, None]
    assert all(sum(row) == pytest.approx(1) for row in depth.eigenvalues)  # type: ignore[arg-type]
    assert len(depth.channels) == 1 + 2 * config.num_layers
