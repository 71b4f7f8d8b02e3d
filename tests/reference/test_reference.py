"""The reference's rewrite and spectra against the paper's statements, one by one.

Section and equation numbers are those of arXiv 2601.00417v1. `test_reference_read.py` tests the
read and the expansion.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddl import reference
from tests.support.tolerances import assert_close

F64 = torch.float64


class Problem(NamedTuple):
    """A rewrite: X (B, T, d, m), k (B, T, d), v (B, T, m), β (B, T), ε_k."""

    X: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    eps_k: float

    def rewrite(self) -> Tensor:
        return reference.rewrite(self.X, self.k, self.v, self.beta, eps_k=self.eps_k)

    def unit(self) -> Tensor:
        """k̂, computed independently of the code under test."""
        return self.k / (self.k.norm(dim=-1, keepdim=True) ** 2 + self.eps_k**2) ** 0.5


def make_problem(
    seed: int, B: int, T: int, d: int, m: int, dtype: torch.dtype = F64, eps_k: float = 0.0
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    beta = 2 * torch.rand(B, T, generator=g, dtype=F64)
    # k of very different lengths: only its direction may matter if eps_k is zero
    k = normal(B, T, d) * torch.exp(normal(B, T, 1))
    wide = torch.float64 if dtype == F64 else torch.float32
    return Problem(normal(B, T, d, m), k, normal(B, T, m).to(wide), beta.to(wide), eps_k)


@st.composite
def problems(
    draw: st.DrawFn, *, eps_k: float | None = 0.0, dtypes: tuple[torch.dtype, ...] = (F64,)
) -> Problem:
    seed = draw(st.integers(0, 2**31))
    B, T, d, m = draw(st.tuples(*[st.integers(1, n) for n in (3, 4, 12, 5)]))
    eps = draw(st.sampled_from([0.0, 1e-3, 0.7])) if eps_k is None else eps_k
    return make_problem(seed, B, T, d, m, draw(st.sampled_from(dtypes)), eps)


# --- the rewrite (eq. 2.5) -----------------------------------------------------------------------


@given(problems(eps_k=None))
def test_rewrite_is_the_papers_line_token_by_token(problem: Problem) -> None:
    expected = torch.empty_like(problem.X)
    for b, t in torch.cartesian_prod(*map(torch.arange, problem.beta.shape)).reshape(-1, 2):
        X, k, v, beta = problem.X[b, t], problem.unit()[b, t], problem.v[b, t], problem.beta[b, t]
        expected[b, t] = X + beta * k[:, None] * (v - k @ X)
    assert_close("X'", problem.rewrite(), expected, F64)


ALL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@given(problems(eps_k=None, dtypes=ALL), st.integers(-20, 12))
def test_beta_zero_gives_the_state_back_bit_for_bit(problem: Problem, exponent: int) -> None:
    X = (problem.X * 2.0**exponent).to(problem.X.dtype) + 0.0  # + 0.0: −0.0 would not be kept
    result = problem._replace(X=X, beta=torch.zeros_like(problem.beta)).rewrite()
    assert result.dtype == X.dtype
    bits = BITS[X.element_size()]
    assert torch.equal(result.view(bits), X.view(bits))


@given(problems(eps_k=None))
def test_beta_one_replaces_the_readout_by_the_value(problem: Problem) -> None:
    """k̂ᵀX' = vᵀ if β = 1 and ε_k = 0; otherwise the error v − k̂ᵀX shrinks by 1 − β|k̂|²."""
    k = problem.unit()
    before = problem.v - torch.einsum("btd,btdm->btm", k, problem.X)
    beta_one = problem._replace(beta=torch.ones_like(problem.beta))
    for case in (problem, beta_one):
        after = case.v - torch.einsum("btd,btdm->btm", k, case.rewrite())
        shrink = 1 - case.beta * (k.norm(dim=-1) ** 2)
        expected = shrink[..., None] * before
        assert_close("v - k'X'", after, expected, F64, scale=before.abs().max().item())
        if case is beta_one and case.eps_k == 0:
            zeros = torch.zeros_like(after)
            assert_close("v - k'X'", after, zeros, F64, scale=before.abs().max().item())


