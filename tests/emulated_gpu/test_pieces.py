"""Vectors in shared memory: each packet has its own place, and no two lanes meet in a bank."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import functional
from tests.emulator.build import build
from tests.emulator.launch import Module
from tests.support import emulated_device
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F32, inputs, parameters

pytestmark = needs_emulator

BANKS, LANES_AT_ONCE = 32, 8  # words of four bytes; lanes that an access of 16 bytes serves at once


class Places(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


@pytest.mark.parametrize("d", [768, 2048, 1000])
@pytest.mark.parametrize("stored", [BF16, F32], ids=str)
def test_lanes_do_not_meet_in_a_bank(d, stored, monkeypatch):
    macros = macros_of_a_backward(d, stored, monkeypatch)
    threads, features = int(macros["THREADS"]), int(macros["FEATURES"])
    found = places(macros)
    kept = [place for row in found for place in row if place >= 0]
    assert sorted(kept) == list(range(0, d, 4)), "every piece has its own place"
    assert len(found) == -(-d // features // threads) * features // 4
    for row in found:
        for first in range(0, threads, LANES_AT_ONCE):
            served = [place for place in row[first : first + LANES_AT_ONCE] if place >= 0]
            words = {(place + word) % BANKS for place in served for word in range(4)}
            assert len(words) == 4 * len(served)


def macros_of_a_backward(d: int, stored: torch.dtype, monkeypatch: Any) -> dict[str, str]:
    """Those of a stream with one value channel, whose sums are in shared memory."""
    compiled: dict[str, list[str]] = {}
    plain = emulated_device._build

    def noted(kernels: Path, sanitizer: str, source: str, defines: list[str]) -> str:
        compiled[source] = list(defines)
        return plain(kernels, sanitizer, source, defines)

    monkeypatch.setattr(emulated_device, "_build", noted)
    given = inputs((1, 2), d, 1) | parameters(d, 1, "identity")
    with emulated(plan={"SUMS": 1}):
        leaves = {
            name: tensor.to(stored if name in ("state", "direction") else F32).requires_grad_()
            for name, tensor in given.items()
            if tensor is not None
        }
        functional.rewrite_read(**leaves, eps_k=0.1).context.sum().backward()
    return dict(define.split("=", 1) for define in compiled["rewrite_read_bwd"])


def places(macros: dict[str, str]) -> list[list[int]]:
    """Of every row and piece, the threads' places; −1 for a thread without a packet."""
    threads, features, d = (int(macros[name]) for name in ("THREADS", "FEATURES", "D"))
    rows = -(-d // features // threads) * features // 4
    source = Path(__file__).with_name("pieces.cu")
    module = Module(build(source, [f"{name}={value}" for name, value in macros.items()], ""))
    out = (ctypes.c_longlong * (rows * threads))(*[-1] * (rows * threads))
    module.launch("places", (1,), (threads,), Places(ctypes.addressof(out)))
    return [out[row * threads : (row + 1) * threads] for row in range(rows)]
