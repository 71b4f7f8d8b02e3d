"""Compare scores of lm-evaluation-harness with an independent computation from logits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerances import TOLERANCES

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from ddl.errors import InputError
from ddl.hf import from_gpt, to_fast
from ddl.lab.evaluation import tables
from ddl.lab.evaluation.harness import Harness
from ddl.models import GPT
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer
from tests.support.eval_cases import datasets_in, harness, make, results
from tests.support.eval_reference import (
    FORMATS,
    Doc,
    Format,
    continuation,
    docs,
    encode,
    likelihood,
    multiple_choice,
    perplexities,
    rolling,
    worked,
)

FLOAT32 = TOLERANCES[torch.float32]
CLOSE = FLOAT32.max_forward * FLOAT32.u
ALL = [f"local_{name}" for name in (*FORMATS, "rolling", "generate")]
STOPS, NEW_TOKENS = ("\n", "."), 12  # of tests/lm_eval_tasks/generate.yaml
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("ddl-cc", 0, {}),
    ("ddl-cc", 1, {}),
    ("ddl-tc", 1, {"rewrites": 2, "direction_rank": 4}),
    ("ddl", 0, {}),
    ("additive", 1, {}),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]}-shot")
def case(request: pytest.FixtureRequest) -> tuple[GPT, int, dict[str, Any]]:
    """Return a model, the number of worked examples, and lm-eval's results for all tasks."""
    residual, shots, options = request.param
    model = make(residual, **options)
    return model, shots, results(harness(model), ALL, shots)


