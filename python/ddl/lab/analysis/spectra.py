"""Spectra, coherence and survival of the rewrites of N tokens over L sublayers, in float64.

    X' = A X + β k̂ vᵀ    A = I − β k̂k̂ᵀ    k̂ = k/√(|k|² + ε_k²)    X: (d, m)  v: (m,)  β ∈ [0, 2]

(Deep Delta Learning, arXiv 2601.00417, eq. 2.3 to 2.5.) Common arguments:

directions: k̂ (N, L, d), of norm 1 or slightly less; up to 1.01 is accepted, because rounding to
bfloat16 lengthens some. gates: β (N, L). values: v (N, L, m).
embedding: X_0 (N, d, m), the states before the first rewrite.
threads: the number of threads; None for torch's. Results are the same to the bit with any number.

Inputs are numpy arrays of float32 or float64, which may be mixed. They are read in place, token by
token, whatever their strides: a transposed view or a read-only memory map is not copied. All
arithmetic is in float64, Python's lock is released, and results are new float64 arrays. N may be 0
unless a figure is a mean over tokens; L, d and m are at least 1.

Raises TypeError for an input that is no numpy array or of another dtype, InputError for a wrong
shape, a number that is not finite, or a direction longer than 1.01. The functions need numpy, which
the extra `train` installs.

For a model, with the N = B·T tokens of its input:

    with ddl.record(model, tokens=("direction", "beta", "value", "state")) as recording:
        model(idx)
    k, beta, v, X = (
        recording.tokens(name).flatten(1, 2).transpose(0, 1).numpy()  # (N, L, …)
        for name in ("direction", "beta", "value", "state")
    )
    spectra.product_singular_values(k, beta)
    spectra.write_survival(k, beta, v, X[:, 0], mean=True)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ddl import _native
from ddl.errors import InputError

try:
    import numpy as np
    import numpy.typing as npt
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`ddl.lab.analysis.spectra` needs numpy: pip install 'ddl-rs[train]'", name="numpy"
    ) from error

__all__ = [
    "REGIMES",
    "Regime",
    "WriteSurvival",
    "coherence",
    "coherence_matrix",
    "determinants",
    "effective_rank",
    "eigenvalues",
    "product_singular_values",
    "regime_shares",
    "write_survival",
]

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Float64 = npt.NDArray[np.float64]


class Regime(NamedTuple):
    """A range of eigenvalues; a bound between two regimes belongs to the one nearer to 0."""

    name: str
    lower: float
    upper: float


REGIMES = tuple(Regime(*regime) for regime in _native.regimes())
"""The regimes of an eigenvalue λ, from identity to reflection:

near-identity λ > 0.9 | interpolating 0.1 < λ ≤ 0.9 | near-projection −0.1 ≤ λ ≤ 0.1 |
near-reflection −0.9 ≤ λ < −0.1 | reflection λ < −0.9
"""


class WriteSurvival(NamedTuple):
    """How much of the embedding (source 0) and of write l (source l) is left; see `write_survival`.

    norms: (N, L + 1, L + 1), norms[:, n, s] for source s after n rewrites; 0 before it is written.
    shares: (N, L + 1), of the last state; they sum to 1. Means over tokens have no axis N.
    """

    norms: Float64
    shares: Float64


def eigenvalues(gates: Floats, norms: Floats, *, threads: int | None = None) -> Float64:
    """λ = 1 − β|k̂|² (N, L), the one eigenvalue of A that differs from 1 (Thm. 3.1).

    It is also the determinant of a rewrite on one value channel. norms: |k̂| (N, L). From |k| it is
    |k|/√(|k|² + ε_k²), in numpy `k / np.hypot(k, eps_k)`.
    """
    sizes = _Sizes()
    arrays = [sizes.check("gates", gates, "N L"), sizes.check("norms", norms, "N L")]
    output = np.empty((sizes["N"], sizes["L"]))
    _run(_native.eigenvalues, *arrays, output, threads=threads)
    return output


def determinants(eigenvalues: Floats, *, threads: int | None = None) -> Float64:
    """The determinants (N,) of A_L…A_1 on one value channel: products of λ (N, L) over depth.

    On all m value channels a determinant is that to the power m (Cor. 3.2).
    """
    sizes = _Sizes()
    array = sizes.check("eigenvalues", eigenvalues, "N L")
    output = np.empty(sizes["N"])
    _run(_native.determinants, array, output, threads=threads)
    return output


def regime_shares(eigenvalues: Floats, *, threads: int | None = None) -> dict[str, float]:
    """The share of eigenvalues λ (N, L) in each regime, by its name in `REGIMES`; they sum to 1.

    Raises InputError if there are no eigenvalues. For the shares of one sublayer pass a slice, as
    in `eigenvalues[:, 3:4]`.
    """
    array = _Sizes().check("eigenvalues", eigenvalues, "N L")
    shares = _run(_native.regime_shares, array, threads=threads)
    return {regime.name: share for regime, share in zip(REGIMES, shares, strict=True)}


def coherence(directions: Floats, *, threads: int | None = None) -> Float64:
    """The cosines (N, L − 1) of each direction with the next one, with their signs.

    Directions may have any norm here; a zero direction has cosine 0.
    """
    sizes = _Sizes()
    array = sizes.check("directions", directions, "N L d")
    output = np.empty((sizes["N"], sizes["L"] - 1))
    _run(_native.coherence, array, output, threads=threads)
    return output


def coherence_matrix(directions: Floats, *, threads: int | None = None) -> Float64:
    """The mean over tokens of |cos| between all pairs of directions, (L, L).

    Directions may have any norm here; a zero direction has cosine 0, with itself, too. Raises
    InputError for N = 0.
    """
    sizes = _Sizes()
    array = sizes.check("directions", directions, "N L d")
    sizes.require_tokens("directions")
    output = np.empty((sizes["L"], sizes["L"]))
    _run(_native.coherence_matrix, array, output, threads=threads)
    return output


def effective_rank(states: Floats, *, threads: int | None = None) -> Float64:
    """The effective rank (N,) of each state X (N, d, m), between 1 and min(d, m); 0 for a zero X.

    It is exp(−Σ p ln p) for p = σ/Σσ, where σ are the singular values of X. Source: O. Roy and
    M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    sizes = _Sizes()
    array = sizes.check("states", states, "N d m")
    output = np.empty(sizes["N"])
    _run(_native.effective_rank, array, output, threads=threads)
    return output


