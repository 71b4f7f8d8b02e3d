"""Where hidden states become a stream, and where streams become hidden states again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddl.hf.cache import CACHE, CACHE_NAMES, cache_in, history_in
from ddl.hf.packing import starts_of
from ddl.nanogpt.annealing import Annealing
from ddl.nn.checks import require_exact_type
from ddl.nn.expand import Expand
from ddl.nn.history import History
from ddl.nn.padding import without_padding
from ddl.nn.read import Read
from ddl.nn.trunk import as_stream, boundary, first_chain, opened
from ddl.ops.checks import gate_dtype
from ddl.options import StreamDtype
from ddl.results import Chain

from .stream import Pass, Stream
from .structure import exchanged

TOKENS = "delta_tokens"  # a keyword argument that passes from the decoder's entry to its layers'


class Tokens(NamedTuple):
    """Which tokens count, and which start documents, (B, T) bool, as in DeltaStream; or None."""

    keep: Tensor | None
    document_starts: Tensor | None


def looks_back(options: Mapping[str, Any]) -> bool:
    """Whether anything in a stream of these options is computed from several tokens."""
    opens = options["expand"] == "conv" and options["expand_kernel_size"] > 1
    reads = options["compress"] == "token" and options["kernel_size"] > 1
    return opens or reads or options["gate_from"] == "convolved"


class Entry:
    """The hooks of a converted decoder.

    decoder_hook: notes which tokens are padding, and which start documents. layer_hook: lets the
    first layer open a stream. returned: reads the streams among what the decoder returns.

    first: the first layer, with `expand` and, while it is annealed, `anneal`. final: the final
    norm, with `readout`. layers: their number. looks_back: whether the past is needed.
    anchor_every, stream_dtype: as in DeltaStream.
    """

    def __init__(
        self,
        decoder: nn.Module,
        layers: nn.ModuleList,
        final: nn.Module,
        *,
        looks_back: bool,
        anchor_every: int | None,
        stream_dtype: StreamDtype | None,
    ) -> None:
        self.first, self.final, self.layers = layers[0], final, len(layers)
        self.looks_back = looks_back
        self.anchor_every, self.stream_dtype = anchor_every, stream_dtype
        self.decoder_arguments = _positional(decoder)
        self.layer_arguments = _positional(layers[0])
        decoder.register_forward_pre_hook(self.decoder_hook, with_kwargs=True)
        decoder.register_forward_hook(self.returned)
        for layer in layers:
            layer.register_forward_pre_hook(self.layer_hook, with_kwargs=True)

    def decoder_hook(self, decoder: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hand on to the layers which tokens are padding, and which start documents."""
        if not self.looks_back or TOKENS in kwargs:
            return args, kwargs
        given = {**dict(zip(self.decoder_arguments, args, strict=False)), **kwargs}
        return args, {**kwargs, TOKENS: tokens_of(given)}

    def layer_hook(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Open the hidden states that the first layer gets."""
        kwargs = dict(kwargs)
        tokens = kwargs.pop(TOKENS) if self.looks_back else Tokens(None, None)
        if layer is not self.first:
            return args, kwargs
        past = cache_in({**dict(zip(self.layer_arguments, args, strict=False)), **kwargs})
        return exchanged(args, kwargs, lambda x: self._opened(x, tokens, past))

    def returned(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Replace streams in `hidden_states` by raw final reads (B, T, d)."""
        if isinstance(output, tuple):
            return tuple(self._read_out(part) for part in output)
        found = getattr(output, "hidden_states", None)
        if found is not None:
            output.hidden_states = self._read_out(found)
        return output

    def _opened(self, x: Any, tokens: Tokens, past: Any) -> Any:
        """The stream of embeddings x (B, T, d)."""
        if isinstance(x, Stream):
            return x
        _refuse_reentrant(self.first)
        history = self._history(past)
        if tokens.keep is not None:
            x = without_padding(x, tokens.keep)
        x = as_stream(x, self.stream_dtype)
        if history is not None:
            history.begin(x.dtype)
        anneal: Annealing | None = getattr(self.first, "anneal", None)
        share = None
        if anneal is not None and not anneal.done:
            share = anneal.share(gate_dtype(x))
        within = Pass(history, *tokens, share)
        expand = require_exact_type("expand", self.first.expand, Expand)
        state = opened(expand, x, tokens.document_starts, within.slot("expand"))
        return Stream(state, within, chain=self._chain(state, share))

    def _chain(self, state: Tensor, share: Tensor | None) -> Chain | None:
        """The beginning of a chain; None to store every state, which an addition to one needs."""
        first: Any = self.first
        if share is not None or hasattr(first, "scale_1"):
            return None
        return first_chain(state, self.anchor_every, 2 * self.layers)

    def _history(self, past: Any) -> History | None:
        """The history in a cache, where one is needed."""
        if past is None or not self.looks_back:
            return None
        if not torch.is_grad_enabled():
            return history_in(past, self.layers)
        if past.get_seq_length() > 0:
            raise ValueError(
                f"`{CACHE}` must be used under torch.no_grad() or torch.inference_mode(), "
                "because reads of several tokens go on from it, got a pass with gradients"
            )
        return None

    def _read_out(self, found: Any) -> Any:
        if isinstance(found, tuple | list):
            return type(found)(self._read_out(part) for part in found)
        if not isinstance(found, Stream):
            return found
        read: Read = self.final.readout  # type: ignore[assignment]
        parameters = read.raw(found.tensor())
        if found.within.history is not None and parameters.looks_back():
            raise ValueError(
                "`output_hidden_states` must be false with a cache if reads take several tokens, "
                "got true"
            )
        result, _ = boundary(found.tensor(), None, parameters, found.within.document_starts)
        return result.context


def tokens_of(given: dict[str, Any]) -> Tokens:
    """Padding and documents, by the arguments of a decoder.

    Raises ValueError for a mask of another kind than (B, tokens so far).
    """
    x = given.get("input_ids")
    x = given["inputs_embeds"] if x is None else x
    mask, past = given.get("attention_mask"), cache_in(given)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            "`attention_mask` must be (batch, tokens so far) with 0 for padding, because reads of "
            f"several tokens leave it out, got {got}"
        )
    if mask is not None:
        return Tokens(_of_these(mask, x.shape[1], past), None)
    if past is not None:  # documents are packed in training only
        return Tokens(None, None)
    packed = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
    numbers = {name: given.get(name) for name in packed}
    return Tokens(None, starts_of(x, None, False, document_starts=None, **numbers))


