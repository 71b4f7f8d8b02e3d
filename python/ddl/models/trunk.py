"""The residual stream around the sublayers: a baseline, or one of the delta streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.adapters import active
from ddl.nn.additions import AddingStream, Addition
from ddl.nn.history import History
from ddl.nn.hyper import HyperStream
from ddl.nn.stream import DeltaStream
from ddl.options import RESIDUAL_OPTIONS

from .cache import Cache
from .config import STREAMS, GPTConfig
from .sublayers import NORM_EPS
from .tokens import place


class AdditiveStream(AddingStream):
    """The plain residual stream, x = x + F(norm(x)), with a final norm: the baseline trunk."""

    def __init__(self, hidden_size: int, sublayers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(sublayers)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, NORM_EPS) for _ in self.sublayers)
        self.readout = nn.RMSNorm(hidden_size, NORM_EPS)

    def reset_parameters(self) -> None:
        for norm in (*self.norms, self.readout):
            nn.init.ones_(norm.weight)

    def forward(
        self,
        x: Tensor,
        *args: Any,
        history: History | None = None,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); `args` go to every sublayer.

        `history`, `keep` and `document_starts` are arguments of DeltaStream; here nothing is
        convolved over time, and only hooks look at `keep`.
        """
        for i, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            x = self._add(i, x, sublayer(norm(x), *args), keep)
        return self.readout(x)

    def _add(self, sublayer: int, x: Tensor, written: Tensor, keep: Tensor | None) -> Tensor:
        if self.hooks:
            self.show(Addition(sublayer, x.unsqueeze(-1), written, None, None, keep))
        return x + written


Trunk = AdditiveStream | HyperStream | DeltaStream


def hidden_states(
    trunk: Trunk,
    config: GPTConfig,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Map embeddings x (B, T, d) to the head's input (B, T, d); arguments as in `GPT.forward`."""
    if cache is not None:
        if not isinstance(cache, Cache):
            raise TypeError(f"`cache` must be a ddl.models.Cache, got {type(cache).__name__}")
        cache.check(config, x)
        if torch.is_grad_enabled() and any(p.requires_grad for p in trunk.parameters()):
            cache.refuse_gradients()
    tokens, keep = place(x, attention_mask, cache, document_starts)
    history = None if cache is None else cache.history
    h = trunk(x, tokens, history=history, keep=keep, document_starts=document_starts)
    if cache is not None:
        cache.advance(x, tokens.begins)
    return h


def read_out(trunk: Trunk, state: Tensor) -> Tensor:
    """Map a state X (B, T, d, m) to the head's input (B, T, d), as after the last sublayer.

    For one value channel, the stream x is (B, T, d, 1); hyper-connections have n streams last.
    """
    trunk = active(trunk)
    if isinstance(trunk, HyperStream):
        state = state.sum(-1, keepdim=True)
    h: Tensor = trunk.readout(state.squeeze(-1) if state.shape[-1] == 1 else state)
    return h


def make_trunk(config: GPTConfig, sublayers: nn.ModuleList) -> Trunk:
    """Build the residual stream that `config.residual` names, around the given sublayers."""
    if config.residual == "additive":
        return AdditiveStream(config.hidden_size, sublayers)
    if config.residual == "hc":
        return HyperStream(
            config.hidden_size, sublayers, streams=config.value_channels, norm_eps=NORM_EPS
        )
    compress, expand = STREAMS[config.residual]
    return DeltaStream(
        config.hidden_size,
        list(sublayers),
        value_channels=1 if config.residual == "ddl" else config.value_channels,
        compress=compress,
        kernel_size=config.compress_kernel_size,
        parameterization=config.compress_parameterization,
        causal=config.compress_causal,
        read_init=config.read_init,
        expand=expand,
        expand_kernel_size=config.expand_kernel_size,
        sublayers_per_compressor=config.sublayers_per_compressor,
        anchor_every=config.anchor_every,
        stream_dtype=config.stream_dtype,
        norm_eps=NORM_EPS,
        **{name: getattr(config, name) for name in RESIDUAL_OPTIONS},
    )
