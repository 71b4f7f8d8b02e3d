"""Directions and gates from the state as modules: dtypes, compilation, copies, wrappers."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from ddl import DeltaResidual
from tests.support.branch_cases import (
    BRANCHES,
    DIRECTIONS,
    F64,
    GATES,
    B,
    D,
    T,
    by_hand,
    direction_by_hand,
    gate_by_hand,
    make,
    make_inputs,
    name_of,
)
from tests.support.helpers import Wrapper, gradients, normal
from tests.support.tolerances import assert_close

F32 = torch.float32
branches = pytest.mark.parametrize("options", BRANCHES, ids=name_of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [*DIRECTIONS, *GATES], ids=name_of)
def test_half_precision(options: dict[str, Any], dtype: torch.dtype, autocast: bool) -> None:
    """Gates have float32 precision; directions have that of the model's matrix products."""
    stored = F32 if autocast else dtype
    module, inputs = make(3, stored, **options), make_inputs(3, stored)
    twin = make(3, stored, **options).to(F64)  # the same rounded parameters and inputs
    X, h, F_h = (inputs[name].double() for name in ("x", "context", "sublayer_out"))
    with torch.autocast("cpu", dtype, enabled=autocast):
        result = module(**inputs)
        given = [inputs[n] for n in ("x", "sublayer_out", "context")]
        k, v, gate, *_ = module.write(*given, *module.value_and_gate(given[2], None))
    assert result.dtype == stored
    assert gate.dtype == F32
    kinds = {name: options[name] for name in ("gate", "gate_from") if name in options}
    assert_close("beta", gate, gate_by_hand(twin, X, h, **kinds), F32)
    if options.get("mapping") == "v":
        exact = direction_by_hand(twin, X, h, options.get("direction", "linear"))
        assert k.dtype == dtype
        assert_close("k", k, exact, dtype)
        assert_close("v", v, F_h @ twin.value.weight.mT, F32)
    for name, gradient in gradients(result, inputs, module).items():
        assert gradient.isfinite().all(), name


def test_attention_weights_are_float32_under_autocast() -> None:
    """The weighted sum is float32; only the output matrix product follows autocast."""
    module, inputs = make(3, F32, **DIRECTIONS[3]), make_inputs(3, F32)
    mixed: list[Tensor] = []
    module.direction.out.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        module(**inputs)
    exact = make(3, **DIRECTIONS[3])
    nn.init.eye_(exact.direction.out.weight)
    expected = direction_by_hand(
        exact, inputs["x"].double(), inputs["context"].double(), "attention"
    )
    assert_close("Σ a_j x̂_j", mixed[0], expected, F32)


@pytest.mark.parametrize("options", [*DIRECTIONS[1:], *GATES], ids=name_of)
def test_mixed_dtypes(options: dict[str, Any]) -> None:
    """A bfloat16 model with float32 gates, on a stream in float32 or bfloat16."""
    module = make(3, torch.bfloat16, **options)
    module.gate.float()
    for dtype in (F32, torch.bfloat16):
        inputs = make_inputs(3, torch.bfloat16)
        inputs["x"] = inputs["x"].detach().to(dtype).requires_grad_()
        result = module(**inputs)
        assert result.dtype == dtype
        exact = {name: x.double() for name, x in inputs.items()}
        twin = make(3, torch.bfloat16, **options)
        twin.gate.float().load_state_dict(module.gate.state_dict())
        assert_close("x'", result, by_hand(twin.double(), **exact, **options), torch.bfloat16)


