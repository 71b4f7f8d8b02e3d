"""The weights that a run starts from, if `init_from` names some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ddl.errors import InputError
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.data import Corpus, GPT2Tokenizer, Tokenizer
from ddl.models import GPT
from ddl.models.tokenizers import describe, training_tokenizer

# `ddl.lab.load.load`, by a path; this room cannot import it.
Load = Callable[[str], tuple[GPT, Tokenizer | None]]
Weights = dict[str, Any]  # by the names of the model's state dict
PROBE = 4096  # validation tokens whose text two tokenizers have to encode alike
PADDED_GPT2 = 50304


def read_initial(config: TrainConfig, corpus: Corpus, load: Load | None) -> Weights | None:
    """Read the weights that `config.init_from` names; None if it names none.

    Raises InputError if they cannot be read, are of another model than `config.model`, or were
    trained on the tokens of another tokenizer than the corpus has.
    """
    if config.init_from is None:
        return None
    if load is None:
        raise InputError(
            "init_from",
            "be left out in a call without `load`",
            config.init_from,
            ("load",),
        )
    model, tokenizer = load(config.init_from)
    require_model(config.model, model.config, config.init_from)
    _require_tokens(config.init_from, model, tokenizer, corpus)
    return model.state_dict()


def require_model(given: GPTConfig, found: GPTConfig, source: str) -> None:
    """Raise InputError, which names the option, unless both are the same model's.

    `initial_weights` may differ: the weights are there.
    """
    for field in fields(GPTConfig):
        was, now = getattr(found, field.name), getattr(given, field.name)
        if was != now and field.name != "initial_weights":
            raise InputError(
                field.name,
                f"be {was!r}, as in {source}, whose weights the run starts from",
                repr(now),
            )


def _require_tokens(source: str, model: GPT, theirs: Tokenizer | None, corpus: Corpus) -> None:
    ours = corpus.tokenizer
    if theirs is None:
        padded = PADDED_GPT2 if isinstance(ours, GPT2Tokenizer) else ours.vocab_size
        if not ours.vocab_size <= model.config.vocab_size <= padded:
            raise InputError(
                "init_from",
                f"be a model with the {ours.vocab_size} tokens of {corpus.name}",
                f"{source} with {model.config.vocab_size} and without a tokenizer",
            )
    elif not _alike(training_tokenizer(theirs), ours, corpus):
        raise InputError(
            "init_from",
            (
                f"be a model with the tokenizer of {corpus.name}, {ours.kind} of {ours.vocab_size}"
                " tokens"
            ),
            f"{source} with another, {theirs.kind} of {theirs.vocab_size}",
        )


def _alike(theirs: Tokenizer, ours: Tokenizer, corpus: Corpus) -> bool:
    if _described(theirs) == _described(ours):
        return True
    if theirs.kind != "fast":  # a tokenizer of ours that was exported has to be compared by its use
        return False
    text = ours.decode(corpus.validation[:PROBE].tolist())
    return theirs.encode(text) == ours.encode(text) and all(
        theirs.decode([token]) == ours.decode([token]) for token in range(ours.vocab_size)
    )


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer but for what is not of its own tokens."""
    return describe(tokenizer) | {"document_token": None, "chat_template": None}
