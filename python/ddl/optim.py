"""AdamW's options, parameter groups and learning-rate schedule. The options need no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ddl.fields import check_counts, check_literals, plain_numbers, require
from ddl.options import check_choice, check_finite, check_least, check_positive

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Decay",
    "OptimConfig",
    "learning_rate",
    "make_optimizer",
    "matrices_and_others",
    "never_decayed",
    "parameter_groups",
]

Decay = Literal["sublayers", "matrices"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up, cosine decay and gradient clipping, as in arXiv 2601.00417."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    warmup_steps: int = 2000
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: float = 1e-8
    """Adam's ε, added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of the parameters that `decay` names."""
    decay: Decay = "sublayers"
    """Parameters with weight decay. sublayers: the matrices of the sublayers and of baselines'
    streams, and the embedding, but nothing of a delta stream. matrices: whatever has two or more
    dimensions, as in nanoGPT, so gates, values, compressors and the embedding convolution as
    well."""
    clip: float = 1.0
    """Gradient norm above which gradients are clipped; 0 switches clipping off."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        check_literals(self)
        check_positive("lr", self.lr)
        check_counts(self, "warmup_steps", least=0)
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1", self.min_lr_ratio)
        two = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        numbers = two and all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas)
        require(numbers, "betas", "two numbers in [0, 1)", self.betas)
        check_positive("eps", self.eps)
        for name in ("weight_decay", "clip"):
            check_finite(name, getattr(self, name))
            check_least(name, getattr(self, name))


def parameter_groups(
    model: nn.Module, weight_decay: float, decay: Decay = "sublayers"
) -> list[dict[str, Any]]:
    """Return two parameter groups for a torch optimizer: with and without weight decay.

    decay: "sublayers" decays matrices of the sublayers and embeddings, but not norms, biases, and
    all parameters of `DeltaResidual`, `Read` and `Expand`, for which zero is no neutral value: a
    compressor decayed to zero reads nothing, and an expansion decayed to zero no longer repeats.
    Nor does it decay the static mixing of `HyperConnection`, as its paper says. The maps of the
    baselines' streams are decayed: without them a stream adds.
    "matrices" decays whatever has two or more dimensions, as nanoGPT does.

    Parameters without requires_grad are left out; shared ones appear once. Raises ValueError for
    another `decay`.
    """
    check_choice("decay", decay, get_args(Decay))
    marked = never_decayed(model) if decay == "sublayers" else []
    kept = {id(parameter): parameter for parameter in marked}
    decayed: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        group = decayed if parameter.ndim >= 2 and id(parameter) not in kept else kept
        group[id(parameter)] = parameter
    return [
        {"params": [p for p in decayed.values() if p.requires_grad], "weight_decay": weight_decay},
        {"params": [p for p in kept.values() if p.requires_grad], "weight_decay": 0.0},
    ]


def matrices_and_others(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    decay: Decay = "sublayers",
    matrices: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return parameter groups for torch.optim.Muon, and those for AdamW beside it.

        hidden, rest = matrices_and_others(model)
        optimizers = Muon(hidden, lr=0.02), AdamW(rest, lr=3e-4)

    Muon's are the matrices of the sublayers: what has two dimensions, and is neither an embedding
    nor a head (a module called `lm_head`, or what `get_output_embeddings` returns) nor a stream's
    own: a gate, a value or a compression is no map that an orthogonal step would make sense for.

    weight_decay, decay: as in `parameter_groups`, which divides AdamW's in two. matrices, others:
    keys that these groups get as well, such as lr or, for an optimizer that tells its groups apart
    by it, `kind`. Groups without a parameter are left out.
    """
    from torch import nn

    groups = parameter_groups(model, weight_decay, decay)
    not_hidden = never_decayed(model) + list(_own_of_streams(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] == "lm_head":
            not_hidden += module.parameters()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    not_hidden += () if head is None else head.parameters()
    known = {id(parameter) for parameter in not_hidden}
    hidden: list[nn.Parameter] = []
    for group in groups:
        hidden += [p for p in group["params"] if p.ndim == 2 and id(p) not in known]
    known = {id(parameter) for parameter in hidden}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in known]
    first = {"params": hidden, "weight_decay": weight_decay, **(matrices or {})}
    rest = [group | (others or {}) for group in groups if group["params"]]
    return [first] if hidden else [], rest


def _own_of_streams(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of residual streams, whose `sublayers` are modules of their own."""
    for stream in model.modules():
        sublayers = stream._modules.get("sublayers")
        if sublayers is not None:
            theirs = {id(parameter) for parameter in sublayers.parameters()}
            yield from (p for p in stream.parameters() if id(p) not in theirs)


def never_decayed(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that their modules mark, each by a method `never_decayed`."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        mark: Callable[[], Iterable[nn.Parameter]] | None = getattr(module, "never_decayed", None)
        found |= {} if mark is None else {id(parameter): parameter for parameter in mark()}
    return list(found.values())


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over `parameter_groups`, torch's fused version (one pass over memory)."""
    import torch

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
