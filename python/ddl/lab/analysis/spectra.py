"""Spectra, coherence and survival of the rewrites of N tokens over L sublayers, in float64.

    X' = A X + β k̂ vᵀ    A = I − α k̂k̂ᵀ    k̂ = k/√(|k|² + ε_k²)    X: (d, m)  v: (m,)  α, β ∈ [0, 2]

(Deep Delta Learning, arXiv 2601.00417, eq. 2.3 to 2.5.) α = β, or 0 of a rewrite that erases
nothing. Common arguments:

directions: k̂ (N, L, d), of norm 1 or slightly less; up to 1.01 is accepted, because rounding to
bfloat16 lengthens some. gates: β (N, L). values: v (N, L, m).
embedding: X_0 (N, d, m), the states before the first rewrite.
threads: the number of threads; None for torch's. Results are the same to the bit with any number.

Inputs are numpy arrays of float32 or float64, which may be mixed. Some tokens at a time are copied,
whatever the strides, so a memory map may be larger than memory. All arithmetic is in float64, and
results are new float64 arrays. N may be 0 unless a figure is a mean over tokens; L, d and m are at
least 1.

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

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ddl.errors import InputError
from ddl.recording.quantities import RANGES

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

CHUNK = 2**18  # numbers of an input that are copied at once, 2 MiB in float64
LONGEST = 1.01  # norm of k̂, which rounding to bfloat16 lengthens by up to 0.4 %
UNIT = "k̂ = k/√(|k|² + ε_k²)"


class Regime(NamedTuple):
    """A range of eigenvalues; a bound between two regimes belongs to the one nearer to 0."""

    name: str
    lower: float
    upper: float


REGIMES = tuple(Regime(name, *bounds) for name, bounds in RANGES.items())
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
    """λ = 1 − α|k̂|² (N, L), the one eigenvalue of A that differs from 1 (Thm. 3.1).

    It is also the determinant of a rewrite on one value channel. gates: α (N, L). norms: |k̂|
    (N, L). From |k| it is |k|/√(|k|² + ε_k²), in numpy `k / np.hypot(k, eps_k)`.
    """
    sizes = _Sizes()
    arrays = {"gates": sizes.check("gates", gates, "N L")}
    arrays["norms"] = sizes.check("norms", norms, "N L")

    def compute(first: int, alpha: Float64, norm: Float64) -> Float64:
        wrong = (norm < 0) | (norm > LONGEST) & (alpha != 0)
        _refuse("norms", wrong, norm, first, f"norms of {UNIT}, from 0 to 1")
        return 1 - alpha * norm * norm

    return np.concatenate(_of_tokens(compute, arrays, threads))


def determinants(eigenvalues: Floats, *, threads: int | None = None) -> Float64:
    """The determinants (N,) of A_L…A_1 on one value channel: products of λ (N, L) over depth.

    On all m value channels a determinant is that to the power m (Cor. 3.2).
    """
    array = _Sizes().check("eigenvalues", eigenvalues, "N L")
    found = _of_tokens(lambda _, values: values.prod(1), {"eigenvalues": array}, threads)
    return np.concatenate(found)


def regime_shares(eigenvalues: Floats, *, threads: int | None = None) -> dict[str, float]:
    """The share of eigenvalues λ (N, L) in each regime, by its name in `REGIMES`; they sum to 1.

    Raises InputError if there are no eigenvalues. For the shares of one sublayer pass a slice, as
    in `eigenvalues[:, 3:4]`.
    """
    array = _Sizes().check("eigenvalues", eigenvalues, "N L")
    if array.size == 0:
        raise InputError("eigenvalues", "have at least one element", "none")

    def compute(first: int, values: Float64) -> list[int]:
        lower = (values > b if b > 0 else values >= b for b in (r.lower for r in REGIMES[:-1]))
        return [int(above.sum()) for above in lower]

    at_least = np.sum(_of_tokens(compute, {"eigenvalues": array}, threads), 0)  # of each regime
    counts = np.diff([0, *at_least, array.size])
    names = (regime.name for regime in REGIMES)
    return dict(zip(names, (counts / array.size).tolist(), strict=True))


def coherence(directions: Floats, *, threads: int | None = None) -> Float64:
    """The cosines (N, L − 1) of each direction with the next one, with their signs.

    Directions may have any norm here; a zero direction has cosine 0.
    """
    array = _Sizes().check("directions", directions, "N L d")

    def compute(first: int, k: Float64) -> Float64:
        unit = _normalised(k)
        return (unit[:, 1:] * unit[:, :-1]).sum(-1).clip(-1, 1)

    return np.concatenate(_of_tokens(compute, {"directions": array}, threads))


def coherence_matrix(directions: Floats, *, threads: int | None = None) -> Float64:
    """The mean over tokens of |cos| between all pairs of directions, (L, L).

    Directions may have any norm here; a zero direction has cosine 0, with itself, too. Raises
    InputError for N = 0.
    """
    sizes = _Sizes()
    array = sizes.check("directions", directions, "N L d")
    sizes.require_tokens("directions")

    def compute(first: int, k: Float64) -> Float64:
        unit = _normalised(k)
        return np.abs(unit @ unit.swapaxes(1, 2)).clip(max=1).sum(0)

    return _mean(_of_tokens(compute, {"directions": array}, threads), sizes)


def effective_rank(states: Floats, *, threads: int | None = None) -> Float64:
    """The effective rank (N,) of each state X (N, d, m), between 1 and min(d, m); 0 for a zero X.

    It is exp(−Σ p ln p) for p = σ/Σσ, where σ are the singular values of X. Source: O. Roy and
    M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    array = _Sizes().check("states", states, "N d m")

    def compute(first: int, X: Float64) -> Float64:
        sigma: Any = np.linalg.svd(_scaled(X, (1, 2)), compute_uv=False)
        share = _over(sigma, sigma.sum(1, keepdims=True))
        logarithm = np.log(share, where=share > 0, out=np.zeros_like(share))
        return np.exp(-(share * logarithm).sum(1)) * (share[:, 0] > 0)

    return np.concatenate(_of_tokens(compute, {"states": array}, threads))


