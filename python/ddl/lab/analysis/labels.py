"""The labels along the axes of tables and pictures: short names of sublayers, and which of many to
show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

__all__ = ["labels", "spread"]

IN_TRUNK = re.compile(r"(?:.*\.)?trunk\.(?:residuals|sublayers)\.(\d+)(?:\.(\d+))?")


def labels(sublayers: Sequence[str]) -> list[str]:
    """ "0 attn", "0 mlp", "1 attn", … in ddl's trunk; else names without what all begin with.

    Several rewrites of a sublayer are "0 attn/0", "0 attn/1", …
    """
    found = [IN_TRUNK.fullmatch(name) for name in sublayers]
    in_trunk = [(int(match[1]), match[2]) for match in found if match]
    if len(in_trunk) == len(sublayers):
        return [
            f"{number // 2} {('attn', 'mlp')[number % 2]}" + (f"/{rewrite}" if rewrite else "")
            for number, rewrite in in_trunk
        ]
    parts = [name.split(".") for name in sublayers]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    same = sum(1 for _ in alike) if len(parts) > 1 else 0
    return [".".join(part[same:] or part[-1:]) for part in parts]  # names may be equal


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    gaps = max(2, most) - 1
    return sorted({round(i * (count - 1) / gaps) for i in range(gaps + 1)})
