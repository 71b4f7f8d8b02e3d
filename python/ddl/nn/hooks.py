"""Hooks: functions that see a rewrite before it is done, and may change it.

`ddl.record` and `ddl.edit` install them. Every trunk passes its rewrites through
`DeltaResidual.hooked`, since it runs the rewrite fused with the next read, where no forward hook
fires. A stream without rewrites shows its hooks what each sublayer adds (additions.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.results import Write


class Rewrite(NamedTuple):
    """A rewrite that is about to be done: X' = X + k̂ (β vᵀ − α k̂ᵀX); or n, one after the other.

    state: X (…, d, m). direction, value, gate, eps_k, erase: as in `Write`; a hook may change the
    value, the gate and what is erased. keep: (…,) bool, False for padding; None without padding.
    continues: True if the tokens continue those of a history or cache. scale: of all gates, the
    residual's `branch_scale`; β and α are without it.
    """

    state: Tensor
    direction: Tensor
    value: Tensor
    gate: Tensor
    eps_k: float
    erase: str
    keep: Tensor | None
    continues: bool
    scale: float = 1.0

    @property
    def write(self) -> Write:
        """The write as the hooks have left it; its gates are without the scale."""
        return Write(self.direction, self.value, self.gate, self.eps_k, self.erase)

    @property
    def alpha(self) -> Tensor:
        """α, in the shape of the gate: β, or 0 of a rewrite that erases nothing."""
        return self.gate if self.erase == "tied" else torch.zeros_like(self.gate)

    def unit_direction(self) -> Tensor:
        """k̂ = k/√(|k|² + ε_k²) (…, d), in the gate's dtype."""
        k = self.direction.to(self.gate.dtype)
        return k / (k.square().sum(-1, keepdim=True) + self.eps_k**2).sqrt()

    def after(self) -> Tensor:
        """X' (…, d, m), in the state's dtype."""
        return functional.write_to(self.state, self.write.scaled(self.scale))

    @property
    def is_single(self) -> bool:
        """Whether it is one rewrite, and none of the tensors has an axis for several."""
        return self.direction.ndim < self.state.ndim

    def singles(self) -> list[Rewrite]:
        """Each of its rewrites alone: the state of one is what the one before leaves, unrounded."""
        if self.is_single:
            return [self]
        state, found = self.state.to(self.gate.dtype), []
        parts = (self.direction.unbind(-2), self.value.unbind(-2), self.gate.unbind(-1))
        for direction, value, gate in zip(*parts, strict=True):
            found.append(self._replace(state=state, direction=direction, value=value, gate=gate))
            state = found[-1].after()
        return found


Hook = Callable[[Rewrite], Rewrite]


class Hooked(nn.Module):
    """A module that shows its hooks what it does to a stream; a copy or a saved one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: tuple[Callable[[Any], Any], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hooks": ()}


_contexts = 0  # that are open, in all threads
_stance: Any = None  # torch's, while one is open
_lock = threading.RLock()


@contextmanager
def installed(hooks: Iterable[tuple[Hooked, Callable[[Any], Any]]]) -> Iterator[None]:
    """Install each hook in its Hooked module, after those it has, until the end.

    Each hook gets what the one before it returned. Meanwhile compiled models run uncompiled,
    because their compiled code calls no hooks. Contexts may end in any order, as in threads:
    torch's stance belongs to the process, and leaving `set_stance` restores the one that it found,
    so the first context sets it and the last one restores it.
    """
    global _contexts, _stance
    pairs = list(hooks)
    with _lock:
        if _contexts == 0:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _contexts += 1
        for residual, hook in pairs:
            residual.hooks = (*residual.hooks, hook)
    try:
        yield
    finally:
        with _lock:
            for residual, hook in pairs:
                residual.hooks = tuple(other for other in residual.hooks if other is not hook)
            _contexts -= 1
            if _contexts == 0:
                _stance.__exit__(None, None, None)
                _stance = None
