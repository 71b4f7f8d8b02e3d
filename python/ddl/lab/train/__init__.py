"""Training: `Trainer` runs the steps, and `train` is `ddl train`.

Names are imported on first use, because a comparison reads runs without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Step": ".trainer",
    "Trained": ".launch",
    "Trainer": ".trainer",
    "Watch": ".watch",
    "stop_on_signal": ".stopping",
    "train": ".launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value
