"""The Transformer of Deep Delta Learning (arXiv 2601.00417), with a choice of residual.

    x = wte(idx);  h = trunk(x);  logits = h · wteᵀ

The trunk owns the residual stream and calls the sublayers attention, MLP, attention, MLP, … on its
normalised read; a mixer over time may take attention's place. Every residual has the same sublayers
and embedding, and with equal seeds they start with equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.nn.checks import require_own_forward
from ddl.nn.graph import GraphedStep, can_capture
from ddl.nn.mixers import DeltaMixer
from ddl.ops.checks import check_is_tensor
from ddl.options import check_count, is_whole

from . import published
from .cache import Cache
from .config import GPTConfig
from .sampling import Sampling
from .scaling import learning_rate_scales
from .sublayers import HIDDEN_STD_FACTOR, Attention, Rotary, SwiGLU, TimeMixer, wide
from .tokens import check_vocabulary
from .trunk import Trunk, hidden_states, make_trunk, read_out

EMBEDDING_STD = 0.02
IGNORE = -100  # cross_entropy's ignore_index


class GPTOutput(NamedTuple):
    """Output of `GPT`.

    logits: (B, T, vocab_size), in the dtype of the matrix products.
    loss: scalar, mean next-token cross-entropy in nats, float32 (float64 for a float64 model);
        None without labels.
    """

    logits: Tensor
    loss: Tensor | None


class GPT(nn.Module):
    """Decoder-only language model; `config.residual` selects additive or one of the DDL streams.

    To get a new model from the meta device, call `to_empty`, then `reset_parameters()`.
    """

    trunk: Trunk

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        sublayers = nn.ModuleList()
        for layer in range(config.num_layers):
            mixer = TimeMixer if layer in config.mixing_layers else Attention
            sublayers.extend((mixer(config, layer), SwiGLU(config)))
        # Before the trunk exists, so that equal seeds give equal backbones for every residual.
        self._reset_backbone(sublayers)
        self.trunk = make_trunk(config, sublayers)
        if config.initial_weights == "paper-code":
            published.draw_stream(self.trunk)

    def reset_parameters(self) -> None:
        """Draw all parameters anew: first the backbone, then the residual's."""
        self._reset_backbone(self.trunk.sublayers)
        self.trunk.reset_parameters()
        if self.config.initial_weights == "paper-code":
            published.draw_stream(self.trunk)

    @torch.no_grad()
    def _reset_backbone(self, sublayers: nn.ModuleList) -> None:
        """Initialise as in the paper or as in its code: embedding std 0.02, norms 1."""
        nn.init.normal_(self.wte.weight, std=EMBEDDING_STD)
        for name, module in sublayers.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self._std_of(name, module.weight))
            elif isinstance(module, nn.RMSNorm | Rotary | DeltaMixer):  # before what it contains
                module.reset_parameters()

    def _std_of(self, name: str, weight: Tensor) -> float:
        if self.config.initial_weights == "standard":
            return HIDDEN_STD_FACTOR / math.sqrt(self.config.hidden_size)
        leaves_the_sublayer = name.endswith("c_proj")
        return published.std_of(weight) / (self.config.num_layers if leaves_the_sublayer else 1)

    def forward(
        self,
        idx: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        document_starts: Tensor | None = None,
        last: int | None = None,
    ) -> GPTOutput:
        """Logits of the next token, and the loss if `labels` are given.

        Args:
            idx: (B, T) int64 or int32 tokens, T ≤ block_size.
            labels: (B, T) int64, usually `idx` itself. They are shifted here: position t is scored
                against labels[:, t + 1]. Labels of −100 are ignored.
            attention_mask: (B, T), 1 for tokens, 0 for padding; with a cache (B, cache.length + T),
                padded on the left. Results for tokens do not depend on the padding.
            cache: past tokens, which idx continues; idx is appended. None for whole sequences.
            document_starts: (B, T) bool, True for the first token of each document in sequences
                that hold several. Each document gets the logits that it would get alone, and its
                first token is not scored. Mark first tokens, not padding before them. Attention
                then takes a mask (B, 1, T, T). None for one document per sequence; with a cache,
                its last document goes on.
            last: return logits of only this many tokens at the end; None for all.

        Raises:
            TypeError: a dtype is wrong. ValueError: anything else does not fit.
        """
        self._check_idx(idx, longest=self.config.block_size)
        if labels is not None:
            self._check_tokens("labels", labels, (torch.int64,), besides=IGNORE)
            if labels.shape != idx.shape or idx.shape[1] < 2:
                expected = f"the shape of `idx`, {tuple(idx.shape)}, with at least 2 tokens"
                raise ValueError(f"`labels` must have {expected}, got {tuple(labels.shape)}")
        fits = last is None or (is_whole(last) and 1 <= last <= idx.shape[1] and labels is None)
        if not fits:
            expected = f"from 1 to {idx.shape[1]}, the tokens of `idx`, and without `labels`"
            raise ValueError(f"`last` must be {expected}, got {last!r}")
        h = self.hidden_states(
            self.wte(idx),
            attention_mask=attention_mask,
            cache=cache,
            document_starts=document_starts,
        )
        logits = self._logits(h if last is None else h[:, -last:])
        if labels is None:
            return GPTOutput(logits, None)
        if document_starts is not None:
            labels = labels.masked_fill(document_starts, IGNORE)
        # Shift the labels, not the logits: slicing the logits would copy all of them.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        loss = F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten(), ignore_index=IGNORE)
        return GPTOutput(logits, loss)

    def hidden_states(self, x: Tensor, **options: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the head's input (B, T, d).

        This is `forward` without embedding and head. options: `attention_mask`, `cache` and
        `document_starts`, as there.
        """
        return hidden_states(self.trunk, self.config, x, **options)

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last sublayer.

        For one value channel, and for the additive residual, the state is (B, T, d, 1).
        """
        return self._logits(read_out(self.trunk, self.config, state))

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        vocabulary: int | None = None,
        generator: torch.Generator | None = None,
        progress: Callable[[], object] | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by `max_new_tokens` sampled tokens → (B, T + max_new_tokens).

        The model sees the last block_size tokens. Up to that length a cache makes each new token
        cost one token; beyond it, each costs a whole block. Without attention it sees all tokens,
        and each new one costs one token, whatever the length. On a GPU these steps are one CUDA
        graph, unless a module has hooks or is compiled.

        temperature: 0 takes the likeliest token. top_k: sample among the k likeliest; None for all.
        top_p: sample among the fewest tokens that together have at least this probability, after
        temperature and top_k; None for all.
        vocabulary: sample among this many first tokens, those of the tokenizer; None for all of the
        model's, which may have more.
        generator: a CPU generator gives equal samples on every device for equal seeds; with None or
        the device's own generator, the host never waits for the device. progress: called after
        every token. Raises ValueError for a negative temperature, top_k < 1, top_p outside
        (0, 1] or an empty idx.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
            vocabulary=vocabulary,
        )
        check_count("max_new_tokens", max_new_tokens, least=0)
        self._check_idx(idx, longest=None)
        length, block, attends = idx.shape[1], self.config.block_size, self.config.attends
        out = F.pad(idx, (0, max_new_tokens))
        captured = can_capture(self, idx.device)
        cache: Cache | None = Cache(self.config, static=captured)
        *past, new = out[:, max(0, length - block) if attends else 0 : length].split(block, dim=1)
        for earlier in past:
            with torch.inference_mode():
                self(earlier, cache=cache, last=1)

        def last_logits(new: Tensor) -> Tensor:
            logits: Tensor = self(new, cache=cache, last=1).logits[:, -1]
            return logits

        graphed = GraphedStep(last_logits)
        for end in range(length, length + max_new_tokens):
            if attends and end > block:  # the window moves: all its tokens have others before them
                cache, new = None, out[:, end - block : end]
            # `out` was made outside inference mode, so that it may be used in a training step.
            with torch.inference_mode():
                single = captured and cache is not None and new.shape[1] == 1
                logits = (graphed if single else last_logits)(new)
                out[:, end : end + 1] = sampling.draw(logits)
            new = out[:, end : end + 1]
            if progress is not None:
                progress()
        return out

    def learning_rate_scales(self) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Factors of the parameters' learning rates and of Adam's ε; none if they are all 1."""
        return learning_rate_scales(self.config, self, GPT)

    def num_parameters(self) -> int:
        """Number of parameters; the tied head and embedding count once."""
        return sum(p.numel() for p in self.parameters())

    def _logits(self, h: Tensor) -> Tensor:
        # The tied head uses the embedding's parameter, so loading never has to tie them again.
        return F.linear(h, self._head())

    def _head(self) -> Tensor:
        """The embedding's weight; TypeError if it is not what the embedding computes with."""
        return require_own_forward("wte", self.wte, nn.Embedding).weight

    def _check_idx(self, idx: Any, *, longest: int | None) -> None:
        self._check_tokens("idx", idx, (torch.int64, torch.int32))
        if idx.ndim != 2 or idx.shape[1] < 1 or (longest is not None and idx.shape[1] > longest):
            most = "tokens" if longest is None else f"1 to block_size = {longest}"
            raise ValueError(f"`idx` must have shape (batch, {most}), got {tuple(idx.shape)}")

    def _check_tokens(
        self, name: str, tokens: Any, dtypes: tuple[torch.dtype, ...], besides: int | None = None
    ) -> None:
        """Raise TypeError or ValueError unless tokens are integers of these dtypes, on the model's
        device and in its vocabulary, or `besides`."""
        check_is_tensor(name, tokens)
        if tokens.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"`{name}` must have dtype {expected}, got {tokens.dtype}")
        device = self._head().device
        if tokens.device != device:
            raise ValueError(f"`{name}` must be on {device}, got a tensor on {tokens.device}")
        check_vocabulary(name, tokens, self.config.vocab_size, besides)
