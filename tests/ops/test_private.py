"""Without any one of torch's private names the operators work as before, at most slower."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddl
from ddl import cuda

PACKAGE = Path(ddl.__file__).parent
# Takes a name away, then compares gradients with the reference's, eager and compiled.
SCRIPT = """
import importlib.util, sys, types, torch

spec = importlib.util.spec_from_file_location("ddl.ops.private", {private!r})
private = sys.modules["ddl.ops.private"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(private)
from ddl import functional, reference
if {name!r} == "FunctionalTensor":
    from ddl.ops import private
    private.sys = types.SimpleNamespace(modules=dict())
if {name!r} == "FALLBACK_ALLOW_LIST":
    from torch._inductor import lowering
    del lowering.FALLBACK_ALLOW_LIST

torch.manual_seed(0)
given = dict(
    state=torch.randn(2, 5, 6, 2), direction=torch.randn(2, 5, 6), value=torch.randn(2, 5, 2),
    gate=torch.rand(2, 5), compress=torch.randn(6, 2, 3), norm_weight=torch.randn(6),
    gate_weight=torch.randn(6), gate_bias=torch.randn(()), value_weight=torch.randn(2, 6),
)
def chained(state, **options):
    # The second rewrite's backward computes its state from the first's.
    chain, at = functional.Chain(2), [options.pop(name) for name in ("direction", "value", "gate")]
    first, chain = functional.rewrite_read_chained(state, *at, chain=chain, **options)
    at[1:] = first.value, first.gate
    return functional.rewrite_read_chained(first.state, *at, chain=chain, **options)[0]
def plain(state, **options):
    at = [options.pop(name) for name in ("direction", "value", "gate")]
    first = reference.rewrite_read(state, *at, **options)
    at[1:] = first.value, first.gate
    return reference.rewrite_read(first.state, *at, **options)
def gradients(function):
    leaves = {{name: tensor.clone().requires_grad_() for name, tensor in given.items()}}
    outputs = [out for out in function(**leaves, eps_k=0.1) if out is not None]
    loss = sum((output.sin() * output).sum() for output in outputs)
    return torch.autograd.grad(loss, list(leaves.values()))
functions = {{functional.rewrite_read: reference.rewrite_read, chained: plain}}
functions |= {{
    torch.compile(function, fullgraph=True, backend="aot_eager"): expected
    for function, expected in functions.items()
}}
for function, expected in functions.items():
    for name, got, wanted in zip(given, gradients(function), gradients(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=name)
print("done")
"""
NAMES = ["FunctionalTensor", "FALLBACK_ALLOW_LIST"]


@pytest.mark.table(0)
@pytest.mark.parametrize("name", NAMES)
def test_without(name: str):
    private = PACKAGE / "ops" / "private.py"
    assert f'"{name}"' in private.read_text("utf-8")
    command = [sys.executable, "-c", SCRIPT.format(name=name, private=str(private))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["done"], run.stderr[-3000:]


def test_warmup_without_fake_tensors_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    with pytest.raises(RuntimeError, match="run one step instead"):
        cuda.warmup(ddl.DeltaResidual(8), architecture="sm_90")


def test_they_stand_in_one_file():
    private = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+|\bforward_ad\._\w+")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if private.search(path.read_text("utf-8"))
    }
    assert found == {"ops/private.py"}
