"""Reads and residuals with computed, pruned, normalised, wrapped or replaced parameters.

The fused operators read the parameters of modules directly and never call them. So changes of a
module's call are refused, and changes of its parameters take effect.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

from ddl import DeltaResidual, DeltaStream, Read
from ddl.nn import DeltaMixer
from ddl.nn.linear import Projection
from tests.support.helpers import Wrapper, assert_same_gradients, gradients, normal, randomise_
from tests.support.tolerances import assert_close

F64 = torch.float64
B, T, D, M = 2, 5, 8, 3


class LowRank(nn.Module):
    """A parametrization W + A B."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rows, 1)), nn.Parameter(torch.randn(1, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def make_stream(**options: Any) -> DeltaStream:
    sublayers = [nn.Linear(D, D) for _ in range(4)]
    stream = DeltaStream(D, sublayers, value_channels=M, **options).to(F64)
    randomise_(stream)
    return stream


def by_loop(stream: DeltaStream, x: Tensor) -> Tensor:
    """The same trunk, calling every module."""
    X = stream.expand(x)
    for read, sublayer, residual in zip(
        stream.reads, stream.sublayers, stream.residuals, strict=True
    ):
        h, raw = read(X, return_compressed=True)
        X = residual(X, sublayer(h), context=h, compressed=raw)
    return stream.readout(X)


def refused(name: str, kind: str, got: str) -> Any:
    sentence = (
        f"`{name}` must be a {kind} with its own forward, because its parameters are used without "
        f"calling it, got {got}: to compute a parameter in another way, use "
        "torch.nn.utils.parametrize"
    )
    return pytest.raises(TypeError, match=f"^{re.escape(sentence)}$")


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gate", {}),
        ("value", {}),
        ("value", {"value_from": "compressed"}),
        ("value", {"value": "sigmoid", "gate": "mlp"}),
        ("value", {"mapping": "v"}),
        ("gate", {"value": "constant"}),
    ],
)
def test_wrapped_gates_and_values_are_refused(name: str, options: dict[str, Any]) -> None:
    stream = make_stream(**options)
    residual = stream.residuals[1]
    setattr(residual, name, Wrapper(getattr(residual, name)))
    h = normal(B, T, D)
    with refused(name, "Projection", "Wrapper"):
        stream(h)
    with refused(name, "Projection", "Wrapper"):
        residual(normal(B, T, D, M), h, context=h, compressed=h)


def test_a_wrapped_gate_of_two_layers_is_refused() -> None:
    stream = make_stream(gate="mlp")
    stream.residuals[0].gate = Wrapper(stream.residuals[0].gate)
    with refused("gate", "Sequential", "Wrapper"):
        stream(normal(B, T, D))


class Doubled(Projection):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_another_forward_is_refused() -> None:
    """Both a subclass's forward and one set on the instance are refused."""
    stream, h = make_stream(), normal(B, T, D)
    residual = stream.residuals[2]
    residual.value = Doubled(D, M).to(F64)
    with refused("value", "Projection", "Doubled with another forward"):
        stream(h)
    residual.value = Projection(D, M).to(F64)
    residual.value.forward = lambda x: x
    with refused("value", "Projection", "Projection with another forward"):
        stream(h)
    del residual.value.forward
    stream(h)


@pytest.mark.parametrize(
    ("container", "index", "kind"),
    [("reads", 0, "Read"), ("reads", 3, "Read"), ("residuals", 2, "DeltaResidual")],
)
def test_wrapped_reads_and_residuals_are_refused(container: str, index: int, kind: str) -> None:
    stream = make_stream()
    modules = getattr(stream, container)
    modules[index] = Wrapper(modules[index])
    with refused(f"{container}[{index}]", kind, "Wrapper"):
        stream(normal(B, T, D))


def test_a_wrapped_readout_is_refused() -> None:
    stream = make_stream()
    stream.readout = Wrapper(stream.readout)
    with refused("readout", "Read", "Wrapper"):
        stream(normal(B, T, D))


