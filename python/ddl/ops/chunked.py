"""The delta rule over time in plain PyTorch, by chunks of steps, for devices without kernels.

In a chunk that begins with the state S₀, step i writes w_i = β_i (v_i − k_iᵀ S_i) along k_i. With
the decay e_ij of the state between steps j and i, all w of the chunk solve one triangular system,

    w_i + β_i Σ_{j<i} (k_i ⊙ e_ij)·k_j w_j  =  β_i v_i − β_i (k_i ⊙ e_i0)ᵀ S₀,

and y and the next chunk's state are matrix products. Source: DeltaNet (arXiv 2406.06484) §3.2,
Gated DeltaNet (arXiv 2412.06464) §3.3, Kimi Linear (arXiv 2510.26692) §3. If flash-linear-attention
is installed and takes the problem, its kernels run instead.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.reference import without_autocast

from .delta_rule import queries_of, steps_of

# Steps of a chunk. A decay per feature takes STEPS² numbers for each feature.
STEPS, STEPS_PER_FEATURE = 64, 16
HALF = (torch.bfloat16, torch.float16)
MOST_KEY_FEATURES = 256  # that flash-linear-attention's kernels take


class _Problem(NamedTuple):
    """The arguments by head and step: q (B, H, queries, T, K), the others (B, H, T·n, ·).

    g is (B, H, T·n, 1 or K), None for no decay; starts (B, T·n), None for one document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    starts: Tensor | None
    state: Tensor


def delta_rule(given: Any) -> tuple[Tensor, Tensor]:
    """Return y and the final state for the arguments of `ddl.functional.delta_rule`, by name."""
    scale = given.k.shape[-1] ** -0.5 if given.scale is None else given.scale
    with without_autocast(given.v):
        if _kernels_take(given):
            return _by_kernels(given, scale)
        y, state = _in_chunks(_by_head(given), n=steps_of(given))
    return (scale * y).to(given.v.dtype), state


