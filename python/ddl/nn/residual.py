"""DeltaResidual: a drop-in replacement for one residual addition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import as_gate
from ddl.options import (
    Direction,
    Erase,
    Gate,
    GateFrom,
    Mapping,
    Value,
    ValueFrom,
    check_count,
    check_residual,
)
from ddl.results import Write

from .branches import Branches
from .checks import check_features, check_stream, report_other_options
from .hooks import Hook, Rewrite

__all__ = ["DeltaResidual"]


class DeltaResidual(Branches):
    """Replace x + F(x) by X' = X + β k̂ (vᵀ − k̂ᵀX): read along k̂, compare with v, write.

    Shapes: with one value channel the state x is (…, d), like any residual stream; with m > 1 it
    is (…, d, m). The sublayer's output and the context are (…, d).

        h = norm(x);  x = residual(x, F(h), context=h)

    k-Map (default): the direction is k = F(h), the value v = φ(W_v z + b_v).
    v-Map: the value is v = φ(W_v F(h)), and a separate branch computes k.
    Gate: β = 2·sigmoid(g(h)) with g linear, or linear–tanh–linear ("mlp").
    Several rewrites (k-Map): X ← X + β_j k̂_j (v_jᵀ − k̂_jᵀX) for j = 1 … n, with k₁ = F(h), further
    directions linear in it, and a value and a gate for each: a generalised Householder product
    (docs/rewrites.md). The state still crosses memory once.
    Values and gates are computed in float32 for every storage dtype (float64 for float64).

    Zero-initialised output projections: if F(h) = 0, then k = 0 and nothing is written (k̂ = 0), and
    the gradient reaches the projection multiplied by 1/√(|k|² + ε_k²) = 1/ε_k. With ε_k = 1e-5 that
    factor is 100,000: after global norm clipping such a step leaves almost nothing of the other
    gradients, and it stays in Adam's second moment. The slope is correct, but only within 1e-5 of
    zero, and optimizer steps are larger. So ε_k is 0.02·√d by default: k̂ shrinks towards 0 if the
    root mean square of k falls below 0.02. The gradient at k = 0 is then some ten times that of a
    small random projection, in every dtype. Gradients stay exact derivatives everywhere. |k̂|² is
    0.96 at a root mean square of 0.1, 0.996 at 0.3.

    The fused operators read the parameters of `gate` and `value` (and of an attention's `query` and
    `key`) directly and never call `forward`: forward hooks on them do not fire, and wrappers are
    rejected. torch.nn.utils.parametrize, prune, weight_norm and spectral_norm work.

    A state dict has the options that its names and shapes do not show as metadata, and
    `load_state_dict` refuses one of other options. `dict(state)` is without them.

    Args:
        hidden_size: d.
        value_channels: m.
        mapping: "k", the sublayer's output is the direction and the value comes from the read; "v",
            it is the value (through W_v) and a branch computes the direction.
        gate: g — "linear", or "mlp" with a hidden layer.
        gate_hidden: hidden units of an "mlp" gate.
        gate_from: input of g — "context", h; "pooled", the mean of the state over its value
            channels; "convolved", these means convolved over time; "flatten", all d·m numbers of
            the state. The latter three are normalised.
        gate_kernel_size: tokens that the convolution of a "convolved" gate spans.
        direction: the branch of the v-Map — "linear", W_k h; "mean" and "flatten", an MLP over the
            mean of the state's value channels, or over all of them, normalised; "attention", the
            context's attention over the value channels (m ≥ 2).
        direction_hidden: hidden units of the MLP; width of the attention's queries and keys.
        value: φ — "linear", "sigmoid" (value_scale·sigmoid), or "constant" (v = value_constant,
            k-Map only).
        value_init: b_v of a linear value at initialisation (k-Map only). A value that starts around
            zero has a random sign in every token, so a sublayer would first have to learn the sign
            with which its output is written (measured: benchmarks/LOG.md).
        value_scale: scale of a "sigmoid" value.
        value_constant: the "constant" value.
        value_from: z of the k-Map — "context", the normalised read h, or "compressed", the raw read
            x, which `forward` then needs.
        rewrites: n, at most 8 (k-Map only).
        direction_rank: rank of the linear map to the further directions, if n > 1; None for a full
            one, with (n − 1)·d² weights.
        beta_init: β at initialisation, in [0, 2], clamped to [2e-6, 2 − 2e-6] so that its logit is
            finite; the gate's weight starts at zero.
        erase: what a rewrite erases, α in X' = X + k̂ (β vᵀ − α k̂ᵀX) — "tied", as much as it writes,
            α = β; "none", nothing, the control without rewriting.
        branch_scale: s, a factor of the gate: for one rewrite the state becomes X + s (X' − X).
            `ddl.record` shows the gate without it.
        eps_k: ε_k in units of |k|; None for 0.02·√d. The papers' checkpoints need 1e-5.
        device, dtype: of the parameters.

    Raises:
        ValueError: an option is unknown, out of range, or without effect and not at its default.

    Source: DDL (arXiv 2601.00417), eq. 2.5 and Appendix B.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int = 1,
        *,
        mapping: Mapping = "k",
        gate: Gate = "linear",
        gate_hidden: int = 128,
        gate_from: GateFrom = "context",
        gate_kernel_size: int = 4,
        direction: Direction = "linear",
        direction_hidden: int = 128,
        value: Value = "linear",
        value_init: float = 1.0,
        value_scale: float = 4.0,
        value_constant: float = 2.0,
        value_from: ValueFrom = "context",
        rewrites: int = 1,
        direction_rank: int | None = None,
        beta_init: float = 1.0,
        erase: Erase = "tied",
        branch_scale: float = 1.0,
        eps_k: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("hidden_size", hidden_size)
        check_count("value_channels", value_channels)
        check_residual(locals(), value_channels)
        super().__init__(hidden_size, value_channels, locals(), device=device, dtype=dtype)
        self.hooks: tuple[Hook, ...] = ()
        self.branch_scale = branch_scale
        self.reset_parameters()

    def never_decayed(self) -> Iterator[nn.Parameter]:
        """Parameters that an optimizer should not decay: zero is not a neutral value for them."""
        return self.parameters()

    def forward(
        self,
        x: Tensor,
        sublayer_out: Tensor,
        *,
        context: Tensor,
        compressed: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Rewrite the state with a sublayer's output.

        Args:
            x: the state, (…, d) for one value channel, (…, d, m) otherwise; gate_from="convolved"
                needs a time axis before these.
            sublayer_out: F(h), (…, d).
            context: h, the sublayer's input, (…, d).
            compressed: the raw read (…, d), the context before its norm. Needed and used only with
                value_from="compressed". `read(X, return_compressed=True)` of a `Read` returns it;
                if h = norm(x) without a `Read`, it is the state x.
            document_starts: (…, T) bool, the tokens with which a document starts; a "convolved"
                gate does not look beyond the start of its own.

        Returns:
            The rewritten state, in the shape and dtype of x.

        Raises:
            ValueError: a shape or device does not fit, or `compressed` is needed and missing.
            TypeError: a dtype does not fit, an argument is not a tensor, `gate` or `value` is
                wrapped.
        """
        # What has no effect, or is missing, no operator refuses.
        given = compressed is not None or document_starts is not None
        if given or self.value_from == "compressed":
            self._check(x, sublayer_out, context, compressed, document_starts)
        try:
            state = x.unsqueeze(-1) if self.value_channels == 1 else x
            value, gate = self.value_and_gate(context, compressed)
            write = self.write(
                state, sublayer_out, context, value, gate, document_starts=document_starts
            )
            if self.hooks or self.branch_scale != 1:
                write = self.hooked(state, write)
            new_state = functional.write_to(state, write)
        except (AttributeError, RuntimeError, TypeError, ValueError, IndexError):
            self._check(x, sublayer_out, context, compressed, document_starts)
            raise
        return new_state.squeeze(-1) if self.value_channels == 1 else new_state

    # --- the options that no parameter shows, in the state dict's metadata ------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["options"] = self._hidden_options()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Do as nn.Module, and report an error if the state dict is of other options."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        report_other_options(local_metadata.get("options", {}), self._hidden_options(), args[-1])

    def _hidden_options(self) -> dict[str, Any]:
        return {
            "branch_scale": float(self.branch_scale),
            "eps_k": float(self.eps_k),
            "erase": self.erase,
            "gate_from": self.gate_from,
            "value": self.value_kind,
            "value_scale": float(self.value_scale),
            "value_constant": float(self.value_constant),
            "value_from": self.value_from,
        }

    def __getstate__(self) -> dict[str, Any]:
        """The module without its hooks: a copy or a saved module outlives `ddl.edit`."""
        return {**self.__dict__, "hooks": ()}

    def hooked(
        self,
        state: Tensor,
        write: Write,
        *,
        keep: Tensor | None = None,
        continues: bool = False,
    ) -> Write:
        """Show a write to the hooks; return it as they leave it, its gates times branch_scale."""
        if not self.hooks:
            return write.scaled(self.branch_scale)
        rewrite = Rewrite(state, write, keep, continues, self.branch_scale)
        for hook in self.hooks:
            rewrite = hook(rewrite)
        write = rewrite.write
        value, gate = as_gate("value", write.value, state), as_gate("gate", write.gate, state)
        return write._replace(value=value, gate=gate).scaled(self.branch_scale)

    def _check(
        self,
        state: Tensor,
        sublayer_out: Tensor,
        context: Tensor,
        compressed: Tensor | None,
        document_starts: Tensor | None,
    ) -> None:
        """Raise what is wrong with an argument, by the names that `forward` has for them."""
        d, m = self.hidden_size, self.value_channels
        size = (d,) if m == 1 else (d, m)
        over_time, starts = self.gate_from == "convolved", document_starts
        check_stream("x", state, size, over_time=over_time, document_starts=starts)
        shape = (*state.shape[: -1 if m == 1 else -2], d)
        check_features("sublayer_out", sublayer_out, shape, state)
        check_features("context", context, shape, state)
        if compressed is not None:
            check_features("compressed", compressed, shape, state)
        elif self.value_from == "compressed":
            raise ValueError(
                f"`compressed` must be the raw read, of shape {tuple(shape)}, with "
                'value_from="compressed", got None: `read(x, return_compressed=True)` returns it, '
                "and where the context is the norm of x itself it is x"
            )

    def extra_repr(self) -> str:
        parts = [f"hidden_size={self.hidden_size}", f"value_channels={self.value_channels}"]
        parts.append(f"mapping={self.mapping!r}")
        if self.mapping == "v":
            parts.append(f"direction={self.direction_kind!r}")
        if self.gate_pool is not None:
            parts.append(f"gate_from={self.gate_from!r}")
        if self.rewrites > 1:
            parts.append(f"rewrites={self.rewrites}")
        if self.erase != "tied":
            parts.append(f"erase={self.erase!r}")
        parts += [f"value={self.value_kind!r}", f"value_from={self.value_from!r}"]
        parts.append(f"beta_init={self.beta_init:g}")
        parts.append(f"eps_k={self.eps_k:.3g}")
        if self.branch_scale != 1:
            parts.append(f"branch_scale={self.branch_scale:g}")
        return ", ".join(parts)
