"""Paired differences: seeds are paired, unfinished runs left out, one seed has no interval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.analysis.compare import compare
from ddl.lab.analysis.paired import Paired, pair, variants_of
from ddl.models import flops_per_token
from tests.lab.analysis.cases import make_run
from tests.support.train_cases import short

ADDITIVE = {1: 3.0, 2: 3.4, 3: 2.6}


def paired(
    folder: Path, variants: Mapping[str, Mapping[int, Any]], baseline: str | None = None
) -> Paired:
    """Pair runs with these losses, by variant and seed."""
    paths = [
        make_run(folder / f"{name}-s{seed}", name, losses=[loss], seed=seed)
        for name, losses in variants.items()
        for seed, loss in losses.items()
    ]
    return pair(compare(paths).runs, baseline)


def test_an_example_by_hand(tmp_path: Path) -> None:
    """Differences −0.1, −0.2, −0.3: mean −0.2, s = 0.1, and 0.1·4.303/√3 = 0.2484."""
    found = paired(tmp_path, {"additive": ADDITIVE, "ddl-cc": {2: 3.2, 1: 2.9, 3: 2.3}})
    assert found.baseline == "additive"
    additive, delta = found.variants
    assert additive.difference is None
    assert additive.loss == pytest.approx(3.0)
    assert delta.loss == pytest.approx(2.8)
    assert delta.seeds == [1, 2, 3]
    assert delta.difference == pytest.approx((-0.2, -0.4484, 0.0484), abs=1e-4)
    assert found.notes == ["At equal tokens, no difference from additive is clear: ddl-cc."]


def test_the_seeds_spread_does_not_widen_the_interval(tmp_path: Path) -> None:
    """The differences are all −0.1, however far the seeds lie apart: so one pairs."""
    found = paired(tmp_path, {"additive": ADDITIVE, "ddl": {1: 2.9, 2: 3.3, 3: 2.5}})
    assert found.variants[1].difference == pytest.approx((-0.1, -0.1, -0.1), abs=1e-9)
    assert found.notes == [
        "At equal tokens, ddl is better than additive by 0.1000 (0.1000 to 0.1000)."
    ]


def test_a_variant_that_is_worse(tmp_path: Path) -> None:
    found = paired(tmp_path, {"additive": ADDITIVE, "ddl": {1: 3.1, 2: 3.6, 3: 2.8}})
    assert found.notes[0].startswith("At equal tokens, additive is better than ddl by 0.1667 (")


def test_only_seeds_that_both_have_are_paired(tmp_path: Path) -> None:
    found = paired(tmp_path, {"additive": ADDITIVE, "ddl": {2: 3.3, 3: 2.4, 4: 9.0}})
    assert found.variants[1].seeds == [2, 3]
    assert found.variants[1].difference is not None
    assert found.variants[1].difference.mean == pytest.approx(-0.15)


def test_another_baseline(tmp_path: Path) -> None:
    found = paired(tmp_path, {"additive": ADDITIVE, "ddl": {1: 2.9}}, baseline="ddl")
    assert [d.variant for d in found.variants] == ["ddl", "additive"]
    assert found.variants[1].difference == (pytest.approx(0.1), None, None)
    with pytest.raises(
        InputError, match=r"^`baseline` must be one of additive, ddl, got 'ddl-tc'$"
    ):
        paired(tmp_path / "again", {"additive": ADDITIVE, "ddl": {1: 2.9}}, baseline="ddl-tc")


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    found = paired(tmp_path, {"additive": {1: 3.0}, "ddl": {1: 2.9}, "ddl-cc": {7: 2.0}})
    assert found.variants[1].difference == (pytest.approx(-0.1), None, None)
    assert found.variants[2].difference is None
    assert found.notes == [
        "At equal tokens, ddl differs from additive by -0.1000 in one seed.",
        "No interval with one seed: ddl. How much the seed alone changes is not known.",
        "No seed in common with additive: ddl-cc.",
    ]


def test_several_intervals_are_warned_of(tmp_path: Path) -> None:
    losses = {"additive": ADDITIVE, "ddl": ADDITIVE, "ddl-cc": ADDITIVE}
    alike, note = paired(tmp_path, losses).notes
    assert alike == "At equal tokens, no difference from additive is clear: ddl, ddl-cc."
    assert note.startswith("Each interval is for its variant alone")


def test_what_is_not_finished_is_left_out(tmp_path: Path) -> None:
    """A run that diverged, and one that has no loss yet."""
    runs = [make_run(tmp_path / f"a-s{s}", losses=[3.0], seed=s) for s in (1, 2, 3)]
    runs += [make_run(tmp_path / "b-s1", "ddl", losses=[2.5], seed=1)]
    runs += [make_run(tmp_path / "b-s2", "ddl", losses=[2.5, float("nan")], seed=2)]
    runs += [make_run(tmp_path / "b-s3", "ddl", losses=[], seed=3)]
    found = pair(compare(runs).runs)
    assert found.variants[1].seeds == [1]
    assert found.notes[-1] == "Without the runs that are not finished: 2."
    with pytest.raises(InputError, match=r"^`paired` must have runs of `ddl train` that are finis"):
        pair(compare(runs[-2:]).runs)


def test_one_variant_alone(tmp_path: Path) -> None:
    notes = paired(tmp_path, {"additive": ADDITIVE}).notes
    assert notes == ["There is one variant only, and nothing to compare it with."]


def test_a_seed_twice_is_refused(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=1) for name in ("a", "b")]
    expected = "`runs` must have each seed of a variant once, got seed 1 of additive in a and b"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        pair(compare(runs).runs)


def test_the_names_of_variants(tmp_path: Path) -> None:
    """Without the seed; of the residual, if the names tell nothing; of a run, if those clash."""
    runs = [make_run(tmp_path / f"cc-lr1-s{s}", "ddl-cc", seed=s) for s in (1, 11)]
    runs += [make_run(tmp_path / name, "ddl", seed=s) for name, s in (("first", 1), ("second", 2))]
    runs += [make_run(tmp_path / f"t{n}", "ddl-tc", seed=n, steps=9) for n in (1, 2)]
    runs += [make_run(tmp_path / f"u{n}", "ddl-tc", seed=n, batch_size=4) for n in (1, 2)]
    groups = variants_of(compare(runs).runs)
    names = {name: [run.name for run in group] for name, group in groups.items()}
    assert names == {
        "cc-lr1": ["cc-lr1-s1", "cc-lr1-s11"],
        "ddl": ["first", "second"],
        "t1": ["t1", "t2"],
        "u1": ["u1", "u2"],
    }


def test_what_the_variants_cost(tmp_path: Path) -> None:
    """FLOPs by the formula, seconds as recorded for the seeds that both have."""
    config = short(tmp_path, "additive")
    steps = round(6 * config.flops_per_step / replace(config, batch_size=4).flops_per_step)
    runs = [make_run(tmp_path / f"a-s{s}", seed=s, steps=600) for s in (1, 2)]
    runs += [make_run(tmp_path / f"b-s{s}", seed=s, steps=1200, batch_size=4) for s in (1, 2)]
    runs += [make_run(tmp_path / f"c-s{s}", "ddl-cc", seed=s, steps=400) for s in (1, 2)]
    runs += [make_run(tmp_path / f"d-s{s}", "ddl-cc", seed=s, steps=600) for s in (2, 3)]
    assert steps == 12
    for run, seconds in zip(runs, (1.0, 3.0, 2.0, 4.0, 1.0, 1.0, 6.0, 9.0), strict=True):
        lines = (
            (run / "metrics.jsonl").read_text().replace('"step"', f'"seconds": {seconds}, "step"')
        )
        (run / "metrics.jsonl").write_text(lines)
    found = pair(compare(runs).runs)
    base, half, fewer, same = found.variants
    ratio = replace(config.model, residual="ddl-cc")
    ratio = flops_per_token(ratio).total / flops_per_token(config.model).total
    assert (base.tokens, base.flops, base.seconds) == (1, 1, 1)
    assert (half.tokens, half.flops, half.seconds) == (1, pytest.approx(1), 1.5)
    assert (fewer.tokens, fewer.flops) == (pytest.approx(2 / 3), pytest.approx(ratio * 2 / 3))
    assert fewer.seconds == 0.5
    assert (same.tokens, same.flops, same.seconds) == (1, pytest.approx(ratio), 2)  # of seed 2
    assert found.notes[:3] == [
        "At equal tokens, d differs from a by +0.0000 in one seed.",
        "At equal tokens and equal FLOPs (within 1 %), no difference from a is clear: b.",
        "With other tokens and FLOPs, no difference from a is clear: c.",
    ]
    lines = (runs[0] / "metrics.jsonl").read_text().replace('"seconds": 1.0', '"seconds": 1.1')
    (runs[0] / "metrics.jsonl").write_text(lines)
    first, other = compare([runs[0], runs[4]]).runs
    assert pair([first, other]).notes[0].startswith("At equal seconds (within 10 %), ")


def test_runs_of_equal_cost_are_fair_with_other_steps(tmp_path: Path) -> None:
    """By FLOPs, which are counted, or by seconds, which are measured and so vary a little."""
    first = make_run(tmp_path / "a", steps=1000)
    model = short(tmp_path, "ddl-cc").model
    of_first = short(tmp_path, "additive").flops_per_step
    equal = round(1000 * of_first / short(tmp_path, "ddl-cc").flops_per_step)
    assert model.residual == "ddl-cc"
    assert compare([first, make_run(tmp_path / "b", "ddl-cc", steps=equal)]).notes == []
    other = make_run(tmp_path / "c", "ddl-cc", steps=500)
    (note,) = compare([first, other]).notes
    assert note == "Not a fair comparison with a: c with 500 steps, not 1,000."
    for run, seconds in ((first, 10.0), (other, 10.4)):
        lines = (
            (run / "metrics.jsonl").read_text().replace('"step"', f'"seconds": {seconds}, "step"')
        )
        (run / "metrics.jsonl").write_text(lines)
    assert compare([first, other]).notes == []


def test_options_that_change_nothing_do_not_make_a_variant(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a-s1", seed=1), make_run(tmp_path / "a-s2", seed=2, keep_every=5)]
    assert list(variants_of(compare(runs).runs)) == ["a"]
    runs += [make_run(tmp_path / "a-s3", seed=3, log_every=1)]
    assert len(variants_of(compare(runs).runs)) == 2