@given(problems())
def test_beta_two_with_value_zero_is_a_householder_reflection(problem: Problem) -> None:
    """§3.2: every column keeps its norm, and a second reflection undoes the first."""
    reflect = problem._replace(v=torch.zeros_like(problem.v), beta=torch.full_like(problem.beta, 2))
    once = reflect.rewrite()
    assert_close("column norms", once.norm(dim=-2), problem.X.norm(dim=-2), F64)
    assert not torch.allclose(once, problem.X)
    assert_close("reflected twice", reflect._replace(X=once).rewrite(), problem.X, F64)


@given(problems(eps_k=None))
def test_the_orthogonal_complement_of_k_is_untouched(problem: Problem) -> None:
    """uᵀX' = uᵀX for every u with kᵀu = 0 (§3.1)."""
    d = problem.k.shape[-1]
    basis = torch.cat(
        [problem.k[..., None], torch.eye(d, dtype=F64).expand(*problem.k.shape, d)], -1
    )
    complement = torch.linalg.qr(basis).Q[..., 1:d].mT  # (B, T, d-1, d), rows orthogonal to k
    after, before = complement @ problem.rewrite(), complement @ problem.X
    assert_close("u'X'", after, before, F64, scale=problem.X.abs().max().item())


@given(problems(eps_k=None))
def test_diagonal_states_are_coupled_as_in_section_3_4(problem: Problem) -> None:
    """Eq. 3.6, (A X)_ij = λ_i δ_ij − β λ_j k_i k_j for X = diag(λ), m = d; v adds β k_i v_j.

    k̂k̂ᵀX has the element k̂_i Σ_l k̂_l λ_l δ_lj = k̂_i k̂_j λ_j. It is the eigenvalue λ_j of the
    *column* that couples features i and j, so A X is not symmetric though A and X are.
    """
    B, T, d = problem.k.shape
    lam, v = torch.randn(2, B, T, d, dtype=F64, generator=torch.Generator().manual_seed(d))
    k, beta = problem.unit(), problem.beta
    expected = torch.empty(B, T, d, d, dtype=F64)
    for i in range(d):
        for j in range(d):
            erased = lam[..., i] * (i == j) - beta * lam[..., j] * k[..., i] * k[..., j]
            expected[..., i, j] = erased + beta * k[..., i] * v[..., j]
    result = problem._replace(X=torch.diag_embed(lam), v=v).rewrite()
    assert_close("X'", result, expected, F64)


def test_the_scalar_state_of_section_3_5() -> None:
    """m = 1: x' = x + γ k̂ with γ = β (v − k̂ᵀx), eq. 3.7. A one-hot k writes one feature."""
    x, k, v, beta = (
        torch.tensor([2.0, 5.0, 7.0], dtype=F64),
        torch.tensor([0.0, 3.0, 0.0]),
        1.0,
        0.5,
    )
    result = reference.rewrite(
        x[:, None], k.double(), torch.tensor([v]).double(), torch.tensor(beta).double(), eps_k=0.0
    )
    assert result[:, 0].tolist() == [2.0, 5.0 + 0.5 * (1.0 - 5.0), 7.0]


def test_eps_k_enters_as_the_third_side_of_a_triangle() -> None:
    """X = 0, v = 1, β = 1 writes k̂ itself: √(3² + 4² + 12²) = 13, without a factor d."""
    k = torch.tensor([3.0, 4.0], dtype=F64)
    state, one = torch.zeros(2, 1, dtype=F64), torch.ones(1, dtype=F64)
    written = reference.rewrite(state, k, one, one[0], eps_k=12.0)
    assert_close("k", written[:, 0], torch.tensor([3 / 13, 4 / 13], dtype=F64), F64)
    written = reference.rewrite(state, k, one, one[0], eps_k=0.0)
    assert_close("k", written[:, 0], torch.tensor([3 / 5, 4 / 5], dtype=F64), F64)


@given(st.floats(1e-6, 1e3), st.integers(0, 2**31), st.integers(1, 9), st.floats(-6, 3))
def test_eps_k_exactly(eps_k: float, seed: int, d: int, exponent: float) -> None:
    k = 10**exponent * torch.randn(d, dtype=F64, generator=torch.Generator().manual_seed(seed))
    one = torch.ones(1, dtype=F64)
    written = reference.rewrite(torch.zeros(d, 1, dtype=F64), k, one, one[0], eps_k=eps_k)
    length = math.sqrt(math.fsum([c * c for c in k.tolist()] + [eps_k * eps_k]))
    expected = torch.tensor([c / length for c in k.tolist()], dtype=F64)
    assert_close("k", written[:, 0], expected, F64)


