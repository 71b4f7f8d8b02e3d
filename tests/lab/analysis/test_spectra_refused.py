"""The sentences of ddl.lab.analysis.spectra."""

from __future__ import annotations

import numpy as np
import pytest

from ddl.errors import InputError
from ddl.lab.analysis import spectra
from tests.lab.analysis.test_spectra import rewrites

GOOD = rewrites(2, 3, 4, 2)


def with_nan(array: np.ndarray, number: float = np.nan) -> np.ndarray:
    array = array.copy()
    array[(1, *[0] * (array.ndim - 1))] = number
    return array


k, beta, v, X0 = GOOD
REFUSED = {
    "NaN direction": (
        lambda: spectra.coherence(with_nan(k)),
        "`directions` must be finite, got NaN for token 1",
    ),
    "infinite gate": (
        lambda: spectra.product_singular_values(k, with_nan(beta, -np.inf)),
        "`gates` must be finite, got -inf for token 1",
    ),
    "NaN value": (
        lambda: spectra.write_survival(k, beta, with_nan(v), X0),
        "`values` must be finite, got NaN for token 1",
    ),
    "NaN embedding, mean": (
        lambda: spectra.write_survival(k, beta, v, with_nan(X0), mean=True),
        "`embedding` must be finite, got NaN for token 1",
    ),
    "NaN state": (
        lambda: spectra.effective_rank(with_nan(X0)),
        "`states` must be finite, got NaN for token 1",
    ),
    "NaN eigenvalue": (
        lambda: spectra.regime_shares(with_nan(beta)),
        "`eigenvalues` must be finite, got NaN for token 1",
    ),
    "NaN in a matrix": (
        lambda: spectra.coherence_matrix(with_nan(k)),
        "`directions` must be finite, got NaN for token 1",
    ),
    "NaN in a determinant": (
        lambda: spectra.determinants(with_nan(beta)),
        "`eigenvalues` must be finite, got NaN for token 1",
    ),
    "long norm": (
        lambda: spectra.eigenvalues(beta, with_nan(0 * beta, 1.5)),
        "`norms` must be norms of k̂ = k/√(|k|² + ε_k²), from 0 to 1, got 1.5 for token 1",
    ),
    "negative norm": (
        lambda: spectra.eigenvalues(beta, with_nan(0 * beta, -0.5)),
        "`norms` must be norms of k̂ = k/√(|k|² + ε_k²), from 0 to 1, got -0.5 for token 1",
    ),
    "raw direction": (
        lambda: spectra.product_singular_values(with_nan(0 * k, 3), beta),
        "`directions` must be k̂ = k/√(|k|² + ε_k²), of norm 1 or less, got 3 for token 1",
    ),
    "raw direction, survival": (
        lambda: spectra.write_survival(with_nan(0 * k, 3), beta, v, X0),
        "`directions` must be k̂ = k/√(|k|² + ε_k²), of norm 1 or less, got 3 for token 1",
    ),
    "gates of other tokens": (
        lambda: spectra.product_singular_values(k, beta[:1]),
        "`gates` must have shape (2, 3), got (1, 3)",
    ),
    "norms of other sublayers": (
        lambda: spectra.eigenvalues(beta, beta[:, 1:]),
        "`norms` must have shape (2, 3), got (2, 2)",
    ),
    "embedding of another width": (
        lambda: spectra.write_survival(k, beta, v, X0[:, 1:]),
        "`embedding` must have shape (2, 4, 2), got (2, 3, 2)",
    ),
    "values of other sublayers": (
        lambda: spectra.write_survival(k, beta, v[:, 1:], X0),
        "`values` must have shape (2, 3, m), got (2, 2, 2)",
    ),
    "too few axes": (
        lambda: spectra.coherence(k[0]),
        "`directions` must have shape (N, L, d), got (3, 4)",
    ),
    "too many axes": (
        lambda: spectra.determinants(k),
        "`eigenvalues` must have shape (N, L), got (2, 3, 4)",
    ),
    "no sublayers": (
        lambda: spectra.coherence(k[:, :0]),
        "`directions` must have shape (N, L, d) with at least one element per token, got (2, 0, 4)",
    ),
    "no width": (
        lambda: spectra.effective_rank(X0[..., :0]),
        "`states` must have shape (N, d, m) with at least one element per token, got (2, 4, 0)",
    ),
    "nothing to average": (
        lambda: spectra.write_survival(k[:0], beta[:0], v[:0], X0[:0], mean=True),
        "`directions` must have at least one token to average over, got none",
    ),
    "no matrix": (
        lambda: spectra.coherence_matrix(k[:0]),
        "`directions` must have at least one token to average over, got none",
    ),
    "no shares": (
        lambda: spectra.regime_shares(beta[:0]),
        "`eigenvalues` must have at least one element, got none",
    ),
    "no threads": (
        lambda: spectra.coherence(k, threads=0),
        "`threads` must be an integer of at least 1, got 0",
    ),
    "threads that are none": (
        lambda: spectra.coherence(k, threads="2"),
        "`threads` must be an integer of at least 1, got '2'",
    ),
}
REFUSED_TYPES = {
    "list": (
        lambda: spectra.coherence(k.tolist()),
        "`directions` must be a numpy array, got builtins.list",
    ),
    "half": (
        lambda: spectra.effective_rank(X0.astype(np.float16)),
        "`states` must have dtype float32 or float64, got float16",
    ),
    "integers": (
        lambda: spectra.product_singular_values(k, beta.astype(int)),
        "`gates` must have dtype float32 or float64, got int64",
    ),
    "other byte order": (
        lambda: spectra.coherence(k.astype(">f8")),
        "`directions` must have dtype float32 or float64, got >f8",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(call, sentence):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == sentence


@pytest.mark.parametrize(("call", "sentence"), REFUSED_TYPES.values(), ids=REFUSED_TYPES)
def test_refused_types(call, sentence):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == sentence
