"""What the tasks in tests/lm_eval_tasks must score, from their files and from logits.

Nothing here knows lm-eval: prompts are put together by hand from the questions, log-likelihoods
are sums of log-softmax over `GPT.forward` of one example at a time, metrics are counted.
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
    """A benchmark with multiple choice: its questions, its worked examples, how they are asked."""

    test: str
    train: str
    contexts: Callable[[Doc], list[str]]  # what stands before each choice
    endings: Callable[[Doc], list[str]]  # what is scored after it
    choices: Callable[[Doc], list[str]]  # whose length normalises the score
    answer: Callable[[Doc], int]


def _lettered(doc: Doc) -> list[str]:
    return doc["choices"]["text"]


def _letter(doc: Doc) -> int:
    return doc["choices"]["label"].index(doc["answerKey"].strip())


def _wikihow(text: str) -> str:
    """A title begins a sentence, other marks in brackets go."""
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
    """One question before all choices, a space between."""
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
    """An example with its answer, as it stands before a question."""
    answer = form.answer(doc)
    return form.contexts(doc)[answer] + form.endings(doc)[answer] + "\n\n"


# --- scores ---------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def log_probabilities(model: GPT, tokens: Sequence[int]) -> torch.Tensor:
    """log p of every next token (T, vocab_size) in float64, from one pass over one example."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0]
    return logits.double().log_softmax(dim=-1)


def likelihood(model: GPT, context: str, ending: str) -> tuple[float, bool]:
    """log p(ending | context), and whether each of its tokens is the likeliest.

    The model reads the last block_size tokens; its last prediction is the last token.
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
    """Σ log p over a text of any length, every token scored once, after the token `prefix`.

    Windows of block_size predictions; the last one reaches back, so that it is full, too.
    """
    block, tokens = model.config.block_size, encode(text)
    before = [prefix, *tokens]  # before[i] is what stands before tokens[i]
    total = 0.0
    for start in range(0, len(tokens), block):
        end = min(start + block, len(tokens))
        first = max(0, end - block) if start else 0
        table = log_probabilities(model, before[first:end])
        total += sum(table[i - first, tokens[i]].item() for i in range(start, end))
    return total


def continuation(model: GPT, prompt: str, stops: Sequence[str], most: int) -> str:
    """The likeliest next token, `most` times, up to the first of the stop strings."""
    tokens = encode(prompt)[-(model.config.block_size - most) :]
    new: list[int] = []
    for _ in range(most):
        new.append(int(log_probabilities(model, tokens + new)[-1].argmax()))
    text = bytes(new).decode("utf-8", errors="replace")
    for stop in stops:
        text = text.split(stop)[0]
    return text


def best(scores: Sequence[float], lengths: Sequence[int]) -> int:
    """The choice with the largest score per unit of length; the first of equal ones."""
    return max(range(len(scores)), key=lambda i: scores[i] / lengths[i])


def multiple_choice(form: Format, doc: Doc, scores: Sequence[float]) -> dict[str, float]:
    """acc: the sum alone; acc_norm: per character; acc_bytes: per byte of UTF-8."""
    choices, answer = form.choices(doc), form.answer(doc)
    lengths = {
        "acc": [1] * len(choices),
        "acc_norm": [len(choice) for choice in choices],
        "acc_bytes": [len(encode(choice)) for choice in choices],
    }
    return {metric: float(best(scores, n) == answer) for metric, n in lengths.items()}


def perplexities(texts: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Of all texts as one: per word (split at white space), per byte, and in bits per byte."""
    words = sum(len(text.split()) for text in texts)
    size = sum(len(encode(text)) for text in texts)
    return {
        "word_perplexity": math.exp(-sum(scores) / words),
        "byte_perplexity": math.exp(-sum(scores) / size),
        "bits_per_byte": -sum(scores) / size / math.log(2),
    }
