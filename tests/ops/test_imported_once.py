"""A second import, or a reload, is refused in a sentence: torch registers operators once."""

from __future__ import annotations

import subprocess
import sys

from ddl.errors import IMPORTED_ONCE

SCRIPT = """
import importlib, sys
import torch
import ddl, ddl.functional

def again():
    for name in [name for name in sys.modules if name.split(".")[0] == "ddl"]:
        del sys.modules[name]
    import ddl.functional

first = ddl.functional
operators = sys.modules["ddl.ops.operators"]
for load in (lambda: importlib.reload(ddl), lambda: importlib.reload(operators), again, again):
    try:
        load()
    except ImportError as error:
        print(error)
x = torch.ones(2, 3, 1, requires_grad=True)
y = first.rewrite(x, torch.ones(2, 3), torch.ones(2, 1), torch.zeros(2), eps_k=0.1)
y.sum().backward()
print(y.equal(x) and x.grad.equal(torch.ones_like(x)))
"""


def test_a_second_import_is_refused() -> None:
    """And what was imported first goes on."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{IMPORTED_ONCE}\n" * 4 + "True\n", done.stderr
