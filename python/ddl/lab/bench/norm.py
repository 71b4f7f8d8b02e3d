"""`ddl bench norm`: a norm inside and outside the operator, against an addition and a norm.

A boundary maps what a sublayer leaves to what the next one needs. It takes the operators as an
argument: `ddl.functional`, or `ddl.reference` to check it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import functional, reference
from ddl.nn import DeltaResidual, Read

from .clock import Clock
from .measure import MismatchError, compare
from .problems import TOLERANCES
from .row import Row, Stages, copy_rate, time_stages
from .setting import Setting
from .traffic import moved

# A LayerNorm or an addition of torch rounds to bfloat16 where the operators do not.
ALLOWED = TOLERANCES | {torch.bfloat16: 5e-2}
CALLS = 4  # in a row, because a single one of the additive kind is short
EPS = 1e-5

Boundary = tuple[nn.Module, dict[str, Tensor]]


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """A row, forward and backward together, for the fused norm and for a LayerNorm outside."""
    num_bytes = bytes_of_a_boundary(setting)
    for what, ours, baseline in (
        ("fused RMSNorm", FusedRead, "rms"),
        ("LayerNorm outside", LayerNormOutside, "layer"),
    ):
        row = Row("norm", what, f"additive, {baseline} norm", bytes=num_bytes)
        timed: dict[str, Stages] = {}
        try:
            for name, made in make(ours, baseline, setting, clock.device).items():
                worst = check(*made) / ALLOWED[setting.torch_dtype]
                row.worst = worst if name == "ours" else row.worst
                timed[name] = [stage(*made)]
        except MismatchError as difference:
            row.red = str(difference)
            yield row
            continue
        taken = time_stages(timed, clock, setting.repeats, what)
        row.seconds = [times[1] / CALLS for times in taken["ours"]]
        row.baseline_seconds = [times[1] / CALLS for times in taken["additive"]]
        row.copy_gb_s = copy_rate(taken, clock)
        yield row


def bytes_of_a_boundary(setting: Setting) -> int:
    """Bytes that a rewrite with a channel read must move, forward and backward."""
    form = "identity" if setting.value_channels == 1 else "channel"
    size = setting.torch_dtype.itemsize
    both = moved("rewrite_read", form, setting.value_channels, state=size, features=size)
    return setting.batch * setting.time * setting.hidden_size * sum(both)


def make(
    ours: Callable[[int, int], nn.Module], norm: str, setting: Setting, device: torch.device
) -> dict[str, Boundary]:
    """Our boundary and the additive one with the same norm, and their random inputs."""
    d = setting.hidden_size
    torch.manual_seed(0)
    modules = {"ours": ours(d, setting.value_channels), "additive": Additive(d, norm)}
    for module in modules.values():
        perturb_(module.to(device, setting.torch_dtype))
    return {name: (module, inputs(module, setting, device)) for name, module in modules.items()}


def inputs(module: nn.Module, setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """Random inputs of a boundary, value and gate in float32, the others in the run's dtype."""
    g, d, m = torch.Generator(device).manual_seed(0), setting.hidden_size, setting.value_channels
    lead = (setting.batch, setting.time)
    shapes: dict[str, tuple[int, ...]] = {"x": (*lead, d), "direction": (*lead, d)}
    if not isinstance(module, Additive):
        shapes = {"state": (*lead, d, m), "direction": (*lead, d), "value": (*lead, m)}
    made = {name: torch.randn(s, generator=g, device=device) for name, s in shapes.items()}
    if "value" in made:
        made["gate"] = torch.rand(lead, generator=g, device=device)
    kept = ("value", "gate")
    return {
        name: tensor.to(tensor.dtype if name in kept else setting.torch_dtype).requires_grad_()
        for name, tensor in made.items()
    }


