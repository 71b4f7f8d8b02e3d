"""ddl.lab.analysis.spectra against numpy's dense linear algebra and ddl.reference, in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddl import reference
from ddl.lab.analysis import spectra

CLOSE = 1e-12  # all arithmetic is in float64; the figures are at most some tens


class Rewrites(NamedTuple):
    directions: np.ndarray
    gates: np.ndarray
    values: np.ndarray
    embedding: np.ndarray


def rewrites(N=3, L=5, d=8, m=4, *, seed=0, dtype=np.float64, hard=True) -> Rewrites:
    """Random rewrites; `hard` ones have parallel and zero directions, and gates 0, 1, 2."""
    random = np.random.default_rng(seed)
    k = random.standard_normal((N, L, d))
    gates = random.uniform(0, 2, (N, L))
    if hard:
        special = zip(
            itertools.product(range(N), range(L)), itertools.cycle(range(5)), strict=False
        )
        for (n, at), kind in special:
            if kind in (1, 2) and at > 0:
                k[n, at] = (-3 if kind == 1 else 0.5) * k[n, at - 1]
            if kind == 3:
                k[n, at] = 0
            if random.random() < 0.5:
                gates[n, at] = kind % 3
    k_hat = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-4)
    values, embedding = random.standard_normal((N, L, m)), random.standard_normal((N, d, m))
    return Rewrites(*(array.astype(dtype) for array in (k_hat, gates, values, embedding)))


def operators(given: Rewrites) -> np.ndarray:
    """A (N, L, d, d) in float64, written out."""
    k, beta = given.directions.astype(np.float64), given.gates.astype(np.float64)
    outer = k[..., :, None] * k[..., None, :]
    return np.eye(k.shape[-1]) - beta[..., None, None] * outer


def product(A: np.ndarray) -> np.ndarray:
    """A_L…A_1 (N, d, d)."""
    P = np.broadcast_to(np.eye(A.shape[-1]), A[:, 0].shape)
    for at in range(A.shape[1]):
        P = A[:, at] @ P
    return P


SIZES = [(3, 5, 8, 4), (2, 1, 6, 1), (2, 9, 4, 1), (3, 6, 1, 4), (2, 24, 40, 16), (9, 3, 3, 5)]
sized = pytest.mark.parametrize("sizes", SIZES, ids=str)
typed = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@sized
@typed
def test_eigenvalues_and_determinants(sizes, dtype):
    given = rewrites(*sizes, dtype=dtype)
    norms = np.linalg.norm(given.directions.astype(np.float64), axis=-1)
    got = spectra.eigenvalues(given.gates, norms)
    A = operators(given)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.linalg.det(A), atol=CLOSE)
    other = np.linalg.eigvalsh(A)  # ascending; all but one are 1
    farthest = np.take_along_axis(other, np.abs(other - 1).argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, farthest, atol=CLOSE)
    np.testing.assert_allclose(
        spectra.determinants(got), np.linalg.det(product(A)), rtol=1e-9, atol=CLOSE
    )


def test_eigenvalues_are_those_of_the_reference():
    k, beta = torch.randn(4, 3, 7, dtype=torch.float64), 2 * torch.rand(4, 3, dtype=torch.float64)
    norms = k.norm(dim=-1).numpy()
    got = spectra.eigenvalues(beta.numpy(), norms / np.hypot(norms, 0.3))
    np.testing.assert_allclose(got, reference.determinant(k, beta, 0.3).numpy(), atol=CLOSE)
    np.testing.assert_allclose(got, reference.eigenvalues(k, beta, 0.3)[..., 0], atol=CLOSE)


def test_regimes():
    bounds = {regime.name: regime[1:] for regime in spectra.REGIMES}
    assert bounds == {
        "near-identity": (0.9, np.inf),
        "interpolating": (0.1, 0.9),
        "near-projection": (-0.1, 0.1),
        "near-reflection": (-0.9, -0.1),
        "reflection": (-np.inf, -0.9),
    }
    on_and_beside = [[1.0, 0.91], [0.9, 0.2], [0.1, 0.0], [-0.1, -0.11], [-0.9, -0.91], [-1.0, 3.0]]
    shares = spectra.regime_shares(np.array(on_and_beside))
    assert [round(12 * share) for share in shares.values()] == [3, 2, 3, 2, 2]
    assert list(shares) == list(bounds)


@sized
def test_regime_shares_are_counts(sizes):
    N, L = sizes[:2]
    got = np.random.default_rng(1).uniform(-1.2, 1.2, (N, L))
    above = [(got > bound).mean() for bound in (0.9, 0.1, -0.1, -0.9)]
    shares = spectra.regime_shares(got)
    expected = -np.diff([1, *above[::-1], 0])[::-1]
    np.testing.assert_allclose(list(shares.values()), expected, atol=CLOSE)
    assert sum(shares.values()) == pytest.approx(1, abs=CLOSE)


@sized
@typed
def test_coherence(sizes, dtype):
    directions = 7 * rewrites(*sizes, dtype=dtype).directions
    k = directions.astype(np.float64)
    norms = np.linalg.norm(k, axis=-1, keepdims=True)
    k = np.divide(k, norms, where=norms > 0, out=np.zeros_like(k))
    cosines = k @ k.swapaxes(1, 2)  # (N, L, L)
    got = spectra.coherence(directions)
    assert got.shape == (sizes[0], sizes[1] - 1)
    np.testing.assert_allclose(got, np.diagonal(cosines, 1, 1, 2), atol=CLOSE)
    np.testing.assert_allclose(
        spectra.coherence_matrix(directions), np.abs(cosines).mean(0), atol=CLOSE
    )


@sized
@typed
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_effective_rank(sizes, dtype, scale):
    N, _, d, m = sizes
    X = np.random.default_rng(2).standard_normal((N, d, m)).astype(dtype)
    X[0] = 0
    X[1] = X[1][:, :1] * np.arange(1, m + 1, dtype=dtype)  # rank one
    X *= dtype(scale)
    sigma = np.linalg.svd(X.astype(np.float64), compute_uv=False)
    share = sigma / sigma.sum(-1, keepdims=True).clip(1e-300)
    expected = np.exp(-(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum(-1))
    got = spectra.effective_rank(X)
    assert got[0] == 0
    np.testing.assert_allclose(got[1:], expected[1:], rtol=CLOSE if dtype == np.float64 else 1e-11)


def test_effective_rank_counts_equal_singular_values():
    Q, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((40, 5)))
    np.testing.assert_allclose(spectra.effective_rank(1e200 * Q[None]), 5, rtol=CLOSE)


@sized
@typed
def test_product_singular_values(sizes, dtype):
    given = rewrites(*sizes, dtype=dtype)
    (N, L, d), P = given.directions.shape, product(operators(given))
    got = spectra.product_singular_values(given.directions, given.gates)
    assert got.shape == (N, min(L, d))
    assert (np.diff(got) <= 0).all()
    everything = np.concatenate([got, np.ones((N, d - got.shape[1]))], 1)
    expected = np.linalg.svd(P, compute_uv=False)
    np.testing.assert_allclose(-np.sort(-everything), expected, atol=CLOSE)
    determinant = np.abs(spectra.determinants(np.linalg.det(operators(given))))
    np.testing.assert_allclose(got.prod(1), determinant, atol=1e-9)


def test_nearly_parallel_directions_keep_their_accuracy():
    """A Gram matrix would lose an angle of 1e-9: its cosine is 1 to rounding."""
    angle = 1e-9
    k = np.array([[[1.0, 0.0, 0.0], [np.cos(angle), np.sin(angle), 0.0]]])
    got = spectra.product_singular_values(k, np.array([[1.0, 1.0]]))
    # (I − k₂k₂ᵀ)(I − k₁k₁ᵀ) in the plane: cos(angle) and 0
    np.testing.assert_allclose(got, [[1.0, 0.0]], atol=1e-15)
    turned = np.array([[[1.0, 0.0, 0.0], [np.cos(angle), np.sin(angle), 0.0]] * 3])
    gates = np.array([[2.0, 2.0, 2.0, 2.0, 1.0, 0.0]])  # rotations, then a projection
    got = spectra.product_singular_values(turned, gates)
    np.testing.assert_allclose(got, [[1.0, 1.0, 0.0]], atol=1e-15)


@sized
@typed
@pytest.mark.parametrize("tied", [True, False])
def test_write_survival(sizes, dtype, tied):
    given = rewrites(*sizes, dtype=dtype)
    N, L = sizes[:2]
    erase = None if tied else (2 - given[1])[:, ::-1].copy()
    A = operators(given if tied else given._replace(gates=erase))
    k, beta, v, X0 = (array.astype(np.float64) for array in given)
    left = [X0]  # of each source
    norms = np.zeros((N, L + 1, L + 1))
    norms[:, 0, 0] = np.linalg.norm(X0, axis=(1, 2))
    for at in range(L):
        written = beta[:, at, None, None] * k[:, at, :, None] * v[:, at, None, :]
        left = [A[:, at] @ source for source in left] + [written]
        for s, source in enumerate(left):
            norms[:, at + 1, s] = np.linalg.norm(source, axis=(1, 2))
    last = sum(left)
    shares = np.stack([(source * last).sum((1, 2)) for source in left], 1)
    shares /= (last**2).sum((1, 2))[:, None]
    got = spectra.write_survival(*given, erase=erase)
    np.testing.assert_allclose(got.norms, norms, atol=CLOSE)
    np.testing.assert_allclose(got.shares, shares, atol=1e-10)
    np.testing.assert_allclose(got.shares.sum(1), 1, atol=1e-10)
    mean = spectra.write_survival(*given, erase=erase, mean=True)
    np.testing.assert_allclose(mean.norms, norms.mean(0), atol=CLOSE)
    np.testing.assert_allclose(mean.shares, shares.mean(0), atol=1e-10)


@sized
def test_sources_add_up_to_the_state_of_the_reference(sizes):
    """The shares give ⟨source, X_L⟩; with the reference's X_L that has to be the same number."""
    given = rewrites(*sizes, hard=False)
    k, beta, v, X = (torch.from_numpy(array) for array in given)
    for at in range(sizes[1]):
        X = reference.rewrite(X, k[:, at], v[:, at], beta[:, at], eps_k=0.0)
    # reference normalises again, so the directions have to be of norm 1 here
    unit = given.directions / np.linalg.norm(given.directions, axis=-1, keepdims=True)
    left = torch.from_numpy(given.embedding)
    for at in range(sizes[1]):
        left = reference.rewrite(left, k[:, at], 0 * v[:, at], beta[:, at], eps_k=0.0)
    got = spectra.write_survival(unit, *given[1:])
    np.testing.assert_allclose(got.norms[:, -1, 0], left.norm(dim=(1, 2)), atol=CLOSE)
    expected = (left * X).sum((1, 2)) / X.square().sum((1, 2))
    np.testing.assert_allclose(got.shares[:, 0], expected, atol=1e-10)
    # one write alone, without an embedding: what survives of it is the state
    for at in {0, sizes[1] - 1}:
        alone = np.zeros_like(given.values)
        alone[:, at] = given.values[:, at]
        state = torch.zeros_like(X)
        for n in range(sizes[1]):
            value = torch.from_numpy(alone[:, n])
            state = reference.rewrite(state, k[:, n], value, beta[:, n], eps_k=0.0)
        np.testing.assert_allclose(got.norms[:, -1, at + 1], state.norm(dim=(1, 2)), atol=CLOSE)


