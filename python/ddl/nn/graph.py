"""A step from a static History as a CUDA graph: a GPU then does not wait for Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP = 2  # steps before the capture, in which kernels are compiled and buffers allocated


class GraphedStep:
    """A step for one token of each sequence, captured after `WARM_UP` calls and then replayed.

    work: maps tokens (B, 1) to a result, (B, …), from a static History, which keeps the past at the
    same addresses.
    """

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        self.work = work
        self.calls = 0
        self.tokens: Tensor | None = None
        self.result: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the result for these tokens, which the next call overwrites."""
        self.calls += 1
        if self.calls <= WARM_UP:
            return self.work(tokens)
        if self.graph is None:
            self.tokens, self.graph = tokens.clone(), torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.work(self.tokens)
        assert self.tokens is not None
        assert self.result is not None
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.result


def can_capture(model: nn.Module, device: torch.device) -> bool:
    """Whether a graph can stand for calls of a model: on a GPU, if no Python code watches them.

    A replay calls neither hooks nor what `Module.compile` put in a module's place.
    """
    return device.type == "cuda" and not any(map(_is_watched, model.modules()))


def _is_watched(module: nn.Module) -> bool:
    theirs = module._forward_hooks, module._forward_pre_hooks, module._compiled_call_impl
    return any((*theirs, getattr(module, "hooks", ())))
