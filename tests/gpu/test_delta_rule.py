"""The delta rule over time on a GPU: chunks in plain PyTorch, or flash-linear-attention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from ddl.models import GPT
from ddl.ops import chunked
from ddl.options import MixerKind
from tests.gpu.test_models import CPU, F64, SMALL, losses, moved
from tests.support.delta_rule_cases import LAYOUTS, problem, results, rounded
from tests.support.gpu_device import DEVICE
from tests.support.helpers import randomise_
from tests.support.op_cases import BF16, F16, F32
from tests.support.tolerances import assert_close

needs_kernels = pytest.mark.skipif(
    not chunked._installed(), reason="needs flash-linear-attention (pip install fla-core)"
)


def there(given: dict[str, Any]) -> dict[str, Any]:
    return {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in given.items()}


def both(given: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results on the GPU, and the reference's on the CPU in float64, of the rounded arguments."""
    with CPU:
        given = rounded(given, dtype)
        expected = results(reference.delta_rule, rounded(given, F64))
        actual = results(on_the_gpu, given)
    return actual, expected


def on_the_gpu(**given: Any) -> Any:
    """The operator on the GPU, between tensors on the CPU."""
    found = functional.delta_rule(**there(given))
    return type(found)(*(x.to(CPU) for x in found))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("documents", [False, True])
def test_chunks_agree(
    dtype: torch.dtype, layout: str, g: str | None, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_kernels_take", lambda _: False)
    with CPU:
        given = problem(layout, T=70, g=g, documents=documents)
    actual, expected = both(given, dtype)
    for name, wanted in expected.items():
        gradient = name.startswith("gradient")
        assert_close(name, actual[name], wanted, dtype, gradient=gradient)


@needs_kernels
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("g", [None, "head", "feature"])
def test_kernels_agree(dtype: torch.dtype, layout: str, g: str | None) -> None:
    """Within what their products of half precision leave. Each kind takes minutes to compile."""
    if g == "head" and chunked._refused(DEVICE):
        pytest.skip("flash-linear-attention refuses a decay per head on Hopper before Triton 3.7.1")
    with CPU:
        given = problem(layout, T=150, K=64, V=64, g=g) | {"scale": 0.125}
    assert chunked._kernels_take(SimpleNamespace(**there(rounded(given, dtype))))
    actual, expected = both(given, dtype)
    for name, wanted in expected.items():
        apart = torch.linalg.vector_norm(actual[name].double() - wanted)
        assert apart <= 0.02 * torch.linalg.vector_norm(wanted), name


@pytest.mark.parametrize("mixer", get_args(MixerKind))
@pytest.mark.parametrize("gated", [False, True, "per-feature"])
def test_training_steps_in_float64_equal_the_cpus(mixer: str, gated: bool | str) -> None:
    several = 1 if mixer == "deltanet" else 2
    with CPU:
        torch.manual_seed(0)
        model = GPT(
            replace(SMALL, residual="ddl-cc", mixer=mixer, mixer_n=several, mixer_gated=gated)
        )
        randomise_(model.trunk, std=0.3)
        idx = torch.randint(SMALL.vocab_size, (4, SMALL.block_size))
    model = model.double()
    elsewhere = moved(model)
    expected, actual = losses(model, idx, 3), losses(elsewhere, idx.to(DEVICE), 3)
    assert actual == pytest.approx(expected, rel=1e-9)
