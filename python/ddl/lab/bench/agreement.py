"""Models to measure, and their agreement: what a model must compute before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddl.lab.config import GPTConfig
from ddl.models import GPT, Cache

from .measure import MismatchError, compare

# Allowed rms error of a tensor, relative to its scale. One operator is accurate to 5e-6 (80 units
# in the last place of float32, tests/support/tolerances.py); a trunk applies 13 in sequence, with
# matrix products between them.
TOLERANCE = 1e-4
# Largest allowed |difference| / |gradient| over all gradients together, of bfloat16 against float32
# and of compiled against eager code. At the presets' sizes it is 0.02 additive, 0.055 ddl.
LARGEST_DRIFT = 0.15
CACHE_TOLERANCE = 1e-5  # of the logits' rms, float32


def make(config: GPTConfig, device: str | torch.device = "cpu") -> GPT:
    """A model whose backbone is the same for every residual."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    perturb_(model)
    return model


@torch.no_grad()
def perturb_(model: GPT) -> None:
    """Add noise to the parameters that the trunk adds to the backbone.

    They start as zeros and ones, which would hide wrong terms from the check.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trunk.named_parameters():
        if not name.startswith("sublayers."):
            size = 0.5 / parameter.shape[-1] ** 0.5 if "residuals" in name else 0.1
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise.to(parameter.device))


def results(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter, by name. Clears the model's gradients."""
    model.zero_grad(set_to_none=True)
    logits, loss = model(batch, labels=batch)
    loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name.removeprefix("_orig_mod.")] = parameter.grad
    model.zero_grad(set_to_none=True)
    return found


def check(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of `compare`. A bias also has the scale of its layer's weight, and the
    `scale` of a `map` the length of the map's gradient: these are sums over tokens that may cancel.
    """
    if actual.keys() != expected.keys():
        alone = ", ".join(sorted(actual.keys() ^ expected.keys()))
        raise MismatchError(f"{alone}: a gradient on one side only")
    pairs = {n: (actual[n], expected[n]) for n in expected}
    scales = {n: n.removesuffix("bias") + "weight" for n in expected if n.endswith(".bias")}
    for name in [n for n in expected if n.endswith(".scale")]:
        length = expected[name.removesuffix("scale") + "map"].norm()
        scales[name] = f"length for {name}"
        pairs[scales[name]] = (length, length)
    return compare(pairs, TOLERANCE, scales)


def drift(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The distance of all gradients from those expected, relative to their length."""
    difference = length = 0.0
    for name in expected.keys() - {"logits", "loss"}:
        exact = expected[name].double()
        difference += (actual[name].double() - exact).square().sum().item()
        length += exact.square().sum().item()
    return float((difference / length) ** 0.5)


def check_drift(drift: float) -> None:
    """Raise MismatchError if gradients in bfloat16 are too far from those expected."""
    if not drift <= LARGEST_DRIFT:
        raise MismatchError(
            f"in bfloat16 its gradients are {drift:.2f} of their length away from those expected, "
            f"allowed {LARGEST_DRIFT}"
        )


@torch.no_grad()
def check_cache(model: GPT, idx: Tensor, tolerance: float = CACHE_TOLERANCE) -> None:
    """Raise MismatchError unless a cached step gives the logits of all of idx (B, T)."""
    cache = Cache(model.config)
    model(idx[:, :-1], cache=cache)
    step, whole = model(idx[:, -1:], cache=cache).logits, model(idx, last=1).logits
    compare({"logits of a cached step": (step, whole)}, tolerance)