@torch.no_grad()
def perturb_(module: nn.Module) -> None:
    """Add noise to the parameters: they start as zeros and ones, which would hide wrong terms."""
    for parameter in module.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def check(module: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Compare outputs and gradients with the same module on `ddl.reference` in float64.

    Returns the largest error relative to a tensor's scale; raises MismatchError for a larger one.
    """
    wide = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    found = computed(module, inputs, functional)
    expected = computed(copy.deepcopy(module).double(), wide, reference)
    pairs = {name: (found[name], expected[name]) for name in expected}
    biases = [name for name in pairs if name.endswith("bias")]  # sums over tokens that may cancel
    scales = {name: name.removesuffix("bias") + "weight" for name in biases}
    dtype = inputs["direction"].dtype
    return compare(pairs, ALLOWED[dtype], {n: s for n, s in scales.items() if s in pairs})


def computed(module: nn.Module, inputs: dict[str, Tensor], ops: Any) -> dict[str, Tensor]:
    """Outputs by number, gradients of inputs and parameters by name."""
    outputs: Sequence[Tensor] = module(**inputs, ops=ops)
    leaves = {**inputs, **dict(module.named_parameters())}
    g = torch.Generator().manual_seed(1)
    given = [torch.randn(out.shape, generator=g).to(out) for out in outputs]
    grads = torch.autograd.grad(list(outputs), list(leaves.values()), given)
    named = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return named | dict(zip(leaves, grads, strict=True))


def stage(module: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward, CALLS times."""
    call, leaves = partial(module, **inputs), [*inputs.values(), *module.parameters()]
    given = [torch.ones_like(out) for out in call()]

    def run() -> None:
        for _ in range(CALLS):
            torch.autograd.grad(list(call()), leaves, given)

    return run


# --- boundaries ---------------------------------------------------------------------------------


class FusedRead(nn.Module):
    """One operator: it rewrites, reads, normalises (RMS), and returns gate and value."""

    def __init__(self, hidden_size: int, value_channels: int) -> None:
        super().__init__()
        compress: Any = "identity" if value_channels == 1 else "channel"
        self.read = Read(hidden_size, value_channels, compress=compress)
        self.residual = DeltaResidual(hidden_size, value_channels)

    def forward(
        self, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, ops: Any = functional
    ) -> Sequence[Tensor]:
        """X (B, T, d, m), k (B, T, d), v (B, T, m), β (B, T) → X', h, v, β of the next sublayer."""
        parameters = self.read.parameters_of(self.read.effective_weight())
        arguments = self.residual.added_to(parameters).keywords()
        result = ops.rewrite_read(
            state, direction, value, gate, eps_k=self.residual.eps_k, **arguments
        )
        return result[:4]


class LayerNormOutside(FusedRead):
    """The operator without its norm, a LayerNorm, and one product for gate and value.

    This is what `ddl.nanogpt` does, because a converted model keeps its norms.
    """

    def forward(
        self, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, ops: Any = functional
    ) -> Sequence[Tensor]:
        """As in FusedRead."""
        residual, weight = self.residual, self.read.effective_weight()
        state, x, *_ = ops.rewrite_read(
            state, direction, value, gate, eps_k=residual.eps_k, compress=weight, norm_eps=None
        )
        h = F.layer_norm(x, x.shape[-1:], self.read.norm_weight, eps=EPS)
        next_value, next_gate = residual.value_and_gate(h, x)
        assert next_value is not None  # value and gate are of the default kinds
        assert next_gate is not None
        return state, h, next_value, next_gate


class Additive(nn.Module):
    """The baseline: y = x + F(h), and its norm. norm: "rms" or "layer"."""

    def __init__(self, hidden_size: int, norm: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.norm = F.rms_norm if norm == "rms" else F.layer_norm

    def forward(self, x: Tensor, direction: Tensor, ops: Any = functional) -> Sequence[Tensor]:
        """x, F(h) (B, T, d) → y, h (B, T, d)."""
        y = x + direction
        return y, self.norm(y, y.shape[-1:], self.weight, eps=EPS)
