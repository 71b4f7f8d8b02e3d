"""The operators under opcheck, gradcheck, torch.compile, autocast, checkpointing and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddl
from ddl import functional
from ddl.ops import declarations
from ddl.results import ERASE
from tests.support.op_cases import F32, F64, inputs, parameters

CASES = [(1, "identity"), (3, "channel"), (2, "token")]


def leaves(
    dtype: torch.dtype, m: int, compress: str, *, d: int = 6
) -> dict[str, torch.Tensor | None]:
    tensors = inputs((2, 5), d, m) | parameters(d, m, compress, taps=3)
    return {n: None if t is None else t.to(dtype).requires_grad_() for n, t in tensors.items()}


def operator_arguments(name: str, m: int, compress: str, dtype: torch.dtype, **options):
    """Positional arguments of torch.ops.ddl.<name>."""
    given: dict[str, Any] = leaves(dtype, m, compress)
    if options.pop("chained", False):
        link = [given[n].detach().clone() for n in ("direction", "value", "gate")]
        link.append(torch.rand(link[2].numel() * (1 + m), dtype=link[2].dtype))
        given["anchor"] = given["state"].detach().clone()
        given["chain"] = [*link, *(x.clone() for x in link)]
    if compress == "token":
        given["weight"] = torch.randn(6, m, 3, dtype=dtype, requires_grad=True)
    given |= {"x": given["state"].detach()[..., 0].requires_grad_(), "value_channels": m}
    return positional(name, given | options)


def positional(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Positional arguments of torch.ops.ddl.<name> from some by name."""
    defaults = {"eps_k": 0.1, "erase": 0, "norm_eps": 1e-5, "value_from_compressed": False}
    known = defaults | {"saves": True} | given
    return tuple(known.get(argument) for argument in getattr(declarations, name).names)


ALL = (1 << 10) - 1


def backward_arguments(name: str, arguments: Sequence[Any], wanted: int = ALL) -> list[Any]:
    """Positional arguments of torch.ops.ddl.<name>_backward, after those of its forward."""
    forward = getattr(declarations, name)
    made = dict(zip(forward.outputs, getattr(torch.ops.ddl, name)(*arguments), strict=True))
    known = {f"grad_{o}": torch.randn_like(x) for o, x in made.items() if x is not None}
    known |= made | forward.Arguments(*arguments)._asdict() | {"wanted": wanted}
    if known.get("chain"):
        known["state"] = known["anchor"]
    return [known.get(argument) for argument in forward.backward.names]


@pytest.mark.table(1)
@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
@pytest.mark.parametrize(("m", "compress"), CASES)
def test_opcheck(name, m, compress):
    op = getattr(torch.ops.ddl, name).default
    for dtype in (F64, F32):
        torch.library.opcheck(op, operator_arguments(name, m, compress, dtype))


@pytest.mark.table(0)
@pytest.mark.parametrize(("m", "compress"), CASES)
def test_opcheck_with_a_chain(m, compress):
    given = operator_arguments("rewrite_read", m, compress, F64, chained=True)
    torch.library.opcheck(torch.ops.ddl.rewrite_read.default, given)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    arguments = backward_arguments("rewrite_read", detached)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.ddl.rewrite_read_backward.default, arguments)
        torch.library.opcheck(torch.ops.ddl.rewrite_read_backward_.default, arguments)


@pytest.mark.parametrize("rewrites", [None, 2])
def test_opcheck_of_what_erases_nothing(rewrites):
    t = inputs((2, 5), 6, 3, rewrites) | parameters(6, 3, "token", 3, rewrites)
    for name in ("rewrite", "rewrite_read"):
        arguments = positional(name, t | {"erase": ERASE.index("none")})
        backward = getattr(torch.ops.ddl, f"{name}_backward").default
        with torch.no_grad():
            torch.library.opcheck(backward, backward_arguments(name, arguments))
        leaves = [
            x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments
        ]
        torch.library.opcheck(getattr(torch.ops.ddl, name).default, leaves)


@pytest.mark.table(1)
@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
@pytest.mark.parametrize(("m", "compress"), CASES)
def test_opcheck_of_the_backwards(name, m, compress):
    arguments = [
        x.detach() if isinstance(x, torch.Tensor) else x
        for x in operator_arguments(name, m, compress, F64)
    ]
    backward = getattr(torch.ops.ddl, f"{name}_backward").default
    for wanted in (ALL, 0b110101):
        with torch.no_grad():
            torch.library.opcheck(backward, backward_arguments(name, arguments, wanted))


@pytest.mark.table(1)
@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
@pytest.mark.parametrize(("m", "compress"), CASES)
@pytest.mark.parametrize("options", [
    {}, {"value_scale": 4.0}, {"value_from_compressed": True}, {"norm_eps": None},
], ids=str)  # fmt: skip
def test_gradcheck(name, m, compress, options):
    arguments = operator_arguments(name, m, compress, F64, **options)

    def differentiable(*arguments):
        outputs = getattr(torch.ops.ddl, name)(*arguments)
        return [o for o in outputs if o is not None and o.requires_grad]

    assert torch.autograd.gradcheck(differentiable, arguments)