def product_singular_values(
    directions: Floats, gates: Floats, *, threads: int | None = None
) -> Float64:
    """The singular values (N, min(L, d)) of A_L…A_1, descending: what all rewrites do to a state.

    The other d − min(L, d) singular values are exactly 1, because no direction reaches their
    vectors. gates: α (N, L). For α in [0, 2] none exceeds 1 by more than rounding. Errors are in
    the order of float64's rounding, for parallel and zero directions, too.

    The triangular factor R of K = [k̂_1 … k̂_L] = QR turns the product into one of the same form and
    of size min(L, d), without forming A or KᵀK.
    """
    sizes = _Sizes()
    arrays = {"directions": sizes.check("directions", directions, "N L d")}
    arrays["gates"] = sizes.check("gates", gates, "N L")

    def compute(first: int, k: Float64, alpha: Float64) -> Float64:
        _check_unit(k, alpha, first)
        R: Any = np.linalg.qr(k.swapaxes(1, 2), mode="r")  # (n, min(L, d), L)
        S = np.tile(np.eye(R.shape[1]), (len(k), 1, 1))
        for at in range(k.shape[1]):
            r = R[:, :, at, None]
            S -= alpha[:, at, None, None] * r * (r.swapaxes(1, 2) @ S)
        values: Any = np.linalg.svd(S, compute_uv=False)
        return values

    return np.concatenate(_of_tokens(compute, arrays, threads))


def write_survival(
    directions: Floats,
    gates: Floats,
    values: Floats,
    embedding: Floats,
    *,
    erase: Floats | None = None,
    mean: bool = False,
    threads: int | None = None,
) -> WriteSurvival:
    """How much of the embedding and of every write is left after each rewrite, and at the end.

    With k̂ and the gates fixed, the state after n rewrites is exactly the sum of what is left of its
    sources: of the embedding A_n…A_1 X_0, and of write l A_n…A_{l+1} β_l k̂_l v_lᵀ. The norms are
    Frobenius norms of these. The share of a source is ⟨what is left of it after L rewrites, X_L⟩ /
    |X_L|²; it is negative for a source that points against the state, and shares sum to 1. If X_L
    is zero, as for padding, all its shares are 0.

    gates: β (N, L). erase: α (N, L); None for β.
    mean: return means over tokens, computed in memory that does not grow with N. Raises InputError
    for N = 0 then.
    """
    sizes = _Sizes()
    arrays = {
        "directions": sizes.check("directions", directions, "N L d"),
        "gates": sizes.check("gates", gates, "N L"),
        "erase": sizes.check("erase", gates if erase is None else erase, "N L"),
        "values": sizes.check("values", values, "N L m"),
        "embedding": sizes.check("embedding", embedding, "N d m"),
    }
    if not mean:
        found = _of_tokens(_left, arrays, threads)
        return WriteSurvival(*(np.concatenate(part) for part in zip(*found, strict=True)))
    sizes.require_tokens("directions")
    sums = _of_tokens(lambda *given: [part.sum(0) for part in _left(*given)], arrays, threads)
    return WriteSurvival(*(_mean(part, sizes) for part in zip(*sums, strict=True)))


