"""Packing: the arguments by which transformers and its collators mark documents in a sequence.

All of it becomes the `document_starts` of `ddl.models`; an argument that nothing here knows is
refused, since a batch whose documents see one another has a plausible loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.models.cache import begins_of
from ddl.models.tokens import on_host

# Cumulated lengths of documents, and the longest one, which some attention kernels have to know.
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
FOR_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


def for_loss(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the loss function's arguments out of `kwargs`, and return them."""
    return {name: kwargs.pop(name) for name in FOR_LOSS if name in kwargs}


def check_known(kwargs: dict[str, Any], *, packed: bool = True) -> None:
    """Raise TypeError for an argument that would have no effect.

    packed: whether the model keeps the documents of packed sequences apart.
    """
    for name, value in kwargs.items():
        if value is not None and not (packed and name in LENGTHS):
            raise TypeError(
                f"`{name}` must be left out, got one of type {type(value).__name__}: the model has "
                "no such argument"
            )


def mask_of_numbers(mask: Any) -> Any:
    """Convert a float mask of zeros and ones, as PEFT's prompts bring, to bool; leave others.

    The host reads it, also on a GPU: an additive mask of 0 and −∞ must not pass.
    """
    floating = isinstance(mask, Tensor) and mask.is_floating_point()
    return mask.bool() if floating and ((mask == 0) | (mask == 1)).all() else mask


def starts_of(
    given: Tensor,
    attention_mask: Tensor | None,
    continues: bool,
    *,
    document_starts: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return which tokens start a document, (B, T) bool; None if none does.

    given: the tokens (B, T) or embeddings (B, T, d). attention_mask: (B, T); other shapes are
        refused later. continues: True if a cache holds tokens before these.
    The rest: as in `DDLForCausalLM.forward`. A token starts a document if one of them marks it.
    Raises ValueError for positions that are not those of documents, or that come with a cache.
    """
    lengths = [ends for ends in (cu_seq_lens_q, cu_seq_lens_k) if ends is not None]
    if position_ids is None and seq_idx is None and not lengths:
        return document_starts
    if continues:
        raise ValueError(
            "`position_ids`, `seq_idx` and `cu_seq_lens_q` must be left out if the cache holds "
            "tokens, got one: positions go on from these, and `document_starts` begins a document"
        )
    mask = attention_mask
    if not isinstance(mask, Tensor) or mask.shape != given.shape[:2]:
        mask = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    mask = mask.bool()
    numbers = torch.arange(mask.shape[1], device=mask.device)
    latest = torch.where(mask, numbers, -1).cummax(-1).values
    before = F.pad(latest[:, :-1], (1, 0), value=-1)  # the last token before each one; −1 for none
    starts = torch.zeros_like(mask)
    if position_ids is not None:
        position_ids = position_ids.expand(mask.shape)
        _check_positions(position_ids, before, mask)
        starts = position_ids == 0
    documents = [] if seq_idx is None else [seq_idx.expand(mask.shape)]
    for ends in lengths:  # of all rows, one after the other
        tokens = torch.arange(mask.numel(), dtype=ends.dtype, device=mask.device)
        documents.append(torch.searchsorted(ends, tokens, right=True).view(mask.shape))
    for index in documents:
        starts = starts | (index != index.gather(1, before.clamp(min=0)))
    starts = starts & mask & (before >= 0)
    if document_starts is not None:
        return starts | document_starts
    return None if on_host(starts) and not starts.any() else starts


def check_documents(starts: Tensor | None, time: int, longest: int) -> None:
    """Raise ValueError for a document of more than `longest` tokens, in rows of `time` tokens.

    On a GPU nothing is read: there the lookup of its positions fails.
    """
    if time <= longest or not (starts is None or on_host(starts)):
        return
    most = time
    if starts is not None:
        numbers = torch.arange(time).expand_as(starts)
        most = 1 + int((numbers - begins_of(numbers, starts, None)).max())
    if most > longest:
        expected = f"documents of at most max_position_embeddings = {longest} tokens"
        raise ValueError(f"`input_ids` must have {expected}, got one of {most}")


def _check_positions(positions: Tensor, before: Tensor, mask: Tensor) -> None:
    """Raise ValueError for positions that neither are 0 nor follow that of the token before.

    A part of a sequence that several processes share has them, and its attention would miss the
    others. Except under compile they are read, also on a GPU.
    """
    earlier = positions.gather(1, before.clamp(min=0)).where(before >= 0, -1)
    strange = mask & (positions != 0) & (positions != earlier + 1)
    readable = type(strange) is Tensor and not strange.is_meta
    if readable and not torch.compiler.is_compiling() and strange.any():
        row, token = (int(number) for number in strange.nonzero()[0])
        where = "at the start" if before[row, token] < 0 else f"after {int(earlier[row, token])}"
        got = f"{int(positions[row, token])} {where}"
        raise ValueError(
            f"`position_ids` must start at 0 in each document and go up by one, got {got}"
        )


def unscored(labels: Tensor, document_starts: Tensor | None, loss: dict[str, Any]) -> Tensor:
    """Return the labels without each document's first token, and change `shift_labels` likewise."""
    if document_starts is None:
        return labels
    ignored = loss.get("ignore_index", -100)
    if loss.get("shift_labels") is not None:
        shifted = F.pad(document_starts[:, 1:], (0, 1))
        loss["shift_labels"] = loss["shift_labels"].masked_fill(shifted, ignored)
    return labels.masked_fill(document_starts, ignored)
