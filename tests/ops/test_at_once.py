"""Many threads call the operators at once, for the first time and with arguments of their own.

The tests hold with and without Python's lock. tests/rust/threads.rs does the like in Rust, where
`make tsan` looks for races.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import sysconfig
import time
import warnings

import pytest
import torch
from torch import Tensor

from ddl import functional
from ddl.ops import devices
from tests.support import ROOT
from tests.support.at_once import at_once

# Imports the package and calls each operator, forward and backward, in many threads of a process
# that has done neither; then once more, alone.
FIRST_USE = """
import sys, warnings
# With a warning, Python turns its lock on for an extension that needs it.
warnings.filterwarnings("error", "The global interpreter lock")
import torch
torch.set_num_threads(int(sys.argv[1]))
from tests.support.at_once import at_once

def step(_):
    from tests.ops.test_at_once import results
    return results()

found, alone = at_once(step), step(0)
assert all(len(each) == len(alone) and all(map(torch.equal, each, alone)) for each in found)
assert all(x.isfinite().all() and x.any() for x in alone)
print(len(alone), getattr(sys, "_is_gil_enabled", lambda: True)())
"""
WITHOUT_LOCK = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def results(tokens: int = 300) -> list[Tensor]:
    """The outputs and gradients of every differentiable operator, from numbers of one seed."""
    r = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r).requires_grad_()

    d, m, T = 16, 4, tokens
    x, weight, compress = leaf(T, d), leaf(d, m, 3), leaf(d, m, 3)
    k, v, gate, of_gate, of_value = leaf(T, d), leaf(T, m), leaf(T), leaf(d), leaf(m, d)
    given = {"compress": compress, "gate_weight": of_gate, "value_weight": of_value}
    state = functional.expand(x, weight, value_channels=m)
    step = functional.rewrite_read(state, k, v, gate, eps_k=0.1, **given)
    alone = functional.rewrite(step[0], k, step[2], step[3], eps_k=0.1)
    last = functional.read(alone, **given)
    heads = [x.view(1, T, 2, 8) for x in (step[1], last[0], x)]
    rule = functional.delta_rule(*heads, gate.view(1, T, 1).expand(1, T, 2).sigmoid() / 8)
    outputs = [x for x in (state, *step, alone, *last, *rule) if x is not None]
    outputs = [x for x in outputs if x.requires_grad]
    leaves = [x, weight, compress, k, v, gate, of_gate, of_value]
    loss = torch.stack([output.tanh().mean() for output in outputs]).sum()
    return [output.detach() for output in outputs] + list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("threads", [1, 3])
def test_first_calls_at_once_have_the_bits_of_one_alone(threads: int) -> None:
    """And without Python's lock, if the interpreter starts without it."""
    run = subprocess.run(
        [sys.executable, "-c", FIRST_USE, str(threads)],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    count, locked = run.stdout.split()
    assert int(count) > 15
    assert locked == str(not WITHOUT_LOCK)


def test_the_number_of_threads_may_change_at_any_time() -> None:
    alone = results()
    numbers = itertools.cycle([1, 3, 2, 5])

    def call(index: int) -> bool:
        same = True
        for _ in range(4):
            if index % 2 == 0:
                torch.set_num_threads(next(numbers))
            same &= all(map(torch.equal, results(), alone))
        return same

    assert all(at_once(call, 4))


def test_every_thread_reads_its_own_refusal() -> None:
    """Native code refuses in the middle of calls of other threads that succeed, or are refused."""
    kernel = torch.ops.ddl.rewrite.kernel
    state, k, v = torch.ones(2, 8, 2), torch.ones(2, 8), torch.ones(2, 2)

    def call(index: int) -> list[str]:
        # 0 and 4 are right. torch's dispatcher alone finds no fault in the others.
        gate, sentences = torch.ones(2 if index % 4 == 0 else 2 + index), []
        for _ in range(200):
            try:
                with torch.no_grad():
                    kernel(state, k, v, gate, 0.1, 0, False)
            except RuntimeError as error:
                sentences.append(str(error).partition("\n")[0])
            try:
                functional.rewrite(state, k, v, gate, eps_k=0.1)
            except ValueError as error:
                sentences.append(str(error))
        return sentences

    for index, sentences in enumerate(at_once(call)):
        expected = f"`gate` must have shape (2,), got ({2 + index},)"
        assert sentences == ([] if index % 4 == 0 else [expected] * 400)


def test_a_device_without_kernels_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(device: torch.device) -> str:
        time.sleep(0.01)
        return "it is none"

    monkeypatch.setattr(devices, "_KNOWN", {})
    monkeypatch.setattr(devices, "_why_without", slowly)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = at_once(lambda _: devices.has_kernels(torch.device("xpu:1")), 16)
    assert found == [False] * 16
    assert [str(one.message).partition(",")[0] for one in given] == ["ddl has no kernels for xpu:1"]