def _of_these(mask: Tensor, count: int, past: Any) -> Tensor:
    """The columns of a mask (B, …) for `count` tokens after those in a cache.

    Raises ValueError if it has none for some of them.
    """
    before = 0
    if mask.shape[1] > count:  # else there is no need to ask the cache
        before = 0 if past is None else int(past.get_seq_length())
    if mask.shape[1] < before + count:
        got = f"{mask.shape[1]} for {count} after {before}"
        raise ValueError(f"`attention_mask` must have a column for each token so far, got {got}")
    return mask[:, before : before + count].bool()


def _refuse_reentrant(layer: Any) -> None:
    """Raise ValueError if the backward runs layers again by way of their tensors alone."""
    recomputes = getattr(layer, "gradient_checkpointing", False) and layer.training
    checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
    if recomputes and getattr(checkpoint, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            "`gradient_checkpointing_kwargs` must have use_reentrant=False, got True: such a "
            "checkpoint finds no gradients in a Stream"
        )


def check_arguments(layers: nn.ModuleList) -> None:
    """Raise ValueError unless the layers get the cache by the name that is looked for here."""
    if not set(CACHE_NAMES) & set(_positional(layers[0])):
        got = f"a {type(layers[0]).__name__} without"
        raise ValueError(
            f"`model` must give its layers `{CACHE}` if reads take several tokens, because their "
            f"past is kept in it, got {got}"
        )


def _positional(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(module.forward).parameters)
