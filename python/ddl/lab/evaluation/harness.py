"""Harness: an lm-evaluation-harness adapter around a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]

from ddl.errors import InputError
from ddl.hf.tokenization import BEFORE

# Most logits per batch for `auto` on a CPU, where no error reports that memory runs out. 2²⁸
# numbers are 1 GiB in float32, and lm-eval also holds their log-softmax.
LOGITS_ON_CPU = 2**28
MOST_SEQUENCES = 64


class Harness(HFLM):
    """lm-eval's HFLM adapter; it also counts truncated requests and refuses unscorable ones.

    The name of a special token in a benchmark's text is words, unless a chat template was applied,
    which writes such names to mean the tokens.

    requests: number so far; each window of a long text's rolling perplexity counts as one.
    truncated: number of requests longer than the model's context, of which only the end was read.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int | str) -> None:
        self._before: int | None = tokenizer.init_kwargs.get(BEFORE)
        if self._before is not None:
            # Without padding, lm-eval would add a token that the model lacks. Masks hide this one.
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token_id = self._before
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            prefix_token_id=self._before,
            softmax_dtype="float32",  # in bfloat16 scores are rounded so coarsely that answers tie
            logits_cache=False,  # it scores wrong tokens where two windows of a text are equal
        )
        self.max_batch_size = MOST_SEQUENCES
        if model.device.type == "cpu":
            one = self.max_length * int(model.config.vocab_size)
            self.max_batch_size = max(1, min(MOST_SEQUENCES, LOGITS_ON_CPU // one))
        known = set(tokenizer.get_vocab().values())
        # As `ddl sample`: rows that pad the vocabulary have no text, and decoding would drop them.
        model.generation_config.suppress_tokens = [
            token for token in range(int(model.config.vocab_size)) if token not in known
        ] or None
        self.requests = 0
        self.truncated = 0
        self._words = True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """For a text only: the end of text as a stop string is the token."""
        before = self.tokenizer.split_special_tokens
        self.tokenizer.split_special_tokens = self._words
        try:
            yield
        finally:
            self.tokenizer.split_special_tokens = before

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        self._words = False
        return str(super().apply_chat_template(*args, **options))

    def tok_decode(self, tokens: Any, **options: Any) -> Any:
        """Decode; None, the end of text of a tokenizer without one, is no stop string."""
        return None if tokens is None else super().tok_decode(tokens, **options)

    def loglikelihood(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        """Score texts; one without context comes after the prefix token, and is scored whole.

        lm-eval leaves its first token out if that is the prefix token, which may be text here.
        """
        if self._before is None:
            return list(super().loglikelihood(requests, **options))
        pairs = []
        for context, text in (request.args for request in requests):
            if context == "":
                tokens = [self.prefix_token_id], self.tok_encode(text, add_special_tokens=False)
            else:
                tokens = self._encode_pair(context, text)
            pairs.append(((context, text), *tokens))
        return self._loglikelihood_tokens(pairs, **options)

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        try:
            with self._reading():
                return list(super().tok_encode(string, *args, **options))
        except Exception as error:  # tokenizers raises plain Exceptions
            if "[UNK]" not in str(error):  # "[UNK]" means a character that the table lacks
                raise
            known = self.tokenizer.get_vocab()
            unknown = next((character for character in string if character not in known), string)
            raise InputError(
                "tasks",
                f"be in the {len(known)} characters that the model was trained on",
                f"{unknown!r}: a task of your own, in the folder of --include-path, can be",
            ) from error

    def tok_batch_encode(self, *args: Any, **options: Any) -> Any:
        with self._reading():
            return super().tok_batch_encode(*args, **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if not context or not continuation:
                raise InputError("tasks", "have texts with tokens in them", texts)
            if len(continuation) > self.max_length:
                raise InputError(
                    "tasks",
                    f"have answers that fit the model's context of {self.max_length} tokens",
                    f"one of {len(continuation)}",
                )
            self.requests += 1
            self.truncated += len(context) + len(continuation) > self.max_length + 1
        return list(super()._loglikelihood_tokens(requests, **options))

    def generate_until(self, requests: Any, **options: Any) -> list[str]:
        for request in requests:
            context, arguments = request.args
            new = normalize_gen_kwargs(arguments, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise InputError(
                    "tasks",
                    f"ask for fewer new tokens than the model's context of {self.max_length}",
                    f"{new} from {request.task_name}",
                )
            self.requests += 1
            self.truncated += len(self.tok_encode(context)) > self.max_length - new
        return list(super().generate_until(requests, **options))
