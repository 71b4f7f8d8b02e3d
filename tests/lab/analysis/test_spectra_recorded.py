"""ddl.lab.analysis.spectra of what ddl.record has kept of a model."""

from __future__ import annotations

import numpy as np
import torch

import ddl
from ddl import recording
from ddl.lab.analysis import spectra
from tests.support.recording_cases import F64, B, L, T, embeddings, make, variants

KEPT = (
    "direction",
    "beta",
    "k_norm",
    "value",
    "eigenvalue",
    "coherence",
    "state",
    "state_after",
)


def kept(stream: ddl.DeltaStream, x: torch.Tensor) -> dict[str, np.ndarray]:
    """Each of KEPT (N, L, …), as views of the recorded (L, B, T, …)."""
    with ddl.record(stream, tokens=KEPT) as recorded, torch.no_grad():
        stream(x)
    return {name: recorded.tokens(name).flatten(1, 2).transpose(0, 1).numpy() for name in KEPT}


@variants
def test_spectra_of_a_recording(options):
    stream = make(options, F64)
    found = kept(stream, embeddings())
    scale = stream.residuals[0].branch_scale
    k, X0, beta = found["direction"], found["state"][:, 0], scale * found["beta"]
    alpha = beta if stream.residuals[0].erase == "tied" else 0 * beta
    assert k.shape[:2] == (B * T, L)
    assert not k.flags.c_contiguous
    norms = found["k_norm"] / np.hypot(found["k_norm"], stream.residuals[0].eps_k)
    np.testing.assert_allclose(spectra.eigenvalues(alpha, norms), found["eigenvalue"], atol=1e-12)
    np.testing.assert_allclose(spectra.coherence(k), found["coherence"], atol=1e-12)

    survival = spectra.write_survival(k, beta, found["value"], X0, erase=alpha)
    last = found["state_after"][:, -1]
    survived = X0.copy()
    for at in range(L):  # the embedding alone, by the equations
        readout = np.einsum("nd,ndm->nm", k[:, at], survived)
        survived -= alpha[:, at, None, None] * k[:, at, :, None] * readout[:, None, :]
    share = (survived * last).sum((1, 2)) / (last**2).sum((1, 2))
    np.testing.assert_allclose(survival.shares[:, 0], share, atol=1e-10)
    np.testing.assert_allclose(survival.shares.sum(1), 1, atol=1e-10)


def test_regimes_are_those_of_a_recording():
    inner = {name: bounds for name, *bounds in spectra.REGIMES}
    assert list(inner) == list(recording.REGIMES)
    for name, bounds in recording.REGIMES.items():
        np.testing.assert_array_equal(np.clip(inner[name], -1, 1), bounds)
