"""DeltaResidual against the equations for every option, its conventions, its use as a module."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import DeltaResidual, reference
from ddl.nn import residual
from ddl.results import Write
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.tolerances import assert_close

F64, F32 = torch.float64, torch.float32
B, T, D = 2, 5, 7

VARIANTS = [
    {"mapping": "k", "gate": gate, "value": value, "value_from": source}
    for gate, value, source in itertools.product(
        ("linear", "mlp"), ("linear", "sigmoid"), ("context", "compressed")
    )
] + [
    {"mapping": mapping, "gate": gate, "value": value}
    for mapping, gate, value in (
        ("k", "linear", "constant"),
        ("k", "mlp", "constant"),
        *itertools.product("v", ("linear", "mlp"), ("linear", "sigmoid")),
    )
]


def name_of(variant: dict[str, Any]) -> str:
    return "-".join(map(str, variant.values()))


def build(m: int, **options: Any) -> DeltaResidual:
    hidden = {"gate_hidden": 5} if options.get("gate") == "mlp" else {}
    return DeltaResidual(D, m, **hidden, **options)


def make(m: int, dtype: torch.dtype = F64, **options: Any) -> DeltaResidual:
    module = build(m, **options).to(dtype)
    randomise_(module)
    return module


def make_inputs(m: int, dtype: torch.dtype) -> dict[str, Tensor]:
    size = (B, T, D) if m == 1 else (B, T, D, m)
    inputs = {
        "x": normal(*size, seed=1),
        "sublayer_out": normal(B, T, D, seed=2),
        "context": normal(B, T, D, seed=3),
        "compressed": normal(B, T, D, seed=4),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def by_hand(
    p: DeltaResidual,
    x: Tensor,
    sublayer_out: Tensor,
    context: Tensor,
    compressed: Tensor,
    *,
    mapping: str,
    gate: str,
    value: str,
    value_from: str = "context",
) -> Tensor:
    """The residual from its parameters, with the rewrite of `ddl.reference`."""
    if gate == "linear":
        logit = context @ p.gate.weight[0] + p.gate.bias
    else:
        hidden = torch.tanh(context @ p.gate[0].weight.mT)
        logit = hidden @ p.gate[2].weight[0] + p.gate[2].bias
    beta = 2 / (1 + torch.exp(-logit))
    if mapping == "v":
        k, v = context @ p.direction.weight.mT, sublayer_out @ p.value.weight.mT
    elif value == "constant":
        k, v = sublayer_out, torch.full((B, T, p.value_channels), 2.0, dtype=x.dtype)
    else:
        z = context if value_from == "context" else compressed
        k, v = sublayer_out, z @ p.value.weight.mT + p.value.bias
    if value == "sigmoid":
        v = 4 / (1 + torch.exp(-v))
    state = x[..., None] if p.value_channels == 1 else x
    return reference.rewrite(state, k, v, beta, eps_k=0.02 * math.sqrt(D)).view_as(x)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_and_gradient(variant: dict[str, Any], m: int, dtype: torch.dtype) -> None:
    exact, module = make(m, **variant), make(m, dtype, **variant)
    inputs, inputs64 = make_inputs(m, dtype), make_inputs(m, F64)
    expected = by_hand(exact, **inputs64, **variant)
    actual = module(**inputs)
    assert actual.dtype == dtype
    assert_close("x'", actual, expected, dtype)
    raw = variant.get("value_from") == "compressed"
    assert_same_gradients(
        gradients(actual, inputs, module),
        gradients(expected, inputs64, exact),
        dtype,
        may_vanish=() if raw else ("compressed",),
    )


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("beta_init", [0.1, 1.0, 1.9])
def test_every_gate_starts_at_beta_init(gate: str, beta_init: float) -> None:
    """With x = 0 and v = 1 it writes β k̂, for any context."""
    module = DeltaResidual(D, gate=gate, beta_init=beta_init, value="constant", value_constant=1.0)
    k, x = normal(4, D, dtype=F32), torch.zeros(4, D)
    written = module(x, k, context=100 * normal(4, D, seed=1, dtype=F32))
    unit = k / (k.square().sum(-1, keepdim=True) + 4e-4 * D).sqrt()
    assert_close("beta k", written, beta_init * unit, F32)


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize(("beta_init", "start"), [(0, 2e-6), (1e-9, 2e-6), (2, 2 - 2e-6)])
def test_a_gate_that_starts_shut_or_open_can_move(
    gate: str, beta_init: float, start: float
) -> None:
    """β/2 is clamped to [1e-6, 1 − 1e-6], as in the published code: its logit has a gradient."""
    module = DeltaResidual(D, 3, gate=gate, beta_init=beta_init, dtype=F64)
    X, h = normal(4, D, 3), normal(4, D, seed=1)
    beta = module.write(X, h, h, *module.value_and_gate(h, None)).gate
    assert (beta - start).abs().max() < 1e-15
    beta.sum().backward()
    *_, bias = module.gate.parameters()
    assert bias.grad.item() == pytest.approx(4 * start * (1 - start / 2), rel=1e-9)


def test_the_direction_is_the_rmsnorm_of_the_sublayer() -> None:
    """ε_k = 0.02·√d, unless it is given: k̂ = RMSNorm(k; 4e-4)/√d, also for small k."""
    for eps_k, norm_eps in ((None, 4e-4), (0.3, 0.09 / D)):
        module = DeltaResidual(D, value="constant", value_constant=1.0, eps_k=eps_k)
        k = 0.01 * normal(4, D, dtype=F32)
        written = module(torch.zeros(4, D), k, context=k)
        assert_close("k", written, F.rms_norm(k, (D,), eps=norm_eps) / math.sqrt(D), F32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mapping", ["k", "v"])
def test_values_and_gates_are_computed_in_float32(
    dtype: torch.dtype, autocast: bool, mapping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def spy(state: Tensor, write: Write) -> Tensor:
        seen.extend((write.value, write.gate))
        return reference.rewrite(state, *write[:3], eps_k=write.eps_k)

    monkeypatch.setattr(residual.functional, "write_to", spy)
    module, inputs = make(3, dtype, mapping=mapping), make_inputs(3, dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        result = module(**inputs)
    assert result.dtype == dtype
    value, gate = seen
    assert value.dtype == gate.dtype == F32
    source = inputs["context" if mapping == "k" else "sublayer_out"].double()
    bias = module.value.bias.double() if mapping == "k" else None
    assert_close("v", value, F.linear(source, module.value.weight.double(), bias), F32)
    exact = [t.double() for t in (inputs["context"], module.gate.weight, module.gate.bias)]
    assert_close("beta", gate, 2 * torch.sigmoid(F.linear(*exact))[..., 0], F32)


BRANCHES: list[dict[str, Any]] = [
    *VARIANTS,
    *({"mapping": "v", "direction": name} for name in ("mean", "flatten", "attention")),
    *({"gate_from": name} for name in ("pooled", "convolved", "flatten")),
    *({"rewrites": 2, "direction_rank": rank} for rank in (None, 2)),
    {"erase": "none"},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", BRANCHES, ids=name_of)
def test_activations_of_half_the_bits_beside_parameters_in_float32(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Without autocast, as nanochat has it: near what all of float32 gives."""
    module, inputs = make(3, F32, **options), make_inputs(3, F32)
    if options.get("value_from") != "compressed":
        del inputs["compressed"]
    x, out, *_ = inputs.values()
    rest = {name: each for name, each in inputs.items() if name not in ("x", "sublayer_out")}
    expected = module(x, out, **rest)
    found = module(x.to(dtype), out.to(dtype), **{name: t.to(dtype) for name, t in rest.items()})
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.1)
    grads = torch.autograd.grad(found.float().square().sum(), list(module.parameters()))
    assert all(grad.dtype == F32 and grad.isfinite().all() for grad in grads)


