"""A state that passes between two blocks, and the history of the stream in nanochat's KVCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddl.nanogpt.mixin import derived
from ddl.nn.history import History

Class = TypeVar("Class", bound=type)

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

    def _scaled(self, scale: Tensor) -> State:
        if not isinstance(scale, Tensor) or scale.numel() != 1:
            got = tuple(scale.shape) if isinstance(scale, Tensor) else repr(scale)
            raise ValueError(f"a State must be scaled by a tensor with one element, got {got}")
        product = scale if self.scale is None else self.scale * scale
        return State(self.value, self.opened, self.read, product)

    def _plus(self, x: Tensor) -> State:  # torch.compile would take a `+` back to torch's dispatch
        return State(self.tensor() + self.opened(x), self.opened, self.read)

    @property
    def dtype(self) -> torch.dtype:
        """That of X."""
        return self.value.dtype

    def tensor(self) -> Tensor:
        """X (B, T, d, m)."""
        return self.value if self.scale is None else self.scale * self.value

    def __add__(self, x: Tensor) -> State:
        return self._plus(x)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do tensor ∘ state; torch.compile comes here, too, for state + tensor."""
        if len(args) != 2 or kwargs:
            return NotImplemented
        state, other = args if isinstance(args[0], State) else args[::-1]
        if function in MUL:
            return state._scaled(other)
        if function in ADD:
            return state._plus(other)
        if function in SUB and state is args[1]:
            return other - state.read(state.tensor())
        return NotImplemented


def cached(kind: Class) -> Class:
    """Return a subclass of nanochat's KVCache that keeps the past of the stream, too.

        KVCache = ddl.nanochat.cached(KVCache)  # in nanochat/engine.py, after the class

    Token reads, an expansion by convolution and convolved gates need it. `prefill` copies it from a
    cache of one sequence to all, `reset` empties it.
    """
    made: Class = kind if issubclass(kind, _WithHistory) else derived(kind, _WithHistory)
    return made


class _WithHistory:
    """Mixin that keeps a history beside the keys and values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history = History()

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.history = History()

    def prefill(self, other: Any) -> None:
        """Copy another cache, of as many sequences or of one."""
        super().prefill(other)  # type: ignore[misc]
        history = history_of(other, needed=True)
        assert history is not None
        self.history = history.clone()
        if other.batch_size != self.batch_size:  # type: ignore[attr-defined]
            rows = torch.zeros(self.batch_size, dtype=torch.int64)  # type: ignore[attr-defined]
            self.history.select(rows.to(self.cache_seqlens.device))  # type: ignore[attr-defined]


def history_of(kv_cache: Any, needed: bool) -> History | None:
    """The history in a cache; None without a cache, or where none is needed.

    Raises TypeError if the cache has none and one is needed.
    """
    if kv_cache is None or not needed:
        return None
    history = getattr(kv_cache, "history", None)
    if isinstance(history, History):
        return history
    raise TypeError(
        "`kv_cache` must be of the class that `ddl.nanochat.cached(KVCache)` returns, because what "
        f"reads several tokens needs their past, got {type(kv_cache).__name__}"
    )
