"""Every operator against the reference in float64: outputs and each gradient by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from tests.support.helpers import present
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.tolerances import assert_close, compute_dtype

PARAMETERS = ("compress", "norm_weight", "gate_weight", "gate_bias", "value_weight", "value_bias")
OUTPUTS = ("state", "context", "value", "gate")


def run(module, name: str, tensors: dict[str, Tensor | None], dtype: torch.dtype, **options):
    """Run one operator on leaves made of `tensors`; return outputs and gradients by name."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if t is not None}
    outputs = getattr(module, name)(**leaves, **options)
    outputs = {"state": outputs} if isinstance(outputs, Tensor) else outputs._asdict()
    outputs = {n: t for n, t in outputs.items() if t is not None}
    generator = torch.Generator().manual_seed(1)  # the same numbers on every device
    weights = {
        n: torch.randn(t.shape, generator=generator, dtype=F64, device="cpu").to(t.device)
        for n, t in outputs.items()
    }
    sum((outputs[n].to(F64) * weights[n].to(dtype).to(F64)).sum() for n in outputs).backward()
    return outputs, {n: leaf.grad for n, leaf in leaves.items()}


def compare(
    name: str, tensors, dtype: torch.dtype, *, stored: torch.dtype | None = None, **options
):
    """Compare the fused operator in `dtype` with the reference in float64 on the same inputs.

    stored: the coarsest storage type, if tensors have several.
    """
    given = {n: None if t is None else t.to(compute_dtype(dtype)) for n, t in tensors.items()}
    for n in given:
        if given[n] is not None and n not in ("value", "gate", "erase"):
            given[n] = given[n].to(options.pop(f"{n}_dtype", dtype))
    exact = {n: None if t is None else t.to(F64) for n, t in given.items()}
    fused = run(functional, name, given, stored or dtype, **options)
    options.pop("context_dtype", None)
    oracle = run(reference, name, exact, stored or dtype, **options)
    for kind, actual, expected in zip(("output", "gradient of"), fused, oracle, strict=True):
        assert actual.keys() == expected.keys()
        for n in expected:
            gradient = kind != "output"
            scale = gradient_scale(n, oracle[1]) if gradient else None
            label = f"{name}: {kind} {n}"
            assert_close(
                label, actual[n], expected[n], stored or dtype, gradient=gradient, scale=scale
            )


def gradient_scale(name: str, gradients: dict[str, Tensor]) -> float | None:
    """Return a bias gradient's scale, at least its weight's, because few elements may cancel."""
    sibling = {"gate_bias": "gate_weight", "value_bias": "value_weight"}.get(name)
    if sibling not in gradients:
        return None
    own = gradients[name].square().mean().sqrt()
    return max(own.item(), gradients[sibling].square().mean().sqrt().item())


COMPRESS = [
    *((m, "channel") for m in (1, 3, 4, 8, 16)),
    *((m, "token") for m in (1, 2, 4, 5)),
    (1, "identity"),
]


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("d", [1, 63, 100, 384])
@pytest.mark.parametrize(("m", "compress"), COMPRESS)
def test_rewrite_read(dtype, d, m, compress):
    tensors = inputs((2, 70), d, m) | parameters(d, m, compress)
    # With one feature k̂ and x̂ are ±1: their gradients cancel to zero unless ε is about one.
    options = {"eps_k": 1.0, "norm_eps": 1.0} if d == 1 else {"eps_k": 0.1}
    compare("rewrite_read", tensors, dtype, **options)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("d", "m"), [(1, 1), (63, 4), (100, 3), (384, 4), (768, 1)])
def test_rewrite(dtype, d, m):
    compare("rewrite", inputs((3, 50), d, m), dtype, eps_k=1.0 if d == 1 else 0.1)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("m", "compress"), COMPRESS)
def test_read(dtype, m, compress):
    tensors = {"state": inputs((2, 70), 63, m)["state"]} | parameters(63, m, compress)
    compare("read", tensors, dtype)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("m", "taps"), [(1, 0), (4, 0), (1, 3), (3, 1), (4, 4), (8, 5)])
def test_expand(dtype, m, taps):
    tensors = {"x": torch.randn(2, 150, 63, dtype=F64)}
    if taps:
        tensors["weight"] = torch.randn(63, m, taps, dtype=F64)
    compare("expand", tensors, dtype, value_channels=m)


@pytest.mark.parametrize("options", [
    {"value_from": "compressed"},
    {"value_scale": 4.0},
    {"value_from": "compressed", "value_scale": 4.0},
    {"norm_eps": None},
    {"norm_eps": None, "value_from": "compressed"},
])  # fmt: skip
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_read_options(dtype, compress, options):
    tensors = inputs((2, 40), 63, 4) | parameters(63, 4, compress)
    compare("rewrite_read", tensors, dtype, eps_k=0.1, **options)


