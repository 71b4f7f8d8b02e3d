"""A state that passes through a decoder's own layers: norms read it, and adding rewrites it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate.hooks import (  # type: ignore[import-untyped]
    add_hook_to_module,
    remove_hook_from_module,
)
from torch import Tensor, nn

from ddl import functional
from ddl.nanogpt.annealing import blend
from ddl.nanogpt.mixin import Rebuilt, derived
from ddl.nn.adapters import active, forward_of
from ddl.nn.checks import check_returned, require_exact_type
from ddl.nn.convolution import Slot
from ddl.nn.history import History
from ddl.nn.linear import form_parameters
from ddl.nn.padding import without_padding
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.nn.trunk import boundary
from ddl.ops.private import register_tensors_of
from ddl.results import Chain, Write

from .structure import ADD, device_of


class Pass(NamedTuple):
    """The part of a forward pass that all layers share.

    history: of the tokens before, in generation with reads of several tokens; else None. keep,
    document_starts: (B, T) bool, as in DeltaStream. share: a, a tensor (), while the model is
    annealed, else None.
    """

    history: History | None
    keep: Tensor | None
    document_starts: Tensor | None
    share: Tensor | None

    def slot(self, name: str) -> Slot | None:
        return None if self.history is None else Slot(self.history, name)


@dataclass(frozen=True)
class Place:
    """A sublayer of a decoder's layer.

    layer: the layer, with the modules `read_1`, `res_1` and, of an adapter, `scale_1`. which: 1 for
    its first sublayer, 2 for its second. number: of the layer.
    """

    layer: Any
    which: int
    number: int

    @property
    def read(self) -> Read:
        name = f"read_{self.which}"
        module = getattr(self.layer, name)
        copied = active(module) is not module
        if copied and any(getattr(self.layer, f"read_{i}")._shared for i in (1, 2)):
            raise TypeError(
                f"`{name}` must not be among modules_to_save, because other reads share its "
                "compression: convert with sublayers_per_compressor=1"
            )
        return require_exact_type(name, module, Read)

    @property
    def residual(self) -> DeltaResidual:
        name = f"res_{self.which}"
        return require_exact_type(name, getattr(self.layer, name), DeltaResidual)

    @property
    def scale(self) -> Tensor | None:
        """The factor of an adapter's gates; None for a model that is no adapter."""
        scale: Scale | None = getattr(self.layer, f"scale_{self.which}", None)
        if scale is None:
            return None
        form_parameters(scale)
        return scale.weight

    @property
    def ends_a_checkpoint(self) -> bool:
        """Whether the backward runs this layer again, and this is its last sublayer."""
        recomputed = getattr(self.layer, "gradient_checkpointing", False) and self.layer.training
        return self.which == 2 and recomputed


class Scale(nn.Module):
    """The factor of the gates of an adapter's rewrite: 0 at first, so that nothing is rewritten."""

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def never_decayed(self) -> Any:
        """The parameters that an optimizer should not decay: all of a stream's."""
        return self.parameters()


class Parts:
    """The parts of a stream, where FSDP2 does not look for tensors to cast."""

    def __init__(self, stream: Stream) -> None:
        self.state, self.within = stream.state, stream.within
        self.write, self.chain = stream.write, stream.chain


