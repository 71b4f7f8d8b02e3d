"""Changes of the kernels that a GPU decides about: each is timed with it and without it.

The planner's own choice has the change. A row here takes it back by `DDL_PLAN`, and is compared
with the planner's by its share of a copy's rate. `DDL_PLAN` holds for both kernels of a call, so
the half that a row is not for may have another plan, too.
"""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """A case of rewrite_read at 32 × 1,024 tokens, and the plan to compare with the planner's.

    half: the kernel that the plan is for; of ORDER, which is for both, the first. plan: words of
    DDL_PLAN.
    """

    form: str
    d: int
    m: int
    state: str
    half: str
    plan: str


# A run of neighbouring tokens for each block, where blocks take turns by default.
RUNS = "ORDER=0"
# A token read's forward without tiles (src/cuda/plan/tile.rs), which any choice by hand gives.
UNTILED = "CLUSTER=1"
# Before the plans that were timed on 2026-11-26 (src/cuda/plan/timed.rs).
ALONE = "THREADS=192 SUMS=0 STAGES=1 BLOCKS=1 WINDOW=0"
CHOICES = (
    Choice("channel", 768, 4, "float32", "forward", RUNS),
    Choice("channel", 768, 4, "bfloat16", "forward", RUNS),
    Choice("identity", 768, 1, "bfloat16", "forward", RUNS),
    Choice("channel", 4096, 4, "float32", "forward", RUNS),
    Choice("channel", 768, 4, "float32", "forward", "STAGES=0 BLOCKS=8"),
    Choice("channel", 768, 4, "bfloat16", "forward", "STAGES=0 BLOCKS=8"),
    Choice("channel", 2048, 4, "bfloat16", "forward", "STAGES=0 BLOCKS=2"),
    Choice("channel", 768, 4, "bfloat16", "backward", "THREADS=96 STAGES=0 BLOCKS=4"),
    Choice("token", 768, 4, "float32", "forward", UNTILED),
    Choice("token", 768, 4, "bfloat16", "forward", UNTILED),
    Choice("token", 768, 4, "float32", "backward", ALONE),
    Choice("token", 768, 4, "bfloat16", "backward", ALONE),
)
# Of the backward with a chain, by the form of the read.
CHAIN_PLANS = {"channel": "THREADS=128 STAGES=0 BLOCKS=3", "token": ALONE}
