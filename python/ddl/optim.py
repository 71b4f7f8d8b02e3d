"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import nn

from ddl.config import Decay, OptimConfig
from ddl.nn.expand import Expand
from ddl.nn.hyper import HyperConnection
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.options import check_choice

__all__ = ["learning_rate", "make_optimizer", "parameter_groups"]

NEVER_DECAYED = (DeltaResidual, Read, Expand)


def parameter_groups(
    model: nn.Module, weight_decay: float, decay: Decay = "sublayers"
) -> list[dict[str, Any]]:
    """Return two parameter groups for a torch optimizer: with and without weight decay.

    decay: "sublayers" decays matrices of the sublayers and embeddings, but not norms, biases, and
    all parameters of `DeltaResidual`, `Read` and `Expand`, for which zero is no neutral value: a
    compressor decayed to zero reads nothing, and an expansion decayed to zero no longer repeats.
    Nor does it decay the static mixing of `HyperConnection`, as its paper says.
    "matrices" decays whatever has two or more dimensions, as nanoGPT does.

    Parameters without requires_grad are left out; shared ones appear once. Raises ValueError for
    another `decay`.
    """
    check_choice("decay", decay, get_args(Decay))
    kept: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if decay == "sublayers" and isinstance(module, NEVER_DECAYED):
            kept |= {id(p): p for p in module.parameters()}
        if decay == "sublayers" and isinstance(module, HyperConnection):  # its own, not its maps'
            kept |= {id(p): p for p in module.parameters(recurse=False)}
    decayed: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        group = decayed if parameter.ndim >= 2 and id(parameter) not in kept else kept
        group[id(parameter)] = parameter
    return [
        {"params": [p for p in decayed.values() if p.requires_grad], "weight_decay": weight_decay},
        {"params": [p for p in kept.values() if p.requires_grad], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over `parameter_groups`, torch's fused version (one pass over memory)."""
    groups = parameter_groups(model, config.weight_decay, config.decay)
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    return torch.optim.AdamW(groups, **options, fused=True)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate at a step of a run: linear warm-up, then cosine decay to lr·min_lr_ratio.

    step: optimizer steps done before, from 0. steps: of the whole run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    low = config.lr * config.min_lr_ratio
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * min(1.0, progress)))
