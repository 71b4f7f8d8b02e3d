"""Token reads in tiles of tokens (kernels/tile.cuh), on the emulated GPU.

They are held against the reference, and bit for bit against the plan without tiles whose threads
have the same packets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.ops import declarations
from tests.emulated_gpu.test_traffic import call
from tests.ops.test_documents import MASKS
from tests.ops.test_ops import compare
from tests.support import emulated_device
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters

pytestmark = needs_emulator

H100: dict[str, Any] = {"shared_per_block": 227 << 10, "cluster": 8}
STATES = pytest.mark.parametrize("state", [BF16, F32, F16], ids=str)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TILE of every forward that is built."""
    found: list[str] = []
    build: Callable[..., str] = emulated_device._build

    def recorded(kernels: Path, sanitizer: str, source: str, defines: Sequence[str]) -> str:
        if source == "rewrite_read_fwd":
            found.extend(define for define in defines if define.startswith("TILE="))
        return build(kernels, sanitizer, source, defines)

    monkeypatch.setattr(emulated_device, "_build", recorded)
    return found


def arguments(batch: tuple[int, int], d: int, taps: int = 4) -> dict[str, Tensor | None]:
    return inputs(batch, d, 4) | parameters(d, 4, "token", taps)


def check(batch: tuple[int, int], state: torch.dtype, *, taps: int = 4, **options: Any) -> None:
    """Compare outputs and gradients with the reference; k is in two bytes."""
    given = arguments(batch, 64, taps)
    k = {"direction_dtype": BF16} if state == F32 else {}
    compare("rewrite_read", given, state, stored=BF16 if k else state, eps_k=0.1, **k, **options)


@pytest.mark.table(2)
@STATES
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8, 40])
@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 11])
def test_sequences_and_chunks_of_any_length(time, chunk, state, tiles):
    with emulated(**H100, plan={"CHUNK": chunk}):
        check((3, time), state)
    assert tiles == ["TILE=4"]


@pytest.mark.table(1)
@pytest.mark.parametrize("starts", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("chunk", [3, 8, 40])
def test_documents(starts, chunk, tiles):
    with emulated(**H100, plan={"CHUNK": chunk}):
        check(tuple(starts.shape), F32, document_starts=starts)
    assert tiles == ["TILE=4"]


@pytest.mark.table(1)
@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {}, {"erase": "none"}, {"value_scale": 4.0}, {"value_from": "compressed"},
], ids=str)  # fmt: skip
def test_fewer_taps_and_other_options(taps, options, tiles):
    with emulated(**H100, plan={"CHUNK": 7}):
        check((2, 11), F32, taps=taps, **options)
    assert tiles == ["TILE=4"]


@pytest.mark.parametrize("order", ["1", "5"])
def test_any_order_of_threads(order, monkeypatch, tiles):
    monkeypatch.setenv("DDL_EMULATOR_ORDER", order)
    with emulated(**H100, plan={"CHUNK": 9}):
        check((2, 11), BF16)
    assert tiles == ["TILE=4"]


def outputs(given: dict[str, Any], plan: dict[str, int]) -> dict[str, Tensor]:
    """All outputs of a forward, those for the backward too."""
    options = {"eps_k": 0.1, "norm_eps": 1e-5, "value_from_compressed": False}
    with emulated(**H100, plan={"CHUNK": 7} | plan):
        return call(declarations.rewrite_read, **given, **options, saves=True)


@pytest.mark.table(2)
@STATES
@pytest.mark.parametrize("warps", range(1, 13))
def test_the_same_bits_as_without_tiles(warps, state, tiles):
    d = 64 * warps
    given = {
        name: None if tensor is None else tensor.to(F32)
        for name, tensor in arguments((2, 13), d).items()
    }
    for name, dtype in (("state", state), ("direction", BF16 if state == F32 else state)):
        tensor = given[name]
        assert tensor is not None
        given[name] = tensor.to(dtype)
    same = {"THREADS": d // 2, "FEATURES": 2, "KEEP_IN_REGISTERS": 1, "WINDOW": 0, "CLUSTER": 1}
    found, expected = outputs(given, {}), outputs(given, same)
    assert tiles == ["TILE=4", "TILE=0"]
    assert {"new_state", "context", "stats", "compressed"} < expected.keys()
    for name, numbers in expected.items():
        assert numbers.isfinite().all(), name
        assert torch.equal(found[name], numbers), name


@pytest.mark.parametrize(
    ("d", "state", "device"),
    [(64, F32, {}), (96, BF16, H100), (64, F64, H100)],
    ids=["before sm_90", "no whole packets", "float64"],
)
def test_other_calls_have_no_tiles(d, state, device, tiles):
    with emulated(**device):
        compare("rewrite_read", arguments((2, 5), d), state, eps_k=0.1)
    assert tiles == ["TILE=0"]
