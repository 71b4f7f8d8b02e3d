"""States that are not stored: gradients from an anchor and a chain are those of stored states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from ddl import functional
from ddl.results import Chain
from tests.ops.test_ops_torch import positional
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.tolerances import compute_dtype

EPS_K, REWRITES = 0.1, 7
OPERANDS = ("direction", "value", "gate")


def leaves(
    dtype: torch.dtype, m: int, compress: str, d: int = 24, several: int | None = None
) -> list[dict[str, Tensor]]:
    """A state, and of each boundary the operands of its rewrites and the parameters of its read."""
    small = compute_dtype(dtype)
    kept = {"value": small, "gate": small}
    calls = []
    for number in range(REWRITES):
        given = inputs((2, 9), d, m, several) | parameters(d, m, compress, 4, several)
        if number > 0:
            del given["state"]
        calls.append({
            name: tensor.to(kept.get(name, dtype)).requires_grad_()
            for name, tensor in given.items()
            if tensor is not None
        })  # fmt: skip
    return calls


def run(calls: list[dict[str, Tensor]], anchor_every: int | None) -> list[Tensor]:
    """Rewrite and read over and over; return the last state and everything that was read."""
    state, chain, outputs = calls[0]["state"], Chain(anchor_every or 1), []
    for call in calls:
        operands = [call[name] for name in OPERANDS]
        options = {n: t for n, t in call.items() if n not in (*OPERANDS, "state")}
        if anchor_every is None:
            result = functional.rewrite_read(state, *operands, eps_k=EPS_K, **options)
        else:
            result, chain = functional.rewrite_read_chained(
                state, *operands, chain=chain, eps_k=EPS_K, **options
            )
        state, *read = result
        outputs += [output for output in read if output is not None]
    return [state, *outputs]


def gradients(calls: list[dict[str, Tensor]], outputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every leaf by name, for fixed gradients of every output."""
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
    named = {f"{n}.{name}": t for n, call in enumerate(calls) for name, t in call.items()}
    found = torch.autograd.grad(outputs, list(named.values()), incoming)
    return dict(zip(named, found, strict=True))


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(
    ("m", "compress"),
    [(1, "identity"), (1, "token"), (2, "channel"), (3, "token"), (4, "channel"), (4, "token")],
)


@DTYPES
@READS
@pytest.mark.parametrize("anchor_every", [1, 2, 3, 32])
def test_gradients_have_the_same_bits(dtype, m, compress, anchor_every):
    calls = leaves(dtype, m, compress)
    expected = gradients(calls, run(calls, None))
    assert_same_bits(gradients(calls, run(calls, anchor_every)), expected)


@DTYPES
@pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (3, "token")])
@pytest.mark.parametrize("anchor_every", [2, 32])
def test_several_rewrites_have_the_same_bits(dtype, m, compress, anchor_every):
    calls = leaves(dtype, m, compress, several=3)
    expected = gradients(calls, run(calls, None))
    assert_same_bits(gradients(calls, run(calls, anchor_every)), expected)


@contextmanager
def mixed() -> Iterator[None]:
    with torch.autocast("cpu", dtype=BF16):
        yield


@pytest.mark.table(0)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("around", [nullcontext, mixed], ids=["plain", "autocast"])
@pytest.mark.parametrize(("m", "compress"), [(4, "channel"), (4, "token")])
def test_compiled_gradients_have_the_same_bits(backend, around, m, compress):
    calls = leaves(F32, m, compress)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with around():
        expected = gradients(calls, run(calls, None))
        assert_same_bits(gradients(calls, compiled(calls, 3)), expected)


PLANS = {
    "as planned": {},
    "one stage": {"STAGES": 1},
    "two stages": {"STAGES": 2},
    "separate sums": {"SUMS": 3},
}


@needs_emulator
@DTYPES
@READS
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.table(1)
def test_gradients_have_the_same_bits_on_a_gpu(dtype, m, compress, plan):
    calls = leaves(dtype, m, compress, d=32)
    with emulated(plan=plan):
        expected = gradients(calls, run(calls, None))
        assert_same_bits(gradients(calls, run(calls, 4)), expected)


