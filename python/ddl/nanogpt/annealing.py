"""The way from additions to rewrites: how far a model is, and the optimizer whose steps count."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ddl.results import Write

__all__ = ["Annealing", "anneal", "blend"]


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
        """Count one step, in place, because a CUDA graph reads the buffer at its address."""
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

    Where nothing is erased, w = v; with a gate of its own for what is, there is no such w
    (`ddl.nanogpt.convert` refuses it).

    Y, and the write of w with aβ, are returned. So the operators and their fusion with the read
    stay as they are, and with a = 0 they keep Y bit for bit: X' is what an addition gives. Nothing
    is divided by β or by |k|, which may be 0. It holds for each of several rewrites, because what
    is added stays what it is: Y_j = X_j + (1 − a) F 1ᵀ after every one of them.

    share: a (). state: X (…, d, m). written: F (…, d), the sublayer's output; it is the direction k
    itself, unless mapping="v".
    """
    direction, value, gate, eps_k, erase, heads = write
    added = (1 - share) * written.to(gate.dtype)
    if erase == "none":
        blended = Write(direction, value, share * gate, eps_k, erase, heads)
        return state + added.unsqueeze(-1).to(state.dtype), blended
    assert eps_k is not None  # what erases is normalised
    k = direction.to(gate.dtype)
    norm = (k.square().sum(-1, keepdim=True) + eps_k**2).sqrt()
    if heads > 1:
        each = torch.unflatten(added, -1, (heads, -1))
    else:
        each = added if k.ndim == added.ndim else added.unsqueeze(-2)
    value = value + (k * each).sum(-1, keepdim=True) / norm
    blended = Write(direction, value, share * gate, eps_k, erase, heads)
    return state + added.unsqueeze(-1).to(state.dtype), blended


_COUNTED: WeakKeyDictionary[torch.optim.Optimizer, WeakSet[Annealing]] = WeakKeyDictionary()


def anneal(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let each step of `optimizer` bring a model of `convert(…, start="additive")` nearer to DDL.

    The model's `configure_optimizers` does this itself. Call it for an optimizer that you make
    yourself, also after resuming: neither the optimizer's state dict nor its pickle holds it. If
    several optimizers step together, call it for one of them. A second call for the same two
    changes nothing.

    model: the converted model, also if torch.compile or DDP wraps it.

    Raises:
        ValueError: `model` was not converted with start="additive".
    """
    found = [module for module in model.modules() if isinstance(module, Annealing)]
    if not found:
        expected, got = 'one converted with start="additive"', type(model).__name__
        raise ValueError(f"`model` must be {expected}, got a {got} that was not")
    for annealing in found:
        counted = _COUNTED.setdefault(optimizer, WeakSet())
        if annealing not in counted:
            counted.add(annealing)
            optimizer.register_step_post_hook(_advance(annealing))


def _advance(annealing: Annealing) -> Any:
    return lambda optimizer, args, kwargs: annealing.advance()
