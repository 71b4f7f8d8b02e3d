"""Kernels run on torch's current stream, without synchronisation, and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ddl import functional
from tests.support.gpu_device import EPS, Tensors, arguments, backward, cotangents, forward
from tests.support.helpers import present

F32, BF16 = torch.float32, torch.bfloat16
# A token per block, and a token per cluster if the GPU has clusters.
WIDTHS = pytest.mark.parametrize("d", [768, 4096])
READS = pytest.mark.parametrize("compress", ["channel", "token"])
LONG = 500_000_000  # cycles: a quarter of a second


def both(leaves: Tensors) -> Tensors:
    """Outputs, and the gradients of all arguments."""
    outputs = forward(leaves)
    return outputs | {f"d{n}": g for n, g in backward(outputs, leaves, cotangents(outputs)).items()}


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@READS
def test_work_goes_to_the_current_stream(compress: str) -> None:
    """The arguments get their values on that stream long after the call returns."""
    right = arguments((2, 65), 96, 4, compress, F32)
    expected = both(right)
    late = {n: torch.zeros_like(t).requires_grad_() for n, t in right.items()}
    both(late)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        with torch.no_grad():
            for name, leaf in late.items():
                leaf.copy_(right[name])
        actual = both(late)
    torch.cuda.synchronize()
    assert_equal(actual, expected)


@READS
def test_two_streams_at_once(compress: str) -> None:
    """Calls on different streams do not share scratch memory."""
    every = [arguments((2, 65), d, 4, compress, F32) for d in (96, 4096)]
    expected = [both(leaves) for leaves in every]
    streams = [torch.cuda.Stream() for _ in every]
    torch.cuda.synchronize()
    actual: list[Tensors] = []
    for _ in range(10):
        actual = []
        for stream, leaves in zip(streams, every, strict=True):
            with torch.cuda.stream(stream):
                actual.append(both(leaves))
    torch.cuda.synchronize()
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one, other)


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Make torch raise if it synchronises with the device."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def calls() -> dict[str, tuple[Callable[..., object], Tensors]]:
    """Every operator with a backward that reaches all arguments."""
    leaves = {c: arguments((2, 65), 96, 4, c, BF16) for c in ("channel", "token")}
    rewrite = ("state", "direction", "value", "gate")
    read = {n: t for n, t in leaves["token"].items() if n not in rewrite[1:]}
    x = leaves["channel"]["direction"]
    return {
        "rewrite_read": (lambda **t: functional.rewrite_read(**t, **EPS), leaves["channel"]),
        "rewrite_read over time": (
            lambda **t: functional.rewrite_read(**t, **EPS),
            leaves["token"],
        ),
        "rewrite": (
            lambda **t: functional.rewrite(**t, **EPS),
            {n: leaves["channel"][n] for n in rewrite},
        ),
        "read": (functional.read, read),
        "expand": (
            lambda **t: functional.expand(**t, value_channels=4),
            {"x": x, "weight": leaves["token"]["compress"]},
        ),
    }


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize(
    "name", ["rewrite_read", "rewrite_read over time", "rewrite", "read", "expand"]
)
def test_no_call_waits_for_the_device(name: str) -> None:
    operator, leaves = calls()[name]

    def run() -> None:
        result = operator(**leaves)
        outputs = present(result) if isinstance(result, tuple) else [result]
        grads = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, list(leaves.values()), grads)

    for _ in range(3):  # compiles, loads, and fills torch's memory cache
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(LONG)
    asleep = torch.cuda.Event()
    asleep.record()
    run()
    assert not asleep.query(), "the call returned after the device had done its work"


@READS
@WIDTHS
def test_a_graph_replays_forward_and_backward(compress: str, d: int) -> None:
    leaves = arguments((2, 65), d, 4, compress, F32)
    fresh = arguments((2, 65), d, 4, compress, F32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            incoming = cotangents(outputs := forward(leaves))
            backward(outputs, leaves, incoming)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward(leaves)
        grads = backward(outputs, leaves, incoming)
    for given in (fresh, arguments((2, 65), d, 4, compress, F32)):
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(given[name])
        graph.replay()
        expected = forward(given)
        assert_equal(outputs, expected)
        assert_equal(grads, backward(expected, given, incoming))


def test_a_captured_model_trains_as_the_model_does() -> None:
    from ddl import DeltaStream

    def make() -> DeltaStream:
        torch.manual_seed(0)
        sublayers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
        return DeltaStream(64, sublayers, value_channels=4, compress="token", expand="conv")

    x = torch.randn(2, 33, 64)
    captured = torch.cuda.make_graphed_callables(make(), (x.clone(),))
    for model in (plain := make(), captured):
        model(x).square().sum().backward()
    for (name, a), b in zip(captured.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-4, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
        )


@READS
@WIDTHS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_results_repeat_bit_for_bit(compress: str, d: int, dtype: torch.dtype) -> None:
    """Sums over tokens in many blocks, with and without another stream's work on the device."""
    leaves = arguments((4, 1024), d, 4, compress, dtype)
    expected = both(leaves)
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096)
    for busy in (False, True, True):
        if busy:
            with torch.cuda.stream(other):
                for _ in range(4):
                    noise @ noise
        assert_equal(both(leaves), expected)


def test_the_weight_of_an_expansion_gets_the_same_gradient_each_time() -> None:
    x, weight = torch.randn(4, 1024, 768), torch.randn(768, 4, 4, requires_grad=True)
    grads = []
    for _ in range(3):
        state = functional.expand(x, weight, value_channels=4)
        grads += torch.autograd.grad(state.square().sum(), weight)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
