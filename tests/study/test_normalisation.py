"""The study's normalisations outside the operator are what their names say."""

from __future__ import annotations

import pytest
import torch

from ddl import reference
from study.normalisation import KINDS, l2, rms, rounded
from tests.support.helpers import normal

EPS = 0.3


@pytest.mark.parametrize("kind", ["l2", "rms"])
def test_the_rewrite_goes_along_the_rounded_direction(kind: str) -> None:
    """In bfloat16, whose k̂ is not of norm 1, against X + β k̂ (vᵀ − k̂ᵀX) as it stands."""
    X, k = normal(7, 16, 4, dtype=torch.float64), normal(7, 16, seed=1).bfloat16()
    v, beta = normal(7, 4, seed=2, dtype=torch.float64), torch.rand(7, dtype=torch.float64) * 2
    k_hat = KINDS[kind](k, EPS).double()
    expected = X + beta[:, None, None] * k_hat[:, :, None] * (
        v[:, None] - (k_hat[:, :, None] * X).sum(1, keepdim=True)
    )
    direction, value, gate = rounded(KINDS[kind], k, v, beta, EPS)
    found = reference.rewrite(X, direction.double(), value, gate, eps_k=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    norms = torch.linalg.vector_norm(k_hat, dim=-1)
    inside = torch.linalg.vector_norm(k.double(), dim=-1)
    assert (norms - inside / (inside**2 + EPS**2).sqrt()).abs().max() > 1e-4  # it is rounded


def test_with_exact_numbers_they_are_the_same() -> None:
    k = normal(50, 32, dtype=torch.float64)
    exact = k / (k.square().sum(-1, keepdim=True) + EPS**2).sqrt()
    torch.testing.assert_close(l2(k, EPS), exact)
    torch.testing.assert_close(rms(k, EPS), exact)