class Trunk(torch.nn.Module):
    """A small model that uses every operator."""

    def __init__(self, m: int, compress: str, dtype: torch.dtype = F32) -> None:
        super().__init__()
        sublayers = [torch.nn.Linear(6, 6, dtype=dtype) for _ in range(3)]
        self.stream = ddl.DeltaStream(
            6, sublayers, value_channels=m, compress=compress, expand="conv", dtype=dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stream(x)


def gradients(model: torch.nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output.square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.table(0)
@pytest.mark.parametrize(("m", "compress"), CASES)
def test_compiled_equals_eager(m, compress):
    model = Trunk(m, compress)
    compiled = torch.compile(model, fullgraph=True)
    for shape in ((2, 5, 6), (3, 9, 6)):
        x = torch.randn(shape)
        output, expected = compiled(x), model(x)
        torch.testing.assert_close(output, expected)
        actual, wanted = gradients(model, output), gradients(model, expected)
        assert actual.keys() == wanted.keys() == dict(model.named_parameters()).keys()
        for name in wanted:
            torch.testing.assert_close(
                actual[name], wanted[name], msg=lambda m, name=name: f"{name}: {m}"
            )
    torch._dynamo.reset()


@pytest.mark.table(0)
@pytest.mark.parametrize(("m", "compress"), CASES)
def test_inductor_writes_no_operands(m, compress, monkeypatch):
    """If Inductor formats a message with the operands, they grow tenfold per layer."""
    from torch._inductor import config, exc, lowering

    for target in [t for t in lowering.lowerings if str(t).startswith("ddl.")]:
        monkeypatch.delitem(lowering.lowerings, target)  # from an earlier test
    written = []
    message = staticmethod(lambda target, *_: written.append(str(target)) or "")
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", message)
    model = Trunk(m, compress)
    with config.patch(fx_graph_cache=False):  # a cached graph would not be lowered again
        gradients(model, torch.compile(model, fullgraph=True)(torch.randn(2, 5, 6)))
    assert any(str(target).startswith("ddl.") for target in lowering.lowerings)
    assert written == []
    torch._dynamo.reset()


@pytest.mark.parametrize(("m", "compress"), CASES)
def test_checkpointing(m, compress):
    model = Trunk(m, compress)
    x = torch.randn(2, 5, 6)
    wanted = gradients(model, model(x))
    actual = gradients(model, checkpoint(model, x, use_reentrant=False))
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(actual[name], wanted[name]), name


def test_export_with_dynamic_batch_and_time():
    model = Trunk(2, "token")
    sizes = {
        0: torch.export.Dim("batch", min=2, max=64),
        1: torch.export.Dim("time", min=2, max=512),
    }
    program = torch.export.export(model, (torch.randn(2, 5, 6),), dynamic_shapes=(sizes,))
    for shape in ((2, 5, 6), (3, 9, 6)):
        x = torch.randn(shape)
        assert torch.equal(program.module()(x), model(x))


def test_an_exported_stream_runs_where_gradients_are_recorded():
    model, x = Trunk(2, "token"), torch.randn(2, 5, 6)
    expected, program = model(x), torch.export.export(model, (x,))
    assert torch.equal(program.run_decompositions().module()(x), expected)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    exported = program.module()
    output = exported(x)
    assert torch.equal(output, expected)
    actual, wanted = gradients(exported, output), gradients(model, expected)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


def test_a_stream_that_only_writes_compiles_and_exports():
    sublayers = [torch.nn.Linear(6, 6) for _ in range(3)]
    stream = ddl.DeltaStream(6, sublayers, value_channels=3, erase="none", rewrites=2)
    x = torch.randn(2, 5, 6)
    compiled = torch.compile(stream, fullgraph=True, backend="aot_eager")
    output, expected = compiled(x), stream(x)
    torch.testing.assert_close(output, expected)
    actual, wanted = gradients(stream, output), gradients(stream, expected)
    assert actual.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name])
    program = torch.export.export(stream, (x,))
    assert torch.equal(program.module()(x), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(("m", "compress"), CASES)
def test_autocast_gives_the_next_sublayer_its_dtype(m, compress):
    model = Trunk(m, compress)
    seen = []
    for sublayer in model.stream.sublayers:
        sublayer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    x = torch.randn(2, 5, 6)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        output = model(x)
    assert seen == [torch.bfloat16] * 3
    assert output.dtype == torch.bfloat16
    assert all(
        g.dtype == F32 and g.isfinite().all() for g in gradients(model, output.float()).values()
    )
    error = (output.float() - model(x)).square().mean().sqrt() / model(x).square().mean().sqrt()
    assert error < 0.05  # three bfloat16 matrix products, 2⁻⁸ each, and cancellation


def test_autocast_keeps_the_gate_in_float32():
    t = leaves(F32, 2, "channel")
    with torch.autocast(t["state"].device.type, dtype=torch.bfloat16):
        result = functional.rewrite_read(**t, eps_k=0.1)
    assert (result.state.dtype, result.context.dtype) == (F32, torch.bfloat16)
    assert result.value.dtype == result.gate.dtype == F32


def test_gradients_nobody_asked_for_cost_nothing_and_stay_none():
    t = leaves(F64, 2, "token")
    state = t["state"].detach()
    functional.rewrite_read(**(t | {"state": state}), eps_k=0.1).value.sum().backward()
    assert state.grad is None
    assert t["gate_weight"].grad is None
    assert t["value_weight"].grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
def test_double_backward_refuses(name):
    arguments = operator_arguments(name, 2, "token", F64)
    first, *_ = getattr(torch.ops.ddl, name)(*arguments)
    (grad,) = torch.autograd.grad(first.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(
        NotImplementedError, match=f"double backward of `ddl.{name}` must go through"
    ):
        grad.sum().backward()


def rewrite_of_state():
    """Return a function of the state alone."""
    t = {n: leaf.detach() for n, leaf in leaves(F64, 2, "channel").items()}
    rest = {n: t[n] for n in ("direction", "value", "gate")}
    return lambda state: functional.rewrite(state, **rest, eps_k=0.1)


def test_forward_mode_refuses():
    state = torch.randn(2, 5, 6, 2, dtype=F64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(state, torch.ones_like(state))
        with pytest.raises(
            NotImplementedError, match="`state` must come without a forward-mode tangent"
        ):
            rewrite_of_state()(dual)


def test_forward_mode_refuses_within_what_is_compiled():
    """Without the error, torch.compile would trace the transform and return a tangent of zeros."""
    state, f = torch.randn(2, 5, 6, 2, dtype=F64), rewrite_of_state()
    compiled = torch.compile(lambda x: torch.func.jvp(f, (x,), (x,)), backend="eager")
    with pytest.raises(NotImplementedError, match=r"must be called outside of torch\.func"):
        compiled(state)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("transform", [
    lambda f, x: torch.vmap(f)(torch.stack([x, x])),
    lambda f, x: torch.func.jvp(f, (x,), (x,)),
    lambda f, x: torch.func.vjp(f, x),
    lambda f, x: torch.func.jacrev(f)(x),
], ids=["vmap", "jvp", "vjp", "jacrev"])  # fmt: skip
def test_functional_transforms_refuse(transform, mode):
    message = "must be called outside of torch.func|must come without a forward-mode tangent"
    with mode(), pytest.raises(NotImplementedError, match=message):
        transform(rewrite_of_state(), torch.randn(2, 5, 6, 2, dtype=F64))


def test_a_tangent_past_the_functional_forms_is_refused():
    X, k, v, b = torch.randn(3, 4, 2), torch.randn(3, 4), torch.randn(3, 2), torch.rand(3)
    sentence = "^`state` must come without a forward-mode tangent"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(NotImplementedError, match=sentence):
                torch.ops.ddl.rewrite(dual, k, v, b, 0.1, 0, True)
        torch.ops.ddl.rewrite(X, k, v, b, 0.1, 0, True)
        weight = torch.autograd.forward_ad.make_dual(torch.ones(4), torch.ones(4))
        sentence = "^`norm_weight` must come without a forward-mode tangent"
        with torch.no_grad(), pytest.raises(NotImplementedError, match=sentence):
            functional.read(X, compress=torch.ones(4, 2), norm_weight=weight)
    for mode in (torch.enable_grad, torch.no_grad):
        with (
            mode(),
            pytest.raises(NotImplementedError, match=r"outside of torch\.func|without a f"),
        ):
            torch.func.jvp(lambda X: torch.ops.ddl.rewrite(X, k, v, b, 0.1, 0, True)[0], (X,), (X,))


@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
def test_what_records_no_gradients_is_refused_where_they_are_recorded(name):
    arguments = operator_arguments(name, 2, "token", F32)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    backward = backward_arguments(name, detached)
    kernel, derivative = (
        getattr(torch.ops.ddl, name).kernel,
        getattr(torch.ops.ddl, f"{name}_backward"),
    )
    for call, given in ((kernel, arguments), (derivative, backward)):
        with torch.no_grad():
            call(*given)
        with pytest.raises(RuntimeError, match=r"must be called under torch.no_grad\(\), because"):
            call(*given)


# --- calls without redispatch --------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Collect the names of the operators that reach this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators():
    leaves = [t.requires_grad_() for t in inputs((2, 3), 8, 2).values()]
    with Seen() as seen:
        functional.rewrite(*leaves, eps_k=0.1).sum().backward()
    assert {"ddl::rewrite.kernel", "ddl::rewrite_backward"} <= set(seen.names)
