"""The heat maps of an inspection: what they show, and that no labels overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from ddl import DeltaStream
from ddl.errors import InputError
from ddl.lab.analysis.heat_maps import draw_depth, draw_training
from ddl.lab.analysis.inspection import Inspection, inspect
from ddl.lab.analysis.labels import labels
from tests.support.figures import saved_figure


def inspected(depth: int, **options: Any) -> Inspection:
    torch.manual_seed(0)
    stream = DeltaStream(8, [nn.Linear(8, 8) for _ in range(depth)], value_channels=2, **options)
    return inspect(stream, [torch.randn(1, 6, 8)])


def drawn(draw: Callable[[Path], None], tmp_path: Path) -> Figure:
    """The figure that is saved."""
    figure = saved_figure(lambda: draw(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    return figure


def images(figure: Figure) -> dict[str, Any]:
    """The values of each heat map by its title."""
    return {axes.get_title(): axes.images[0].get_array() for axes in figure.axes if axes.images}


def recordings(found: Inspection) -> list[dict[str, Any]]:
    return [{"step": 1000 * i, **found.recording.summary()} for i in range(1, 40)]


def test_depth_shows_what_was_measured(tmp_path: Path) -> None:
    found = inspected(5)
    shown = images(drawn(lambda path: draw_depth(found, path), tmp_path))
    eigenvalues = shown["What rewrites do: eigenvalue λ = 1 − α|k̂|²"]
    assert (np.round(eigenvalues * 6, 9) == found.recording.eigenvalue_counts().numpy()).all()
    assert np.array_equal(shown["Write survival"].filled(np.nan), found.survival, equal_nan=True)
    assert np.array_equal(shown["Coherence of directions"], found.coherence)
    channels = shown["Norm of the value channels"]
    assert (channels[:-1] == found.recording.statistics("channel_norm").mean.numpy()).all()
    after = found.recording.statistics("channel_norm_after").mean.numpy()
    assert (channels[-1] == after[-1]).all()


def test_training_shows_the_means_by_step(tmp_path: Path) -> None:
    records = recordings(inspected(3))[:2]
    records[1]["sublayers"][2]["beta"]["mean"] = None
    shown = images(drawn(lambda path: draw_training(records, path), tmp_path))
    for title, quantity in (("Gate β", "beta"), ("Error |v − p|", "error")):
        expected = [[r["sublayers"][i][quantity]["mean"] for r in records] for i in range(3)]
        values = np.array(expected, dtype=float)
        assert np.array_equal(np.ma.filled(shown[title], np.nan), values, equal_nan=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a\x1b[31m", "$x^{", "犰🙂\n", "\udcff"])
def test_a_name_of_odd_characters_is_drawn_without_a_warning(name: str, tmp_path: Path) -> None:
    records = recordings(inspected(3))[:2]
    for record in records:
        record["sublayers"][0]["name"] = name
    draw_training(records, tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 0


@pytest.mark.filterwarnings("error")
def test_a_stream_without_anything_in_it(tmp_path: Path) -> None:
    stream = DeltaStream(8, [nn.Linear(8, 8, bias=False)], value_channels=2)
    with torch.no_grad():
        stream.residuals[0].value.bias.zero_()
    found = inspect(stream, [torch.zeros(1, 6, 8)])
    assert np.isnan(found.survival).all()
    draw_depth(found, tmp_path / "picture.png")


@pytest.mark.parametrize(("broken", "after"), [(0, 1), (2, 3)])
@pytest.mark.parametrize("number", [float("nan"), 1e38])
def test_a_model_that_has_diverged_is_refused(broken: int, after: int, number: float) -> None:
    stream = DeltaStream(8, [nn.Linear(8, 8) for _ in range(3)], value_channels=2)
    with torch.no_grad():
        stream.residuals[broken].value.weight.fill_(number)
    sentence = f"^`model` must have finite states, got NaN or infinity after {after} sublayers"
    with pytest.raises(InputError, match=sentence):
        inspect(stream, [100 * torch.rand(1, 6, 8)])


@pytest.mark.parametrize("sublayers", [None, [], "abc", [3], [{"name": "other"}]])
def test_training_with_other_sublayers_is_refused(tmp_path: Path, sublayers: Any) -> None:
    records = recordings(inspected(3))[:2]
    records[1]["sublayers"] = sublayers
    with pytest.raises(ValueError, match="sublayers"):
        draw_training(records, tmp_path / "picture.png")


@pytest.mark.parametrize("mean", [1e308, "x", float("inf"), {}])
def test_training_leaves_out_what_is_no_number(tmp_path: Path, mean: Any) -> None:
    records = recordings(inspected(3))[:2]
    for record in records:
        for sublayer in record["sublayers"]:
            sublayer["beta"]["mean"] = sublayer["error"] = mean
    shown = images(drawn(lambda path: draw_training(records, path), tmp_path))
    assert np.isnan(np.ma.filled(shown["Gate β"], np.nan)).all()


@pytest.mark.table(1)
@pytest.mark.parametrize("depth", [1, 12, 96])
@pytest.mark.parametrize("training", [False, True])
def test_no_labels_overlap(depth: int, training: bool, tmp_path: Path) -> None:
    found = inspected(depth)

    def draw(path: Path) -> None:
        draw_training(recordings(found), path) if training else draw_depth(found, path)

    figure = drawn(draw, tmp_path)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [axes.title for axes in figure.axes if axes.get_title()]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            shown = axis.get_view_interval()
            ticks = [t for t in axis.get_major_ticks() if shown.min() <= t.get_loc() <= shown.max()]
            texts += [tick.label1 for tick in ticks if tick.label1.get_visible()]
            texts += [tick.label2 for tick in ticks if tick.label2.get_visible()]
            texts.append(axis.label)
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()
    ]
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} and {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text


def test_labels() -> None:
    trunk = [f"model.trunk.residuals.{i}" for i in range(3)]
    assert labels(trunk) == ["0 attn", "0 mlp", "1 attn"]
    assert labels(trunk[1:2]) == ["0 mlp"]
    blocks = ["h.0.attn.residual", "h.0.mlp.residual", "h.1.attn.residual"]
    assert labels([f"transformer.{name}" for name in blocks]) == [n[2:] for n in blocks]
    assert labels(["residual"]) == ["residual"]
    assert labels([]) == []


@pytest.mark.parametrize("names", [["a.b", "a.b"], ["a", "a.b"], ["x"], []])
def test_labels_of_equal_or_nested_names(names: list[str]) -> None:
    """Names come from files; nothing of them may be lost entirely."""
    found = labels(names)
    assert len(found) == len(names)
    assert all(found)
