"""Functions named in the task files of this folder. lm-eval imports this file by its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).parent


def read(data_files: dict[str, str], **_: Any) -> datasets.DatasetDict:
    """Read JSON lines beside this file, whatever the current folder is.

    `dataset_path: json` would look for them in the current folder.
    """
    paths = {split: str(HERE / name) for split, name in data_files.items()}
    return datasets.load_dataset("json", data_files=paths)


def endings(docs: datasets.Dataset) -> datasets.Dataset:
    """HellaSwag's questions: activity, context and endings without WikiHow's marks."""
    return docs.map(
        lambda doc: {
            "query": _plain(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"),
            "choices": [_plain(ending) for ending in doc["endings"]],
            "gold": int(doc["label"]),
        }
    )


def _plain(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def partial_choices(doc: dict[str, Any]) -> list[str]:
    """WinoGrande's contexts: the sentence up to the blank, followed by each option."""
    before = doc["sentence"].partition("_")[0]
    return [before + doc["option1"], before + doc["option2"]]


def partial_target(doc: dict[str, Any]) -> str:
    """The rest of the sentence; its likelihood is compared between the contexts."""
    return doc["sentence"].partition("_")[2].strip()


def partial_answer(doc: dict[str, Any]) -> int:
    return int(doc["answer"]) - 1