@pytest.mark.table(1)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [*DIRECTIONS[1:], *GATES], ids=name_of)
def test_compiles_without_graph_breaks(options: dict[str, Any], autocast: bool) -> None:
    torch._dynamo.reset()  # all modules share one `forward`, whose recompilations are limited
    module, results = make(3, F32, **options), []
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        inputs = make_inputs(3, F32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = run(**inputs)
        results.append((outputs, gradients(outputs, inputs, module)))
    (expected, eager), (actual, compiled) = results
    assert_close("x'", actual, expected, F32)
    for name, gradient in eager.items():
        in_half = autocast and name.startswith("direction")  # its matrix products follow autocast
        dtype = torch.bfloat16 if in_half else F32
        assert_close(f"gradient of {name}", compiled[name], gradient, dtype, gradient=True)


@branches
def test_copies_compute_the_same(options: dict[str, Any]) -> None:
    module, inputs = make(3, F32, **options), make_inputs(3, F32)
    expected = module(**inputs)
    fresh = DeltaResidual(D, 3, **options)
    assert not torch.equal(fresh(**inputs), expected)
    fresh.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(twin(**inputs), expected)


@branches
def test_meta_device_and_reset(options: dict[str, Any]) -> None:
    """A module is built and run on meta, then given memory and a new module's initialisation."""
    module = DeltaResidual(D, 3, **options, device="meta")
    result = module(**{name: x.to("meta") for name, x in make_inputs(3, F32).items()})
    assert (result.device.type, result.shape) == ("meta", (B, T, D, 3))
    with torch.device("meta"):
        assert all(p.is_meta for p in DeltaResidual(D, 3, **options).parameters())
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(7)
    module.reset_parameters()
    fresh = DeltaResidual(D, 3, **options)
    torch.manual_seed(7)
    fresh.reset_parameters()
    for (name, p), q in zip(module.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name


@branches
def test_dtype_and_names(options: dict[str, Any]) -> None:
    module = DeltaResidual(D, 3, **options, dtype=F64)
    assert {p.dtype for p in module.parameters()} == {F64}
    text = module.extra_repr()
    for name in ("direction", "gate_from"):
        said = f"{name}={options[name]!r}" in text if name in options else name not in text
        assert said, text


def test_repr_of_the_branches() -> None:
    module = DeltaResidual(D, 3, **DIRECTIONS[2], **GATES[1])
    text = repr(module)
    for line in (
        "(gate_pool): Pool(5 × 3 → 5, 'convolved', kernel_size=3)",
        "(pool): Pool(5 × 3 → 15, 'flatten')",
        "(hidden): Projection(15 → 3, bias=False)",
    ):
        assert line in text


# --- wrapped, pruned, parametrized ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "key"])
def test_wrapped_queries_and_keys_are_refused(name: str) -> None:
    module, inputs = make(3, **DIRECTIONS[3]), make_inputs(3)
    setattr(module.direction, name, Wrapper(getattr(module.direction, name)))
    with pytest.raises(TypeError, match=rf"^`direction\.{name}` must be a Projection with its own"):
        module(**inputs)


@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_a_wrapped_gate_is_refused(gate: str) -> None:
    module, inputs = make(3, gate=gate, gate_from="pooled"), make_inputs(3)
    module.gate = Wrapper(module.gate)
    with pytest.raises(TypeError, match=r"^`gate` must be a .* with its own forward"):
        module(**inputs)


@branches
def test_wrapped_branches_are_called(options: dict[str, Any]) -> None:
    module, inputs = make(3, **options), make_inputs(3)
    expected = module(**inputs)
    for name in ("direction", "gate_pool"):
        if getattr(module, name) is not None:
            setattr(module, name, Wrapper(getattr(module, name)))
    assert torch.equal(module(**inputs), expected)


@pytest.mark.parametrize("options", [DIRECTIONS[3], GATES[1]], ids=name_of)
def test_computed_and_pruned_weights(options: dict[str, Any]) -> None:
    """Both take effect, also during training, when the weight must be recomputed at every step."""

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    module, plain, inputs = make(3, **options), make(3, **options), make_inputs(3)
    branch, twin = (m.direction if m.direction else m.gate_pool for m in (module, plain))
    first, last = ("query", "key") if module.direction else ("", "")
    pruned, other = branch.get_submodule(first), twin.get_submodule(first)
    prune.random_unstructured(pruned, "weight", amount=0.5)
    if last:
        parametrize.register_parametrization(branch.key, "weight", Halved())
    for _ in range(2):
        with torch.no_grad():
            pruned.weight_orig.mul_(1.5)
            other.weight.copy_(pruned.weight_orig * pruned.weight_mask)
            if last:
                twin.key.weight.copy_(branch.key.weight)
        assert_close("x'", module(**inputs), plain(**inputs), F64)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3])
def test_a_convolved_gate_wants_a_time_axis(m: int) -> None:
    module, h = make(m, **GATES[1]), normal(D)
    x = h if m == 1 else normal(D, 3)
    sentence = "(…, time, hidden_size)" if m == 1 else "(…, time, hidden_size, value_channels)"
    with pytest.raises(ValueError, match=f"^{re.escape(f'`x` must have shape {sentence}, got ')}"):
        module(x, h, context=h)


@branches
@pytest.mark.parametrize("shape", [(4,), (0, 3), (2, 0, 3), (2, 1, 3)])
def test_any_batch_shape(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    module = make(3, F32, **options)
    x, k = normal(*shape, D, 3, dtype=F32), normal(*shape, D, dtype=F32)
    assert module(x, k, context=k, compressed=k).shape == x.shape