@dataclass(eq=False, repr=False)
class Stream:
    """A state X (B, T, d, m) in place of a decoder's hidden states (B, T, d).

        h = norm(stream)          the norm of the raw read of X, by a StreamNorm
        stream = stream + F(h)    the rewrite that F(h) writes; also F(h) + stream

    A rewrite is done together with the next read, in one pass over memory, so it is kept until
    then: `write` is one that `state` has not had yet. chain: as in DeltaStream, the rewrites since
    the last stored state. last_read: raw, and normalised.

    A stream keeps its dtypes. FSDP2 rebuilds it at every layer, around tensors in the dtype of its
    MixedPrecisionPolicy and then around tensors with hooks; it takes the second alone. parts: of
    the stream that it was rebuilt from.
    """

    state: Tensor
    within: Pass
    write: Write | None = None
    chain: Chain | None = None
    parts: Parts | None = None

    def __post_init__(self) -> None:
        self.last_read: tuple[Place, Tensor, Tensor] | None = None
        if self.parts is not None:
            self._restore(self.parts)
        self.parts = Parts(self)

    def _restore(self, parts: Parts) -> None:
        self.within, self.chain = parts.within, parts.chain
        self.state = _unless_cast(self.state, parts.state)
        if self.write is not None and parts.write is not None:
            k, v, gate = map(_unless_cast, self.write[:3], parts.write[:3])
            self.write = Write(k, v, gate, *parts.write[3:])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a Stream has no {name!r}: it was given to a norm whose forward was replaced after "
            "`convert`, as Liger's kernels do; leave them out, "
            'liger_kernel_config={"rms_norm": False}'
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtype

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def shape(self) -> torch.Size:
        """That of the hidden states, (B, T, d)."""
        return self.state.shape[:-1]

    def to(self, *args: Any, **kwargs: Any) -> Stream:
        """The stream on another device, for a model whose layers are on several."""
        device = device_of(args, kwargs)
        if device == self.state.device:
            return self
        moved = [None if x is None else x.to(device) for x in self.within[1:]]
        return Stream(self.tensor().to(device), Pass(self.within.history, *moved))

    def tensor(self) -> Tensor:
        """X, after the rewrite that was kept."""
        if self.write is not None:
            self.state, self.write = functional.write_to(self.state, self.write), None
            self.chain = None if self.chain is None else Chain(self.chain.anchor_every)
            self.parts = Parts(self)
        return self.state

    def raw(self, read: Read, slot: Slot | None) -> Tensor:
        """The raw read x (B, T, d) of X."""
        form_parameters(read)
        if read.compress == "identity":  # X is its own read, which a fused pass would store twice
            return self.tensor().squeeze(-1)
        parameters, starts = read.raw(self.state), self.within.document_starts
        result, self.chain = boundary(
            self.state, self.write, parameters, starts, chain=self.chain, slot=slot
        )
        self.state, self.write, self.parts = result.state, None, Parts(self)
        return result.context

    def plus(self, written: Tensor) -> Stream:
        """The stream after the rewrite that a sublayer's output F(h) (B, T, d) writes."""
        if self.last_read is None:
            raise TypeError("a Stream must be read by a norm before something is added")
        (place, x, h), self.last_read = self.last_read, None
        check_returned(f"sublayer {place.which} of layer {place.number}", written, h)
        residual, within, state = place.residual, self.within, self.tensor()
        added = written if within.keep is None else without_padding(written, within.keep)
        if place.scale is not None:
            state = state + added.unsqueeze(-1)
        value, gate = residual.value_and_gate(h, x)
        write = residual.write(
            *(state, written, h, value, gate),
            keep=within.keep,
            document_starts=within.document_starts,
            slot=within.slot(f"{place.number}.res_{place.which}"),
        )
        if within.share is not None:
            state, write = blend(within.share, state, added, write)
        if place.scale is not None:
            write = write.scaled(place.scale)
        write = residual.hooked(
            state, write, keep=within.keep, continues=within.history is not None
        )
        new = Stream(state, within, write, self.chain)
        if place.ends_a_checkpoint:  # what is kept beyond it would be computed twice
            new.tensor()
        return new

    def __add__(self, written: Tensor) -> Stream:
        return self.plus(written)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do tensor + stream; torch.compile comes here, too, for stream + tensor."""
        if function not in ADD or len(args) != 2 or kwargs:
            return NotImplemented
        stream, written = args if isinstance(args[0], Stream) else args[::-1]
        return stream.plus(written)


def _unless_cast(tensor: Tensor, before: Tensor) -> Tensor:
    return tensor if tensor.dtype == before.dtype else before


def _flatten(stream: Stream) -> tuple[list[Any], Any]:
    write = stream.write
    tensors = [stream.state, *(() if write is None else write[:3])]
    return tensors, (stream.within, None if write is None else write[3:], stream.chain)


def _unflatten(tensors: Any, context: Any) -> Stream:
    state, *written = tensors
    within, rest, chain = context
    return Stream(state, within, None if rest is None else Write(*written, *rest), chain)


# FSDP2 looks for the tensors among what a layer gets and returns, to run its hooks in the backward.
# torch 2.15 finds them because Stream is a dataclass, older versions because it is registered here.
register_tensors_of(Stream, _flatten, _unflatten)


class StreamNorm(Rebuilt):
    """Mixin before the class of a layer's norm, which reads a Stream."""

    place: Place

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalise hidden states, or the raw read of a Stream."""
        if not isinstance(x, Stream):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        place = self.place
        raw = x.raw(place.read, x.within.slot(f"{place.number}.read_{place.which}"))
        h = super().forward(raw, *args, **kwargs)  # type: ignore[misc]
        x.last_read = place, raw, h
        return h


class FinalNorm(Rebuilt):
    """Mixin before the class of the norm after the last layer."""

    readout: Read

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalise hidden states, or the raw final read of a Stream, with which a pass ends."""
        if isinstance(x, Stream):
            within = x.within
            x = x.raw(require_exact_type("readout", self.readout, Read), within.slot("readout"))
            if within.history is not None:
                within.history.commit()
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


def check_norm(norm: nn.Module) -> None:
    """Raise TypeError if a norm's forward was replaced: streams would not reach ours."""
    own = forward_of(norm)
    if own is not type(norm).forward:
        kind = type(norm).__name__
        raise TypeError(f"`{kind}` must have its class's forward, got another one")


def reading_norm(norm: nn.Module, mixin: type) -> None:
    """Let a norm read streams, in place, below accelerate's hook, if it has one."""
    kind: Any = type(norm)
    hook = norm.__dict__.get("_hf_hook")
    if hook is not None:
        remove_hook_from_module(norm)  # which leaves the class's own forward in the module
    norm.__dict__.pop("forward", None)
    norm.__class__ = derived(kind, mixin)
    if hook is not None:
        add_hook_to_module(norm, hook)
