"""Arguments in memory: unaligned views, very large tensors, and tensors on different devices."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional
from tests.ops.test_ops import gradient_scale
from tests.support.gpu_device import DEVICE, EPS, arguments, backward, cotangents, forward
from tests.support.tolerances import assert_close

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def moved(tensor: Tensor, elements: int = 1) -> Tensor:
    """A contiguous copy that starts `elements` elements into its storage."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    there = memory[elements:].view(tensor.shape)
    return there.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    "name", ["state", "direction", "compress", "norm_weight", "value_weight", ""]
)
@pytest.mark.parametrize("d", [63, 768])
def test_unaligned_views(d: int, name: str, dtype: torch.dtype, compress: str) -> None:
    """Offset one argument by one element, or ("") all of them and the gradients."""
    leaves = arguments((2, 37), d, 4, compress, dtype)
    expected = forward(leaves)
    incoming = cotangents(expected)
    grads = backward(expected, leaves, incoming)
    shifted = {n: moved(t) if name in (n, "") else t for n, t in leaves.items()}
    assert name == "" or shifted[name].data_ptr() % 16 == dtype.itemsize
    outputs = forward(shifted)
    given = {n: moved(t) for n, t in incoming.items()} if name == "" else incoming
    for n, gradient in backward(outputs, shifted, given).items():
        scale = gradient_scale(n, grads)
        label = f"gradient of {n}"
        assert_close(label, gradient, grads[n], dtype, gradient=True, scale=scale)
    for n in expected:
        assert_close(n, outputs[n], expected[n], dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_unaligned_expansion(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 37, 64).to(dtype), torch.randn(64, 4, 4).to(dtype)
    expected = functional.expand(x, weight, value_channels=4)
    for a, b in ((moved(x), weight), (x, moved(weight)), (moved(x), moved(weight))):
        assert_close("state", functional.expand(a, b, value_channels=4), expected, dtype)


MANY = 2**31
SIZES = [(4096, 4, "channel"), (768, 1, "identity"), (1024, 4, "token"), (4096, 4, "token")]


@pytest.fixture
def _most_of_the_memory() -> Iterator[None]:
    """Admit one test process at a time, and empty torch's cache afterwards."""
    with (Path(tempfile.gettempdir()) / f"ddl-gpu-memory-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("_most_of_the_memory")
@pytest.mark.parametrize(("d", "m", "compress"), SIZES)
def test_more_than_two_to_the_31_elements(d: int, m: int, compress: str) -> None:
    """All but the first and last tokens are zero; these must give the same results as alone."""
    tokens, ends, taps = MANY // (d * m) + 5, 6, 4
    needed = 10 * 2 * tokens * d * m
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on the GPU")
    few = arguments((1, 2 * ends), d, m, compress, BF16)
    many = {n: t.detach() for n, t in few.items()}
    for n in ("state", "direction", "value", "gate"):
        wide = torch.zeros(1, tokens, *few[n].shape[2:], dtype=few[n].dtype)
        wide[:, :ends], wide[:, -ends:] = few[n][:, :ends].detach(), few[n][:, ends:].detach()
        many[n] = wide
    many = {n: t.requires_grad_() for n, t in many.items()}
    assert many["state"].numel() > MANY
    outputs = forward(many)
    incoming = {n: torch.zeros_like(t) for n, t in outputs.items()}
    given = cotangents({n: t[:, -ends:] for n, t in outputs.items()})
    for n in incoming:
        incoming[n][:, -ends:] = given[n]
    grads = backward(outputs, many, incoming)

    last = {n: t.detach() for n, t in few.items()}
    last |= {n: last[n][:, ends:] for n in ("state", "direction", "value", "gate")}
    last = {n: t.clone().requires_grad_() for n, t in last.items()}
    expected = forward(last)
    expected_grads = backward(expected, last, given)
    for n in expected:
        assert torch.equal(outputs[n][:, -ends:], expected[n]), n
    for n, gradient in expected_grads.items():
        actual = grads[n]
        if n in ("state", "direction", "value", "gate"):
            assert not actual[:, ends : -ends - (taps - 1)].any(), n  # no window reaches these
            actual = actual[:, -ends:]
        scale = gradient_scale(n, expected_grads)
        assert_close(f"gradient of {n}", actual, gradient, BF16, gradient=True, scale=scale)
    first = {n: t.detach() for n, t in few.items()}
    first |= {n: first[n][:, :ends] for n in ("state", "direction", "value", "gate")}
    for n, tensor in forward(first).items():
        assert torch.equal(outputs[n][:, :ends], tensor), n


CPU = torch.device("cpu")


def mixed(name: str, change: str) -> dict[str, Any]:
    """Arguments on the GPU except `change`, which is on the CPU."""
    leaves: dict[str, Any] = {
        n: t.detach() for n, t in arguments((2, 5), 6, 4, "token", F32).items()
    }
    leaves |= {"x": leaves["direction"], "weight": leaves["compress"]}
    accepted = {
        "rewrite": ("state", "direction", "value", "gate"),
        "read": ("state", "compress", "norm_weight", "gate_weight", "gate_bias", "value_weight"),
        "expand": ("x", "weight"),
    }
    names = (*accepted["rewrite"], *accepted["read"]) if name == "rewrite_read" else accepted[name]
    chosen = {n: leaves[n] for n in names}
    chosen[change] = chosen[change].to(CPU)
    return chosen


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rewrite", "direction"),
        ("rewrite", "value"),
        ("rewrite", "gate"),
        ("read", "compress"),
        ("read", "norm_weight"),
        ("read", "gate_weight"),
        ("read", "gate_bias"),
        ("read", "value_weight"),
        ("rewrite_read", "direction"),
        ("rewrite_read", "compress"),
        ("expand", "weight"),
    ],
)
def test_an_argument_elsewhere_is_named(name: str, change: str) -> None:
    options = {"rewrite": EPS, "rewrite_read": EPS, "expand": {"value_channels": 4}}.get(name, {})
    sentence = f"`{change}` must be on {DEVICE}, got a tensor on cpu"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        getattr(functional, name)(**mixed(name, change), **options)


def test_a_state_elsewhere_decides_where_the_others_should_be() -> None:
    sentence = f"`direction` must be on cpu, got a tensor on {DEVICE}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        functional.rewrite(**mixed("rewrite", "state"), **EPS)
