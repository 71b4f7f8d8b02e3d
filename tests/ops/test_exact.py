"""Contracts that hold bit for bit, where a tolerance would hide a rounding at the wrong place.

`rewrite_read` equals `rewrite` then `read`: all outputs and all parameter gradients, for any data.
The gradients of X, k, v and β pass G = ∂L/∂X', which two operators round and add and one does not;
they are equal for data whose G is exact in every storage type (`exact_case`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddl import functional
from tests.support.helpers import by_name
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.tolerances import compute_dtype

REWRITE = ("state", "direction", "value", "gate")
DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])
EPS_K = 0.1


def rounded(tensors: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return leaves: v and β in the type of the arithmetic, all others stored in `dtype`."""
    kept = {"value": compute_dtype(dtype), "gate": compute_dtype(dtype)}
    return {
        n: t.to(kept.get(n, dtype)).requires_grad_() for n, t in tensors.items() if t is not None
    }


def in_one(leaves: dict[str, Tensor], **read: object) -> dict[str, Tensor]:
    """Return the outputs of `rewrite_read` by name."""
    return by_name(functional.rewrite_read(**leaves, eps_k=EPS_K, **read))


def in_two(leaves: dict[str, Tensor], **read: object) -> dict[str, Tensor]:
    """Return the outputs of `rewrite` and then `read`, by the names of `rewrite_read`."""
    state = functional.rewrite(**{n: leaves[n] for n in REWRITE}, eps_k=EPS_K)
    weights = {n: t for n, t in leaves.items() if n not in REWRITE}
    return {"state": state, **by_name(functional.read(state, **weights, **read))}


def gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor], incoming: dict[str, Tensor]):
    """Return the gradients of `leaves` by name, for gradients `incoming` of some outputs."""
    used = [outputs[n] for n in incoming]
    found = torch.autograd.grad(used, list(leaves.values()), list(incoming.values()))
    return dict(zip(leaves, found, strict=True))


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        same = torch.equal(actual[name], tensor)
        assert same, f"{name} differs in {(actual[name] != tensor).sum()} of {tensor.numel()}"


def bits_case(dtype: torch.dtype, m: int, compress: str, d: int = 33) -> dict[str, Tensor]:
    return rounded(inputs((2, 70), d, m) | parameters(d, m, compress), dtype)


@DTYPES
@READS
def test_outputs_of_rewrite_then_read(dtype, m, compress):
    """Red if the forward reads X' before it is rounded to the storage type."""
    leaves = bits_case(dtype, m, compress)
    options = {"context_dtype": compute_dtype(dtype)}  # a narrow h would hide a difference
    assert_same_bits(in_one(leaves, **options), in_two(leaves, **options))


@pytest.mark.parametrize("options", [{}, {"norm_eps": None}, {"value_from": "compressed"}], ids=str)
@DTYPES
@READS
def test_parameter_gradients_of_rewrite_then_read(dtype, m, compress, options):
    """Red if the backward rebuilds X' without rounding it as the forward stored it."""
    leaves = bits_case(dtype, m, compress)
    results = []
    for run in (in_one, in_two):
        outputs = run(leaves, **options)
        generator = torch.Generator().manual_seed(1)
        incoming = {
            n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in outputs.items()
        }
        found = gradients(outputs, leaves, incoming)
        results.append({n: grad for n, grad in found.items() if n not in REWRITE})
    assert_same_bits(*results)


def draw(shape: torch.Size, *numbers: float) -> Tensor:
    """Draw each element from `numbers`."""
    return torch.tensor(numbers, dtype=F64)[torch.randint(len(numbers), shape)]


