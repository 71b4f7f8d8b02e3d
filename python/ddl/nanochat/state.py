"""A state that passes between two blocks, with the arithmetic of nanochat's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MUL = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
SUB = (torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)


class State:
    """A state X (B, T, d, m), which nanochat's forward takes for a stream x (B, T, d).

        λ·X              scales it
        λ·X + x          adds an embedding x (B, T, d), opened as the first one was
        x − λ·X          subtracts the raw read of λ·X from x, the last block's raw read

    and has a dtype. Nothing else is defined.

    opened: opens an embedding to a state. read: the raw read (B, T, d) of a state. scale: λ, a
    tensor with one element, not multiplied yet; None for 1.
    """

    def __init__(
        self,
        value: Tensor,
        opened: Callable[[Tensor], Tensor],
        read: Callable[[Tensor], Tensor],
        scale: Tensor | None = None,
    ) -> None:
        self.value, self.opened, self.read, self.scale = value, opened, read, scale

    def scaled(self, scale: Tensor) -> State:
        """λ·X. Raises ValueError unless λ is a tensor with one element."""
        if not isinstance(scale, Tensor) or scale.numel() != 1:
            got = tuple(scale.shape) if isinstance(scale, Tensor) else repr(scale)
            raise ValueError(f"a State must be scaled by a tensor with one element, got {got}")
        product = scale if self.scale is None else self.scale * scale
        return State(self.value, self.opened, self.read, product)

    def plus(self, x: Tensor) -> State:
        """X + x."""
        return State(self.tensor() + self.opened(x), self.opened, self.read)

    def taken_from(self, x: Tensor) -> Tensor:
        """x − X, read."""
        return x - self.read(self.tensor())

    @property
    def dtype(self) -> torch.dtype:
        """That of X."""
        return self.value.dtype

    def tensor(self) -> Tensor:
        """X (B, T, d, m)."""
        return self.value if self.scale is None else self.scale * self.value

    def __add__(self, x: Tensor) -> State:
        return self.plus(x)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do tensor ∘ state; torch.compile comes here, too, for state + tensor."""
        if len(args) != 2 or kwargs:
            return NotImplemented
        state, other = args if isinstance(args[0], State) else args[::-1]
        if function in MUL:
            return state.scaled(other)
        if function in ADD:
            return state.plus(other)
        if function in SUB and state is args[1]:
            return state.taken_from(other)
        return NotImplemented
