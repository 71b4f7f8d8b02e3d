"""`inspect` against dense matrices, from the rewrites of `ddl.reference`, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import ddl
from ddl.lab.analysis.inspection import Inspection, inspect
from ddl.lab.analysis.inspection_tables import audit_table, three_digits
from tests.support.recording_cases import B, D, L, Rewrite, T, by_hand, embeddings, make, variants

WINDOWS = (0, 1, 2)  # seeds
Array = Any
F64 = torch.float64


@pytest.fixture(scope="module", params=["tied", "none"])
def inspected(request: pytest.FixtureRequest) -> tuple[Inspection, list[list[Rewrite]]]:
    options = {"value_channels": 3, "expand": "conv", "eps_k": 0.3, "erase": request.param}
    stream = make(options)
    windows = [embeddings(seed=seed) for seed in WINDOWS]
    return inspect(stream, windows), [list(by_hand(stream, x)) for x in windows]


def tokens(windows: list[list[Rewrite]]) -> list[list[Rewrite]]:
    """The rewrites of every token."""
    return [
        [Rewrite(*(t[b, t_] for t in rewrite)) for rewrite in rewrites]
        for rewrites in windows
        for b, t_ in itertools.product(range(B), range(T))
    ]


def k_hat(rewrite: Rewrite) -> Array:
    k = rewrite.direction.numpy()
    return k / np.sqrt(k @ k + 0.3**2)


def operator(rewrite: Rewrite) -> Array:
    return np.eye(D) - rewrite.erase.numpy() * np.outer(k_hat(rewrite), k_hat(rewrite))


def test_coherence(inspected: tuple[Inspection, list[list[Rewrite]]]) -> None:
    found, windows = inspected
    expected = np.zeros((L, L))
    for rewrites in tokens(windows):
        k = np.stack([k_hat(r) for r in rewrites])
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        expected += abs(k @ k.T) / (B * T * len(WINDOWS))
    np.testing.assert_allclose(found.coherence, expected, atol=1e-12)


def test_effective_rank(inspected: tuple[Inspection, list[list[Rewrite]]]) -> None:
    found, windows = inspected
    expected = np.zeros(L + 1)
    for rewrites in tokens(windows):
        states = [r.state.numpy() for r in rewrites] + [rewrites[-1].after.numpy()]
        for i, state in enumerate(states):
            p = np.linalg.svd(state, compute_uv=False)
            p /= p.sum()
            expected[i] += np.exp(-(p * np.log(p)).sum()) / (B * T * len(WINDOWS))
    np.testing.assert_allclose(found.effective_rank, expected, rtol=1e-9)


def test_singular_values(inspected: tuple[Inspection, list[list[Rewrite]]]) -> None:
    found, windows = inspected
    all_of = []
    for rewrites in tokens(windows):
        product = np.eye(D)
        for rewrite in rewrites:
            product = operator(rewrite) @ product
        values = np.linalg.svd(product, compute_uv=False)
        far = sorted(values, key=lambda value: -abs(value - 1))[:L]  # the others are 1
        all_of.append(sorted(far, reverse=True))
    expected = np.quantile(np.array(all_of), (0.1, 0.5, 0.9), axis=0)
    np.testing.assert_allclose(found.singular_values, expected, atol=1e-9)


def survival_and_shares(windows: list[list[Rewrite]]) -> tuple[Array, Array]:
    norms, shares = np.zeros((L + 1, L + 1)), np.zeros(L + 1)
    for rewrites in tokens(windows):
        sources = [rewrites[0].state.numpy()]
        norms[0, 0] += np.linalg.norm(sources[0])
        for n, rewrite in enumerate(rewrites, start=1):
            sources = [operator(rewrite) @ source for source in sources]
            sources.append(rewrite.gate.numpy() * np.outer(k_hat(rewrite), rewrite.value.numpy()))
            norms[: n + 1, n] += [np.linalg.norm(source) for source in sources]
        last = rewrites[-1].after.numpy()
        np.testing.assert_allclose(sum(sources), last, atol=1e-12)
        shares += [(source * last).sum() / (last * last).sum() for source in sources]
    return norms / norms.diagonal()[:, None], shares / (B * T * len(WINDOWS))


def test_survival_and_shares(inspected: tuple[Inspection, list[list[Rewrite]]]) -> None:
    found, windows = inspected
    survival, shares = survival_and_shares(windows)
    upper = np.triu(np.ones_like(survival)) > 0
    np.testing.assert_allclose(found.survival[upper], survival[upper], rtol=1e-9)
    assert np.isnan(found.survival[~upper]).all()
    np.testing.assert_allclose(found.shares, shares, atol=1e-9)
    assert found.shares.sum() == pytest.approx(1)


def test_the_audit(inspected: tuple[Inspection, list[list[Rewrite]]]) -> None:
    """Discrepancies before and after, what is erased later and by whom, as `ddl inspect` prints."""
    found, windows = inspected
    survival, _ = survival_and_shares(windows)
    table = audit_table(found.summary())
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert list(columns) == ["sublayer", "before", "after", "shrinks", "erased", "most by"]
    for i in range(L):
        rewrites = [each[i] for each in tokens(windows)]
        before, after = (
            np.array(
                [
                    np.linalg.norm(r.value.numpy() - k_hat(r) @ X.numpy())
                    for r, X in zip(rewrites, states, strict=True)
                ]
            )
            for states in ([r.state for r in rewrites], [r.after for r in rewrites])
        )
        assert columns["before"][i] == three_digits(before.mean())
        assert columns["after"][i] == three_digits(after.mean())
        assert columns["shrinks"][i] == f"{(after < before).mean():.0%}"
        left = survival[i + 1, i + 1 :]
        assert columns["erased"][i] == f"{1 - left[-1]:.0%}"
        drops = left[:-1] - left[1:]
        if len(drops) == 0 or drops.max() <= 0:
            assert columns["most by"][i] == "–"
        else:
            name = f"{i + 1 + int(drops.argmax())}"
            assert columns["most by"][i].split()[-2:] == [name, f"{drops.max():.0%}"]


@variants
def test_every_variant_is_measured(options: dict[str, Any]) -> None:
    """The figures that hold for any rewrites, in float32, in summary, too."""
    stream = make(options, dtype=torch.float32)
    x = embeddings(dtype=torch.float32)
    steps = []
    found = inspect(stream, [x], progress=lambda: steps.append(1))
    assert steps == [1]
    assert len(found.recording) == B * T
    assert found.coherence.diagonal() == pytest.approx(np.ones(L), abs=1e-5)
    assert ((found.effective_rank >= 1 - 1e-6) & (found.effective_rank <= 3 + 1e-6)).all()
    assert found.survival.diagonal() == pytest.approx(np.ones(L + 1))
    assert not (np.diff(found.survival, axis=1) > 1e-6).any()  # no rewrite lengthens anything
    assert found.shares.sum() == pytest.approx(1)
    assert found.singular_values.max() <= 1 + 1e-6
    with ddl.record(stream) as recording:
        stream(x)
    assert found.recording.summary() == recording.summary()
    summary = found.summary()
    assert summary["survival"][1][0] is None
    assert summary["survival"][0][0] == 1.0
    assert [sublayer["name"] for sublayer in summary["sublayers"]] == recording.sublayers


def test_several_rewrites_of_a_sublayer_count_as_several() -> None:
    stream = make({"value_channels": 3, "rewrites": 2})
    found = inspect(stream, [embeddings()])
    assert found.coherence.shape == (2 * L, 2 * L)
    assert len(found.effective_rank) == 2 * L + 1
    assert found.survival.shape == (2 * L + 1, 2 * L + 1)
    assert found.shares.sum() == pytest.approx(1)
    assert not (np.diff(found.survival, axis=1) > 1e-6).any()
    names = [f"residuals.{i}.{j}" for i in range(L) for j in range(2)]
    assert [sublayer["name"] for sublayer in found.summary()["sublayers"]] == names
    with ddl.record(stream, tokens=("direction", "beta")) as recording:
        stream(embeddings())
    k, beta = (recording.tokens(n).flatten(1, 2).double() for n in ("direction", "beta"))
    product = torch.eye(D, dtype=F64).expand(B * T, D, D)
    for row in range(2 * L):
        step = torch.eye(D, dtype=F64) - beta[row][:, None, None] * torch.einsum(
            "ni,nj->nij", k[row], k[row]
        )
        product = step @ product
    values = torch.linalg.svdvals(product).numpy()
    wanted = np.quantile(values, (0.1, 0.5, 0.9), axis=0)
    np.testing.assert_allclose(found.singular_values, wanted[:, D - 2 * L :], atol=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    stream = make({"value_channels": 3})
    stream.train()
    x = embeddings()
    before = stream(x)
    modes: list[bool] = []
    hook = stream.sublayers[0].register_forward_hook(lambda *_: modes.append(stream.training))
    inspect(stream, [x])
    hook.remove()
    assert modes == [False]  # dropout is off
    assert stream.training
    assert torch.equal(stream(x), before)
    assert not any(residual.hooks for residual in stream.residuals)


def test_what_cannot_be_inspected() -> None:
    with pytest.raises(ValueError, match=r"^`windows` must have at least one window, got none$"):
        inspect(make({}), [])
    with pytest.raises(ValueError, match=r"^`model` must have a DeltaResidual or a stream"):
        inspect(torch.nn.Linear(2, 2), [torch.zeros(2)])