def test_a_zero_state_has_no_shares():
    given = rewrites(2, 3, 4, 1)
    given.values[0], given.embedding[0] = 0, 0
    got = spectra.write_survival(*given)
    assert not got.shares[0].any()
    assert not got.norms[0].any()
    assert got.shares[1].sum() == pytest.approx(1)


@settings(max_examples=40)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 7, 7, 3))),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_properties(sizes, seed, dtype):
    given = rewrites(*sizes, seed=seed, dtype=dtype)
    L, d = sizes[1:3]
    values = spectra.product_singular_values(given.directions, given.gates)
    assert (values <= 1 + 1e-6).all()  # contractions; float32 directions may be longer than 1
    expected = np.linalg.norm(product(operators(given)), axis=(1, 2)) ** 2
    np.testing.assert_allclose((values**2).sum(1) + d - min(L, d), expected, atol=1e-10)
    survival = spectra.write_survival(*given)
    later = survival.norms[:, 1:] - survival.norms[:, :-1]
    for s in range(L + 1):  # nothing grows once it is written
        assert (later[:, s:, s] <= 1e-5 * (1 + survival.norms[:, s, s, None])).all()
    ranks = spectra.effective_rank(given.embedding)
    assert (ranks >= 1 - CLOSE).all()
    assert (ranks <= min(given.embedding.shape[1:]) + CLOSE).all()
    assert (np.abs(spectra.coherence(given.directions)) <= 1).all()