@needs_emulator
@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_several_rewrites_have_the_same_bits_on_a_gpu(dtype, plan):
    calls = leaves(dtype, 4, "token", d=32, several=2)
    with emulated(plan=plan):
        expected = gradients(calls, run(calls, None))
        assert_same_bits(gradients(calls, run(calls, 4)), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_only_anchors_are_stored(compile_it):
    """Of seven states the backward keeps X0, X3 and X6 for N = 3, besides the incoming state."""
    calls = leaves(F32, 4, "channel")
    numel = calls[0]["state"].numel()
    torch._dynamo.reset()
    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compile_it else run
    for anchor_every, expected in ((1, 7), (3, 3), (32, 1)):
        kept: set[int] = set()
        alive: list[Tensor] = []

        def pack(tensor: Tensor, kept: set[int] = kept, alive: list[Tensor] = alive) -> Tensor:
            if tensor.numel() == numel:
                kept.add(tensor.untyped_storage().data_ptr())
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(calls, anchor_every)
        assert len(kept) == expected, anchor_every


def test_another_dtype_of_the_direction_starts_a_new_chain():
    calls = leaves(F32, 4, "channel")
    for call in calls[3:]:
        call["direction"] = call["direction"].detach().bfloat16().requires_grad_()
    expected = gradients(calls, run(calls, None))
    assert_same_bits(gradients(calls, run(calls, 32)), expected)


def test_another_number_of_rewrites_starts_a_new_chain():
    calls = leaves(F32, 4, "channel")
    for call, other in zip(calls[3:], leaves(F32, 4, "channel", several=2)[3:], strict=True):
        call |= {name: other[name] for name in OPERANDS}
    expected = gradients(calls, run(calls, None))
    assert_same_bits(gradients(calls, run(calls, 32)), expected)


# --- the operator itself --------------------------------------------------------------------------


def operator_call(calls: list[dict[str, Tensor]], chain: list[Tensor]) -> tuple[Tensor, ...]:
    """Call `rewrite_read` with an anchor and a chain that other tensors might have led to."""
    anchor = {"anchor": calls[0]["state"].detach().clone(), "chain": chain}
    arguments = positional("rewrite_read", calls[0] | {"eps_k": EPS_K} | anchor)
    return torch.ops.ddl.rewrite_read(*arguments)


def link(calls: list[dict[str, Tensor]]) -> list[Tensor]:
    """A rewrite that writes nothing, with tensors that require gradients."""
    like = calls[1]
    gate = torch.zeros_like(like["gate"]).requires_grad_()
    stats = torch.ones(gate.numel() * (1 + like["value"].shape[-1])).requires_grad_()
    return [like["direction"], like["value"], gate, stats]


def test_anchor_and_chain_get_no_gradient():
    calls = leaves(F32, 4, "channel")
    chain = link(calls)
    outputs = operator_call(calls, chain)
    torch.autograd.backward([outputs[0].sum() + outputs[1].square().sum()])
    assert calls[0]["state"].grad is not None
    assert calls[0]["direction"].grad is not None
    assert all(tensor.grad is None for tensor in chain)


def test_the_backward_starts_from_the_anchor():
    """It is the chain that counts, not the state: with β = 0 the anchor is the state."""
    calls = leaves(F32, 4, "channel")
    writes = link(calls)
    writes[2] = torch.ones_like(writes[2])
    plain, still, moved = (
        torch.autograd.grad(operator_call(calls, chain)[1].sum(), calls[0]["direction"])[0]
        for chain in ([], link(calls), writes)
    )
    assert torch.equal(plain, still)
    assert not torch.equal(plain, moved)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda chain: chain[:3], "`chain` must hold direction, value, gate and stats of each"),
        (lambda chain: [chain[0][:1], *chain[1:]], "`chain` must have shape"),
        (lambda chain: [chain[0].double(), *chain[1:]], "`chain` must have dtype"),
        (
            lambda chain: [chain[0].bfloat16(), *chain[1:]],
            "`chain` must have dtype torch.float32, got",
        ),
        (lambda chain: [*chain[:3], chain[3][1:]], "`chain` must have shape"),
    ],
)
def test_a_wrong_chain_is_refused(change, sentence):
    calls = leaves(F32, 4, "channel")
    outputs = operator_call(calls, change(link(calls)))
    with pytest.raises((ValueError, TypeError, RuntimeError)) as refusal:
        outputs[0].sum().backward()
    assert sentence in str(refusal.value)


def test_a_chain_without_an_anchor_is_refused():
    calls = leaves(F32, 4, "channel")
    given = calls[0] | {"eps_k": EPS_K, "chain": link(calls)}
    with pytest.raises(ValueError, match="`chain` must come with an `anchor`, got 4 tensors"):
        torch.ops.ddl.rewrite_read(*positional("rewrite_read", given))


@needs_emulator
def test_a_gpu_refuses_a_chain_that_is_too_long():
    calls = leaves(F32, 4, "channel", d=32)
    with emulated():
        outputs = operator_call(calls, 32 * link(calls))
        with pytest.raises(
            (ValueError, RuntimeError), match="at most 31 rewrites on a GPU, got 32"
        ):
            outputs[0].sum().backward()
