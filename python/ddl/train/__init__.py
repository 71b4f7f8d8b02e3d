"""Training: `Trainer` runs the steps, and `train` is `ddl train`."""

from .loop import Trained, train
from .session import progress_bar
from .stopping import stop_on_signal
from .trainer import Step, Trainer, pick_device
from .watch import Watch

__all__ = [
    "Step",
    "Trained",
    "Trainer",
    "Watch",
    "pick_device",
    "progress_bar",
    "stop_on_signal",
    "train",
]
