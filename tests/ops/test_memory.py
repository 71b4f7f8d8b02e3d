"""Scratch memory of the operators: its amount, and the error if there is not enough.

Each case runs in a process of its own, whose address space is limited to its current size plus some
room. The environment makes glibc map every large block anew, so the room is exact.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ddl import functional, reference
from tests.support.op_cases import F32, F64, inputs, parameters
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

START = """
import os, resource, signal, torch
from ddl import functional

torch.set_num_threads(2)

def rewrite(tokens, d, m):
    state, direction = torch.empty(tokens, d, m), torch.empty(tokens, d)
    return lambda: functional.rewrite(
        state, direction, torch.zeros(tokens, m), torch.zeros(tokens), eps_k=0.1
    )

def read(tokens, d, m, taps):
    state = torch.empty(tokens, d, m).requires_grad_()
    compress = torch.zeros(d, m, taps, requires_grad=True)
    return lambda: functional.read(state, compress=compress).context

def expand(tokens, d, m, taps):
    x, weight = torch.zeros(tokens, d), torch.zeros(d, m, taps, requires_grad=True)
    return lambda: functional.expand(x, weight, value_channels=m)

def backward(forward):
    output = forward()
    grad = torch.ones_like(output)
    return lambda: output.backward(grad, retain_graph=True)

def within(mebibytes, call):
    with open("/proc/self/statm") as pages:
        size = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (mebibytes << 20), resource.RLIM_INFINITY))
    try:
        call()
        print("done")
    except MemoryError as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

for small in (rewrite(256, 64, 4), backward(read(256, 64, 4, 2)), expand(256, 64, 4, 2)):
    small()  # starts the threads and torch's late imports
"""

GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def run(script: str, **environment: str) -> list[str]:
    """Run a script, which must succeed, and return the lines that it prints."""
    run = subprocess.run(
        [sys.executable, "-c", START + script],
        env=os.environ | GLIBC | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


def refusal(operator: str, asked: str) -> str:
    return (
        f"`{operator}` asked for {asked} of scratch memory, which could not be had; "
        "take fewer taps, value channels or features, or free memory"
    )


# Each call has room for the outputs and gradients that torch allocates, but not for its scratch.
@pytest.mark.table(0)
@pytest.mark.parametrize(
    ("call", "room", "operator", "asked"),
    [
        ("read(8, 1024, 4, 1024)", 8, "read", "16 MiB"),
        ("backward(read(8, 1024, 4, 1024))", 24, "read", "16 MiB"),
        ("expand(8, 1024, 4, 1024)", 8, "expand", "16 MiB"),
        ("backward(expand(8, 1024, 4, 1024))", 24, "expand", "16 MiB"),
        ("rewrite(4, 2**20, 2)", 36, "rewrite", "4 MiB"),
    ],
)
def test_too_little_memory_is_an_error(call, room, operator, asked):
    script = f"call = {call}\nwithin({room}, call)\nwithin(1024, call)"
    assert run(script) == [refusal(operator, asked), "done"]


@pytest.mark.table(0)
@pytest.mark.parametrize("threads", ["openmp", "rayon"])
def test_too_little_memory_within_a_thread_is_an_error(threads):
    """Parts with a direction of scratch each; nothing ever touches the 512 MiB."""
    script = "call = rewrite(128, 2**18, 4)\nwithin(514, call)\nwithin(2048, rewrite(256, 64, 4))"
    assert run(script, DDL_THREADS=threads) == [refusal("rewrite", "1 MiB"), "done"]


@pytest.mark.parametrize(("operator", "moved"), [("read", 8), ("expand", 2)])
def test_partial_sums_stay_small_beside_the_state(operator, moved):
    """Weight 0.5 MiB, state 8 MiB: a sum for each of 64 parts would take 32 MiB."""
    script = f"call = backward({operator}(8192, 64, 4, 512))\nwithin({moved} + 8, call)"
    assert run(script) == ["done"]


@pytest.mark.parametrize("operator", ["read", "expand"])
def test_results_with_many_taps_are_right_and_do_not_depend_on_the_threads(operator):
    """Three parts of 166 tokens or more, which read 39 earlier ones, in two sequences of 250."""
    weight = parameters(16, 4, "token", 40)["compress"]
    if operator == "read":
        cotangent = torch.randn(2, 250, 16)
        tensors, options = {"state": inputs((2, 250), 16, 4)["state"], "compress": weight}, {}
    else:
        x = inputs((2, 250), 16, 4)["direction"]
        cotangent = torch.randn(2, 250, 16, 4)
        tensors, options = {"x": x, "weight": weight}, {"value_channels": 4}

    def gradients(module, dtype):
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
        output = getattr(module, operator)(**leaves, **options)
        output = output.context if operator == "read" else output
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent.to(dtype))
        return dict(zip(["output", *tensors], [output, *grads], strict=True))

    exact = gradients(reference, F64)
    for name, actual in gradients(functional, F64).items():
        assert_close(name, actual, exact[name], F64, gradient=name != "output")
    runs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        runs.append(gradients(functional, F32))
    for name, expected in runs[0].items():
        assert all(torch.equal(run[name], expected) for run in runs[1:]), name


def test_rayon_threads_are_made_anew_in_a_fork():
    script = """
call = rewrite(256, 64, 4)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits for its parent's threads
    call()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
call()
"""
    assert run(script, DDL_THREADS="rayon") == ["0"]
