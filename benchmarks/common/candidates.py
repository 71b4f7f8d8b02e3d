"""The models of the training-step benchmark: how they are made, that they agree, what a step is."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from baselines import plain
from common.measure import RedGateError, gate
from common.report import progress
from ddl.config import GPTConfig
from ddl.models import GPT

# rms error of a tensor, relative to its scale. One operator is right to 5e-6 (80 units in the last
# place of float32, tests/support/tolerances.py); a trunk has 13 in sequence, with matrix products
# between.
TOLERANCE = 1e-4


@dataclass
class Contestant:
    """One model in one form and mode."""

    residual: str
    form: str  # "fused" or "plain"; the additive residual is plain
    mode: str  # "eager" or "compiled"
    model: nn.Module
    oracle: nn.Module  # the same parameters in plain PyTorch, eager
    optimizer: torch.optim.Optimizer | None
    hidden_size: int
    heat: str = "fused"  # the form that is timed in the same rounds; additive runs in both
    error: float | None = None  # largest in the gate
    drift: float | None = None  # of its gradients in bfloat16
    red: str | None = None
    compile_seconds: float | None = None  # of the first step; little where a cache had it all
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.residual} {self.form} {self.mode}"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def enter(args: argparse.Namespace, mode: str) -> list[Contestant]:
    """The contestants of a mode; the forms of one variant share their parameters."""
    contestants = []
    backbone = GPTConfig(
        vocab_size=256,
        block_size=args.time,
        num_layers=args.layers,
        num_heads=args.heads,
        hidden_size=args.hidden_size,
    )
    for residual in args.variants:
        model = make(replace(backbone, residual=residual))
        oracle = model if residual == "additive" else plain.peer(model)
        forms = {"plain": oracle} if residual == "additive" else {"fused": model, "plain": oracle}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if args.adamw else None
        for form, module in forms.items():
            if form == "plain" and residual != "additive" and not args.peer:
                continue
            timed = module if mode == "eager" else compiled(module, args.backend)
            heat = "fused" if residual == "additive" else form
            contestants.append(
                Contestant(residual, form, mode, timed, oracle, optimizer, args.hidden_size, heat)
            )
    return contestants


def make(config: GPTConfig, device: str | torch.device = "cpu") -> GPT:
    """A model whose backbone is the same for every residual."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    perturb_(model)
    return model


@torch.no_grad()
def perturb_(model: GPT) -> None:
    """Noise on what the trunk adds to the backbone: its zeros and ones would hide wrong terms."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trunk.named_parameters():
        if not name.startswith("sublayers."):
            size = 0.5 / parameter.shape[-1] ** 0.5 if "residuals" in name else 0.1
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += size * noise.to(parameter.device)


def compiled(model: nn.Module, backend: str) -> nn.Module:
    """The model under torch.compile, without graph breaks, for one shape."""
    # All models run the same code objects: the default limit of 8 versions of each is too small.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


def step(contestant: Contestant, batch: Tensor) -> None:
    """What is timed."""
    contestant.model.zero_grad(set_to_none=True)
    contestant.model(batch, labels=batch).loss.backward()
    if contestant.optimizer is not None:
        contestant.optimizer.step()


def check_all(contestants: list[Contestant], batch: Tensor) -> None:
    """Compare every contestant with its oracle; note errors, and turn failing variants red."""
    reasons: dict[str, str] = {}
    expected: tuple[nn.Module | None, dict[str, Tensor]] = (None, {})
    for contestant in contestants:
        progress(f"checking {contestant.name}")
        if expected[0] is not contestant.oracle:
            expected = contestant.oracle, results(contestant.oracle, batch)
        started = time.perf_counter()
        actual = results(contestant.model, batch)
        if contestant.mode == "compiled":
            contestant.compile_seconds = time.perf_counter() - started
        try:
            contestant.error = check(actual, expected[1])
        except RedGateError as difference:
            reasons[contestant.residual] = f"{contestant.name}: {difference}"
    for contestant in contestants:  # which form is wrong is not known: none of them is timed
        contestant.red = reasons.get(contestant.residual)


def results(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter, by name; `model` is left without any."""
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
    """The largest error of `gate`; a bias is measured against the weight beside it as well."""
    if actual.keys() != expected.keys():
        alone = ", ".join(sorted(actual.keys() ^ expected.keys()))
        raise RedGateError(f"{alone}: a gradient on one side only")
    scales = {n: n.removesuffix("bias") + "weight" for n in expected if n.endswith(".bias")}
    return gate({n: (actual[n], expected[n]) for n in expected}, TOLERANCE, scales)