@pytest.mark.parametrize("absent", [
    subset for size in (1, 2, 5)
    for subset in itertools.combinations(PARAMETERS[1:], size)
    if not ("gate_weight" in subset and "gate_bias" not in subset)
    and not ("value_weight" in subset and "value_bias" not in subset)
])  # fmt: skip
def test_parameters_may_be_absent(absent):
    tensors = inputs((2, 9), 20, 2) | parameters(20, 2, "channel") | dict.fromkeys(absent)
    compare("rewrite_read", tensors, F64, eps_k=0.1)
    tensors = {n: t for n, t in tensors.items() if n not in ("direction", "value", "gate")}
    compare("read", tensors, F64)


@pytest.mark.parametrize("parameter", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("sublayer", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("state", [F32, BF16, F16], ids=str)
def test_any_mix_of_storage_types(state, sublayer, parameter):
    coarsest = max((state, sublayer, parameter), key=lambda dtype: torch.finfo(dtype).eps)
    tensors = inputs((2, 70), 63, 4) | parameters(63, 4, "token")
    kinds = dict.fromkeys([f"{n}_dtype" for n in PARAMETERS], parameter)
    kinds |= {"state_dtype": state, "direction_dtype": sublayer}
    compare(
        "rewrite_read", tensors, F32, stored=coarsest, eps_k=0.1, context_dtype=sublayer, **kinds
    )


@pytest.mark.parametrize(
    "batch", [(), (7,), (2, 3, 5), (0,), (3, 0), (0, 0), (1, 1), (2, 65), (1, 4097)]
)
@pytest.mark.parametrize("compress", ["channel", "token"])
def test_any_batch_shape(batch, compress):
    if compress == "token" and batch == ():
        pytest.skip("token compression needs a time axis")
    tensors = inputs(batch, 5, 2) | parameters(5, 2, compress)
    compare("rewrite_read", tensors, F64, eps_k=0.1)


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_a_narrow_context_does_not_narrow_what_is_read(compress):
    tensors = {"state": 1e6 * inputs((1, 40), 63, 4)["state"]} | parameters(63, 4, compress)
    tensors = {n: t.float() for n, t in tensors.items()}
    narrow = functional.read(**tensors, context_dtype=F16)
    exact = reference.read(**{n: t.double() for n, t in tensors.items()})
    assert_close("context", narrow.context, exact.context, F16)
    assert_close("value", narrow.value, exact.value, F32)
    assert_close("gate", narrow.gate, exact.gate, F32)


@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize(("d", "m"), [(4096, 4), (4096, 8), (8192, 1), (8192, 4), (1024, 16)])
def test_wide_states(d, m, compress):
    """Some of these have sums of parameter gradients that do not fit in a GPU's shared memory."""
    compare("rewrite_read", inputs((1, 7), d, m) | parameters(d, m, compress), BF16, eps_k=0.1)


def test_no_tokens_of_any_width():
    d = 2**44  # nothing to store, so the width may be anything
    state, direction = torch.empty(0, d, 1), torch.empty(0, d)
    new = functional.rewrite(state, direction, torch.empty(0, 1), torch.empty(0), eps_k=0.1)
    assert new.shape == state.shape
    assert functional.read(state).context.shape == (0, d)
    assert functional.expand(direction, value_channels=1).shape == state.shape


@pytest.mark.parametrize("taps", [1, 2, 7, 64, 200])
def test_token_compression_longer_than_a_part_or_the_sequence(taps):
    tensors = inputs((3, 130), 5, 2) | parameters(5, 2, "token", taps)
    compare("rewrite_read", tensors, F64, eps_k=0.1)


def test_batch_elements_do_not_see_each_other_through_the_halo():
    tensors = parameters(5, 2, "token")
    state = torch.randn(4, 33, 5, 2, dtype=F64)
    batched = functional.read(state, **tensors).context
    single = torch.stack([functional.read(one, **tensors).context for one in state])
    assert torch.equal(batched, single)


def strided(tensor: Tensor) -> Tensor:
    """Return a view with the same values and gaps between them."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.ndim else tensor


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_non_contiguous_inputs(compress):
    tensors = inputs((2, 9), 20, 2) | parameters(20, 2, compress)
    spread = {n: strided(t) for n, t in tensors.items()}
    spread["state"] = tensors["state"].transpose(0, 1).contiguous().transpose(0, 1)
    assert [n for n, t in spread.items() if t.is_contiguous()] == ["gate_bias"]
    packed, actual = (run(functional, "rewrite_read", t, F64, eps_k=0.1) for t in (tensors, spread))
    for results, expected in zip(actual, packed, strict=True):
        for name in expected:
            assert torch.equal(results[name], expected[name]), name


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_non_contiguous_incoming_gradients(compress):
    tensors = inputs((2, 9), 20, 2) | parameters(20, 2, compress)
    leaves = [t.requires_grad_() for t in tensors.values()]
    outputs = present(functional.rewrite_read(**tensors, eps_k=0.1))
    incoming = [torch.randn_like(output) for output in outputs]
    packed, spread = (
        torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        for grads in (incoming, [strided(grad) for grad in incoming])
    )
    for name, actual, expected in zip(tensors, spread, packed, strict=True):
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_results_do_not_depend_on_the_number_of_threads(compress):
    tensors = {
        n: t.float() for n, t in (inputs((2, 500), 64, 4) | parameters(64, 4, compress)).items()
    }
    runs = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        runs.append(run(functional, "rewrite_read", tensors, F32, eps_k=0.1))
    for outputs, gradients in runs[1:]:
        for name, expected in (runs[0][0] | {}).items():
            assert torch.equal(outputs[name], expected), name
        for name, expected in runs[0][1].items():
            assert torch.equal(gradients[name], expected), name


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_beta_zero_returns_the_state_bit_for_bit(dtype):
    tensors = {n: t.to(dtype) for n, t in inputs((3, 7), 33, 4).items()}
    tensors["state"][0, 0, 0] = -0.0
    tensors["gate"].zero_()
    tensors |= {n: tensors[n].to(compute_dtype(dtype)) for n in ("value", "gate")}
    new = functional.rewrite(**tensors, eps_k=1e-5)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert torch.equal(new.view(integer), tensors["state"].view(integer))


@pytest.mark.parametrize("module", [functional, reference], ids=["fused", "reference"])
def test_beta_zero_keeps_all_but_what_infinity_reaches(module):
    """0·∞ is NaN: in the value channel whose readout is infinite, of that token alone."""
    tensors = {n: t.float() for n, t in inputs((3, 7), 33, 4).items()}
    tensors["gate"].zero_()
    tensors["state"][1, 2, 5, 3] = torch.inf
    new, expected = module.rewrite(**tensors, eps_k=1e-5), tensors["state"].clone()
    expected[1, 2, :, 3] = torch.nan
    assert torch.equal(new.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["state", "direction", "value", "gate"])
def test_nan_and_inf_propagate_within_their_token(name, bad):
    tensors = inputs((2, 40), 20, 4) | parameters(20, 4, "channel")
    tensors[name][1, 5] = bad
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    outputs = functional.rewrite_read(**leaves, eps_k=0.1)
    hit = torch.zeros(2, 40, dtype=torch.bool)
    hit[1, 5] = True
    assert torch.equal(outputs.state.isfinite().all(-1).all(-1), ~hit)
    assert torch.equal(outputs.context.isfinite().all(-1), ~hit)
    outputs.context.sum().backward()
    assert not leaves["norm_weight"].grad.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("m", "compress"), [(4, "channel"), (3, "token"), (1, "identity")])
def test_nan_and_inf_spread_as_in_the_reference(m, compress, bad):
    """NaN and Inf in each argument reach the same outputs and gradients."""
    tensors = inputs((2, 40), 20, m) | parameters(20, m, compress)
    for name in (name for name, tensor in tensors.items() if tensor is not None):
        spoiled = tensors | {name: tensors[name].clone()}
        spoiled[name].view(-1)[spoiled[name].numel() // 3] = bad
        fused, oracle = (
            run(module, "rewrite_read", spoiled, F64, eps_k=0.1)
            for module in (functional, reference)
        )
        for actual, expected in zip(fused, oracle, strict=True):
            for n in expected:
                assert torch.equal(actual[n].isfinite(), expected[n].isfinite()), (name, n)


def test_nan_reaches_the_state_in_bfloat16():
    tensors = {n: t.to(BF16) for n, t in inputs((1, 3), 20, 4).items()}
    tensors["direction"][0, 1, 0] = float("nan")
    new = functional.rewrite(**tensors, eps_k=0.1)
    assert new[0, 1].isnan().all()
    assert new[0, [0, 2]].isfinite().all()


def test_extreme_directions_keep_their_unit_length():
    tensors = inputs((2, 4), 64, 2)
    for scale in (1e-3, 1e6, 1e12):
        scaled = {n: t.float() for n, t in tensors.items()}
        scaled["direction"] = scaled["direction"] * scale
        new = functional.rewrite(**scaled, eps_k=1e-5)
        exact = reference.rewrite(**{n: t.double() for n, t in scaled.items()}, eps_k=1e-5)
        assert_close(f"state at |k| × {scale:g}", new, exact, F32)


@pytest.mark.parametrize(
    ("name", "used"),
    [("rewrite_read", "state"), *itertools.product(["read", "rewrite_read"], OUTPUTS[1:])],
)
def test_parameters_of_outputs_that_nobody_used_get_no_gradient(name, used):
    found = []
    for module in (functional, reference):
        torch.manual_seed(0)
        tensors = inputs((2, 9), 20, 4) | parameters(20, 4, "channel")
        options = {"eps_k": 0.1}
        if name == "read":
            tensors = {n: t for n, t in tensors.items() if n not in ("direction", "value", "gate")}
            options = {}
        leaves = {n: t.requires_grad_() for n, t in tensors.items()}
        getattr(getattr(module, name)(**leaves, **options), used).sum().backward()
        found.append({n for n in PARAMETERS[2:] if leaves[n].grad is not None})
    assert found[0] == found[1]
