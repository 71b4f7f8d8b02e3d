"""The formats that are recorded, and the small models and modules whose files they hold.

A format is a folder named by the version of ddl-rs that wrote it, and never changes. Names here
that occur in its files stay; a new case is recorded with the next format:

    python -m tests.compatibility.write 0.2
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ddl.nanogpt
from ddl import DeltaResidual, DeltaStream, Expand, Read, functional
from tests.support.helpers import normal
from tests.support.nanogpt_standin import GPT, GPTConfig

FOLDER = Path(__file__).resolve().parent
SUMS = "sums.txt"  # of every other file of a format
# The oldest first.
FORMATS = sorted(
    (path.parent for path in FOLDER.glob(f"*/{SUMS}")),
    key=lambda folder: [int(number) for number in folder.name.split(".")],
)

RUNS = ("additive", "ddl-tc")
PREPARED = "prepared"  # a directory of `ddl prepare`, of the lines of a text
EXPORTED = "ddl-tc"  # the run whose export is recorded, in ddl-tc-hf
PROMPT = "the software"  # both tokenizers know its characters
LAST = 3  # tokens of the prompt whose logits are recorded

B, T, D, M = 1, 5, 8, 2


def sums(folder: Path) -> str:
    """A line for every file of a format: its SHA-256 and its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in files
    ]
    return "".join(lines)


class Case(NamedTuple):
    """A module whose state dict is recorded, and the arguments of the recorded call, by name."""

    make: Callable[[], nn.Module]
    given: dict[str, Tensor]


def stream(value_channels: int = M, **options: Any) -> DeltaStream:
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(2)]
    return DeltaStream(D, sublayers, value_channels=value_channels, **options)


def nanogpt(**start: Any) -> Any:
    model = GPT(GPTConfig(block_size=8, vocab_size=32, n_embd=D))
    return ddl.nanogpt.convert(model, value_channels=M, compress="token", expand="conv", **start)


def annealed() -> nn.Module:
    """A quarter of each write is a rewrite."""
    model = nanogpt(start="additive", anneal_steps=4)
    model.transformer.h[0].anneal.advance()
    return model


def features(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float32)


X = {"x": features(B, T, D, seed=1)}
STATE = features(B, T, D, M, seed=2)
WRITE = {"sublayer_out": features(B, T, D, seed=3), "context": features(B, T, D, seed=4)}
TOKENS = torch.tensor([[3, 1, 4, 15, 9, 26, 5]])

# Together they have every parameter that the modules can have.
MODULES: dict[str, Case] = {
    "stream": Case(lambda: stream(1), X),
    "stream-channel": Case(stream, X),
    "stream-token": Case(lambda: stream(compress="token", expand="conv"), X),
    "stream-factored": Case(
        lambda: stream(compress="token", compress_parameterization="factored", value="sigmoid"), X
    ),
    "stream-branches": Case(
        lambda: stream(
            mapping="v", direction="mean", direction_hidden=3,
            gate="mlp", gate_hidden=3, gate_from="convolved",
        ),
        X,
    ),
    "residual": Case(lambda: DeltaResidual(D), X | WRITE),
    "residual-linear": Case(lambda: DeltaResidual(D, M, mapping="v"), WRITE | {"x": STATE}),
    "residual-attention": Case(
        lambda: DeltaResidual(D, M, mapping="v", direction="attention", direction_hidden=3),
        WRITE | {"x": STATE},
    ),
    "read": Case(
        lambda: Read(D, M, compress="channel", compress_parameterization="factored"),
        {"state": STATE},
    ),
    "expand": Case(lambda: Expand(D, M, kind="conv"), X),
    "nanogpt": Case(nanogpt, {"idx": TOKENS, "targets": TOKENS}),
    "nanogpt-annealed": Case(annealed, {"idx": TOKENS, "targets": TOKENS}),
}  # fmt: skip


def call(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """Call a module without gradients; return its first output."""
    with torch.no_grad():
        output = module(**given)
    return output[0] if isinstance(output, tuple) else output


class Program(nn.Module):
    """A module that calls every operator: the recorded program is its torch.export."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.empty(D, M, 4))
        self.read = nn.ParameterDict({
            "compress": torch.empty(D, M, 4),
            "norm_weight": torch.empty(D),
            "gate_weight": torch.empty(D),
            "gate_bias": torch.empty(()),
            "value_weight": torch.empty(M, D),
            "value_bias": torch.empty(M),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        read = dict(self.read.items())
        state = functional.expand(x, self.expand, value_channels=M)
        h, value, gate, *_ = functional.read(state, **read)
        state = functional.rewrite(state, h, value, gate, eps_k=0.1)
        return functional.rewrite_read(
            state, x, value, gate, eps_k=0.1, value_scale=4.0, **read
        ).context