def test_direction_zero() -> None:
    """k = 0 leaves the state unchanged, with the gradient β G v/ε_k; without ε_k it gives NaN."""
    X, k = torch.randn(4, 2, dtype=F64), torch.zeros(4, dtype=F64, requires_grad=True)
    v, beta, G = torch.randn(2, dtype=F64), torch.tensor(0.8, dtype=F64), torch.randn(4, 2).double()
    result = reference.rewrite(X, k, v, beta, eps_k=0.25)
    assert torch.equal(result, X)
    result.backward(G)
    assert_close("dk", k.grad, 0.8 * (G @ v) / 0.25, F64, gradient=True)
    assert reference.rewrite(X, k, v, beta, eps_k=0.0).isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_in_their_token(bad: float) -> None:
    problem = make_problem(3, 1, 3, 4, 2, eps_k=0.1)
    clean = problem.rewrite()
    for name in ("X", "k", "v", "beta"):
        poisoned = getattr(problem, name).clone()
        poisoned[0, 1].view(-1)[0] = bad
        result = problem._replace(**{name: poisoned}).rewrite()
        assert not result[0, 1].isfinite().all(), name
        assert torch.equal(result[0, ::2], clean[0, ::2]), name


# --- the operator's spectrum (Theorem 3.1, Corollary 3.2) ----------------------------------------


@given(problems(eps_k=None))
def test_eigenvalues_and_determinant_against_linalg(problem: Problem) -> None:
    args = (problem.k, problem.beta, problem.eps_k)
    A = reference.operator(*args)
    closed = reference.eigenvalues(*args)
    numeric = torch.linalg.eigvalsh(A)  # ascending
    assert_close("eigenvalues", numeric, closed.sort(-1).values, F64)
    if problem.eps_k == 0:
        assert_close("1 - beta", closed[..., 0], 1 - problem.beta, F64, scale=1.0)
    assert torch.equal(closed[..., 1:], torch.ones_like(closed[..., 1:]))
    assert_close("determinant", reference.determinant(*args), torch.linalg.det(A), F64, scale=1.0)


@given(problems(eps_k=None))
def test_the_operator_lifted_to_states(problem: Problem) -> None:
    """I_m ⊗ A acts on the stacked columns of X (§3.1), and its determinant is (det A)^m."""
    args, (B, T, d, m) = (problem.k, problem.beta, problem.eps_k), problem.X.shape
    A, eye = reference.operator(*args), torch.eye(m, dtype=F64)
    lifted = torch.einsum("jl,btcd->btjcld", eye, A).reshape(B, T, m * d, m * d)
    numeric, closed = torch.linalg.det(lifted), reference.determinant(*args, value_channels=m)
    assert_close("lifted determinant", closed, numeric, F64, scale=1.0)
    if problem.eps_k == 0:
        assert_close("(1 - beta)^m", closed, (1 - problem.beta) ** m, F64, scale=1.0)
    stacked = problem.X.mT.reshape(B, T, m * d, 1)
    moved = (lifted @ stacked).reshape(B, T, m, d).mT
    erased = problem._replace(v=torch.zeros_like(problem.v)).rewrite()
    assert_close("A X", erased, moved, F64)


def test_regimes_of_the_operator() -> None:
    """§3.2: β = 0 is the identity, β = 1 a projection, β = 2 a reflection."""
    k = torch.randn(5, dtype=F64)
    identity = torch.eye(5, dtype=F64)
    keep, erase, flip = (reference.operator(k, torch.tensor(b, dtype=F64)) for b in (0.0, 1.0, 2.0))
    assert torch.equal(keep, identity)
    assert_close("P P", erase @ erase, erase, F64)
    assert_close("P k", erase @ k, torch.zeros(5, dtype=F64), F64, scale=1.0)
    assert_close("H'H", flip.mT @ flip, identity, F64)
    assert_close("H k", flip @ k, -k, F64)
