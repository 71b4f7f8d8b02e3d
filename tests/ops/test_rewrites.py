"""Several rewrites between two reads: each against the reference, and what they are together."""

from __future__ import annotations

import pytest
import torch

from ddl import functional, reference
from tests.ops.test_ops import compare
from tests.ops.test_ops_torch import positional
from tests.support.helpers import present
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.refused_cases import refused
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(
    ("m", "compress"), [(1, "identity"), (3, "channel"), (4, "channel"), (4, "token")]
)
REWRITES = pytest.mark.parametrize("rewrites", [1, 2, 3, 8])


@pytest.mark.table
@DTYPES
@READS
@REWRITES
@pytest.mark.parametrize("d", [63, 100])
def test_rewrite_read(dtype, m, compress, rewrites, d):
    tensors = inputs((2, 40), d, m, rewrites) | parameters(d, m, compress, 4, rewrites)
    compare("rewrite_read", tensors, dtype, eps_k=0.1)


@DTYPES
@REWRITES
@pytest.mark.parametrize("m", [1, 4])
def test_rewrite(dtype, m, rewrites):
    compare("rewrite", inputs((2, 40), 63, m, rewrites), dtype, eps_k=0.1)


@DTYPES
@READS
@REWRITES
def test_read(dtype, m, compress, rewrites):
    tensors = {"state": inputs((2, 40), 63, m)["state"]}
    compare("read", tensors | parameters(63, m, compress, 4, rewrites), dtype)


@pytest.mark.parametrize(("now", "later"), [(None, 2), (3, None), (2, 3)])
@pytest.mark.parametrize("options", [
    {"value_from": "compressed", "value_scale": 4.0}, {"norm_eps": None}, {"value_scale": 4.0},
])  # fmt: skip
def test_as_many_as_before_need_not_come(now, later, options):
    tensors = inputs((2, 40), 63, 4, now) | parameters(63, 4, "channel", 4, later)
    compare("rewrite_read", tensors, F64, eps_k=0.1, **options)


@pytest.mark.parametrize("absent", [("gate_weight", "gate_bias"), ("value_weight", "value_bias")])
def test_gates_or_values_may_be_absent(absent):
    tensors = inputs((2, 9), 20, 2, 3) | parameters(20, 2, "channel", 4, 3)
    compare("rewrite_read", tensors | dict.fromkeys(absent), F64, eps_k=0.1)


@pytest.mark.parametrize("operator", ["rewrite", "read", "rewrite_read"])
@DTYPES
def test_an_axis_of_one_changes_no_bit(dtype, operator):
    given = inputs((2, 9), 24, 4) | parameters(24, 4, "channel")
    small = F64 if dtype == F64 else F32
    kept = {"value": small, "gate": small}
    plain = {n: t.to(kept.get(n, dtype)) for n, t in given.items()}
    at = {"direction": 2, "value": 2, "gate": 2}
    at |= dict.fromkeys(("gate_weight", "gate_bias", "value_weight", "value_bias"), 0)
    results = []
    for several in (False, True):
        tensors = {
            n: (t.unsqueeze(at[n]) if several and n in at else t).clone().requires_grad_()
            for n, t in plain.items()
        }
        names = {"rewrite": [*at][:3], "read": [*given][4:], "rewrite_read": [*given][1:]}
        options = {} if operator == "read" else {"eps_k": 0.1}
        used = {n: tensors[n] for n in ("state", *names[operator])}
        outputs = getattr(functional, operator)(**used, **options)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else present(outputs)
        sum(output.float().square().sum() for output in outputs).backward()
        results.append([*outputs, *(tensor.grad for tensor in used.values())])
    for one, axis in zip(*results, strict=True):
        assert torch.equal(one.flatten(), axis.flatten())


@pytest.mark.parametrize("m", [1, 3])
def test_they_are_the_product_of_their_operators(m):
    """X' = A₃A₂A₁X + Σⱼ (Πᵢ₌ₙ…ⱼ₊₁ Aᵢ) βⱼ k̂ⱼ vⱼᵀ, with a value channel or several."""
    given = inputs((5,), 12, m, 3)
    state, k, v, beta = (given[name] for name in ("state", "direction", "value", "gate"))
    expected = state
    for j in range(3):
        A = reference.operator(k[:, j], beta[:, j], eps_k=0.1)
        unit = k[:, j] / (k[:, j].square().sum(-1, keepdim=True) + 0.1**2).sqrt()
        expected = A @ expected + beta[:, j, None, None] * unit[:, :, None] * v[:, j, None, :]
    assert_close("state", functional.rewrite(**given, eps_k=0.1), expected, F64)


