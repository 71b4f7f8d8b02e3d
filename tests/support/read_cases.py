"""Every kind of Read, for the tests of Read and of the trunk."""

from __future__ import annotations

from typing import Any

B, T, D = 2, 6, 7

READS: list[dict[str, Any]] = [
    {"value_channels": 1, "compress": "identity"},
    {"value_channels": 1, "compress": "token", "kernel_size": 3},
    {"value_channels": 3, "compress": "channel"},
    {"value_channels": 3, "compress": "token", "kernel_size": 2},
    {"value_channels": 3, "compress": "token", "compress_parameterization": "factored"},
    # K < m, K = m and K > m; K even and odd, because parity decides the centre
    {
        "value_channels": 3,
        "compress": "channel",
        "compress_parameterization": "factored",
        "kernel_size": 2,
    },
    {
        "value_channels": 4,
        "compress": "channel",
        "compress_parameterization": "factored",
        "causal": True,
    },
    {
        "value_channels": 2,
        "compress": "channel",
        "compress_parameterization": "factored",
        "kernel_size": 5,
    },
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))