def test_a_wrapped_direction_is_called() -> None:
    """No operator reads its weights directly, so it need not be refused."""
    stream, x = make_stream(mapping="v"), normal(B, T, D)
    expected = stream(x)
    stream.residuals[1].direction = Wrapper(stream.residuals[1].direction)
    assert torch.equal(stream(x), expected)


# --- replaced ------------------------------------------------------------------------------------


def test_a_replaced_owner_of_a_shared_compression() -> None:
    """The reads that shared it must be replaced, too, or they would use a removed module."""
    stream, x = make_stream(compress="channel"), normal(B, T, D)
    stream.reads[2] = Read(D, M, compress="channel").to(F64)
    sentence = (
        "`reads[3]` must share the compression of a read before it, got that of one that was "
        "replaced: replace it, too, by Read(…, shared=stream.reads[…])"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        stream(x)
    stream.reads[3] = Read(D, M, compress="channel", shared=stream.reads[2]).to(F64)
    assert_close("readout", stream(x), by_loop(stream, x), F64)


def test_a_replaced_read_that_nobody_shares() -> None:
    stream, x = make_stream(), normal(B, T, D)
    stream.reads[1] = Read(D, M, compress="token", kernel_size=2).to(F64)
    stream.reads[3] = Read(D, M, compress="channel", shared=stream.reads[0]).to(F64)
    stream.readout = Read(D, M, compress="token").to(F64)
    randomise_(stream, seed=1)
    assert_close("readout", stream(x), by_loop(stream, x), F64)


def test_sharing_what_is_shared_is_sharing_with_its_owner() -> None:
    stream, x = make_stream(), normal(B, T, D)
    stream.reads[3] = Read(D, M, compress="channel", shared=stream.reads[1]).to(F64)
    assert stream.reads[3].effective_weight() is stream.reads[0].compress_weight
    assert_close("readout", stream(x), by_loop(stream, x), F64)


# --- computed parameters -------------------------------------------------------------------------


@pytest.mark.table(0)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("options", [{}, {"gate": "mlp"}, {"mapping": "v"}], ids=str)
def test_parametrized_weights(options: dict[str, Any], compile: bool) -> None:
    """Compare the fused trunk, the loop, and a trunk with the computed weights as parameters."""
    stream, x = make_stream(**options), normal(B, T, D).requires_grad_()
    plain = make_stream(**options)
    residuals = zip(stream.residuals, plain.residuals, strict=True)
    pairs = [(a.value, b.value, "weight") for a, b in residuals]
    pairs += [(stream.reads[0], plain.reads[0], "compress_weight")]
    if options.get("gate") == "mlp":
        pairs += [(stream.residuals[0].gate[0], plain.residuals[0].gate[0], "weight")]
    else:
        pairs += [(stream.residuals[0].gate, plain.residuals[0].gate, "weight")]
    with torch.no_grad():
        for module, other, name in pairs:
            rows, columns = getattr(module, name).shape
            parametrize.register_parametrization(module, name, LowRank(rows, columns).to(F64))
            getattr(other, name).copy_(getattr(module, name))
    run = torch.compile(stream, backend="aot_eager", fullgraph=True) if compile else stream
    actual = run(x)
    assert_close("readout", actual, plain(x), F64, depth=4)
    expected = by_loop(stream, x)
    named, looped = (gradients(y, {"x": x}, stream) for y in (actual, expected))
    assert_same_gradients(named, looped, F64, depth=4)


# State that torch.nn.utils keeps in hooks, by which it computes a parameter before every call.
IN_HOOKS: dict[str, Any] = {
    "prune": lambda part, name: prune.random_unstructured(part, name, amount=0.5),
    "spectral_norm": spectral_norm,
    "weight_norm": lambda part, name: weight_norm(part, name, 1 if "compress" in name else None),
}
every_hook = pytest.mark.parametrize("hook", IN_HOOKS)


def hooked(stream: DeltaStream, hook: str) -> list[nn.Module]:
    """Let hooks compute the weights of some modules; return these modules."""
    first, last = stream.residuals[0], stream.residuals[3]
    gates = [first.gate] if isinstance(first.gate, Projection) else list(first.gate)[::2]
    for module in (projections := [*gates, first.value, last.value]):
        IN_HOOKS[hook](module, "weight")
    IN_HOOKS[hook](stream.reads[2], "compress_weight")
    IN_HOOKS[hook](stream.reads[1], "norm_weight")
    return [*projections, stream.reads[1], stream.reads[2]]


@pytest.mark.table(0)
@pytest.mark.parametrize("compile", [False, True])
@every_hook
@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_weights_of_hooks_follow_their_originals(gate: str, hook: str, compile: bool) -> None:
    """In training, hooks recompute a weight before each call, but these modules are not called."""
    torch._dynamo.reset()  # whose recompilations are limited
    stream, x = make_stream(gate=gate), normal(B, T, D)
    assert len(hooked(stream, hook)) >= 5
    for _ in range(9):  # the power iterations of spectral_norm converge
        stream(x)
    stream.eval()  # without further ones the fused trunk and the loop have the same weights
    run = torch.compile(stream, backend="aot_eager", fullgraph=True) if compile else stream
    for _ in range(3):
        actual, expected = run(x), by_loop(stream, x)
        assert_close("readout", actual, expected, F64, depth=4)
        named, looped = (gradients(y, {}, stream) for y in (actual, expected))
        assert_same_gradients(named, looped, F64, depth=4)
        with torch.no_grad():
            for name, parameter in stream.named_parameters():
                parameter.sub_(0.1 * named[name])


EVERYWHERE: dict[str, dict[str, Any]] = {
    "channel": {"compress": "channel", "rewrites": 2, "direction_rank": 3},
    "token": {"compress": "token", "expand": "conv", "gate_from": "convolved", "gate": "mlp"},
    "factored": {"compress": "token", "compress_parameterization": "factored"},
    "attention": {"mapping": "v", "direction": "attention", "expand": "conv"},
    "pooled": {"mapping": "v", "direction": "mean"},
    "mixer": {"gated": True},
}


@every_hook
@pytest.mark.parametrize("options", EVERYWHERE.values(), ids=EVERYWHERE)
def test_weights_of_hooks_learn(options: dict[str, Any], hook: str) -> None:
    """Every matrix, norm and convolution, in training mode over several steps."""
    torch.manual_seed(0)
    mixer = "gated" in options
    module = DeltaMixer(D, 2, **options).to(F64) if mixer else make_stream(**options)
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.numel() > D // 2 and name != "bias":
                IN_HOOKS[hook](part, name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        module(normal(B, T, D)).square().sum().backward()
        optimizer.step()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


def test_a_pruned_compression_that_is_shared() -> None:
    """A read that shares it uses the current weight, even if called without its owner."""
    owner = Read(D, M, compress="channel").to(F64)
    prune.random_unstructured(owner, "compress_weight", amount=0.5)
    with torch.no_grad():
        owner.compress_weight_orig.mul_(torch.randn(D, M, dtype=F64))
    X = normal(B, T, D, M)
    shared = Read(D, M, compress="channel", shared=owner).to(F64)
    assert_close("h", shared(X), owner(X), F64)


def test_pruned_weights_of_one_residual() -> None:
    module, x, k = DeltaResidual(D).to(F64), normal(B, T, D), normal(B, T, D, seed=1)
    prune.random_unstructured(module.value, "weight", amount=0.5)
    with torch.no_grad():
        module.value.weight_orig.mul_(3)
    plain = DeltaResidual(D).to(F64)
    kept = module.value.weight_orig * module.value.weight_mask
    plain.load_state_dict({**plain.state_dict(), "value.weight": kept})
    assert_close("x'", module(x, k, context=x), plain(x, k, context=x), F64)


# --- hooks ---------------------------------------------------------------------------------------


def test_forward_hooks_fire_where_a_module_is_called() -> None:
    """Hooks fire on sublayers and on the expansion, not on reads and residuals, as documented."""
    stream, fired = make_stream(), []
    for name, module in stream.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    x = normal(B, T, D)
    stream(x)
    assert fired == ["expand", *(f"sublayers.{index}" for index in range(4)), ""]
    fired.clear()
    stream.residuals[0](normal(B, T, D, M), x, context=x)
    assert fired == ["residuals.0"]
