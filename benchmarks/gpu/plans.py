"""Plans to compare with the planner's own: choices that its model of costs cannot decide.

The planner counts bytes, registers and shared memory. What these plans differ in shows on a GPU
alone: how many passes a shared or first-level access takes, whether loads stay ahead of their uses
and whether one wave of blocks ends together. DDL_PLAN holds for both kernels of a call; each is
aimed at one half, and the other half says what it costs there.
"""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    op: str
    form: str
    d: int
    m: int
    aim: str  # the half that the plans are for
    plans: tuple[str, ...]


CHOICES = (
    # With packets of 8 features a lane owns 32 bytes of parameters, and each 16-byte access of a
    # warp reaches half the banks: 560 clocks, where the bytes of a token allow 501 (both reckoned
    # from machine code). With packets of 4 and the sums in registers 190. STAGES=1: if registers
    # are short, loads sink below the first wait, and a token pays memory's latency twice.
    Choice("rewrite_read", "identity", 768, 1, "backward",
           ("FEATURES=4 THREADS=64 BLOCKS=8 SUMS=0", "STAGES=1")),
    # The same: 1,480 clocks of 1,337, and 470.
    Choice("rewrite_read", "identity", 2048, 1, "backward",
           ("FEATURES=4 THREADS=128 BLOCKS=3 SUMS=0", "STAGES=1")),
    # 3,200 of 2,673, and 1,200.
    Choice("rewrite_read", "identity", 4096, 1, "backward",
           ("FEATURES=4 THREADS=256 BLOCKS=1 SUMS=0 STAGES=1",)),
    # 1,380 of 1,255, and 890. Left to choose, the planner would add a cluster.
    Choice("rewrite_read", "channel", 768, 4, "backward",
           ("CLUSTER=1 THREADS=128 BLOCKS=3 SUMS=0", "STAGES=1")),
    # One block of 192 threads on a multiprocessor keeps too few bytes in flight.
    Choice("rewrite_read", "token", 768, 4, "backward", ("CLUSTER=2", "SUMS=1 WINDOW=1")),
    # One block on a multiprocessor, its sums in shared memory.
    Choice("rewrite_read", "channel", 2048, 4, "backward", ("CLUSTER=2", "SUMS=3")),
    # A sum over a cluster of four sends packets of four bytes to its other blocks. Is it waited
    # for? Then two blocks, or one that loads its packets again, are faster.
    Choice("rewrite_read", "channel", 4096, 4, "backward",
           ("CLUSTER=2", "CLUSTER=1 KEEP_IN_REGISTERS=0")),
    # One wave of equal chunks ends with its slowest block. Two or four waves even that out.
    Choice("rewrite_read", "channel", 768, 4, "forward", ("CHUNK=16", "CHUNK=8")),
    # The next token's loads: behind the second sum (1), with β and v one token ahead (2, the
    # planner's if nothing spills), or before that sum (0), where a weight's wait may include them.
    Choice("rewrite_read", "channel", 2048, 4, "forward", ("LOAD_AHEAD=1", "LOAD_AHEAD=0")),
    Choice("rewrite_read", "token", 768, 4, "forward", ("LOAD_AHEAD=1", "LOAD_AHEAD=0")),
    # Bound by instructions: longer chunks check fewer bounds, shorter ones balance better.
    Choice("expand", "conv", 768, 4, "backward", ("CHUNK=64", "CHUNK=256")),
)  # fmt: skip
