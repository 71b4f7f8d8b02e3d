"""Which device a command takes for "auto", "cpu" and "cuda"."""

from __future__ import annotations

import re

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.device import pick_device

CPU = torch.device("cpu")


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", "ddl-cc") == pick_device("cpu", "ddl-cc") == CPU
    expected = "`device` must be cpu, because torch finds no GPU, got 'cuda'"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        pick_device("cuda", "additive")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = "cuda:0 cannot be used: it is too old"
    monkeypatch.setattr("ddl.cuda.why_unavailable", lambda: reason)
    for plain in ("additive", "expanded"):
        assert pick_device("auto", plain) == pick_device("cuda", plain)
    assert pick_device("auto", "additive").type == "cuda"
    assert pick_device("auto", "ddl-cc") == CPU
    with pytest.raises(InputError, match=f"^`device` must be cpu, because {reason}, got 'cuda'$"):
        pick_device("cuda", "ddl-cc")
    monkeypatch.setattr("ddl.cuda.why_unavailable", lambda: None)
    assert pick_device("auto", "ddl-cc").type == "cuda"
    monkeypatch.setattr("ddl.cuda.why_unavailable", lambda: pytest.fail("looked for a driver"))
    assert pick_device("cpu", "ddl-cc") == CPU
