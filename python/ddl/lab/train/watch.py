"""Watch: notice a loss or gradient that is not finite, without making a GPU wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ddl.errors import DivergedError

from .trainer import Flags, Step, Trainer


class Watch:
    """Looks at the loss, the gradient norm and the processes' flags of every step.

    On a CPU at once. On a GPU one step later, when the numbers have arrived; `finish` looks at the
    last ones. Both raise DivergedError.

    flags: those that some process had set in the step that was looked at last; none for a single
    process. All processes have the same ones after the same step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.flags = Flags()
        self._seen: _Seen | None = None

    def add(self, step: Step) -> None:
        """Look at the step before this one, or at this one if its numbers are on the CPU."""
        self.finish()
        lr = self.trainer.optimizer.param_groups[0]["lr"]
        numbers = torch.stack((step.loss.float(), step.grad_norm.float()))
        if step.flags is not None:
            numbers = torch.cat((numbers, step.flags))
        self._seen = _Seen(self.trainer.steps_done, lr, *_to_host(numbers))
        if self._seen.arrived is None:
            self.finish()

    def finish(self) -> None:
        """Look at the numbers that have not been looked at."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        if seen.arrived is not None:
            seen.arrived.synchronize()
        loss, norm, *flags = seen.numbers.tolist()
        self.flags = Flags(*(count > 0 for count in flags))
        check_finite(loss, norm, seen.lr, seen.step)


class _Seen(NamedTuple):
    step: int
    lr: float
    numbers: Tensor
    arrived: torch.cuda.Event | None


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if numbers.device.type != "cuda":
        return numbers, None
    copied = numbers.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))
    return copied, arrived


def check_finite(loss: float, norm: float, lr: float, step: int) -> None:
    """Raise DivergedError unless loss and gradient norm are finite."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    wrong = "gradient" if math.isfinite(loss) else "loss"
    raise DivergedError(
        f"the {wrong} is not finite at step {step} (loss {loss:.6g}, gradient norm {norm:.6g},"
        f" learning rate {lr:.3g}): try a lower learning rate or a longer warm-up"
    )


def check_validation(loss: float | None, step: int) -> None:
    """Raise DivergedError if a validation loss is known and not finite."""
    if loss is not None and not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss} at step {step}: try a lower learning rate"
        )


@contextmanager
def sampling(step: int) -> Iterator[None]:
    """Turn torch's refusal to draw from probabilities that are not finite into DivergedError.

    The loss of the step before was finite: it was computed with the weights before their update.
    """
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise DivergedError(
            f"the probabilities of a sample are not finite at step {step}: try a lower learning"
            " rate"
        ) from error
