"""`ddl bench norm`: a norm inside and outside the operator, against an addition and a norm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddl import functional, reference

from . import boundaries
from .clock import Clock
from .measure import MismatchError, compare
from .problems import TOLERANCES
from .row import Row, Stages, copy_rate, time_stages
from .setting import Setting
from .traffic import moved

# A LayerNorm or an addition of torch rounds to bfloat16 where the operators do not.
ALLOWED = TOLERANCES | {torch.bfloat16: 5e-2}
CALLS = 4  # in a row, because a single one of the additive kind is short

Boundary = tuple[nn.Module, dict[str, Tensor]]


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """A row, forward and backward together, for the fused norm and for a LayerNorm outside."""
    num_bytes = bytes_of_a_boundary(setting)
    for what, ours, baseline in (
        ("fused RMSNorm", boundaries.FusedRead, "rms"),
        ("LayerNorm outside", boundaries.LayerNormOutside, "layer"),
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
    d, m, dtype = setting.hidden_size, setting.value_channels, setting.torch_dtype
    torch.manual_seed(0)
    modules = {"ours": ours(d, m), "additive": boundaries.Additive(d, norm)}
    shape = (setting.batch, setting.time, d)
    tensors = {
        "ours": boundaries.inputs(*shape, m, device),
        "additive": boundaries.additive_inputs(*shape, device),
    }
    for module in modules.values():
        perturb_(module.to(device, dtype))
    return {name: (modules[name], rounded(tensors[name], dtype)) for name in modules}


@torch.no_grad()
def perturb_(module: nn.Module) -> None:
    """Add noise to the parameters: they start as zeros and ones, which would hide wrong terms."""
    for parameter in module.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs in the dtype of the run; value and gate stay in float32, as reads return them."""
    kept = ("value", "gate")
    return {
        name: tensor.detach().to(tensor.dtype if name in kept else dtype).requires_grad_()
        for name, tensor in tensors.items()
    }


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
