"""CUDA graphs without a GPU: operators on CPU tensors are recorded, undone, and replayed.

As in a capture, nothing that is recorded counts until the graph is replayed; and a replay runs no
Python code of a model, reads the recorded tensors and writes the recorded results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph."""

    made: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # storages that a call writes
        self.replays = 0
        Graph.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture cannot read back"
        named = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in named if argument.is_write]
        written += [
            kwargs[x.name] for x in func._schema.arguments if x.is_write and x.name in kwargs
        ]
        for tensor in tensors(written):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        outputs = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, outputs))
        return outputs

    def undo(self) -> None:
        for storage, content in self.before.values():
            storage.copy_(content)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(outputs), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    with graph:
        yield
    graph.undo()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Graphs that are captured on the CPU in this test."""
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr("ddl.models.gpt.can_capture", on_cpu)
    # On the CPU a cache counts its tokens, and masks are looked at.
    monkeypatch.setattr("ddl.models.tokens.on_host", lambda x: False)
    monkeypatch.setattr("ddl.models.cache.Cache.check", lambda *_: None)
    return Graph.made


def on_cpu(model: Any, device: torch.device) -> bool:
    from ddl.nn.graph import can_capture

    return can_capture(model, torch.device("cuda"))
