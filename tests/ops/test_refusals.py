"""Refused calls: they leak nothing, keep their type on every path, and never panic into torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch

from ddl import _native, functional
from tests.support.op_cases import inputs, parameters

LEAK = """
import resource, sys, torch
from ddl import functional

state, k, v, gate = torch.zeros(8, 4096, 4), torch.zeros(8, 4096), torch.zeros(8, 4), torch.zeros(8)
wide = torch.zeros(8, 4096, 8)[..., ::2]  # is copied before the call is refused
calls = [
    lambda: functional.rewrite(state, k, v, torch.zeros(7), eps_k=0.1),
    lambda: functional.rewrite(wide, k, v, gate, eps_k=-1.0),
    lambda: functional.rewrite(state, k.long(), v, gate, eps_k=0.1),
    lambda: functional.read(state, compress=torch.zeros(4096, 4), value_bias=torch.zeros(4)),
    lambda: torch.ops.ddl.expand(k, None, None, 0, None, True),
]
def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()
def refuse(times):
    for index in range(times):
        try:
            calls[index % len(calls)]()
        except (ValueError, TypeError):
            continue
        sys.exit(f"call {index} was not refused")
refuse(1000)
grown = []
for _ in range(3):
    before = resident()
    refuse(int(sys.argv[1]))
    grown.append((resident() - before) / 2**20)
print(min(grown))  # a leak is there every time, a larger heap once
"""


def grown(refusals: int) -> float:
    """MiB of memory that a process gains by so many refused calls, at least."""
    command = [sys.executable, "-c", LEAK, str(refusals)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return float(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("refusals", [20_000, pytest.param(200_000, marks=pytest.mark.exhaustive)])
def test_a_refused_call_leaks_nothing(refusals):
    """One handle of 64 bytes a call would be 1 MiB, one state 512 KiB a call."""
    assert grown(refusals) < 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_types_on_every_path(mode):
    state, k, v, gate = inputs((2, 3), 4, 2).values()
    with mode():
        with pytest.raises(ValueError, match=r"^`eps_k` must be a positive finite"):
            functional.rewrite(state.requires_grad_(), k, v, gate, eps_k=-1.0)
        with pytest.raises(TypeError, match=r"^`gate` must have dtype torch"):
            functional.rewrite(state, k, v, gate.float(), eps_k=0.1)


def test_an_undefined_tensor_is_refused(capfd):
    """torch passes None for a tensor to a kernel, as a handle of no tensor."""
    state, _, v, gate = inputs((2, 3), 4, 2).values()
    with pytest.raises(TypeError, match=r"^`direction` must be a torch.T"):
        functional.rewrite(state, None, v, gate, eps_k=0.1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="`direction` must be a tensor"):
        torch.ops.ddl.rewrite(state, None, v, gate, 0.1, 0, False)
    assert capfd.readouterr().err == "", "torch's shims print what fails in them"


@torch.no_grad()
def test_a_backward_checks_what_it_is_given():
    state, k, v, gate = inputs((2, 3), 4, 2).values()
    grad, stats = torch.ones_like(state), torch.zeros(2 * 3 * 3, dtype=torch.float64)
    rewrite_backward = torch.ops.ddl.rewrite_backward
    rewrite_backward(grad, state, k, v, gate, 0.1, 0, stats, -1)
    with pytest.raises(RuntimeError, match="`grad_new_state` must have shape"):
        rewrite_backward(grad[:1], state, k, v, gate, 0.1, 0, stats, -1)
    with pytest.raises(RuntimeError, match="`grad_new_state` must have dtype"):
        rewrite_backward(grad.float(), state, k, v, gate, 0.1, 0, stats, -1)
    with pytest.raises(RuntimeError, match="`stats` must have shape"):
        rewrite_backward(grad, state, k, v, gate, 0.1, 0, stats[:-1], -1)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_memory_that_torch_cannot_allocate_is_torchs_own_error():
    """Batch-size finders look for torch's sentence."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    x = torch.zeros(1, 1)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    try:
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
            functional.expand(x, value_channels=1 << 42)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_state_beyond_every_address_is_refused():
    with pytest.raises(
        ValueError, match=r"`state` must have shape with fewer elements, got \(1, 1, 4"
    ):
        functional.expand(torch.zeros(1, 1), value_channels=1 << 62)


@pytest.mark.skipif(not hasattr(_native, "emulate"), reason="needs the feature `emulator`")
def test_a_panic_becomes_an_error():
    t = inputs((2, 3), 4, 2) | parameters(4, 2, "channel")
    _native.emulate(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match=r"^an assertion of ddl-rs failed; please"):
            functional.rewrite_read(**t, eps_k=0.1)
    finally:
        _native.emulate(None)
    functional.rewrite_read(**t, eps_k=0.1)
