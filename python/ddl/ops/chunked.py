"""The delta rule over time in plain PyTorch, by chunks of steps, for devices without kernels.

In a chunk that begins with the state S₀, step i writes w_i = β_i (v_i − k_iᵀ S_i) along k_i. With
the decay e_ij of the state between steps j and i, all w of the chunk solve one triangular system,

    w_i + β_i Σ_{j<i} (k_i ⊙ e_ij)·k_j w_j  =  β_i v_i − β_i (k_i ⊙ e_i0)ᵀ S₀,

and y and the next chunk's state are matrix products. Nothing reaches a step from a later one or
from another document, not even NaN; nor a gradient from an output that its step does not reach.
Source: DeltaNet (arXiv 2406.06484) §3.2, Gated DeltaNet (arXiv 2412.06464) §3.3, Kimi Linear (arXiv
2510.26692) §3. If flash-linear-attention is installed and takes the problem, its kernels run
instead.
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

from . import pairs
from .checks import STORED, gate_dtype

# Steps of a chunk. A decay per feature takes STEPS² numbers for each feature.
STEPS, STEPS_PER_FEATURE = 64, 16
MOST_KEY_FEATURES = 256  # that flash-linear-attention's kernels take


class _Seen(NamedTuple):
    """Masks over (chunks, B, 1, …): the steps and states that the steps of each chunk see.

    steps (…, C, C): step i sees step j, which is itself or an earlier one of its document. before
    (…, C, 1): a step sees the state before the chunk. after (…, C, 1): the state after the chunk
    sees it. through (…, 1, 1): the state after the chunk sees that before it.
    """

    steps: Tensor
    before: Tensor
    after: Tensor
    through: Tensor


def steps_of(args: Any) -> int:
    """n, the steps of a token."""
    return args.beta.shape[2] if args.beta.ndim == 4 else 1


def queries_of(args: Any) -> int:
    """The queries to one state."""
    return max(1, args.q.shape[2] // args.beta.shape[-1])


def delta_rule(args: Any) -> tuple[Tensor, Tensor]:
    """Return y and the final state for the arguments of `ddl.functional.delta_rule`, by name."""
    scale = args.k.shape[-1] ** -0.5 if args.scale is None else args.scale
    with without_autocast(args.v):
        if _kernels_take(args):
            return _by_kernels(args, scale)
        y, state = _in_chunks(steps_of(args), *_by_head(args))
    return (scale * y).to(args.v.dtype), state


def _by_head(args: Any) -> tuple[Tensor, ...]:
    """Return the arguments by head and step: q (B, H, queries, T, K); k, v, β and g (B, H, T·n, ·),
    g with 1 or K numbers; the starts (B, T·n); the state."""
    n, H = steps_of(args), args.beta.shape[-1]
    (B, T), K, V = args.q.shape[:2], args.k.shape[-1], args.v.shape[-1]
    dtype = gate_dtype(args.v)

    def steps(x: Tensor) -> Tensor:
        x = x.to(dtype).reshape(B, T * n, *x.shape[-2:])
        return x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2)

    queries = queries_of(args)
    q = args.q.to(dtype).repeat_interleave(H * queries // args.q.shape[2], 2)
    q = torch.unflatten(q, 2, (H, queries)).movedim(1, 3)
    g, starts, state = args.g, args.document_starts, args.initial_state
    if g is None:
        g = q.new_zeros(B, T, H)
    g = (g if g.ndim == 4 else g.unsqueeze(-1)).to(dtype).unsqueeze(2)
    if starts is None:
        starts = q.new_zeros(B, T, dtype=torch.bool)
    if state is None:
        state = q.new_zeros(B, H, K, V)
    # A token decays, and starts a document, before the first of its steps.
    g = F.pad(g, (0, 0, 0, 0, 0, n - 1)).flatten(1, 2).transpose(1, 2)
    starts = F.pad(starts.unsqueeze(2), (0, n - 1)).flatten(1)
    beta = args.beta.to(dtype).reshape(B, T * n, H, 1).transpose(1, 2)
    return q, steps(args.k), steps(args.v), beta, g, starts, state


def _in_chunks(
    n: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, starts: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, heads, V), not scaled, and the final state."""
    tokens = max(1, (STEPS_PER_FEATURE if g.shape[-1] > 1 else STEPS) // n)
    (B, H, queries, T, _), C, V = q.shape, tokens * n, v.shape[-1]
    chunks = -(-T // tokens)
    if not chunks:
        return v.new_empty(B, 0, H * queries, V), state

    def cut(x: Tensor, axis: int, size: int) -> Tensor:
        """Pad the time axis with steps that do nothing, and divide it into chunks."""
        padding = [0, 0] * (x.ndim - axis - 1) + [0, chunks * size - x.shape[axis]]
        return torch.unflatten(F.pad(x, padding), axis, (chunks, size)).movedim(axis, 0)

    q = cut(q, 3, tokens)
    k, v, beta, g = (cut(x, 2, C) for x in (k, v, beta, g))  # (chunks, B, H, C, ·)
    seen = _seen(cut(starts, 1, C))
    between, before = _decays(g, seen)
    earlier = seen.steps.tril(-1)
    weighted = beta * k
    system = _products(weighted, k, between, earlier)
    known = weighted.where(seen.before, 0) * before
    written = pairs.solve(system, beta * v, earlier)  # w = written − erased S₀
    erased = pairs.solve(system, known, earlier).where(seen.before, 0)
    keys = k.where(seen.after, 0) * between[..., -1, :, :]
    last = slice(n - 1, None, n)  # of the steps of each token, the queried one
    # With an axis for the queries to a state.
    steps, asked = (x[..., last, :].unsqueeze(3) for x in (seen.steps, seen.before))
    each = (-1, -1, -1, queries, -1, -1)
    query = _products(q, k.unsqueeze(3).expand(each), between[..., last, :, :].unsqueeze(3), steps)
    q = q.where(asked, 0) * before[..., last, :].unsqueeze(3)
    parts = (written, erased, q, keys, before[..., -1, :, None], seen.before, asked, *seen[2:])
    ws, ys = [], []
    # The gradient of an index, x[i], would be as large as x; that of all together is one copy.
    for chunk in zip(*[x.unbind() for x in parts], strict=True):
        written, erased, q, keys, left, sees, asked, after, through = chunk
        w = written - (erased @ state).where(sees, 0)
        ys.append((q @ state.unsqueeze(2)).where(asked, 0))
        state = left * state.where(through, 0) + keys.mT @ w.where(after, 0)
        ws.append(w)
    w = torch.stack(ws).unsqueeze(3).expand(each)
    y = (torch.stack(ys) + pairs.sums(query, w, steps)).movedim(0, 3).flatten(3, 4)[..., :T, :]
    return y.flatten(1, 2).transpose(1, 2), state


def _seen(starts: Tensor) -> _Seen:
    document = starts.cumsum(-1)[:, :, None, :, None]  # its number in the chunk
    last = document[..., -1:, :]
    steps = (document == document.mT).tril()
    return _Seen(steps, document == 0, document == last, last == 0)


def _decays(g: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
    """Return e_ij (chunks, B, H, C, C, 1 or K) and e_i0 (chunks, B, H, C, 1 or K), 0 if not seen.

    Sums of g over j < m ≤ i are no differences, which would cancel, and be NaN for g = −∞. They are
    masked before the exponential, whose derivative would be 0·NaN after it.
    """
    C = g.shape[-2]
    earlier = torch.ones_like(seen.steps[0, 0, 0]).tril(-1)
    sums = g.unsqueeze(-2).expand(*g.shape[:-1], C, g.shape[-1])
    sums = sums.masked_fill(~earlier[..., None], 0).cumsum(-3)
    between = sums.masked_fill(~seen.steps[..., None], -torch.inf).exp()
    return between, g.cumsum(-2).masked_fill(~seen.before, -torch.inf).exp()


def _products(a: Tensor, b: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """(a_i ⊙ e_ij)·b_j for the pairs of rows of a mask, else 0."""
    if decay.shape[-1] == 1:
        return pairs.products(a, b, mask) * decay[..., 0]
    decayed = a.unsqueeze(-2).where(mask[..., None], 0) * decay
    return torch.einsum("...ijk,...jk->...ij", decayed, b).where(mask, 0)


# --- flash-linear-attention -----------------------------------------------------------------------


def _kernels_take(args: Any) -> bool:
    """Whether flash-linear-attention is there and its kernels take the problem."""
    same = args.q.dtype == args.k.dtype == args.v.dtype
    return (
        args.v.device.type == "cuda"
        and same
        and args.v.dtype in STORED[1:]  # its chunked kernels refuse float32
        and args.document_starts is None
        and 0 not in (*args.v.shape, *args.q.shape)
        and args.q.shape[-1] <= MOST_KEY_FEATURES
        and _installed()
        and not (args.g is not None and args.g.ndim == 3 and _refused(args.v.device))
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


def _by_kernels(args: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Return y and the final state from flash-linear-attention: n steps are n tokens to it."""
    n, H = steps_of(args), args.beta.shape[-1]
    B, T, heads, _ = args.q.shape
    k, v = (x.reshape(B, T * n, *x.shape[-2:]) for x in (args.k, args.v))
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    q = args.q.repeat_interleave(n, 1) if n > 1 else args.q
    beta, state = args.beta.reshape(B, T * n, H), args.initial_state
    g = args.g
    if g is not None and n > 1:
        g = F.pad(g.unsqueeze(2), (0, 0) * (g.ndim - 2) + (0, n - 1)).flatten(1, 2)
    queries = queries_of(args)  # its kernels have one query to a state, so states are repeated
    q = q.repeat_interleave(H * queries // heads, 2)
    if queries > 1:
        k, v, beta = (x.repeat_interleave(queries, 2) for x in (k, v, beta))
        g = None if g is None else g.repeat_interleave(queries, 2)
        state = None if state is None else state.repeat_interleave(queries, 1)
    if g is None:
        from fla.ops.delta_rule import chunk_delta_rule as kernel
    elif g.ndim == 3:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    else:
        from fla.ops.kda import chunk_kda as kernel
    gates = (beta,) if g is None else (g, beta)
    y, state = kernel(q, k, v, *gates, scale=scale, initial_state=state, output_final_state=True)
    return y[:, n - 1 :: n], state[:, ::queries]
