"""Streams without rewrites, and what their hooks see: the addition of each sublayer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddl.reference import without_autocast

from .hooks import Hooked


class Addition(NamedTuple):
    """The addition of a sublayer of a stream without rewrites: X' = X M + F bᵀ.

    sublayer: its number. state: X (…, d, n), n streams. written: F (…, d). mix: M (…, n, n) and
    join: b (…, n); None for the identity and 1, as in an additive stream. keep: as in Rewrite.
    """

    sublayer: int
    state: Tensor
    written: Tensor
    mix: Tensor | None
    join: Tensor | None
    keep: Tensor | None

    def weights(self) -> Tensor:
        """b (…, n), in the dtype of F."""
        if self.join is None:
            return torch.ones_like(self.written[..., :1])
        return self.join.to(self.written.dtype)

    def after(self) -> Tensor:
        """X' (…, d, n), in the state's dtype."""
        mixed = self.state
        if self.mix is not None:
            with without_autocast(mixed):
                mixed = mixed @ self.mix.to(mixed.dtype)
        added = self.written.unsqueeze(-1) * self.weights().unsqueeze(-2)
        return mixed + added.to(mixed.dtype)


class AddingStream(Hooked):
    """A stream without rewrites, whose hooks see every Addition; what they return has no effect."""

    def __init__(self, sublayers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(sublayers)

    def reset_parameters(self) -> None:
        """Reset all parameters but the sublayers', in the order of the modules."""
        for name, part in self.named_children():
            if name != "sublayers":
                for module in part if isinstance(part, nn.ModuleList) else [part]:
                    reset = getattr(module, "reset_parameters", None)
                    if reset is not None:
                        reset()

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, n) to the final read (B, T, d)."""
        raise NotImplementedError

    def show(self, addition: Addition) -> None:
        """Show the hooks an addition before it is done."""
        for hook in self.hooks:
            hook(addition)