def _by_head(given: Any) -> _Problem:
    n, H = steps_of(given), given.beta.shape[-1]
    (B, T), K, V = given.q.shape[:2], given.k.shape[-1], given.v.shape[-1]
    dtype = torch.float64 if given.v.dtype == torch.float64 else torch.float32

    def steps(x: Tensor) -> Tensor:
        x = x.to(dtype).reshape(B, T * n, *x.shape[-2:])
        return x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2)  # (B, H, T·n, ·)

    queries = queries_of(given)
    q = given.q.to(dtype).repeat_interleave(H * queries // given.q.shape[2], 2)
    g, starts, state = given.g, given.document_starts, given.initial_state
    if g is not None:  # a token decays before the first of its steps
        g = (g if g.ndim == 4 else g.unsqueeze(-1)).to(dtype).unsqueeze(2)
        g = F.pad(g, (0, 0, 0, 0, 0, n - 1)).flatten(1, 2).transpose(1, 2)
    if starts is not None:
        starts = F.pad(starts.unsqueeze(2), (0, n - 1)).flatten(1)
    return _Problem(
        torch.unflatten(q, 2, (H, queries)).movedim(1, 3),
        steps(given.k),
        steps(given.v),
        given.beta.to(dtype).reshape(B, T * n, H).mT,
        g,
        starts,
        given.v.new_zeros(B, H, K, V, dtype=dtype) if state is None else state,
    )


def _in_chunks(given: _Problem, n: int) -> tuple[Tensor, Tensor]:
    """Return y (B, T, heads, V), not scaled, and the final state."""
    per_feature = given.g is not None and given.g.shape[-1] > 1
    tokens = max(1, (STEPS_PER_FEATURE if per_feature else STEPS) // n)
    T, C, V = given.q.shape[3], tokens * n, given.v.shape[-1]
    chunks = -(-T // tokens)

    def cut(x: Tensor, axis: int, size: int) -> Tensor:
        """Pad the time axis with steps that do nothing, and divide it into chunks."""
        padding = [0, 0] * (x.ndim - axis - 1) + [0, chunks * size - x.shape[axis]]
        return torch.unflatten(F.pad(x, padding), axis, (chunks, size)).movedim(axis, 0)

    q, k, v = cut(given.q, 3, tokens), cut(given.k, 2, C), cut(given.v, 2, C)
    beta = cut(given.beta, 2, C).unsqueeze(-1)  # (chunks, B, H, C, 1)
    between, before = _decays(
        None if given.g is None else cut(given.g, 2, C),
        None if given.starts is None else cut(given.starts, 1, C),
        k,
    )
    system = beta * _products(k, k, between).tril(-1)
    known = torch.cat((beta * v, beta * k * before), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written, erased = solved.split((V, k.shape[-1]), -1)  # w = written − erased S₀
    last = slice(n - 1, None, n)  # of the steps of each token, the queried one
    query = _products(q, k.unsqueeze(3), between[..., last, :, :].unsqueeze(3))
    q, keys = q * before[..., last, :].unsqueeze(3), k * between[..., -1, :, :]
    state, y = given.state, []
    for i in range(chunks):
        w = written[i] - erased[i] @ state
        y.append(q[i] @ state.unsqueeze(2) + query[i] @ w.unsqueeze(2))
        state = before[i, ..., -1, :, None] * state + keys[i].mT @ w
    if not chunks:
        return given.q.new_empty(given.q.shape[0], 0, q.shape[2] * q.shape[3], V), state
    return torch.cat(y, 3)[..., :T, :].flatten(1, 2).transpose(1, 2), state


def _decays(g: Tensor | None, starts: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return e_ij (chunks, B, H, C, C, 1 or K) and e_i0 (chunks, B, H, C, 1 or K).

    Both are 0 across the start of a document. Sums of g over j < m ≤ i are no differences, which
    would cancel, and be NaN for g = −∞.
    """
    C = k.shape[-2]
    earlier = k.new_ones(C, C, dtype=torch.bool).tril(-1)
    if g is None:
        g = k.new_zeros(*k.shape[:-1], 1)
    sums = g.unsqueeze(-2).expand(*g.shape[:-1], C, g.shape[-1])
    sums = sums.masked_fill(~earlier[..., None], 0).cumsum(-3)
    between, before = sums.exp() * (~earlier.mT)[..., None], g.cumsum(-2).exp()
    if starts is not None:
        document = starts.cumsum(-1).unsqueeze(2)  # (chunks, B, 1, C), its number in the chunk
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        between, before = between * same[..., None], before * (document == 0)[..., None]
    return between, before


def _products(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """(a_i ⊙ e_ij)·b_j for all pairs of rows."""
    if decay.shape[-1] == 1:
        return (a @ b.mT) * decay[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", a, b, decay)


# --- flash-linear-attention -----------------------------------------------------------------------


def _kernels_take(given: Any) -> bool:
    """Whether flash-linear-attention is there and its kernels take the problem."""
    same = given.q.dtype == given.k.dtype == given.v.dtype
    return (
        given.v.device.type == "cuda"
        and same
        and given.v.dtype in HALF  # its chunked kernels refuse float32
        and given.document_starts is None
        and 0 not in (*given.v.shape, *given.q.shape)
        and given.q.shape[-1] <= MOST_KEY_FEATURES
        and _installed()
        and not (given.g is not None and given.g.ndim == 3 and _refused(given.v.device))
    )


@cache
def _installed() -> bool:
    return find_spec("fla") is not None


@cache
def _refused(device: torch.device) -> bool:
    """Whether flash-linear-attention's backward with a decay per head raises.

    It does on Hopper with Triton from 3.4 on and before 3.7.1, which compiles it wrong (its issue
    640).
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    version = [int(number) for number in re.findall(r"\d+", import_module("triton").__version__)]
    return [3, 4] <= version[:3] < [3, 7, 1]


def _by_kernels(given: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Return y and the final state from flash-linear-attention: n steps are n tokens to it."""
    n, H = steps_of(given), given.beta.shape[-1]
    B, T, heads, _ = given.q.shape
    k, v = (x.reshape(B, T * n, *x.shape[-2:]) for x in (given.k, given.v))
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    q = given.q.repeat_interleave(n, 1) if n > 1 else given.q
    beta, state = given.beta.reshape(B, T * n, H), given.initial_state
    g = given.g
    if g is not None and n > 1:
        g = F.pad(g.unsqueeze(2), (0, 0) * (g.ndim - 2) + (0, n - 1)).flatten(1, 2)
    queries = queries_of(given)  # its kernels have one query to a state, so states are repeated
    q = q.repeat_interleave(H * queries // heads, 2)
    if queries > 1:
        k, v, beta = (x.repeat_interleave(queries, 2) for x in (k, v, beta))
        g = None if g is None else g.repeat_interleave(queries, 2)
        state = None if state is None else state.repeat_interleave(queries, 1)
    options = {"scale": scale, "initial_state": state, "output_final_state": True}
    if g is None:
        from fla.ops.delta_rule import chunk_delta_rule

        y, state = chunk_delta_rule(q, k, v, beta, **options)
    elif g.ndim == 3:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        y, state = chunk_gated_delta_rule(q, k, v, g, beta, **options)
    else:
        from fla.ops.kda import chunk_kda

        y, state = chunk_kda(q, k, v, g, beta, **options)
    return y[:, n - 1 :: n], state[:, ::queries]
