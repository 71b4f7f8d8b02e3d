"""Every baseline compiles, exports, and runs under autocast, as the other residuals do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddl.models import GPT, GPTConfig
from ddl.models.config import BASELINES
from ddl.nn.additions import Addition
from tests.support.helpers import gradients, normal, randomise_
from tests.support.sampling import few

every = pytest.mark.parametrize("residual", BASELINES[1:])


def make(residual: str) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "block_size": 16, "num_layers": 2, "num_heads": 2}
    model = GPT(GPTConfig(residual, hidden_size=32, **sizes))
    randomise_(model.trunk, std=0.4)
    return model


def tokens() -> Tensor:
    return torch.arange(24).view(2, 12).remainder(32)


@pytest.mark.parametrize("residual", few(BASELINES[1:], "mhc", "gated", "expanded"))
def test_compiled_without_a_break(residual: str) -> None:
    """Hidden states and gradients, by name; in float64 no fusion changes more than rounding."""
    model, x = make(residual).double(), normal(2, 12, 32).requires_grad_()
    compiled = torch.compile(model.trunk, backend="aot_eager", fullgraph=True)
    expected = gradients(model.trunk(x), {"x": x}, model.trunk)
    for name, found in gradients(compiled(x), {"x": x}, model.trunk).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@every
def test_exported(residual: str) -> None:
    model = make(residual).eval()
    program = torch.export.export(model, (tokens(),))
    torch.testing.assert_close(program.module()(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("residual", ["mhc", "independent-hc", "expanded"])
def test_the_maps_of_streams_are_not_rounded(residual: str) -> None:
    """Autocast changes no bit of the weights, nor of the reads of float32 states."""
    stream, x = make(residual).trunk, normal(2, 12, 4, 32, dtype=torch.float32)
    parts = stream.residuals if residual == "expanded" else (*stream.connections, stream.head)
    for part in parts:
        expected = part(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = part(x)
        for one, other in zip(flat(found), flat(expected), strict=True):
            assert torch.equal(one, other)


def flat(outputs: Any) -> list[Tensor]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [x for x in found if isinstance(x, Tensor)]


@pytest.mark.parametrize("residual", [r for r in BASELINES[1:] if r != "additive-conv"])
def test_plain_pytorch_alone(residual: str) -> None:
    """No operator of ours runs, forward or backward."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.add(func.namespace)
            return func(*args, **kwargs or {})

    model, names = make(residual), set[str]()
    with Seen():
        loss = model(tokens(), labels=tokens()).loss
        assert loss is not None
        loss.backward()
    assert "aten" in names
    assert "ddl" not in names


@every
def test_autocast(residual: str) -> None:
    """The states stay in float32."""
    model, idx = make(residual), tokens()
    seen: list[Addition] = []
    model.trunk.hooks = (seen.append,)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, labels=idx).loss
        after = seen[-1].after()
    dtypes = {addition.state.dtype for addition in seen} | {after.dtype}
    assert dtypes == {torch.float32}
    model.trunk.hooks = ()
    assert loss is not None
    loss.backward()
    exact = model(idx, labels=idx).loss
    torch.testing.assert_close(loss, exact, rtol=0.03, atol=0.03)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name


@every
def test_a_model_in_bfloat16(residual: str) -> None:
    model = make(residual).bfloat16()
    seen: list[torch.dtype] = []
    model.trunk.hooks = (lambda addition: seen.append(addition.state.dtype),)
    assert model(tokens()).logits.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("residual", ["mhc", "independent-hc", "gated"])
def test_the_maps_of_hugging_faces_model_in_bfloat16(residual: str, tmp_path: Path) -> None:
    """Those of mhc and independent-hc stay in float32, as their sources keep them."""
    from ddl.hf import DDLForCausalLM, from_gpt

    from_gpt(make(residual)).save_pretrained(tmp_path)
    model = DDLForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {n for n, p in model.model.named_parameters() if p.dtype == torch.float32}
    parts = [f"trunk.connections.{i}" for i in range(4)] + ["trunk.head"]
    maps = {f"{part}.{name}" for part in parts for name in ("map", "base", "scale")}
    assert wide == (set() if residual == "gated" else maps)
