"""The way from additions to rewrites: how far a model is, and which optimizer steps count."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddl.results import Write


class Annealing(nn.Module):
    """The share a of the rewrites in a converted model: a = step/steps, and 1 from then on.

    It is linear in the number of optimizer steps, so each of them moves the function by the same
    share.

    steps: N, over which a goes from 0 to 1.
    step: buffer (), int64, how many were taken. An integer, because `model.to(torch.bfloat16)`
        would round a fraction, and then a small increment would leave it where it is.
    done: True if a is 1. The forward branches on this bool, not on the buffer: torch.compile
        compiles once more when it changes, and no forward waits for the device.
    """

    step: Tensor

    def __init__(self, steps: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.steps, self.done = steps, False
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> Annealing:
        super()._apply(fn, recurse)
        if self.step.is_inference():  # moved under inference mode: it could not count in training
            with torch.inference_mode(False):
                self.step = self.step.clone()
        return self

    def reset_parameters(self) -> None:
        """Reset the count to 0."""
        self.step.zero_()
        self.done = False

    def share(self, dtype: torch.dtype) -> Tensor:
        """Return a as a tensor ()."""
        return (self.step.to(dtype) / self.steps).clamp(max=1)

    def advance(self) -> None:
        """Count one step, in place, because a CUDA graph reads the buffer at its address.

        Steps of torch's optimizers are counted (`count_steps`); call it after those of others.
        """
        if not self.done:
            self.step.add_(1)
            self.find_out_if_done()

    def find_out_if_done(self) -> None:
        """Set `done` from the buffer, which may have been loaded."""
        # The buffer alone is believed, as DDP may have just copied it from another process. On a
        # GPU this waits for the step, but only while a model is annealed.
        self.done = not self.step.is_meta and int(self.step) >= self.steps

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.find_out_if_done()

    def extra_repr(self) -> str:
        return f"steps={self.steps}"


def blend(share: Tensor, state: Tensor, written: Tensor, write: Write) -> tuple[Tensor, Write]:
    """Return the state and the write that together are a blend of an addition and a rewrite.

        X' = X + (1 − a) F 1ᵀ + aβ k̂ (vᵀ − k̂ᵀX)          F is added to every value channel
           = Y + aβ k̂ (wᵀ − k̂ᵀY),  Y = X + (1 − a) F 1ᵀ,  w = v + (1 − a) k̂ᵀF

    Where nothing is erased, w = v.

    Y, and the write of w with aβ, are returned. So the operators and their fusion with the read
    stay as they are, and with a = 0 they keep a finite Y bit for bit: X' is what an addition gives.
    Nothing is divided by β or by |k|, which may be 0. It holds for each of several rewrites,
    because what is added stays what it is: Y_j = X_j + (1 − a) F 1ᵀ after every one of them.

    share: a (). state: X (…, d, m). written: F (…, d), the sublayer's output; it is the direction k
    itself, unless mapping="v".
    """
    direction, value, gate, eps_k, erase = write
    added = (1 - share) * written.to(gate.dtype)
    if erase == "tied":
        k = direction.to(gate.dtype)
        norm = (k.square().sum(-1, keepdim=True) + eps_k**2).sqrt()
        each = added if k.ndim == added.ndim else added.unsqueeze(-2)
        value = value + (k * each).sum(-1, keepdim=True) / norm
    blended = Write(direction, value, share * gate, eps_k, erase)
    return state + added.unsqueeze(-1).to(state.dtype), blended


class _Counter:
    """Which optimizer steps count for an Annealing: those that train parameters of its model.

    Of several optimizers that step one after the other, as Muon and AdamW, one counts; of an
    optimizer that has another one do its steps, as ZeroRedundancyOptimizer, the inner one.

    models: the model and its parts around the Annealing, any of which may outlive the others.
    steps: how many there were, counted or not; begun: at the beginning of an optimizer's step.
    round: ids of the optimizers that have stepped since the last step that counted, and of their
    parameters.
    """

    def __init__(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        self.steps = 0
        self.begun: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.round: set[int] = set()

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step that `optimizer` has just taken counts."""
        trained = self._trained_by(optimizer)
        if not trained or self.begun.get(optimizer, self.steps) != self.steps:
            return False
        first = not self.round or not self.round.isdisjoint(trained)
        self.round = trained if first else self.round | trained
        self.steps += 1
        return first

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The ids of an optimizer and of the model's parameters that it has stepped; or none."""
        theirs = (p for group in optimizer.param_groups for p in group["params"])
        stepped = {id(p) for p in theirs if p.grad is not None}
        stepped &= {id(p) for model in self.models for p in model.parameters()}
        skipped = getattr(optimizer, "found_inf", None)  # GradScaler's, for fused optimizers
        if not stepped or (skipped is not None and skipped):
            return set()
        return {id(optimizer), *stepped}


_COUNTERS: WeakKeyDictionary[Annealing, _Counter] = WeakKeyDictionary()
_LOCK = threading.Lock()


def count_steps(model: nn.Module) -> None:
    """Let each optimizer step that trains parameters of `model` count for its Annealing."""
    for name, module in model.named_modules():
        if isinstance(module, Annealing):
            _listen()
            *above, _ = name.split(".")
            around = [".".join(above[:n]) for n in range(len(above) + 1)]
            with _LOCK:
                counter = _COUNTERS.setdefault(module, _Counter())
            counter.models.update(map(model.get_submodule, around))


def _counters() -> list[tuple[Annealing, _Counter]]:
    with _LOCK:
        return [(annealing, c) for annealing, c in _COUNTERS.items() if not annealing.done]


@cache
def _listen() -> None:
    """See the steps of all optimizers of this process from now on."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for _, counter in _counters():
        counter.begun[optimizer] = counter.steps


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for annealing, counter in _counters():
        if counter.counts(optimizer):
            annealing.advance()