def test_two_reflections_are_a_rotation():
    """β = 2, v = 0: lengths are kept, the determinant is 1, a plane turns by twice the angle."""
    angle = torch.tensor(0.4, dtype=F64)
    k = torch.zeros(2, 5, dtype=F64)
    k[0, 0] = 1.0
    k[1, 0], k[1, 1] = angle.cos(), angle.sin()
    basis = torch.eye(5, dtype=F64)  # each column a value channel
    gate, value = torch.full((2,), 2.0, dtype=F64), torch.zeros(2, 5, dtype=F64)
    turned = functional.rewrite(basis, k, value, gate, eps_k=1e-18)
    assert_close("determinant", torch.linalg.det(turned), torch.tensor(1.0, dtype=F64), F64)
    assert_close("lengths", turned.T @ turned, basis, F64)
    assert_close("twice the angle", turned[0, 0], (2 * angle).cos(), F64)
    assert turned[1, 0] != 0
    assert torch.equal(turned[2:, 2:], basis[2:, 2:])


def test_gradients():
    """gradcheck of every operand in float64; the second of two directions is nearly the first."""
    given = inputs((3,), 5, 2, 2)
    given["direction"][:, 1] = given["direction"][:, 0] + 0.1 * given["direction"][:, 1]
    read = parameters(5, 2, "channel", 4, 2)
    tensors = {n: t.requires_grad_() for n, t in (given | read).items()}

    def call(*values):
        result = functional.rewrite_read(**dict(zip(tensors, values, strict=True)), eps_k=0.1)
        return tuple(present(result))

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))


def test_parallel_directions_write_one_after_the_other():
    """The second finds what the first has written: with β = 1 only the last value is left."""
    given = inputs((4,), 8, 2, 2)
    given["direction"][:, 1] = -3 * given["direction"][:, 0]
    given["gate"].fill_(1.0)
    after = functional.rewrite(**given, eps_k=1e-18)
    unit = torch.nn.functional.normalize(given["direction"][:, 1], dim=-1)
    readout = torch.einsum("td,tdm->tm", unit, after)
    assert_close("k̂ᵀX'", readout, given["value"][:, 1], F64)


@DTYPES
def test_shut_gates_keep_the_state_bit_for_bit(dtype):
    given = inputs((2, 9), 24, 4, 3)
    state = given["state"].to(dtype)
    state.flatten()[0] = -0.0
    small = F64 if dtype == F64 else F32
    after = functional.rewrite(
        state,
        given["direction"].to(dtype),
        given["value"].to(small),
        torch.zeros_like(given["gate"], dtype=small),
        eps_k=0.1,
    )
    assert torch.equal(after.view(torch.uint8), state.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"direction": (2, 9, 0, 24)}, "`direction` must have 1 to 8 rewrites, got 0"),
        ({"direction": (2, 9, 9, 24)}, "`direction` must have 1 to 8 rewrites, got 9"),
        ({"direction": (2, 9, 3, 23)}, "`direction` must have shape (2, 9, 24), got (2, 9, 3, 23)"),
        ({"direction": (2, 9, 24)}, "`value` must have shape (2, 9, 4), got (2, 9, 3, 4)"),
        ({"value": (2, 9, 4)}, "`value` must have shape (2, 9, 3, 4), got (2, 9, 4)"),
        ({"gate": (2, 9, 2)}, "`gate` must have shape (2, 9, 3), got (2, 9, 2)"),
        ({"gate_weight": (9, 24)}, "`gate_weight` must have 1 to 8 rewrites, got 9"),
        ({"gate_weight": (2, 24)}, "`gate_bias` must have shape (2,), got (3,)"),
        ({"value_weight": (4, 24)}, "`value_weight` must have shape (3, 4, 24), got (4, 24)"),
        ({"value_bias": (4,)}, "`value_bias` must have shape (3, 4), got (4,)"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(change, sentence, device):
    tensors = inputs((2, 9), 24, 4, 3) | parameters(24, 4, "channel", 4, 3)
    tensors |= {name: torch.zeros(shape, dtype=F64) for name, shape in change.items()}
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    with refused(ValueError, sentence):
        functional.rewrite_read(**tensors, eps_k=0.1)


@pytest.mark.parametrize("operator", ["rewrite", "rewrite_read", "read"])
def test_torchs_own_checks(operator):
    tensors = inputs((2, 5), 8, 2, 3) | parameters(8, 2, "token", 2, 3)
    values = positional(operator, {n: tensor.requires_grad_() for n, tensor in tensors.items()})
    torch.library.opcheck(getattr(torch.ops.ddl, operator).default, values)