def test_autocast_takes_mixed_dtypes() -> None:
    """float32 parameters and state, a bfloat16 sublayer: the stream stays float32."""
    module, inputs = make(3, F32), make_inputs(3, F32)
    inputs["sublayer_out"] = normal(B, T, D, seed=2, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = module(**inputs)
    assert result.dtype == F32
    result.sum().backward()
    assert inputs["sublayer_out"].grad is not None
    assert inputs["sublayer_out"].grad.dtype == torch.bfloat16
    exact = by_hand(make(3), **make_inputs(3, F64), mapping="k", gate="linear", value="linear")
    assert_close("x'", result, exact, torch.bfloat16)


@pytest.mark.table(0)
@pytest.mark.parametrize(
    "options",
    [{}, {"gate": "mlp"}, {"value_from": "compressed"}, {"value": "constant"}, {"mapping": "v"}],
    ids=str,
)
def test_gradients_stay_float32_under_compile_and_autocast(options: dict[str, Any]) -> None:
    """torch.compile runs a backward under its call's autocast, even if the forward disabled it."""
    module, results = make(3, F32, **options), []
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        inputs = make_inputs(3, F32)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = run(**inputs)
        results.append(gradients(outputs, inputs, module))
    eager, compiled = results
    for name, gradient in eager.items():
        if name != "direction.weight":  # its matrix product is in bfloat16
            assert_close(f"gradient of {name}", compiled[name], gradient, F32, gradient=True)


# --- as a module ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_copies_compute_the_same(variant: dict[str, Any]) -> None:
    module, inputs = make(3, F32, **variant), make_inputs(3, F32)
    expected = module(**inputs)
    fresh = build(3, **variant)
    assert not torch.equal(fresh(**inputs), expected)
    fresh.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(twin(**inputs), expected)
        assert not {p.data_ptr() for p in twin.parameters()} & {
            p.data_ptr() for p in module.parameters()
        }


def test_reset_parameters_is_the_initialisation() -> None:
    module = make(3, F32, gate="mlp", beta_init=0.5)
    torch.manual_seed(7)
    module.reset_parameters()
    torch.manual_seed(7)
    fresh = DeltaResidual(D, 3, gate="mlp", gate_hidden=5, beta_init=0.5)
    torch.manual_seed(7)
    fresh.reset_parameters()
    for (name, p), q in zip(module.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_to_moves_every_parameter() -> None:
    module = make(3, F32, gate="mlp")
    assert {p.dtype for p in module.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in DeltaResidual(D, dtype=F64).parameters()} == {F64}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_meta_device(variant: dict[str, Any]) -> None:
    """A module is built and run on meta, then given memory and an initialisation."""
    module = DeltaResidual(D, 3, **variant, device="meta")
    inputs = {name: x.to("meta") for name, x in make_inputs(3, F32).items()}
    result = module(**inputs)
    assert result.device.type == "meta"
    assert result.shape == (B, T, D, 3)
    with torch.device("meta"):
        assert all(p.is_meta for p in DeltaResidual(D, 3, **variant).parameters())
    module.to_empty(device="cpu").reset_parameters()
    assert module(**make_inputs(3, F32)).isfinite().all()


def test_extra_repr() -> None:
    text = DeltaResidual(768, 4, value="sigmoid", value_from="compressed", eps_k=1e-5).extra_repr()
    assert text == (
        "hidden_size=768, value_channels=4, mapping='k', value='sigmoid', "
        "value_from='compressed', beta_init=1, eps_k=1e-05"
    )


@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (2, 0, 3)])
def test_any_batch_shape(shape: tuple[int, ...]) -> None:
    module = make(3, F32)
    x, k = normal(*shape, D, 3, dtype=F32), normal(*shape, D, dtype=F32)
    assert module(x, k, context=k).shape == x.shape


def test_a_models_own_initialisation_of_linear_layers_leaves_gate_and_value_alone() -> None:
    """nanoGPT's `apply(_init_weights)`: every nn.Linear normal with a zero bias."""

    def init_weights(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
            torch.nn.init.zeros_(module.bias)

    for gate in ("linear", "mlp"):
        module = DeltaResidual(D, 3, gate=gate, beta_init=0.2)
        before = {name: p.clone() for name, p in module.named_parameters()}
        module.apply(init_weights)
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