def _left(
    first: int, k: Float64, beta: Float64, alpha: Float64, v: Float64, X: Float64
) -> tuple[Float64, Float64]:
    """Norms (n, L + 1, L + 1) and shares (n, L + 1) of n tokens; overwrites X.

    What is left of write l is a vector times v_lᵀ, because a write has rank one.
    """
    _check_unit(k, alpha, first)
    tokens, L, _ = k.shape
    writes, norms = np.zeros_like(k), np.zeros((tokens, L + 1, L + 1))
    norms[:, 0, 0], of_values = _norm(_flat(X)), _norm(v)
    for at in range(L):
        unit, earlier, made = k[:, at, :, None], writes[:, :at], writes[:, : at + 1]
        erased = alpha[:, at, None, None] * unit
        earlier -= (earlier @ unit) * erased.swapaxes(1, 2)
        X -= erased * (unit.swapaxes(1, 2) @ X)
        writes[:, at] = beta[:, at, None] * unit[..., 0]
        norms[:, at + 1, 0] = _norm(_flat(X))
        norms[:, at + 1, 1 : at + 2] = _norm(made) * of_values[:, : at + 1]
    last = X + writes.swapaxes(1, 2) @ v
    along = [_flat(X * last).sum(1, keepdims=True), ((writes @ last) * v).sum(-1)]
    square = _flat(np.square(last)).sum(1, keepdims=True)
    return norms, _over(np.concatenate(along, 1), square)


class _Sizes(dict[str, int]):
    """The sizes N, L, d and m, each known from the first array that has it."""

    def check(self, name: str, array: Any, axes: str) -> Any:
        """Check an array against `axes`, as in "N L d", and return it."""
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
        self.update(sizes)
        return array

    def require_tokens(self, name: str) -> None:
        if self["N"] == 0:
            raise InputError(name, "have at least one token to average over", "none")


def _of_tokens(
    compute: Callable[..., Any], arrays: dict[str, Any], threads: int | None
) -> list[Any]:
    """Return the results of `compute` for some tokens after the others, on several threads.

    It gets the number of the first of these tokens, and of each array their part in float64.
    """
    if threads is None:
        threads = torch.get_num_threads()
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InputError("threads", "be an integer of at least 1", repr(threads))
    count = len(next(iter(arrays.values())))
    size = max(1, CHUNK // max(math.prod(array.shape[1:]) for array in arrays.values()))

    def work(first: int) -> Any:
        parts = (_part(name, array, first, size) for name, array in arrays.items())
        return compute(first, *parts)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(0, max(1, count), size)))


def _part(name: str, array: Any, first: int, size: int) -> Float64:
    part = np.array(array[first : first + size], np.float64, order="C")
    _refuse(name, ~np.isfinite(part), part, first, "finite")
    return part


def _refuse(name: str, wrong: Any, numbers: Float64, first: int, expected: str) -> None:
    """Raise InputError for the first number that is wrong. first: the number of the first token."""
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        number = "NaN" if np.isnan(numbers[at]) else f"{numbers[at]:g}"
        raise InputError(name, f"be {expected}", f"{number} for token {first + at[0]}")


def _check_unit(k: Float64, alpha: Float64, first: int) -> None:
    """Raise for a direction that is longer than 1, unless nothing is erased along it."""
    norm = _norm(k)
    wrong = (norm > LONGEST) & (alpha != 0)
    _refuse("directions", wrong, norm, first, f"{UNIT}, of norm 1 or less")


def _flat(arrays: Float64) -> Float64:
    return arrays.reshape(len(arrays), math.prod(arrays.shape[1:]))


def _norm(rows: Float64) -> Float64:
    return np.sqrt(np.square(rows).sum(-1))


def _over(numbers: Float64, by: Float64) -> Float64:
    """Quotients; 0 for a division by 0."""
    return np.divide(numbers, by, where=by != 0, out=np.zeros_like(numbers))


def _scaled(numbers: Float64, axes: Any) -> Float64:
    """The numbers over their largest absolute value, so that no square overflows; zeros stay."""
    return _over(numbers, np.abs(numbers).max(axes, keepdims=True))


def _normalised(rows: Float64) -> Float64:
    scaled = _scaled(rows, -1)
    return _over(scaled, _norm(scaled)[..., None])


def _mean(sums: Any, sizes: _Sizes) -> Float64:
    total: Float64 = np.sum(np.stack(sums), 0) / sizes["N"]
    return total
