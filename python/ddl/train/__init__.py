"""Training: `Trainer` runs the steps, and `train` is `ddl train`."""

from .loop import check_finite, progress_bar, stop_on_interrupt, train, train_steps
from .trainer import Step, Trainer, pick_device

__all__ = [
    "Step",
    "Trainer",
    "check_finite",
    "pick_device",
    "progress_bar",
    "stop_on_interrupt",
    "train",
    "train_steps",
]
