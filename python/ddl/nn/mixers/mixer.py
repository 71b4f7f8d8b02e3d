"""DeltaMixer: the delta rule over time as a sublayer, in attention's place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.functional import delta_rule
from ddl.layouts import layout_of
from ddl.ops.checks import check_is_tensor, check_mask
from ddl.options import (
    MIXER_OPTIONS,
    MixerGated,
    MixerKind,
    check_count,
    check_options,
    check_positive,
    refuse,
)

from ..checks import require_own_forward
from ..convolution import Slot, convolve
from ..linear import (
    Projection,
    empty_parameter,
    form_parameters,
    project,
    projection_of,
    reset_,
)
from ..padding import without_padding

__all__ = ["DeltaMixer"]

UNIT_EPS = 1e-6  # in k / √(|k|² + ε)
STEPS = (1e-3, 0.1)  # softplus(b) at initialisation, spread evenly in its logarithm
RATES = (1.0, 16.0)  # exp(a)


class DeltaMixer(nn.Module):
    """Mix tokens by the delta rule over time: h (B, T, d) to (B, T, d), causal.

        q, k, v = silu(conv(W_q h)), silu(conv(W_k h)), silu(conv(W_v h));  q, k of norm 1
        S ← exp(g) S;  S ← S + k (β (vᵀ − kᵀS));  y = K^-½ Sᵀq
        W_o (norm(y) ∘ silu(W_g h))

    The convolutions are causal and depthwise, over `kernel_size` tokens. β = 2·sigmoid of a linear
    map is in [0, 2] and starts at 1. A state is as large as it is, however many tokens there were.

    Args:
        hidden_size: d.
        heads: each has the queries, keys, values and states of the kind.
        kind: by Chen's note; n of them per head.

            "deltanet": one query, key, value and state. n is 1.
            "deltaproduct": n keys and values, which a token writes into one state, in order.
            "multi-head": n queries, keys, values and states.
            "multi-kv": n keys, values and states, one query.
            "multi-value": n values and states, one query and key.
            "multi-key": n keys and states, one query and value.
            "multi-query": n queries, of one state.
        n: of the note.
        gated: decay of the states, g. False: none. True: one number per state, as in Gated
            DeltaNet. "per-feature": one per key feature, of rank head_size, as in Kimi Linear.
        head_size: K = V; None for hidden_size / heads.
        kernel_size: tokens that the convolutions span; 1 leaves them without a past.
        norm_eps: ε of the outputs' RMS norm.
        device, dtype: of the parameters.

    Raises InputError for what does not fit.

    Source: DeltaNet (arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv
    2510.26692), DeltaProduct (arXiv 2502.10297) and Chen's note on it (2025).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kind: MixerKind = "deltanet",
        n: int = 1,
        gated: MixerGated = False,
        head_size: int | None = None,
        kernel_size: int = 4,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_count("hidden_size", hidden_size)
        check_count("heads", heads)
        check_count("head_size", head_size, optional=True)
        check_options({"kind": kind, "n": n, "gated": gated}, MIXER_OPTIONS)
        check_count("kernel_size", kernel_size)
        check_positive("norm_eps", norm_eps)
        if head_size is None and hidden_size % heads:
            refuse("heads", f"a divisor of the hidden size of {hidden_size}", heads)
        self.hidden_size, self.heads, self.kind, self.n = hidden_size, heads, kind, n
        self.gated, self.kernel_size = gated, kernel_size
        self.head_size = size = head_size or hidden_size // heads
        self.layout = layout = layout_of(kind, n)
        states = heads * layout.states
        outputs = heads * max(layout.queries, layout.states)

        def linear(size_in: int, size_out: int) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=False, **factory)

        widths = {
            "q": heads * layout.queries * size,
            "k": layout.steps * heads * layout.keys * size,
            "v": layout.steps * heads * layout.values * size,
        }
        self.c_q, self.c_k, self.c_v = (linear(hidden_size, width) for width in widths.values())
        self.taps = nn.ParameterDict(
            {name: empty_parameter(width, kernel_size, **factory) for name, width in widths.items()}
        )
        self.gate = Projection(hidden_size, layout.steps * states, **factory)
        self.decay = None
        if gated:
            features = (size, size) if gated == "per-feature" else ()
            self.decay = Decay(hidden_size, states, *features, **factory)
        self.norm = nn.RMSNorm(size, eps=norm_eps, **factory)
        self.c_g = linear(hidden_size, outputs * size)
        self.c_proj = linear(outputs * size, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices as nn.Linear does, and the taps as nn.Conv1d; β starts at 1."""
        for child in self.children():
            if isinstance(child, nn.Linear | nn.RMSNorm | Decay):
                child.reset_parameters()
        largest = self.kernel_size**-0.5
        for taps in self.taps.values():
            nn.init.uniform_(taps, -largest, largest)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def never_decayed(self) -> Iterator[nn.Parameter]:
        """The parameters that an optimizer should not decay: zero is no neutral value for them."""
        yield from (*self.taps.values(), self.gate.weight)

    def forward(
        self,
        h: Tensor,
        *,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
        slot: Slot | None = None,
    ) -> Tensor:
        """Map h (B, T, d) to (B, T, d).

        keep: (B, T) bool, False for padding, which no token sees and which leaves no trace.
        document_starts: (B, T) bool, tokens that see nothing before them. slot: where the past of
        these tokens lies, and where they leave theirs, which counts after `slot.history.commit()`;
        use it without gradients.
        """
        self._check(h, slot)
        for name, mask in (("keep", keep), ("document_starts", document_starts)):
            if mask is not None:
                check_mask(name, mask, h.shape[:2], h)
        if keep is not None:
            h = without_padding(h, keep)
        q, k, v = (
            self._mixed(name, projection(h), slot, document_starts)
            for name, projection in (("q", self.c_q), ("k", self.c_k), ("v", self.c_v))
        )
        gate = projection_of("gate", self.gate)
        beta = 2 * torch.sigmoid(project(h, gate.weight, gate.bias))
        if self.layout.steps > 1:
            beta = torch.unflatten(beta, -1, (self.layout.steps, -1))
        g = None if self.decay is None else self.decay(h)
        if keep is not None:  # nothing is written, nothing decays
            beta, g = without_padding(beta, keep), None if g is None else without_padding(g, keep)
        past = None if slot is None else slot.history.get(f"{slot.name}.state")
        y, state = delta_rule(
            unit(q), unit(k), v, beta, g, initial_state=past, document_starts=document_starts
        )
        if slot is not None:
            slot.history.set(f"{slot.name}.state", state)
        normed = self.norm(y.to(self.norm.weight.dtype)).to(y.dtype)  # float32 under autocast
        return self.c_proj(normed.flatten(-2) * F.silu(self.c_g(h)))

    def _check(self, h: Any, slot: Any) -> None:
        """Raise unless h has the shape of this module's inputs, and the past a place."""
        check_is_tensor("h", h)
        if h.ndim != 3 or h.shape[-1] != self.hidden_size:
            refuse("h", f"of shape (batch, time, {self.hidden_size})", tuple(h.shape))
        if slot is not None and not isinstance(slot, Slot):
            raise TypeError(f"`slot` must be a ddl.nn.Slot, got {type(slot).__name__}")

    def _mixed(
        self, name: str, x: Tensor, slot: Slot | None, document_starts: Tensor | None
    ) -> Tensor:
        """Return silu(conv(x)), by heads: (B, T, ·, K), or (B, T, n, ·, K) for n steps."""
        place = None if slot is None else Slot(slot.history, f"{slot.name}.{name}")
        taps = require_own_forward("taps", self.taps, nn.ParameterDict)
        form_parameters(taps)
        x = F.silu(convolve(x, taps[name], place, document_starts))
        steps = (self.layout.steps,) if name != "q" and self.layout.steps > 1 else ()
        return torch.unflatten(x, -1, (*steps, -1, self.head_size))

    def extra_repr(self) -> str:
        n = "" if self.kind == "deltanet" else f", n={self.n}"
        return (
            f"{self.hidden_size}, heads={self.heads}, kind={self.kind!r}{n}, gated={self.gated!r}, "
            f"head_size={self.head_size}, kernel_size={self.kernel_size}"
        )


def unit(x: Tensor) -> Tensor:
    """Return x (…, K) / √(|x|² + 1e-6), computed in float32 (float64 for float64)."""
    exact = x if x.dtype == torch.float64 else x.float()
    size = x.shape[-1]
    return (F.rms_norm(exact, (size,), eps=UNIT_EPS / size) * size**-0.5).to(x.dtype)


class Decay(nn.Module):
    """The log decay g = −exp(a)·softplus(f(h) + b) of each state, or of each of its features.

    h (B, T, d) becomes g (B, T, H), or (B, T, H, K), in float32 (float64 for float64). rank: of the
    map to the H·K features; None for one number per state and a full map.

    Source: Gated DeltaNet (arXiv 2412.06464), whose gate is Mamba 2's; Kimi Linear (arXiv
    2510.26692) for a decay per key feature, of low rank.
    """

    def __init__(
        self,
        hidden_size: int,
        states: int,
        features: int = 1,
        rank: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.states, self.features = states, features
        width = states * features
        self.down = None
        if rank is not None:
            self.down = Projection(hidden_size, rank, bias=False, **factory)
        self.up = Projection(rank or hidden_size, width, **factory)
        self.log_rate = empty_parameter(states, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates and steps, as Mamba 2 does."""
        for projection in (self.down, self.up):
            if projection is not None:
                reset_(projection)
        low, high = (math.log(step) for step in STEPS)
        step = torch.empty_like(self.up.bias).uniform_(low, high).exp_()
        self.up.bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.log_rate.uniform_(*RATES).log_()

    def forward(self, h: Tensor) -> Tensor:
        if self.down is not None:
            h = project(h, projection_of("down", self.down).weight, None)
        up = projection_of("up", self.up)
        steps = F.softplus(project(h, up.weight, up.bias))
        rates = self.log_rate.to(steps.dtype).exp()
        if self.features == 1:
            return -rates * steps
        return -rates[:, None] * torch.unflatten(steps, -1, (self.states, self.features))