def product_singular_values(
    directions: Floats, gates: Floats, *, threads: int | None = None
) -> Float64:
    """The singular values (N, min(L, d)) of A_L…A_1, descending: what all rewrites do to a state.

    The other d − min(L, d) singular values are exactly 1, because no direction reaches their
    vectors. For β in [0, 2] none exceeds 1 by more than rounding. Errors are in the order of
    float64's rounding, for parallel and zero directions, too.

    The triangular factor R of K = [k̂_1 … k̂_L] = QR turns the product into one of the same form and
    of size min(L, d), without forming A or KᵀK.
    """
    sizes = _Sizes()
    arrays = [sizes.check("directions", directions, "N L d"), sizes.check("gates", gates, "N L")]
    output = np.empty((sizes["N"], min(sizes["L"], sizes["d"])))
    _run(_native.product_singular_values, *arrays, output, threads=threads)
    return output


def write_survival(
    directions: Floats,
    gates: Floats,
    values: Floats,
    embedding: Floats,
    *,
    mean: bool = False,
    threads: int | None = None,
) -> WriteSurvival:
    """How much of the embedding and of every write is left after each rewrite, and at the end.

    With k̂ and β fixed, the state after n rewrites is exactly the sum of what is left of its
    sources: of the embedding A_n…A_1 X_0, and of write l A_n…A_{l+1} β_l k̂_l v_lᵀ. The norms are
    Frobenius norms of these. The share of a source is ⟨what is left of it after L rewrites, X_L⟩ /
    |X_L|²; it is negative for a source that points against the state, and shares sum to 1. If X_L
    is zero, as for padding, all its shares are 0.

    mean: return means over tokens, computed in memory that does not grow with N. Raises InputError
    for N = 0 then.
    """
    sizes = _Sizes()
    arrays = [
        sizes.check("directions", directions, "N L d"),
        sizes.check("gates", gates, "N L"),
        sizes.check("values", values, "N L m"),
        sizes.check("embedding", embedding, "N d m"),
    ]
    if mean:
        sizes.require_tokens("directions")
    tokens = () if mean else (sizes["N"],)
    output = np.empty((*tokens, sizes["L"] + 2, sizes["L"] + 1))
    _run(_native.write_survival, *arrays, output, mean, threads=threads)
    return WriteSurvival(norms=output[..., :-1, :], shares=output[..., -1, :].copy())


class _Sizes(dict[str, int]):
    """The sizes N, L, d and m, each known from the first array that has it."""

    def check(self, name: str, array: Any, axes: str) -> Any:
        """Check an array against `axes`, as in "N L d", and return it with three axes."""
        if not isinstance(array, np.ndarray):
            got = f"{type(array).__module__}.{type(array).__qualname__}"
            raise TypeError(f"`{name}` must be a numpy array, got {got}")
        if array.dtype not in (np.float32, np.float64):  # nor in another byte order
            raise TypeError(f"`{name}` must have dtype float32 or float64, got {array.dtype}")
        names = axes.split()
        sizes = dict(zip(names, array.shape, strict=False))
        empty = 0 in (size for axis, size in sizes.items() if axis != "N")
        fits = all(size == self.get(axis, size) for axis, size in sizes.items())
        if len(names) != array.ndim or empty or not fits:
            wanted = ", ".join(str(self.get(axis, axis)) for axis in names)
            least = " with at least one element per token" if empty else ""
            raise InputError(name, f"have shape ({wanted}){least}", array.shape)
        if not array.flags.aligned:
            raise InputError(name, "be aligned in memory", "an unaligned view")
        self.update(sizes)
        return array if array.ndim == 3 else array[..., None]

    def require_tokens(self, name: str) -> None:
        if self["N"] == 0:
            raise InputError(name, "have at least one token to average over", "none")


def _run(function: Any, *arguments: Any, threads: int | None) -> Any:
    """Call a native function; its ValueErrors are sentences about the numbers of an array."""
    if threads is None:
        threads = torch.get_num_threads()
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InputError("threads", "be an integer of at least 1", repr(threads))
    try:
        return function(*arguments, threads)
    except ValueError as error:
        raise InputError.sentence(str(error)) from None
