"""The ways in which an operator is called: inference mode, threads, forks, C++ from inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddl import functional, reference
from tests.support.helpers import present
from tests.support.op_cases import F32, inputs, parameters


def given(d: int = 8) -> dict[str, torch.Tensor]:
    tensors = inputs((2, 5), d, 2) | parameters(d, 2, "token", taps=3)
    return {name: tensor.to(F32) for name, tensor in tensors.items() if tensor is not None}


def close(actual: tuple, expected: tuple) -> None:
    for index, pair in enumerate(zip(present(actual), present(expected), strict=True)):
        torch.testing.assert_close(*pair, msg=lambda text, at=index: f"{at}: {text}")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_recording(mode):
    t = given()
    with mode():
        outputs = functional.rewrite_read(**t, eps_k=0.1)
    close(outputs, reference.rewrite_read(**t, eps_k=0.1))
    assert not any(output.requires_grad for output in present(outputs))
    assert all(
        output.is_inference() == (mode is torch.inference_mode) for output in present(outputs)
    )


def test_a_refusal_stays_in_its_thread():
    """Each thread gets its own sentence, while others are refused and others succeed."""

    def call(index: int) -> bool:
        t = given() | {"gate": torch.rand(2, 5 + index % 3)}
        try:
            close(functional.rewrite_read(**t, eps_k=0.1), reference.rewrite_read(**t, eps_k=0.1))
        except ValueError as error:
            return f"got (2, {5 + index % 3})" in str(error)
        return index % 3 == 0

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(300)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_calls_them_too():
    script = """
import os, torch, warnings
from ddl import functional
torch.set_num_threads(1)
warnings.simplefilter("ignore")  # of forking with threads
t = [torch.randn(2, 3, 4, 2), torch.randn(2, 3, 4), torch.randn(2, 3, 2), torch.rand(2, 3)]
before = functional.rewrite(*t, eps_k=0.1)
if os.fork() == 0:
    t[0].requires_grad_()
    after = functional.rewrite(*t, eps_k=0.1)
    after.sum().backward()
    os._exit(0 if torch.equal(before, after) and t[0].grad is not None else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.split() == ["0"], run.stderr


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # inductor's, of caches
def test_inductors_cpp_wrapper_calls_them():
    """C++ that inductor writes calls them through the dispatcher."""
    t = given()
    function = torch.compile(lambda t: functional.rewrite(*t, eps_k=0.1) + 1, fullgraph=True)
    arguments = [t[name] for name in ("state", "direction", "value", "gate")]
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        actual = function(arguments)
    torch._dynamo.reset()
    torch.testing.assert_close(actual, reference.rewrite(*arguments, eps_k=0.1) + 1)


def test_a_tensor_that_left_a_transform():
    """torch.func marks it as dead, and unwraps it in Python, which the operators skip."""
    left = []
    torch.func.grad(lambda X: left.append(2 * X) or X.sum())(torch.randn(3, 4, 2))
    k, v, gate = torch.randn(3, 4, requires_grad=True), torch.randn(3, 2), torch.rand(3)
    (X,) = left
    actual, expected = (f.rewrite(X, k, v, gate, eps_k=0.1) for f in (functional, reference))
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(x.sum(), k)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_compiled_autograd_of_an_eager_forward():
    leaves = {name: tensor.requires_grad_() for name, tensor in given().items()}

    def gradients() -> list[torch.Tensor]:
        for leaf in leaves.values():
            leaf.grad = None
        outputs = functional.rewrite_read(**leaves, eps_k=0.1)
        sum(output.square().sum() for output in present(outputs)).backward()
        return [leaf.grad for leaf in leaves.values()]

    expected = gradients()
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = gradients()
    torch._dynamo.reset()
    for name, *pair in zip(leaves, actual, expected, strict=True):
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")


def test_an_exception_of_others_keeps_its_cause():
    def pack(_: torch.Tensor) -> None:
        raise RuntimeError("cannot pack") from OSError("disk full")

    t = given()
    rewrite = [t[name].requires_grad_() for name in ("state", "direction", "value", "gate")]
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        pytest.raises(RuntimeError, match="cannot pack") as raised,
    ):
        functional.rewrite(*rewrite, eps_k=0.1)
    assert isinstance(raised.value.__cause__, OSError)
