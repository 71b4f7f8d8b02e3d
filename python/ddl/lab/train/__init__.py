"""Training: `Trainer` runs the steps, and `train` is `ddl train`."""

from .launch import Trained, train
from .stopping import stop_on_signal
from .trainer import Step, Trainer
from .watch import Watch

__all__ = [
    "Step",
    "Trained",
    "Trainer",
    "Watch",
    "stop_on_signal",
    "train",
]
