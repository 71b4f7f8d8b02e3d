"""Reference scores of the tasks in lm_eval_tasks, computed from their files and from logits.

Nothing here uses lm-eval. Prompts are built from the questions by hand, log-likelihoods are sums of
log-softmax over `GPT.forward` of one example at a time, and metrics are counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddl.models import GPT

TASKS = Path(__file__).parent / "lm_eval_tasks"
Doc = dict[str, Any]


def docs(name: str) -> list[Doc]:
    text = (TASKS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# --- prompts --------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A multiple-choice benchmark: its questions, its few-shot examples and its prompt format."""

    test: str
    train: str
    contexts: Callable[[Doc], list[str]]  # the prompt before each choice
    endings: Callable[[Doc], list[str]]  # the scored text after it
    choices: Callable[[Doc], list[str]]  # their lengths normalise the scores
    answer: Callable[[Doc], int]


def _lettered(doc: Doc) -> list[str]:
    return doc["choices"]["text"]


def _letter(doc: Doc) -> int:
    return doc["choices"]["label"].index(doc["answerKey"].strip())


def _wikihow(text: str) -> str:
    """Turn a [title] mark into the start of a sentence; remove other bracketed marks."""
    text = text.strip().replace(" [title]", ". ")
    while "[" in text:
        text = text[: text.index("[")] + text[text.index("]") + 1 :]
    return text.replace("  ", " ")


def _activity(doc: Doc) -> str:
    return _wikihow(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}")


def _filled(doc: Doc) -> list[str]:
    return [doc["sentence"].split("_")[0] + doc[option] for option in ("option1", "option2")]


def _plain(
    question: Callable[[Doc], str], choices: Callable[[Doc], list[str]]
) -> tuple[Callable[[Doc], list[str]], ...]:
    """Ask the same question before every choice, separated by a space."""
    return (
        lambda doc: [question(doc)] * len(choices(doc)),
        lambda doc: [f" {choice}" for choice in choices(doc)],
        choices,
    )


FORMATS = {
    "arc": Format(
        "arc_test",
        "arc_train",
        *_plain(lambda d: f"Question: {d['question']}\nAnswer:", _lettered),
        _letter,
    ),
    "hellaswag": Format(
        "hellaswag_validation",
        "hellaswag_train",
        *_plain(_activity, lambda d: [_wikihow(ending) for ending in d["endings"]]),
        lambda d: int(d["label"]),
    ),
    "openbookqa": Format(
        "openbookqa_test",
        "openbookqa_train",
        *_plain(lambda d: d["question_stem"], _lettered),
        _letter,
    ),
    "piqa": Format(
        "piqa_validation",
        "piqa_train",
        *_plain(lambda d: f"Question: {d['goal']}\nAnswer:", lambda d: [d["sol1"], d["sol2"]]),
        lambda d: d["label"],
    ),
    "sciq": Format(
        "sciq_test",
        "sciq_train",
        *_plain(
            lambda d: f"{d['support'].lstrip()}\nQuestion: {d['question']}\nAnswer:",
            lambda d: [d[f"distractor{n}"] for n in (1, 2, 3)] + [d["correct_answer"]],
        ),
        lambda d: 3,
    ),
    "social_iqa": Format(
        "social_iqa_validation",
        "social_iqa_train",
        *_plain(
            lambda d: f"Q: {d['context']} {d['question']}\nA:",
            lambda d: [d["answerA"], d["answerB"], d["answerC"]],
        ),
        lambda d: int(d["label"]) - 1,
    ),
    "winogrande": Format(
        "winogrande_validation",
        "winogrande_train",
        _filled,
        lambda d: [" " + d["sentence"].split("_")[1].strip()] * 2,
        _filled,
        lambda d: int(d["answer"]) - 1,
    ),
}


def worked(form: Format, doc: Doc) -> str:
    """Format a few-shot example with its answer."""
    answer = form.answer(doc)
    return form.contexts(doc)[answer] + form.endings(doc)[answer] + "\n\n"


# --- scores ---------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def log_probabilities(model: GPT, tokens: Sequence[int]) -> torch.Tensor:
    """log p of every next token (T, vocab_size) in float64, from a forward pass of one example."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0]
    return logits.double().log_softmax(dim=-1)


def likelihood(model: GPT, context: str, ending: str) -> tuple[float, bool]:
    """Return log p(ending | context), and whether greedy decoding gives the ending.

    The model reads at most block_size tokens, and its last prediction is the last token.
    """
    scored = len(encode(ending))
    window = encode(context + ending)[-(model.config.block_size + 1) :]
    table = log_probabilities(model, window[:-1])
    total, greedy = 0.0, True
    for position in range(len(window) - 1 - scored, len(window) - 1):
        total += table[position, window[position + 1]].item()
        greedy &= int(table[position].argmax()) == window[position + 1]
    return total, greedy


def rolling(model: GPT, text: str, prefix: int) -> float:
    """Return Σ log p over a text of any length, every token scored once, after the token `prefix`.

    Windows have block_size predictions; the last one starts earlier, so that it is also full.
    """
    block, tokens = model.config.block_size, encode(text)
    before = [prefix, *tokens]  # before[i] precedes tokens[i]
    total = 0.0
    for start in range(0, len(tokens), block):
        end = min(start + block, len(tokens))
        first = max(0, end - block) if start else 0
        table = log_probabilities(model, before[first:end])
        total += sum(table[i - first, tokens[i]].item() for i in range(start, end))
    return total


def continuation(model: GPT, prompt: str, stops: Sequence[str], most: int) -> str:
    """Decode `most` tokens greedily and cut the text at the first stop string."""
    tokens = encode(prompt)[-(model.config.block_size - most) :]
    new: list[int] = []
    for _ in range(most):
        new.append(int(log_probabilities(model, tokens + new)[-1].argmax()))
    text = bytes(new).decode("utf-8", errors="replace")
    for stop in stops:
        text = text.split(stop)[0]
    return text


def best(scores: Sequence[float], lengths: Sequence[int]) -> int:
    """Return the choice with the largest score per unit of length; of equals, the first."""
    return max(range(len(scores)), key=lambda i: scores[i] / lengths[i])


def multiple_choice(form: Format, doc: Doc, scores: Sequence[float]) -> dict[str, float]:
    """Return acc (unnormalised), acc_norm (per character) and acc_bytes (per UTF-8 byte)."""
    choices, answer = form.choices(doc), form.answer(doc)
    lengths = {
        "acc": [1] * len(choices),
        "acc_norm": [len(choice) for choice in choices],
        "acc_bytes": [len(encode(choice)) for choice in choices],
    }
    return {metric: float(best(scores, n) == answer) for metric, n in lengths.items()}


def perplexities(texts: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Perplexity of all texts as one, per white-space word and per byte, and bits per byte."""
    words = sum(len(text.split()) for text in texts)
    size = sum(len(encode(text)) for text in texts)
    return {
        "word_perplexity": math.exp(-sum(scores) / words),
        "byte_perplexity": math.exp(-sum(scores) / size),
        "bits_per_byte": -sum(scores) / size / math.log(2),
    }