def exact_case(m: int, compress: str, d: int = 33) -> dict[str, Tensor | None]:
    """Return arguments for which kᵀG is exact, whatever the order: k, γ, w are small powers of two.

    Without norm and gates dx = γ·dh, so for whole dh and G every term is a whole number and no sum
    of a feature's terms exceeds 2^8. X, v and β are arbitrary.
    """
    tensors = inputs((2, 70), d, m)
    weights = {
        n: t for n, t in parameters(d, m, compress).items() if n in ("compress", "norm_weight")
    }
    tensors["direction"] = draw(tensors["direction"].shape, -2, -1, 0, 1, 2)
    exact = {n: None if t is None else draw(t.shape, -2, -1, 1, 2) for n, t in weights.items()}
    return tensors | exact


@pytest.mark.parametrize("used", [("context",), ("state", "context")], ids=" and ".join)
@DTYPES
@READS
def test_every_gradient_of_rewrite_then_read(dtype, m, compress, used):
    """Red if X' is rebuilt without rounding, too: then dw and dγ differ."""
    leaves = rounded(exact_case(m, compress), dtype)
    results = []
    for run in (in_one, in_two):
        outputs = run(leaves, norm_eps=None)
        torch.manual_seed(1)
        incoming = {n: draw(outputs[n].shape, -3, -2, -1, 0, 1, 2, 3).to(dtype) for n in used}
        results.append(gradients(outputs, leaves, incoming))
    assert_same_bits(*results)


@DTYPES
@READS
def test_forward_and_backward_read_the_same_x(dtype, m, compress):
    """h = γx and dγ = Σ dh·x, so with γ = 1 and dh = 1 at one token, dγ is that token's h.

    Red if a token read goes on with the x that it has not rounded as it saved it.
    """
    leaves = bits_case(dtype, m, compress)
    leaves = {n: leaves[n] for n in (*REWRITE, "compress") if n in leaves}
    gamma = torch.ones(33, dtype=compute_dtype(dtype), requires_grad=True)
    options = {"norm_eps": None, "context_dtype": compute_dtype(dtype)}
    context = in_one(leaves | {"norm_weight": gamma}, **options)["context"]
    incoming = torch.zeros_like(context)
    incoming[1, 50] = 1
    (grad,) = torch.autograd.grad(context, gamma, incoming)
    assert torch.equal(grad, context[1, 50])


THREADED = {
    "rewrite": lambda: (inputs((2, 500), 63, 4), {"eps_k": EPS_K}),
    "read over channels": lambda: (read_case("channel"), {}),
    "read over time": lambda: (read_case("token"), {}),
    "rewrite_read over channels": lambda: (rewrite_read_case("channel"), {"eps_k": EPS_K}),
    "rewrite_read over time": lambda: (rewrite_read_case("token"), {"eps_k": EPS_K}),
    "expand by repetition": lambda: ({"x": torch.randn(2, 500, 63)}, {"value_channels": 4}),
    "expand over time": lambda: (
        {"x": torch.randn(2, 500, 63), "weight": torch.randn(63, 4, 4)}, {"value_channels": 4}
    ),
}  # fmt: skip


def rewrite_read_case(compress: str) -> dict[str, Tensor | None]:
    return inputs((2, 500), 63, 4) | parameters(63, 4, compress)


def read_case(compress: str) -> dict[str, Tensor | None]:
    return {n: t for n, t in rewrite_read_case(compress).items() if n not in REWRITE[1:]}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", THREADED)
def test_results_do_not_depend_on_the_number_of_threads(name, dtype):
    """Red if any operator divides its tokens by the number of threads, in either direction."""
    tensors, options = THREADED[name]()
    leaves = rounded(tensors, dtype)
    function = getattr(functional, name.split()[0])
    runs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        outputs = function(**leaves, **options)
        outputs = {"state": outputs} if isinstance(outputs, Tensor) else by_name(outputs)
        generator = torch.Generator().manual_seed(1)
        incoming = {
            n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in outputs.items()
        }
        found = gradients(outputs, leaves, incoming)
        runs.append(outputs | {f"gradient of {n}": grad for n, grad in found.items()})
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
