"""Stored configurations: fields that a file lacks, and options that are gone."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.hf import DDLConfig, DDLDecoderConfig, DDLNanoGPTConfig
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.config.stored import from_json, plain, to_json
from ddl.nanogpt import named_as_today
from ddl.options import without_removed

GONE = ", which can no longer be built; commit 600add3e is the last that can"


def test_a_field_that_a_file_lacks_takes_its_default() -> None:
    written, default = json.loads(to_json(TrainConfig())), TrainConfig()
    taken = 0
    for name in ("", "model", "optim"):
        section, fields = (written[name], getattr(default, name)) if name else (written, default)
        for field in dataclasses.fields(fields):
            value = section.pop(field.name)
            assert from_json(TrainConfig, json.dumps(written)) == default, field.name
            section[field.name] = value
            taken += 1
    assert taken > 40


def of_run(options: dict[str, Any]) -> GPTConfig:
    stored = plain(TrainConfig())
    stored["model"] |= options
    return from_json(TrainConfig, json.dumps(stored)).model


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "run": of_run,
    "model": lambda options: from_json(GPTConfig, json.dumps(options)),
    "transformers": lambda options: DDLConfig.from_dict(DDLConfig().to_dict() | options).gpt,
    "conversion": named_as_today,
    "nanoGPT": lambda options: DDLNanoGPTConfig(delta=options).delta,
    "decoder": lambda options: DDLDecoderConfig(stream=options).stream,
}
readers = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@readers
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 4}, "`heads` must be 1, got 4"),
        ({"normalize": False, "erase": "none"}, "`normalize` must be True, got False"),
        ({"erase": "separate"}, "`erase` must be 'tied' or 'none', got 'separate'"),
    ],
)
def test_options_that_are_gone_are_refused(
    read: Callable[[Any], Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence + GONE)}$"):
        read(options)


@readers
@pytest.mark.parametrize("erase", ["tied", "none"])
def test_options_that_are_gone_are_dropped_at_what_is_left(
    read: Callable[[Any], Any], erase: str
) -> None:
    assert read({"heads": 1, "normalize": True, "erase": erase}) == read({"erase": erase})


@pytest.mark.parametrize("name", ["run", "model", "transformers"])
def test_expanded_had_set_them(name: str) -> None:
    """Its stored configuration had `erase` and `normalize`, which were not options of it."""
    stored = {"erase": "none", "normalize": False, "heads": 1, "eps_k": None}
    own = {"residual": "expanded"}
    assert READERS[name](own | stored) == READERS[name](own)
    assert without_removed(own | stored) == own | {"eps_k": None}
