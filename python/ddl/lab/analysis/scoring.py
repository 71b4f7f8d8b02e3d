"""The loss of runs on one text, for `ddl compare --data`: each with its own tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ddl.errors import InputError, listed, reason_of
from ddl.lab.config import GPTConfig
from ddl.lab.data.spelling import spelling
from ddl.lab.load import OURS, load
from ddl.lab.train.runs import LAST, RunDirectory
from ddl.models import GPT
from ddl.models.tokenizers import ByteTokenizer, Tokenizer, lost, training_tokenizer
from ddl.paths import is_run, path_kind

from .runs import Run

__all__ = ["Score", "mean_loss", "read_text", "score_run"]

MOST_WINDOWS = 64  # of one forward pass
MOST_LOGITS = 2**25  # numbers of one forward pass, 128 MiB
NAMED = 3  # characters that a sentence names

TokenArray = npt.NDArray[Any]  # (N,) integers
Advance = Callable[[int, int], object]  # called with windows done, and how many there are


class Score(NamedTuple):
    """The loss of a run's last checkpoint on a text.

    step: of the checkpoint; None for an exported model. loss: nats per predicted token. tokens:
    those that are predicted. bytes: of UTF-8 that these tokens spell, 0 if that cannot be known.
    """

    step: int | None
    loss: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / self.bytes / math.log(2) if self.bytes else None


def read_text(path: Path) -> str:
    """The text of a file; InputError if it is no regular file, not UTF-8 or empty."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("data", "be a UTF-8 text", f"{path}: {reason_of(error)}") from error
    if not text:
        raise InputError("data", "have at least two tokens", f"{path}, which is empty")
    return text


def score_run(run: Run, text: str, advance: Advance) -> tuple[Score, GPT]:
    """The score of a run, and its model in evaluation mode.

    Raises InputError, as the end of a sentence that begins with the run, if it has no model or no
    tokens for the text.
    """
    if path_kind(run.path) not in OURS:
        raise InputError.sentence("it is no model of ddl")
    step = _step(run.path)
    checkpoint = LAST if step is None else str(step)
    model, tokenizer = load(run.path, checkpoint=checkpoint, argument="runs")
    if not isinstance(model, GPT):
        raise InputError.sentence("it has nanoGPT's modules, which only `ddl eval` scores")
    if tokenizer is None:
        raise InputError.sentence("it has no tokenizer")
    tokenizer = training_tokenizer(tokenizer)
    tokens = encode(text, tokenizer)
    windows = places(len(tokens), model.config)
    mixed = run.config is not None and run.config.precision == "bfloat16"
    with precision(model, mixed=mixed):
        loss = mean_loss(model, tokens, windows, advance)
    predicted = sum(place.stop - place.start - 1 for place in windows)
    known = spelling(tokenizer)
    per_token = 0.0 if known is None else known.bytes_per_token(tokens, windows, apart=False)
    return Score(step, loss, predicted, round(per_token * predicted)), model


def encode(text: str, tokenizer: Tokenizer) -> TokenArray:
    """The tokens of a text; InputError for characters without a token, or for a single token."""
    tokens: TokenArray
    if isinstance(tokenizer, ByteTokenizer):
        tokens = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    else:
        if lacking := lost(text, tokenizer):
            named = listed(list(map(repr, dict.fromkeys(lacking))), NAMED)
            raise InputError.sentence(f"its tokenizer has no tokens for {named}")
        tokens = np.array(tokenizer.encode(text), dtype=np.int64)
    if len(tokens) < 2:
        raise InputError.sentence(
            f"the text has {len(tokens)} of its tokens, of which none is predicted"
        )
    return tokens


def places(count: int, config: GPTConfig) -> list[slice]:
    """Windows as in validation over `count` tokens: side by side, each of the model's length.

    What is left behind the last one is not scored. A shorter text is one window.
    """
    block = min(config.block_size, count)
    return [slice(start, start + block) for start in range(0, count - block + 1, block)]


@torch.no_grad()
def mean_loss(model: GPT, tokens: TokenArray, windows: Sequence[slice], advance: Advance) -> float:
    """The mean loss in nats over all predicted tokens: those of each window but its first."""
    device, total, done = model.wte.weight.device, 0.0, 0
    for group in _groups(windows, model.config):
        idx = torch.from_numpy(np.stack([tokens[place] for place in group]).astype(np.int64))
        loss = model(idx.to(device), labels=idx.to(device)).loss
        assert loss is not None
        total += float(loss) * len(group)  # all windows have equally many tokens
        done += len(group)
        advance(done, len(windows))
    return total / len(windows)


def _groups(windows: Sequence[slice], config: GPTConfig) -> Iterator[Sequence[slice]]:
    length = windows[0].stop - windows[0].start
    size = max(1, min(MOST_WINDOWS, MOST_LOGITS // (length * config.vocab_size)))
    return (windows[first : first + size] for first in range(0, len(windows), size))


@contextmanager
def precision(model: GPT, *, mixed: bool) -> Iterator[None]:
    """The arithmetic of a run's validation: with bfloat16, autocast, as it was trained."""
    device = model.wte.weight.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
        yield


def _step(path: Path) -> int | None:
    """The step of a run's last checkpoint; None without checkpoints."""
    if not is_run(path):
        return None
    found = RunDirectory(path).find_checkpoint(LAST)
    return None if found is None else int(found.name.rpartition("-")[2])
