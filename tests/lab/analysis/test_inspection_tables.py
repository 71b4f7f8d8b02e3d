"""How `ddl inspect` writes its figures."""

from __future__ import annotations

import pytest

from ddl.lab.analysis.inspection_tables import sentences, three_digits

REWRITES = [{"regimes": {}}]


@pytest.mark.parametrize(
    ("value", "written"),
    [(2.0, "2.00"), (0.9, "0.900"), (15.04, "15.0"), (150.4, "150"), (float("nan"), "nan")],
)
def test_three_digits(value: float, written: str) -> None:
    assert three_digits(value) == written


@pytest.mark.parametrize(
    ("share", "written"),
    [(-0.021, "it is −2% of"), (-0.004, "it is 0% of"), (0.5, "is 50% of"), (None, "is nan% of")],
)
def test_shares(share: float | None, written: str) -> None:
    summary = {"sublayers": REWRITES, "survival": [[1.0, 0.9]], "shares": [share, 0.5]}
    assert written in sentences(summary)


def test_the_text_is_named() -> None:
    summary = {"sublayers": REWRITES, "survival": [[1.0]], "shares": [1.0]}
    assert sentences({**summary, "text": "a.txt"}).endswith("\nMeasured on a.txt.")
    assert "Measured" not in sentences(summary)
