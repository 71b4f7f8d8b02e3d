"""DeltaStream: a whole trunk on an expanded residual stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddl.ops.checks import autocast_dtype
from ddl.options import (
    RESIDUAL_OPTIONS,
    STREAM_OPTIONS,
    Compress,
    ExpandKind,
    Parameterization,
    StreamDtype,
    check_count,
    check_known,
    check_options,
)

from .checks import check_stream
from .expand import Expand
from .history import History
from .padding import without_padding
from .read import OF_THE_OWNER, Read, make_reads
from .residual import DeltaResidual
from .trunk import Call, as_stream, run


class DeltaStream(nn.Module):
    """Run a whole trunk on an expanded residual stream: expand, read – sublayer – rewrite, read.

    h = stream(x) maps embeddings x (B, T, d) to the normalised final read h (B, T, d). Every
    sublayer F maps a context (B, T, d) to (B, T, d), without a norm or residual of its own; it gets
    all further arguments of `forward`. Each rewrite is fused with the read after it, so the state
    passes through memory once between two sublayers. The result is that of this loop over the same
    parameters:

        X = stream.expand(x)
        for read, sublayer, residual in zip(stream.reads, stream.sublayers, stream.residuals):
            h = read(X)
            X = residual(X, sublayer(h), context=h)
        h = stream.readout(X)

    (With value_from="compressed" the loop also passes on the raw read: `h, x = read(X,
    return_compressed=True)` and `residual(…, compressed=x)`.)

    The fused operators read the parameters of `reads` and `residuals` directly and never call their
    `forward`: forward hooks on them, or on their gates and values, do not fire, and wrappers are
    rejected, but those of torch.nn.utils work. If you replace a read whose compression other reads
    share, replace those as well.

    Args:
        hidden_size: d.
        sublayers: the F in order; for a Transformer, attention and MLP alternate.
        value_channels: m.
        compress: as in Read; None for "identity" if m = 1, else "channel".
        kernel_size, compress_parameterization, causal, read_init, norm_eps, norm_affine: as in
            Read.
        expand, expand_kernel_size: as Expand's kind and kernel_size.
        anchor_every: every so many states are stored for the backward, at most 32; it computes the
            others again, with the same bits. (On a GPU the sums of the gradients may round
            differently: docs/decisions/anchors.md.) None for 1 if m = 1, else for 4 on a CUDA
            device and 8 elsewhere, or for the next larger number that spreads the stored states
            evenly (12 with 12 sublayers on a CPU). A state that a gate or direction reads is stored
            all the same.
        stream_dtype: "bfloat16" or "float16", in which the states are stored under autocast, with
            half the bytes and a rounding after every rewrite; None for the dtype of x, as without
            autocast.
        sublayers_per_compressor: number of consecutive sublayers whose reads share one compression
            (2 in the papers: attention and MLP of a block).
        device, dtype: of the parameters.
        residual: options of DeltaResidual.

    Raises:
        ValueError: an option is unknown, out of range, or without effect and not at its default.
        TypeError: `sublayers` are not modules; neither this class nor DeltaResidual has an option.

    Source: DDL (arXiv 2601.00417, newest version), variants CC and TC with and without EC.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Iterable[nn.Module],
        *,
        value_channels: int = 1,
        compress: Compress | None = None,
        kernel_size: int = 4,
        compress_parameterization: Parameterization = "direct",
        causal: bool = False,
        read_init: float | None = None,
        norm_eps: float | None = 1e-5,
        norm_affine: bool = True,
        expand: ExpandKind = "repeat",
        expand_kernel_size: int = 4,
        sublayers_per_compressor: int = 2,
        anchor_every: int | None = None,
        stream_dtype: StreamDtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **residual: Any,
    ) -> None:
        super().__init__()
        check_count("value_channels", value_channels)
        if compress is None:
            compress = "identity" if value_channels == 1 else "channel"
        check_options(locals(), STREAM_OPTIONS)
        own = {name: option for name, option in locals().items() if name in OF_THE_OWNER}
        known = ("value_channels", *STREAM_OPTIONS, *RESIDUAL_OPTIONS, "device", "dtype")
        check_known(residual, known, "DeltaStream or of DeltaResidual")
        if isinstance(sublayers, nn.Module) and not isinstance(sublayers, nn.ModuleList):
            got = type(sublayers).__name__
            raise TypeError(f"`sublayers` must be a sequence of modules, got {got}")
        self.sublayers = nn.ModuleList(sublayers)
        if len(self.sublayers) == 0:
            raise ValueError("`sublayers` must hold at least one module, got none")
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.anchor_every, self.stream_dtype = anchor_every, stream_dtype
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.expand = Expand(
            hidden_size, value_channels, kind=expand, kernel_size=expand_kernel_size, **factory
        )
        common: dict[str, Any] = {"compress": compress, **factory}
        common |= {"norm_eps": norm_eps, "norm_affine": norm_affine}
        self.reads = make_reads(
            hidden_size,
            value_channels,
            sublayers=len(self.sublayers),
            sublayers_per_compressor=sublayers_per_compressor,
            own=own,
            **common,
        )
        self.residuals = nn.ModuleList(
            DeltaResidual(hidden_size, value_channels, **residual, **factory)
            for _ in self.sublayers
        )
        self.readout = Read(hidden_size, value_channels, **own, **common)

    def reset_parameters(self) -> None:
        """Reset expansion, reads, residuals and final read, but not the sublayers."""
        for module in (self.expand, *self.reads, *self.residuals, self.readout):
            module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *args: Any,
        call: Call | None = None,
        history: History | None = None,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map embeddings x (B, T, d) to the normalised final read (B, T, d).

        Args:
            x: the embeddings.
            call: f(index, sublayer, h), which returns F(h) (B, T, d), for sublayers whose arguments
                differ (a window, a layer's cache, value embeddings); None to pass all of them the
                same, `args` and `kwargs`.
            history: past inputs of the convolutions over time; those of x are appended. Pass an
                empty History to start a sequence, under torch.no_grad() or inference_mode().
                Sublayers must cache their own past.
            keep: (B, T) bool, False for padding. The state of a padding token stays zero, so that
                no convolution over time carries it into another token.
            document_starts: (B, T) bool, True for the first token of each document in a sequence
                that holds several. No convolution over time looks beyond the start of its own
                document; sublayers must keep documents apart themselves, by `args`. None for one
                document per sequence.
            args, kwargs: passed to every sublayer; none with `call`.

        Raises:
            ValueError: x, a mask or a sublayer's output has another shape, a read shares the
                compression of a read that was replaced, or x has another dtype than before.
            TypeError: x or a sublayer's output is not a tensor or has an unsupported dtype; a
                read or residual is wrapped; `call` got arguments beside it.
        """
        if call is not None and (args or kwargs):
            got = ", ".join([f"{len(args)} by position"] * bool(args) + list(kwargs))
            raise TypeError(
                f"`call` must give the sublayers their arguments itself, got others: {got}"
            )

        def same(index: int, sublayer: nn.Module, h: Tensor) -> Any:
            return sublayer(h, *args, **kwargs)

        masks = {"keep": keep, "document_starts": document_starts}
        check_stream("x", x, (self.hidden_size,), over_time=True, **masks)
        if history is not None and x.ndim != 3:
            expected = f"shape (batch, time, {self.hidden_size}) with a history"
            raise ValueError(f"`x` must have {expected}, got {tuple(x.shape)}")
        dtype = autocast_dtype(x)
        if keep is not None:
            x = without_padding(x, keep)
        x = as_stream(x, self.stream_dtype)
        return run(
            self,
            x,
            same if call is None else call,
            dtype,
            history=history,
            keep=keep,
            starts=document_starts,
        )
