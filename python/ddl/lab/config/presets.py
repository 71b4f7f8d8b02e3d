"""Named configurations: tiny and demo for any machine, small and medium as in the papers."""

from __future__ import annotations

from dataclasses import replace

from ddl.models.config import GPTConfig
from ddl.optim import OptimConfig

from .training import TrainConfig

SMALL = GPTConfig()
MEDIUM = GPTConfig(num_layers=24, num_heads=8, hidden_size=1024)
# Small models have token compression, the best of the variants at equal cost (docs/results.md).
DEMO = GPTConfig(
    residual="ddl-tc", vocab_size=256, block_size=256, num_layers=4, num_heads=4, hidden_size=256
)
TINY = GPTConfig(
    residual="ddl-tc", vocab_size=256, block_size=64, num_layers=2, num_heads=2, hidden_size=64
)

# The papers' recipe: 480 sequences of 1,024 tokens per step. The user must name a corpus.
_PAPER = TrainConfig(data=None)

PRESETS: dict[str, TrainConfig] = {
    "tiny": TrainConfig(
        model=TINY,
        optim=OptimConfig(lr=3e-3, warmup_steps=20),
        steps=200,
        batch_size=8,
        accumulation=1,
        eval_every=50,
        eval_batches=10,
        precision="float32",
    ),
    "demo": TrainConfig(
        model=DEMO,
        optim=OptimConfig(lr=2e-3, warmup_steps=40),
        steps=120,
        batch_size=8,
        accumulation=1,
        eval_every=40,
        eval_batches=0,
        precision="float32",
    ),
    "small": _PAPER,
    "medium": replace(_PAPER, model=MEDIUM, batch_size=8, accumulation=60),
}
