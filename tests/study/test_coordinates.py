"""The slopes of sizes over width and depth, at small sizes, and the command that prints them."""

from __future__ import annotations

from functools import partial

import pytest

from study import coordinates
from tests.support.sampling import few


@pytest.mark.parametrize("residual", few(["additive", "ddl", "ddl-cc", "ddl-tc"], "ddl-cc"))
def test_sizes_stay_as_derived(residual):
    """The coordinate check at small sizes; in the standard parameterization sizes do not stay."""
    slopes = list(coordinates.check([residual], widths=(64, 256), depths=(2, 8), seeds=(0,)))
    for slope in slopes:
        if slope.parameterization != "standard":
            # One seed and two places; docs/transfer.md has the slopes at the study's sizes.
            assert abs(slope.found - slope.derived) < 0.15, slope
    off = {(s.over, s.quantity) for s in slopes if s.parameterization == "standard" and not s.near}
    assert ("width", "Δ logit of the label") in off
    assert ("depth", "first write / state") in off


@pytest.mark.parametrize(("near", "status"), [(9.0, 0), (0.0, 1)])
def test_the_command(near, status, monkeypatch, capsys):
    """Every slope is printed, and the status is 1 if one is not near."""
    monkeypatch.setattr(coordinates, "NEAR", near)
    small = {"widths": (64, 128), "depths": (2, 4), "seeds": (0,)}
    monkeypatch.setattr(coordinates, "STEPS", 1)
    monkeypatch.setattr(coordinates, "check", partial(coordinates.check, **small))
    assert coordinates.main(["--residuals", "ddl", "--device", "cpu"]) == status
    shown = capsys.readouterr().out
    assert shown.count("width") == 6 + 8  # quantities of additive and of ddl
    assert ("not near" in shown) == bool(status)


def test_a_residual_without_rules_is_refused_before_training(monkeypatch, capsys):
    monkeypatch.setattr(coordinates, "check", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as stopped:
        coordinates.main(["--residuals", "ddl", "mhc"])
    assert stopped.value.code == 2
    assert "--residuals: mhc has no rules for its sizes: `parameterization` must be left" in (
        capsys.readouterr().err
    )
