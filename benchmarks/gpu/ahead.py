"""Imports of the process that forks all workers. A worker meets an error of these again.

None may call the driver: after cuInit a process cannot fork.
"""

import contextlib

with contextlib.suppress(Exception):
    from gpu import ops, steps  # noqa: F401
