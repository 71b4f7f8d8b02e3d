"""The Python of docs/backbones.md runs."""

from __future__ import annotations

import re
from typing import Any

from ddl import nanochat
from tests.support import ROOT
from tests.support.nanochat_standin import GPT, GPTConfig, KVCache

PYTHON = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "backbones.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE | re.DOTALL,
)


def test_every_block_runs_after_the_ones_before() -> None:
    names: dict[str, Any] = {"GPT": GPT, "KVCache": KVCache}
    for source in PYTHON:
        exec(compile(source, "docs/backbones.md", "exec"), names)
    assert issubclass(names["GPT"], GPT)
    assert issubclass(names["KVCache"], KVCache)
    assert isinstance(names["GPT"](GPTConfig()).transformer.h[0], nanochat.DeltaBlock)
    assert len(names["hidden"][0]["params"]) == 2
    assert names["h"].shape == (2, 16, 64)
