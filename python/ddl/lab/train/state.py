"""The state of a Trainer as named tensors: the weights, and everything else that a step depends on.

torch.distributed.checkpoint's names for the optimizer are used: `optimizer.state.NAME.exp_avg`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checkpoint import Tensors
from .trainer import Trainer

OPTIMIZER = "optimizer."


def model_tensors(trainer: Trainer) -> Tensors:
    """The weights, by the names of the model's state dict. They share memory with the model."""
    return trainer.model.state_dict()


def training_tensors(trainer: Trainer) -> Tensors:
    """Adam's moments and step counts, the random states, and the sum of losses since a record."""
    optimizer = _optimizer_state(trainer)
    tensors = {
        OPTIMIZER + name: value for name, value in optimizer.items() if isinstance(value, Tensor)
    }
    tensors["random.cpu"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(trainer.device)
    return tensors | {"loss_sum": trainer.loss_sum}


def restore_training(trainer: Trainer, tensors: Tensors) -> None:
    """Set what `training_tensors` returned, which has been filled from a checkpoint since then.

    Learning rate, decay and Adam's rates are not stored: the configuration has them.
    """
    from torch.distributed.checkpoint import state_dict

    optimizer = _optimizer_state(trainer)
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            optimizer[name.removeprefix(OPTIMIZER)] = value
    flat = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    state_dict.set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer, options=flat)
    torch.set_rng_state(tensors["random.cpu"])
    if trainer.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], trainer.device)
    trainer.loss_sum.copy_(tensors["loss_sum"])


def _optimizer_state(trainer: Trainer) -> dict[str, Any]:
    """The optimizer's state, which torch creates if no step has been done, and its options."""
    from torch.distributed.checkpoint import state_dict  # half a second

    flat = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    return state_dict.get_optimizer_state_dict(trainer.model, trainer.optimizer, options=flat)
