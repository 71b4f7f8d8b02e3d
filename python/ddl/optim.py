"""AdamW's options, parameter groups and learning-rate schedule. The options need no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ddl.errors import InputError
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
    "set_learning_rate",
]

Decay = Literal["sublayers", "matrices"]

NEEDS_SUBLAYERS = (
    "have its sublayers in a DeltaStream, in blocks with a DeltaResidual each, or in the blocks of"
    " an nn.ModuleList"
)


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
    """Return parameter groups for a torch optimizer: with and without weight decay.

    A model with another parameterization than the standard one has several of each, with keys of
    their own: `lr_scale`, by which a group's learning rate is multiplied (`set_learning_rate` does
    it), and `eps_scale`, the factor of Adam's ε. The weight decay of a group is divided by its
    `lr_scale`, since AdamW multiplies it by the rate (docs/transfer.md).

    decay: "sublayers" decays matrices of the sublayers and embeddings, but not norms, biases, and
    all parameters of `DeltaResidual`, `Read` and `Expand`, for which zero is no neutral value: a
    compressor decayed to zero reads nothing, and an expansion decayed to zero no longer repeats.
    Nor does it decay the static mixing of `HyperConnection`, as its paper says. The maps of the
    baselines' streams are decayed: without them a stream adds.
    "matrices" decays whatever has two or more dimensions, as nanoGPT does.

    Parameters without requires_grad are left out; shared ones appear once. Raises ValueError for
    another `decay`, and for a weight decay that is negative or no number.
    """
    check_choice("decay", decay, get_args(Decay))
    check_finite("weight_decay", weight_decay)
    check_least("weight_decay", weight_decay)
    marked = never_decayed(model) if decay == "sublayers" else []
    kept = {id(parameter): parameter for parameter in marked}
    decayed: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        group = decayed if parameter.ndim >= 2 and id(parameter) not in kept else kept
        group[id(parameter)] = parameter
    scales = _scales_of(model)
    return [
        *_by_scale(scales, decayed.values(), weight_decay),
        *_by_scale(scales, kept.values(), 0.0),
    ]


def _scales_of(model: nn.Module) -> dict[int, tuple[float, float]]:
    """The factors of rate and ε, by the id of a parameter; none in the standard case."""
    scales: dict[int, tuple[float, float]] = {}
    for module in model.modules():
        own: Any = getattr(module, "learning_rate_scales", None)
        scales |= {} if own is None else {id(p): (scale, eps) for p, scale, eps in own()}
    return scales


def _by_scale(
    scales: dict[int, tuple[float, float]],
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Groups of parameters with the same factors: one in the standard case."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not scales:
        return [{"params": trained, "weight_decay": weight_decay}]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault(scales.get(id(parameter), (1.0, 1.0)), []).append(parameter)
    return [
        {"params": group, "weight_decay": weight_decay / lr, "lr_scale": lr, "eps_scale": eps}
        for (lr, eps), group in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's learning rate: lr times the group's `lr_scale`, if it has one."""
    check_finite("lr", lr)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


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

    Muon's are the matrices (2-D parameters) of the sublayers, but for embeddings and for a stream's
    own: a gate, a value or a compression is not a map that an orthogonal step would make sense for.
    Sublayers are those of a DeltaStream or a model of `ddl.models`, and all modules in a block that
    holds a DeltaResidual. A block is an entry of a ModuleList, Sequential or ModuleDict. If a model
    has none of these, as a plain baseline, its blocks are the entries of every ModuleList that have
    modules inside. AdamW gets everything else: heads, positions, embeddings, norms, biases.

    weight_decay, decay: as in `parameter_groups`, which divides AdamW's in two. matrices, others:
    keys that these groups get as well, such as lr or, for an optimizer that tells its groups apart
    by it, `kind`. Groups without a parameter are left out.

    Raises ValueError if the model has matrices but no sublayers by this rule.
    """
    from torch import nn

    groups = parameter_groups(model, weight_decay, decay)
    not_hidden = never_decayed(model)
    for module in model.modules():
        not_hidden += module.parameters() if isinstance(module, nn.Embedding) else ()
    known = {id(parameter) for parameter in not_hidden}
    left = [p for group in groups for p in group["params"] if p.ndim == 2 and id(p) not in known]
    inner = _matrices_of_sublayers(model) - known
    if left and not inner:
        raise InputError("model", NEEDS_SUBLAYERS, f"a {type(model).__name__} with none of these")
    hidden = [parameter for parameter in left if id(parameter) in inner]
    known = {id(parameter) for parameter in hidden}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in known]
    first = {"params": hidden, "weight_decay": weight_decay, **(matrices or {})}
    rest = [group | (others or {}) for group in groups if group["params"]]
    return [first] if hidden else [], rest


def _matrices_of_sublayers(model: nn.Module) -> set[int]:
    """The ids of the 2-D parameters in sublayers and blocks, by `matrices_and_others`'s rule."""
    from torch import nn

    def matrices(modules: Iterable[nn.Module]) -> set[int]:
        return {id(p) for module in modules for p in module.parameters() if p.ndim == 2}

    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    entries = (entry for each in lists for entry in each if any(entry.children()))
    return matrices(_sublayers(model, None)) or matrices(entries)


def _sublayers(module: nn.Module, block: nn.Module | None) -> Iterator[nn.Module]:
    """The sublayers of streams in `module`, and the blocks with rewrites; `block` is around it."""
    from torch import nn

    from ddl.nn.additions import AddingStream
    from ddl.nn.residual import DeltaResidual
    from ddl.nn.stream import DeltaStream

    if isinstance(module, DeltaStream | AddingStream):
        yield module.sublayers
    elif isinstance(module, DeltaResidual):
        yield from () if block is None else (block,)
    else:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        listed |= block is None and isinstance(module, nn.ModuleDict)  # else it is part of a block
        for child in module.children():
            is_block = listed and not isinstance(child, DeltaResidual)
            yield from _sublayers(child, child if is_block else block)


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
    for group in groups:
        group["eps"] = config.eps * group.get("eps_scale", 1.0)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    set_learning_rate(optimizer, config.lr)
    return optimizer


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate at a step of a run: linear warm-up, then cosine decay to lr·min_lr_ratio.

    step: optimizer steps done before, from 0. steps: of the whole run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    low = config.lr * config.min_lr_ratio
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * min(1.0, progress)))