def in_order(run: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return sorted(run["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])


def responses(sample: dict[str, Any]) -> list[Any]:
    return [response for (response,) in sample["resps"]]


def assert_same_score(got: float, expected: float, text: str) -> None:
    """Compare two log-probabilities of `text`, whose tokens are bytes.

    A log-probability is the difference of a logit and a logarithm of sums, both of the order of 1
    or more. So its rounding is absolute, and stays as large if the probability comes near 1.
    """
    allowed = CLOSE * max(len(encode(text)), abs(expected))
    assert abs(got - expected) <= allowed, (got, expected, allowed)


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.table(1)
@pytest.mark.parametrize("name", FORMATS)
def test_multiple_choice(case: tuple[GPT, int, dict[str, Any]], name: str) -> None:
    model, shots, run = case
    form, rows = FORMATS[name], []
    for sample, doc in zip(in_order(run, name), docs(FORMATS[name].test), strict=True):
        assert sample["arguments"] in prompts(form, doc, shots)
        expected = [likelihood(model, *request) for request in sample["arguments"]]
        found = zip(responses(sample), expected, sample["arguments"], strict=True)
        for (got, greedy), (total, likeliest), (_, ending) in found:
            assert_same_score(got, total, ending)
            assert greedy == likeliest
        by_hand = multiple_choice(form, doc, [total for total, _ in expected])
        rows.append({metric: by_hand[metric] for metric in sample["metrics"]})
        assert rows[-1] == {metric: sample[metric] for metric in sample["metrics"]}
    for metric in rows[0]:
        mean = sum(row[metric] for row in rows) / len(rows)
        assert math.isclose(run["results"][f"local_{name}"][f"{metric},none"], mean)
    assert run["n-shot"][f"local_{name}"] == shots


def prompts(form: Format, doc: Doc, shots: int) -> list[list[tuple[str, str]]]:
    """Contexts and endings, preceded by each possible worked example if there is one."""
    examples = [worked(form, example) for example in docs(form.train)] if shots else [""]
    pairs = list(zip(form.contexts(doc), form.endings(doc), strict=True))
    return [[(example + context, ending) for context, ending in pairs] for example in examples]


def test_rolling_perplexity(case: tuple[GPT, int, dict[str, Any]]) -> None:
    """Texts are shorter than the context, or longer by one window and by several."""
    model, _, run = case
    texts = [doc["text"] for doc in docs("rolling_test")]
    assert max(len(encode(text)) for text in texts) > 2 * model.config.block_size
    prefix = harness(model).prefix_token_id
    scores = [rolling(model, text, prefix) for text in texts]
    for sample, score, text in zip(in_order(run, "rolling"), scores, texts, strict=True):
        assert_same_score(*responses(sample), score, text)
    for metric, value in perplexities(texts, scores).items():
        got = run["results"]["local_rolling"][f"{metric},none"]
        assert math.isclose(got, value, rel_tol=100 * CLOSE)  # an exponential of a mean of ~100


def test_generated_text(case: tuple[GPT, int, dict[str, Any]]) -> None:
    """Generation is greedy, in batches padded on the left, up to the stop strings."""
    model, shots, run = case
    matches = []
    for sample, doc in zip(in_order(run, "generate"), docs("generate_test"), strict=True):
        ((prompt, _),) = sample["arguments"]
        assert prompt.endswith(doc["prompt"])
        assert (prompt == doc["prompt"]) == (shots == 0)
        text = continuation(model, prompt, STOPS, NEW_TOKENS)
        assert responses(sample) == [text]
        matches.append(float(text == doc["completion"]))
    got = run["results"]["local_generate"]["exact_match,none"]
    assert math.isclose(got, sum(matches) / len(matches))


@pytest.fixture(scope="module")
def trained() -> GPT:
    """A model that has memorised the sentences of generate_test.jsonl."""
    model = make("ddl-cc").train()
    texts = [doc["prompt"] + doc["completion"] + "." for doc in docs("generate_test")]
    rows = [encode(text)[-model.config.block_size :] for text in texts]
    length = max(map(len, rows))
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(labels.clamp(min=0), labels).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.2
    return model.eval()


def test_a_match_is_counted(trained: GPT) -> None:
    right = [
        continuation(trained, doc["prompt"], STOPS, NEW_TOKENS) == doc["completion"]
        for doc in docs("generate_test")
    ]
    assert sum(right) >= 4
    run = results(harness(trained), ["local_generate"])
    assert [sample["exact_match"] for sample in in_order(run, "generate")] == right


@pytest.mark.parametrize("ending", ["p", "purple"])
def test_the_likeliest_ending_is_greedy(trained: GPT, ending: str) -> None:
    """Test one token and several, for which lm-eval has different code."""
    context, ending = "Red and blue make", f" {ending}"
    wrong = ending[:-1] + "x"
    requests = [
        Instance("loglikelihood", {}, pair, 0)
        for pair in ((context, ending), (context, wrong), ("", ending))
    ]
    subject = harness(trained)
    right, other, alone = subject.loglikelihood(requests)
    assert right[1]
    assert not other[1]
    assert_same_score(right[0], likelihood(trained, context, ending)[0], ending)
    assert_same_score(other[0], likelihood(trained, context, wrong)[0], wrong)
    # The prefix token comes before an ending without a context.
    assert_same_score(alone[0], rolling(trained, ending, subject.prefix_token_id), ending)


# --- batches, and contexts that are too long ------------------------------------------------------


@pytest.fixture(scope="module")
def one_by_one() -> dict[str, Any]:
    return results(harness(make("ddl-tc"), 1), ALL)


@pytest.mark.table(0)
@pytest.mark.parametrize("batch_size", ["auto", 4])
def test_batch_size_changes_nothing(
    one_by_one: dict[str, Any], batch_size: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ddl-tc reads over time, so padding must not reach a text in a batch.

    On a CPU, where no error reports that memory runs out, the size of the logits bounds `auto`.
    """
    monkeypatch.setattr("ddl.lab.evaluation.harness.LOGITS_ON_CPU", 6 * 96 * 256 + 1)
    subject = harness(make("ddl-tc"), batch_size)
    assert subject.max_batch_size == 6
    run = results(subject, ALL)
    for name in (name.removeprefix("local_") for name in ALL):
        for a, b in zip(in_order(one_by_one, name), in_order(run, name), strict=True):
            assert a["arguments"] == b["arguments"]
            for one, other, given in zip(responses(a), responses(b), a["arguments"], strict=True):
                if name == "generate":
                    assert one == other
                    continue
                score, others = (r if name == "rolling" else r[0] for r in (one, other))
                assert_same_score(score, others, given[-1])
    for name, metrics in one_by_one["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert math.isclose(run["results"][name][metric], value, rel_tol=100 * CLOSE)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_repeated_text(batch_size: int) -> None:
    """The last window of a text has the tokens of an earlier one, of which it scores a part."""
    model, text = make("ddl-cc"), "ab" * 150
    subject = harness(model, batch_size)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (got,) = subject.loglikelihood_rolling([request])
    assert_same_score(got, rolling(model, text, subject.prefix_token_id), text)


def test_scores_of_a_bfloat16_model_do_not_tie() -> None:
    """Its logits are bfloat16, their softmax is float32."""
    form, model = FORMATS["sciq"], from_gpt(make("ddl-cc")).bfloat16()
    pairs = [
        pair
        for doc in docs(form.test)
        for pair in zip(form.contexts(doc), form.endings(doc), strict=True)
    ]
    subject = Harness(model, to_fast(ByteTokenizer(), model.config), 1)
    found = subject.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert len({score for score, _ in found}) == len(pairs)
    for (got, _), (context, ending) in zip(found, pairs, strict=True):
        window = encode(context + ending)[-97:]
        with torch.no_grad():
            table = model(torch.tensor([window[:-1]])).logits[0].float().log_softmax(dim=-1)
        scored = table.gather(1, torch.tensor(window[1:])[:, None])[-len(encode(ending)) :]
        assert_same_score(got, scored.double().sum().item(), ending)


@pytest.mark.parametrize("more", [0, 1])
def test_the_context_of_the_model_is_used_and_no_more(more: int) -> None:
    """Truncated requests are counted; another test checks that their end is scored.

    A request may have one token more than the context, because its last token is only predicted.
    """
    form = FORMATS["sciq"]
    lengths = sorted(
        len(encode(context + ending))
        for doc in docs(form.test)
        for context, ending in zip(form.contexts(doc), form.endings(doc), strict=True)
    )
    longest_that_fits = lengths[len(lengths) // 2]
    subject = harness(make("additive", block_size=longest_that_fits - 1 - more))
    assert subject.max_length == longest_that_fits - 1 - more
    run = results(subject, ["local_sciq"])
    too_long = sum(length > longest_that_fits - more for length in lengths)
    assert (run["truncated"], run["requests"]) == (too_long, len(lengths))


@pytest.mark.parametrize("more", [0, 1])
def test_truncated_prompts_are_counted(more: int) -> None:
    """A prompt is truncated to leave room for the new tokens."""
    lengths = [len(encode(doc["prompt"])) for doc in docs("generate_test")]
    model = make("additive", block_size=max(lengths) + NEW_TOKENS - more)
    run = results(harness(model), ["local_generate"])
    assert (run["truncated"], run["requests"]) == (more, len(lengths))


def test_an_answer_that_cannot_fit_is_refused() -> None:
    first = FORMATS["piqa"].endings(docs("piqa_validation")[0])[0]
    sentence = (
        "`tasks` must have answers that fit the model's context of 16 tokens,"
        f" got one of {len(encode(first))}"
    )
    with pytest.raises(InputError, match=f"^{sentence}$"):
        results(harness(make("additive", block_size=16)), ["local_piqa"])


def test_more_new_tokens_than_fit_are_refused() -> None:
    sentence = (
        "`tasks` must ask for fewer new tokens than the model's context of 12,"
        " got 12 from local_generate"
    )
    with pytest.raises(InputError, match=f"^{sentence}$"):
        results(harness(make("additive", block_size=12)), ["local_generate"])


def test_too_few_examples_for_the_shots() -> None:
    with pytest.raises(InputError, match=r"^`num_fewshot` must be at most as many as .* got 9: "):
        results(harness(make("additive")), ["local_arc"], 9)


def test_a_limit_takes_the_first_examples() -> None:
    run = results(harness(make("additive")), ["local_arc"], limit=2)
    assert [sample["doc"]["id"] for sample in in_order(run, "arc")] == ["a1", "a2"]
    assert run["n-samples"]["local_arc"] == {"original": 7, "effective": 2}


def test_groups_have_a_table_of_their_own() -> None:
    run = results(harness(make("additive")), ["local_science"])
    arc, sciq = (run["results"][f"local_{name}"] for name in ("arc", "sciq"))
    mean = (
        7 * arc["acc_norm,none"] + 6 * sciq["acc_norm,none"]
    ) / 13  # weighted by the number of examples
    assert 0 < mean < 1
    assert math.isclose(run["groups"]["local_science"]["acc_norm,none"], mean)
    model = {"path": "x", "parameters": 1, "context": 96}
    printed = tables({"model": model, "limit": None, "runs": [run]})
    assert printed.count("local_science") == 2
    assert re.search(rf"Groups .*\n.*\n\|local_science\|.*\|acc_norm\|↑ +\|{mean:.4f}\|", printed)


def test_a_task_twice() -> None:
    with pytest.raises(InputError, match=r"^`tasks` must have each task once, got .*local_arc"):
        results(harness(make("additive")), ["local_science", "local_arc"])


# --- tokens ---------------------------------------------------------------------------------------


def test_characters_that_the_model_does_not_know() -> None:
    texts = (f"{text}\n" for doc in docs("piqa_validation") for text in all_text(doc))
    table = sorted({character for text in texts for character in text} - {"?"})
    model = make("additive", vocab_size=len(table))
    subject = Harness(from_gpt(model), to_fast(CharTokenizer(table), model.config), 4)
    expected = r"^`tasks` must be in the \d+ characters that the model was trained on, got '\?': "
    with pytest.raises(InputError, match=expected):
        results(subject, ["local_piqa"])


def all_text(doc: Doc) -> list[str]:
    return FORMATS["piqa"].contexts(doc) + FORMATS["piqa"].endings(doc)


@pytest.mark.parametrize("chat", [False, True])
def test_the_name_of_a_special_token_in_a_text(chat: bool) -> None:
    """It is words in a benchmark's text, and the token in the text that a chat template wrote."""
    model = make("additive", vocab_size=257)
    fast = to_fast(ByteTokenizer(), model.config)
    fast.chat_template = "{{ messages[0].content }}<|endoftext|>"
    subject = Harness(from_gpt(model), fast, 1)
    text = "ab<|endoftext|>"
    if chat:
        assert subject.apply_chat_template([{"role": "user", "content": "ab"}]) == text
    expected = [*b"ab", 256] if chat else list(text.encode())
    assert subject.tok_encode(text) == expected
    assert subject.tok_batch_encode([text])[0].tolist() == [expected]
    assert fast(text).input_ids == [*b"ab", 256]  # lm-eval encodes stop strings so


# --- a model without an end of text ---------------------------------------------------------------

TABLE = "abc \n"


def characters() -> tuple[GPT, Harness]:
    model = make("ddl-cc", vocab_size=len(TABLE), block_size=48)
    return model, Harness(from_gpt(model), to_fast(CharTokenizer(TABLE), model.config), 2)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


def test_no_character_of_a_full_table_ends_a_generation() -> None:
    model, adapter = characters()
    options = {"until": [], "max_gen_toks": 30, "do_sample": False}
    prompts = ("a b\nc", "cab")  # of two lengths, so that one is padded
    found = adapter.generate_until(requests("generate_until", *((p, options) for p in prompts)))
    tokenizer = CharTokenizer(TABLE)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        expected = tokenizer.decode(model.generate(ids, 30, temperature=0)[0].tolist())
        assert prompt + text == expected
    assert "\n" in "".join(found)


def test_no_padding_of_the_vocabulary_is_generated() -> None:
    """A text would lose the tokens that have none, here the likeliest by far."""
    model = make("ddl-cc", vocab_size=256, block_size=48)
    with torch.no_grad():
        model.wte.weight[len(TABLE) + 1 :] *= 30
    adapter = Harness(from_gpt(model), to_fast(CharTokenizer(TABLE), model.config), 2)
    options = {"until": [], "max_gen_toks": 30, "do_sample": False}
    (text,) = adapter.generate_until(requests("generate_until", ("ab", options)))
    assert len(text.replace("<|endoftext|>", "x")) == 30


@pytest.mark.parametrize("context", ["", "ab"])
def test_every_character_of_a_full_table_is_scored(context: str) -> None:
    """Without context, the newline comes before the text; a newline of the text counts as well."""
    model, adapter = characters()
    ((got, _),) = adapter.loglikelihood(requests("loglikelihood", (context, "\nc")))
    ids = CharTokenizer(TABLE).encode((context or "\n") + "\nc")
    logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = sum(float(logits[at - 1, ids[at]]) for at in range(len(ids) - 2, len(ids)))
    assert math.isclose(got, expected, abs_tol=1e-5)


def test_a_tokenizer_stays_as_its_owner_left_it() -> None:
    model, _ = characters()
    fast = to_fast(CharTokenizer(TABLE), model.config)
    Harness(from_gpt(model), fast, 2)
    assert fast.pad_token_id is None
    assert len(fast) == len(TABLE)
