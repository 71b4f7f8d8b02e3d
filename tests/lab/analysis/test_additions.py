"""`inspect` of models without rewrites, against sums over sources in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ddl.lab.analysis.heat_maps import draw_depth, draw_training
from ddl.lab.analysis.inspection import inspect
from ddl.lab.analysis.inspection_tables import depth_table, sentences
from ddl.lab.analysis.spectra import effective_rank
from tests.recording.test_additions import by_hand, make, plain
from tests.support import hf_cases
from tests.support.figures import saved_figure
from tests.support.recording_cases import F64

L = 4
SINGLE = ("additive", "additive-conv")  # streams of additions, which keep all that is written


@plain
def test_it_equals_the_sum_over_sources(residual: str) -> None:
    """The rest of every source is followed as a whole state (B, T, d, n)."""
    model = make(residual)
    windows = [hf_cases.tokens(2, 5), hf_cases.tokens(2, 5) + 1]
    found = inspect(model, windows)
    norms, shares = torch.zeros(L + 1, L + 1, dtype=F64), torch.zeros(L + 1, dtype=F64)
    cosines, ranks = torch.zeros(L, L, dtype=F64), np.zeros(L + 1)
    for idx in windows:
        steps = by_hand(model, idx)
        for at, X in enumerate([steps[0].state, *(step.after for step in steps)]):
            ranks[at] += effective_rank(X.flatten(0, 1).numpy()).mean() / 2
        left = [steps[0].state]
        norms[0, 0] += left[0].flatten(-2).norm(dim=-1).mean() / 2
        for after, step in enumerate(steps, start=1):
            left = [state @ step.mix for state in left]
            left.append(step.written[..., None] * step.join[..., None, :])
            for source, state in enumerate(left):
                norms[source, after] += state.flatten(-2).norm(dim=-1).mean() / 2
        last = steps[-1].after
        torch.testing.assert_close(sum(left), last)
        along = torch.stack([(state * last).sum((-1, -2)) for state in left])
        shares += (along / last.square().sum((-1, -2))).flatten(1).mean(1) / 2
        units = torch.stack([s.written / s.written.norm(dim=-1, keepdim=True) for s in steps])
        cosines += torch.einsum("ibtd,jbtd->ijbt", units, units).abs().flatten(2).mean(2) / 2
    np.testing.assert_allclose(found.shares, shares, atol=1e-10)
    np.testing.assert_allclose(found.coherence, cosines, atol=1e-10)
    assert found.shares.sum() == pytest.approx(1)
    assert found.singular_values is None
    if residual in SINGLE:
        assert found.survival is found.effective_rank is None
    else:
        wanted = (norms / norms.diagonal()[:, None]).numpy()
        upper = np.triu(np.ones_like(wanted)) > 0
        assert found.survival is not None
        assert found.effective_rank is not None
        np.testing.assert_allclose(found.survival[upper], wanted[upper], rtol=1e-10)
        assert np.isnan(found.survival[~upper]).all()
        np.testing.assert_allclose(found.effective_rank, ranks, rtol=1e-10)
        assert found.effective_rank[0] == pytest.approx(1)  # all streams are equal at first
        assert found.effective_rank[-1] > 1


@plain
def test_tables_and_pictures_have_no_empty_part(residual: str, tmp_path: Path) -> None:
    found = inspect(make(residual), [hf_cases.tokens(2, 5)])
    summary = found.summary()
    table = depth_table(summary)
    headings = [column.header for column in table.columns]
    several = ["rank", "left"] if residual not in SINGLE else []
    assert headings == ["sublayer", "write", "|X|", "cosine", *several, "share"]
    assert all("nan" not in str(cell) for column in table.columns for cell in column.cells)
    text = sentences(summary)
    assert "β" not in text
    assert ("left: of the write" in text) == (residual not in SINGLE)
    figure = saved_figure(lambda: draw_depth(found, tmp_path / "depth.png"))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    streams = ["Write survival", "Coherence of what sublayers add", "Norm of the streams"]
    assert titles == [
        "Norm of the write (dark) and of the stream after it",
        *(streams if residual not in SINGLE else streams[1:2]),
    ]
    bars = [patch.get_width() for patch in figure.axes[0].patches]
    np.testing.assert_allclose(bars[1 : L + 1], found.recording.statistics("state_norm_after").mean)
    np.testing.assert_allclose(bars[L + 1 :], found.recording.statistics("write_norm").mean)
    records = [{"step": step, **found.recording.summary()} for step in (1, 2)]
    figure = saved_figure(lambda: draw_training(records, tmp_path / "training.png"))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["Norm of the write", "Norm of the stream after it"]
