"""Training: `Trainer` runs the steps, and `train` is `ddl train`."""

from .device import pick_device
from .loop import Trained, train
from .progress import progress_bar
from .stopping import stop_on_signal
from .trainer import Step, Trainer
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
