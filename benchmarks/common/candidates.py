"""The models of the training benchmarks: building them, checking that they agree, one step."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ddl.lab.bench.agreement import check, check_drift, drift, make, results
from ddl.lab.bench.measure import MismatchError
from ddl.lab.bench.oracle import peer
from ddl.lab.bench.tables import progress
from ddl.lab.config import GPTConfig


@dataclass
class Candidate:
    """One model in one form and mode, with its check and its times."""

    residual: str
    form: str  # "fused" or "plain"; the additive residual is plain
    mode: str  # "eager" or "compiled"
    model: nn.Module
    oracle: nn.Module  # the same parameters in plain PyTorch, eager
    hidden_size: int
    optimizer: torch.optim.Optimizer | None = None
    group: str = "fused"  # the form that is timed in the same rounds; additive runs in both
    autocast: bool = False  # timed in bfloat16 over float32 parameters
    error: float | None = None  # the largest in the check against the oracle
    drift: float | None = None  # relative distance of its bfloat16 gradients from float32
    red: str | None = None  # why the check failed; it is then not timed
    compile_seconds: float | None = None  # of the first step; short if a cache had everything
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.residual} {self.form} {self.mode}"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def build(args: argparse.Namespace, mode: str) -> list[Candidate]:
    """The candidates of a mode; the forms of one residual share their parameters."""
    candidates = []
    autocast = args.precision == "autocast"
    backbone = backbone_of(args)
    for residual in args.variants:
        model = make(configured(backbone, residual, args))
        oracle = model if residual == "additive" else peer(model)
        forms = {"plain": oracle} if residual == "additive" else {"fused": model, "plain": oracle}
        for form, module in forms.items():
            if form == "plain" and residual != "additive" and not args.peer:
                continue
            timed = module if mode == "eager" else compiled(module, args.backend)
            group = "fused" if residual == "additive" else form
            candidates.append(
                Candidate(
                    residual=residual,
                    form=form,
                    mode=mode,
                    model=timed,
                    oracle=oracle,
                    hidden_size=args.hidden_size,
                    group=group,
                    autocast=autocast,
                )
            )
    return candidates


def backbone_of(args: argparse.Namespace) -> GPTConfig:
    """The sizes of every model of a run."""
    return GPTConfig(
        vocab_size=256,
        block_size=args.time,
        num_layers=args.layers,
        num_heads=args.heads,
        hidden_size=args.hidden_size,
    )


def configured(backbone: GPTConfig, residual: str, args: argparse.Namespace) -> GPTConfig:
    """The backbone with a residual and, if that has a stream, the options for it."""
    if residual == "additive":
        return replace(backbone, residual=residual)
    options = {"anchor_every": args.anchor_every, "stream_dtype": args.stream_dtype}
    return replace(backbone, residual=residual, **options)


def compiled(model: nn.Module, backend: str) -> nn.Module:
    """The model under torch.compile, without graph breaks, for one shape."""
    # All models run the same code objects: the default limit of 8 versions of each is too small.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


def step(candidate: Candidate, batch: Tensor) -> None:
    """The timed training step."""
    candidate.model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=candidate.autocast):
        loss = candidate.model(batch, labels=batch).loss
    loss.backward()


def check_all(candidates: list[Candidate], batch: Tensor) -> None:
    """Compare every candidate with its oracle; record errors, and mark failing residuals red.

    In bfloat16 its gradients must stay near the oracle's, and the eager model agree in float32.
    """
    reasons: dict[str, str] = {}
    expected: tuple[nn.Module | None, dict[str, Tensor]] = (None, {})
    for candidate in candidates:
        progress(f"checking {candidate.name}")
        if expected[0] is not candidate.oracle:
            expected = candidate.oracle, results(candidate.oracle, batch)
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=candidate.autocast):
            actual = results(candidate.model, batch)
        if candidate.mode == "compiled":
            candidate.compile_seconds = time.perf_counter() - started
        try:
            if candidate.autocast:
                candidate.drift = drift(actual, expected[1])
                check_drift(candidate.drift)
                actual = results(getattr(candidate.model, "_orig_mod", candidate.model), batch)
            candidate.error = check(actual, expected[1])
        except MismatchError as difference:
            reasons[candidate.residual] = f"{candidate.name}: {difference}"
    for candidate in candidates:  # it is unknown which form is wrong, so none is timed
        candidate.red = reasons.get(candidate.residual)


def quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high
