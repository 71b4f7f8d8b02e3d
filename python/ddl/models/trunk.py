"""The residual stream around the sublayers: a baseline, or one of the delta streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.adapters import active
from ddl.nn.additions import AddingStream
from ddl.nn.stream import DeltaStream

from .cache import Cache
from .config import STREAMS, GPTConfig
from .streams.additive import AdditiveStream
from .streams.attention_residual import AttentionResidualStream
from .streams.connected import ConnectedStream, SumOfStreams
from .streams.controls import ConvolvedStream, ExpandedStream
from .streams.gated import GatedConnection, GatedRead
from .streams.hyper import HyperConnection
from .streams.mhc import (
    IndependentConnection,
    ManifoldConnection,
    WeightedHead,
    independent_start,
)
from .sublayers import NORM_EPS
from .tokens import Tokens, place

Trunk = AddingStream | DeltaStream


def hidden_states(
    trunk: Trunk,
    config: GPTConfig,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    document_starts: Tensor | None = None,
    adapt: Callable[[Tokens], Tokens] | None = None,
) -> Tensor:
    """Map embeddings x (B, T, d) to the head's input (B, T, d); arguments as in `GPT.forward`.

    adapt: changes the tokens for sublayers that attend by a function of their own.
    """
    if cache is not None:
        cache.check(config, x)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *trunk.parameters())):
            raise ValueError(
                "`cache` must be used under torch.no_grad() or torch.inference_mode(), got a "
                "forward pass with gradients"
            )
        cache.history.begin(x.dtype)
    tokens = place(x, attention_mask, cache, document_starts)
    tokens = tokens if adapt is None else adapt(tokens)
    history = None if cache is None else cache.history
    h = trunk(x, tokens, history=history, keep=tokens.keep, document_starts=document_starts)
    if cache is not None:
        cache.advance(x, tokens.begins)
    return scaled_for_head(h, config)


def scaled_for_head(h: Tensor, config: GPTConfig) -> Tensor:
    """The head's input: h (B, T, d), less as much as the model is wider than its base."""
    return h if config.times_as_wide == 1 else h / config.times_as_wide


def read_out(trunk: Trunk, config: GPTConfig, state: Tensor) -> Tensor:
    """Map a state X (B, T, d, m) to the head's input (B, T, d), as after the last sublayer.

    For one value channel, the stream x is (B, T, d, 1); a baseline with n streams has them last.
    """
    trunk = active(trunk)
    if isinstance(trunk, AddingStream):
        return scaled_for_head(trunk.read_out(state), config)
    h: Tensor = trunk.readout(state.squeeze(-1) if state.shape[-1] == 1 else state)
    return scaled_for_head(h, config)


def make_trunk(config: GPTConfig, sublayers: nn.ModuleList) -> Trunk:
    """Build the residual stream that `config.residual` names, around the given sublayers."""
    d, n, eps = config.hidden_size, config.value_channels, NORM_EPS
    branch_scale = 1 / config.times_as_deep
    reads: dict[str, Any] = {
        "kernel_size": config.compress_kernel_size,
        "compress_parameterization": config.compress_parameterization,
        "causal": config.compress_causal,
        "read_init": config.read_init,
        "sublayers_per_compressor": config.sublayers_per_compressor,
        "norm_eps": eps,
    }
    norm: Callable[[], nn.Module] = partial(nn.RMSNorm, d, eps)
    connections: list[nn.Module]
    head: nn.Module
    match config.residual:
        case "additive":
            return AdditiveStream(d, sublayers, norm_eps=eps, branch_scale=branch_scale)
        case "additive-conv":
            return ConvolvedStream(d, sublayers, **reads)
        case "expanded":
            options = reads | {"value_channels": n, "branch_scale": branch_scale}
            return ExpandedStream(d, sublayers, **options)
        case "attention-residual":
            block = config.summed_sublayers
            return AttentionResidualStream(d, sublayers, sublayers_per_block=block, norm_eps=eps)
        case "hc":
            connections = [HyperConnection(d, n, index) for index in range(len(sublayers))]
            head = SumOfStreams()
        case "mhc":
            connections = [ManifoldConnection(d, n, eps) for _ in sublayers]
            head = WeightedHead(d, n, eps)
        case "independent-hc":
            connections = [IndependentConnection(d, n, eps) for _ in sublayers]
            head = WeightedHead(d, n, eps, **independent_start(n))
        case "gated":  # its reads have a norm of their own
            connections = [GatedConnection(d, n, eps, config.gated_size) for _ in sublayers]
            head, norm = GatedRead(d, n, eps, config.gated_size), nn.Identity
        case _:
            compress, expand = STREAMS[config.residual]
            return DeltaStream(
                d,
                list(sublayers),
                value_channels=1 if config.residual == "ddl" else n,
                compress=compress,
                expand=expand,
                expand_kernel_size=config.expand_kernel_size,
                anchor_every=config.anchor_every,
                stream_dtype=config.stream_dtype,
                **reads,
                **config.rewrite_options,
            )
    return ConnectedStream(sublayers, n, connections=connections, head=head, norm=norm)
