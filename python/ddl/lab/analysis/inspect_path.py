"""`ddl inspect`: find the text, measure, draw, and show tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn

from ddl.errors import InputError, first_line, reason_of
from ddl.files import make_directory, write_text
from ddl.lab import data
from ddl.lab.config import InspectConfig
from ddl.lab.data.verifying import verify_corpus
from ddl.lab.load import load_or_decoder
from ddl.lab.progress import passing_bar
from ddl.lab.train.runs import INSPECTED, RunDirectory, load_config
from ddl.models.tokenizers import Tokenizer, encode_prompt, training_tokenizer
from ddl.nanogpt.annealing import Annealing
from ddl.paths import is_run
from ddl.recording import Lens, lens
from ddl.recording.sublayers import has_rewrites

from .heat_maps import draw_depth, draw_training
from .inspection import FILE, Inspection, inspect

DEPTH, TRAINING = "depth.png", "training.png"
TOP = 3  # tokens that the lens shows


class Inspected(NamedTuple):
    """Findings of `ddl inspect`. lens: None without a prompt. files: what was written."""

    inspection: Inspection
    lens: Lens | None
    tokenizer: Tokenizer | None
    summary: dict[str, Any]
    files: list[Path]


def inspect_path(config: InspectConfig, console: Console) -> Inspected:
    """Load the model, measure it and write pictures and JSON.

    Raises InputError if path, text or prompt cannot be used.
    """
    model, tokenizer = load_or_decoder(
        config.run, config.device, checkpoint=config.checkpoint, argument="run"
    )
    model = model.float()
    _require_stream(model, config.run)
    prompt = None if config.prompt is None else _encoded(config.prompt, tokenizer, model)
    tokens, source = _text(config, training_tokenizer(tokenizer), model, console)
    windows = _windows(tokens, config.tokens, model)
    with passing_bar(console, MofNCompleteColumn()) as bar:
        task = bar.add_task("measuring", total=len(windows))
        inspection = inspect(model, windows, progress=lambda: bar.advance(task))
    read = None if prompt is None else lens(model, prompt, top=TOP)
    summary = {"model": str(config.run), "text": source, **inspection.summary()}
    if read is not None and tokenizer is not None:
        summary["lens"] = _lens_summary(read, tokenizer)
    return Inspected(inspection, read, tokenizer, summary, _write(config, inspection, summary))


def _require_stream(model: Any, path: Path) -> None:
    try:
        has_rewrites(model)
    except ValueError as error:
        got = f"{path}, nanoGPT's model without them: `ddl eval` scores it"
        raise InputError(
            "run", "be a model with rewrites, or one that `ddl train` made", got
        ) from error
    if any(isinstance(module, Annealing) and not module.done for module in model.modules()):
        got = f"{path}, part of whose additions are additions yet"
        raise InputError("run", "be a model whose additions are all rewrites", got)


def _context(model: Any) -> int:
    """The most tokens that a model reads."""
    config = model.config
    return int(getattr(config, "block_size", None) or config.max_position_embeddings)


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _write(config: InspectConfig, inspection: Inspection, summary: dict[str, Any]) -> list[Path]:
    run = config.run
    out = config.out
    if out is None:
        out = run / INSPECTED if run.is_dir() else run.with_name(f"{run.stem}-{INSPECTED}")
    make_directory(out)
    draw_depth(inspection, out / DEPTH)
    write_text(out / FILE, json.dumps(summary, indent=1))
    written = [out / DEPTH, out / FILE]
    recordings = RunDirectory(config.run).recordings.read() if is_run(config.run) else []
    if recordings:
        try:
            draw_training(recordings, out / TRAINING)
        except ValueError as error:
            got = f"{RunDirectory(config.run).recordings.path}: {first_line(error)}"
            raise InputError("run", "have recordings of `ddl train`", got) from error
        written.append(out / TRAINING)
    return written


# --- the text -------------------------------------------------------------------------------------


def _text(
    config: InspectConfig, tokenizer: Tokenizer | None, model: Any, console: Console
) -> tuple[Any, str]:
    """Tokens to measure on, and their name."""
    if config.data is not None and not config.data.is_dir():
        return _encoded_file(config.data, tokenizer), str(config.data)
    source: Any = config.data
    validation = None
    if source is None and is_run(config.run):
        trained = load_config(config.run)
        source, validation = trained.data, trained.validation
    elif source is None:
        source = data.EMBEDDED
    if str(source) == data.EMBEDDED and not isinstance(tokenizer, data.ByteTokenizer):
        text, name = data.embedded_text().decode(), "Python's documentation"
        return np.array(_tokens(text, tokenizer, f"nothing, which means {name},")), name
    corpus = data.load_with(source, validation)
    corpus.check(_context(model), model.config.vocab_size)
    verify_corpus(corpus, console)
    return corpus.validation, corpus.validated_on or f"the held-out part of {corpus.name}"


def _encoded_file(path: Path, tokenizer: Tokenizer | None) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path}: {reason_of(error)}"
        raise InputError("data", "be a UTF-8 text or a directory", got) from error
    tokens = np.array(_tokens(text, tokenizer, str(path)), dtype=np.int64)
    if len(tokens) == 0:
        raise InputError("data", "have at least one token", f"{path} without")
    return tokens


def _tokens(text: str, tokenizer: Tokenizer | None, name: str) -> list[int]:
    """The tokens of `--data`, which `name` names in a refusal."""
    try:
        return _needed(tokenizer).encode(text)
    except InputError as error:
        if error.argument != "text":
            raise
        raise InputError("data", error.expected, f"{name} with {error.got}") from error


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InputError("run", "have a tokenizer to encode a text", "one without")
    return tokenizer


def _encoded(prompt: str, tokenizer: Tokenizer | None, model: Any) -> torch.Tensor:
    tokens = encode_prompt(prompt, _needed(tokenizer))
    return torch.tensor([tokens[-_context(model) :]], device=_device(model))


def _windows(tokens: Any, wanted: int, model: Any) -> list[torch.Tensor]:
    """Windows (1, T), spread evenly over the text: at least one, and `wanted` tokens or fewer."""
    block = min(_context(model), wanted, len(tokens))
    count = max(1, wanted // block)
    batches = data.evaluation_batches(tokens, 1, block, count)
    return [windows.tokens.to(_device(model)) for windows in batches]


def _lens_summary(read: Lens, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The lens after the prompt's last token, as JSON's values."""
    return [
        {
            "after": name,
            "tokens": [tokenizer.decode([t]) for t in read.tokens[row, 0, -1].tolist()],
            "probabilities": read.probabilities[row, 0, -1].tolist(),
            "channels": [
                [tokenizer.decode([t]) for t in alone.tolist()]
                for alone in read.channel_tokens[row, :, 0, -1]
            ],
        }
        for row, name in enumerate(read.sublayers)
    ]
