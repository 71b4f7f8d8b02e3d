"""Devices without kernels run the reference, after one warning that says so."""

from __future__ import annotations

import warnings

import pytest
import torch

import ddl
from ddl import functional, reference
from ddl.ops import declarations, devices
from tests.ops.test_ops import compare
from tests.ops.test_ops_torch import positional
from tests.support.helpers import present
from tests.support.op_cases import F32, F64, inputs, parameters
from tests.support.plain_operators import run_plain


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_KNOWN", {})


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device without kernels."""
    run_plain(monkeypatch)


def given(*names: str) -> dict[str, torch.Tensor]:
    t = inputs((2, 5), 6, 2) | parameters(6, 2, "token", taps=3)
    return {name: t[name].to(F32).requires_grad_() for name in names or t}


def same(actual: object, expected: object, leaves: dict[str, torch.Tensor]) -> None:
    actual, expected = (
        [x] if isinstance(x, torch.Tensor) else present(x) for x in (actual, expected)
    )
    gradients = [
        torch.autograd.grad(sum(x.sum() for x in outputs), list(leaves.values()))
        for outputs in (actual, expected)
    ]
    assert all(map(torch.equal, actual, expected))
    for pair in zip(*gradients, strict=True):  # sums of three terms in another order
        torch.testing.assert_close(*pair)


def test_they_run_the_reference_after_one_warning(without_kernels):
    t, rewrite = given(), ("state", "direction", "value", "gate")
    with pytest.warns(UserWarning, match="no kernels for cpu, and runs as plain PyTorch"):
        actual = functional.rewrite_read(**t, eps_k=0.1, value_from="compressed")
    expected = reference.rewrite_read(**t, eps_k=0.1, value_from="compressed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(actual, expected, t)
        t = given(*rewrite)
        same(functional.rewrite(**t, eps_k=0.1), reference.rewrite(**t, eps_k=0.1), t)
        t = given("state", "compress", "gate_weight")
        read, expected = functional.read(**t), reference.read(**t)
        same((read.context, read.gate), (expected.context, expected.gate), t)
        assert read.value is None
        t = {"x": torch.randn(2, 5, 6, requires_grad=True)}
        same(*(f.expand(**t, value_channels=2) for f in (functional, reference)), t)


@pytest.mark.parametrize("rewrites", [None, 3])
@pytest.mark.parametrize("erase", ["tied", "none"])
def test_what_they_erase(without_kernels, monkeypatch, rewrites, erase):
    monkeypatch.setattr(devices, "_KNOWN", {torch.device("cpu"): False})  # the warning was given
    tensors = inputs((2, 5), 6, 3, rewrites) | parameters(6, 3, "token", 3, rewrites)
    alone = {name: tensors[name] for name in ("state", "direction", "value", "gate")}
    compare("rewrite", alone, F64, eps_k=0.1, erase=erase)
    compare("rewrite_read", tensors, F64, eps_k=0.1, erase=erase)


@pytest.mark.parametrize("learnt", [["gate_weight"], ["value_weight"], ["compress"], ["gate"], []])
def test_some_parameters_learn(without_kernels, monkeypatch, learnt):
    monkeypatch.setattr(devices, "_KNOWN", {torch.device("cpu"): False})  # the warning was given
    t = {n: x.detach().requires_grad_(n in learnt) for n, x in given().items()}
    outputs = [f.rewrite_read(**t, eps_k=0.1) for f in (functional, reference)]
    for output in ("state", "context", "value", "gate"):
        pair = [getattr(result, output) for result in outputs]
        assert pair[0].requires_grad == pair[1].requires_grad
        for name in learnt if pair[1].requires_grad else []:
            options = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
            actual, expected = (torch.autograd.grad(x.sum(), t[name], **options) for x in pair)
            torch.testing.assert_close(actual, expected)


def test_arguments_are_checked_there_too(without_kernels):
    t = given("state", "direction", "value", "gate")
    with (
        pytest.warns(UserWarning, match="no kernels"),
        pytest.raises(ValueError, match=r"^`gate` must have shape"),
    ):
        functional.rewrite(**(t | {"gate": torch.zeros(3)}), eps_k=0.1)
    with pytest.raises(ValueError, match=r"^`eps_k` must be at least"):
        functional.rewrite(**t, eps_k=1e-30)


def test_a_model_compiles_there(without_kernels):
    stream = ddl.DeltaStream(8, [torch.nn.Linear(8, 8) for _ in range(2)], value_channels=2,
                             compress="channel")  # fmt: skip
    x = torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match="no kernels"):
        compiled = torch.compile(stream, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, stream(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "hip", "reason", "expected"),
    [
        ("cpu", None, None, True),
        ("meta", None, None, True),
        ("mps", None, None, "kernels exist for device="),
        ("xpu:1", None, None, "kernels exist for device="),
        ("cuda:0", "6.4", None, "built for ROCm"),
        ("cuda:0", None, "NVRTC was not found", "NVRTC was not found"),
        ("cuda", None, None, True),
    ],
)
def test_which_devices_have_kernels(monkeypatch, device, hip, reason, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices._native, "why_unavailable", lambda _: reason)
    if expected is True:
        assert devices.has_kernels(torch.device(device))
        return
    with pytest.warns(UserWarning, match=expected):
        assert not devices.has_kernels(torch.device(device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not devices.has_kernels(torch.device(device)), "told once"


def test_a_wrong_plan_is_not_answered_by_the_reference(monkeypatch):
    """The operator raises, so that a benchmark never times something else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices._native, "why_unavailable", lambda _: "`DDL_PLAN` must have …")
    monkeypatch.setenv("DDL_PLAN", "STAGES=3")
    assert devices.has_kernels(torch.device("cuda:0"))


def test_a_fake_cuda_tensor_keeps_its_operator(monkeypatch):
    """A machine without a GPU can trace for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.has_kernels(torch.device("cuda:0"))


def test_a_chain_leads_from_its_anchor_to_the_state(monkeypatch):
    """Plain PyTorch takes the state, and native code the anchor: with the same gradients."""
    t = inputs((2, 5), 6, 2) | parameters(6, 2, "channel")
    link = [t[name].flip(0) for name in ("direction", "value", "gate")]
    state, stats = torch.ops.ddl.rewrite(t["state"], *link, 0.1, 0, True)
    t |= {"anchor": t["state"], "state": state, "chain": [*link, stats]}
    leaves = [t[name].requires_grad_() for name in ("state", "direction", "compress")]
    arguments = positional("rewrite_read", t)

    def gradients() -> tuple[torch.Tensor, ...]:
        _, context, value, *_ = declarations.rewrite_read.call(*arguments)
        return torch.autograd.grad(context.sin().sum() + value.sum(), leaves)

    expected = gradients()
    monkeypatch.setattr(devices, "_KNOWN", {torch.device("cpu"): False})  # the warning was given
    run_plain(monkeypatch)
    for actual, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
