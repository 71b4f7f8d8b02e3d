"""Print today's costs beside the recorded ones; `--record` writes them to recorded.json."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.costs.calls import in_a_child
from tests.costs.instructions import CASES, per_token
from tests.support import ROOT

FILE = Path(__file__).with_name("recorded.json")


def measure() -> dict[str, Any]:
    return {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "torch": release(),
        "instructions per token": per_token(list(CASES)),
        **in_a_child(),
    }


def release() -> str:
    """Return torch's version without its build, such as +cu130."""
    return torch.__version__.split("+")[0]


def machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"model name\s*: (.*)", cpus)
    return found[1] if found else "unknown"


def commit() -> str:
    """Return the commit, with a plus if the tree differs from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def show(name: str, now: Any, before: Any) -> None:
    """Print the numbers of a nested dict, each beside the one of before."""
    if isinstance(now, dict):
        for key, value in now.items():
            below = before.get(key) if isinstance(before, dict) else None
            show(f"{name}: {key}" if name else key, value, below)
    else:
        print(f"{name:<60} {now!s:>12}   recorded {before}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=__doc__)
    parser.add_argument("--record", action="store_true", help="rewrite recorded.json")
    options = parser.parse_args()
    now = measure()
    show("", now, recorded() if FILE.exists() else None)
    if options.record:
        FILE.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
