"""GPT and `generate` raise for invalid arguments; the messages are pinned."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.models.test_gpt import make


@pytest.mark.parametrize(
    ("idx", "kind", "sentence"),
    [
        (torch.zeros(1, 4), TypeError, "`idx` must have dtype int64 or int32, got torch.float32"),
        (
            torch.zeros(1, 17, dtype=torch.int64),
            ValueError,
            "`idx` must have shape (batch, 1 to block_size = 16), got (1, 17)",
        ),
        (
            torch.zeros(4, dtype=torch.int64),
            ValueError,
            "`idx` must have shape (batch, 1 to block_size = 16), got (4,)",
        ),
        (
            torch.tensor([[1, 256]]),
            ValueError,
            "`idx` must hold tokens from 0 to vocab_size - 1 = 255, got 256",
        ),
        (
            torch.tensor([[1, -1]]),
            ValueError,
            "`idx` must hold tokens from 0 to vocab_size - 1 = 255, got -1",
        ),
    ],
)
def test_idx_errors(idx: torch.Tensor, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        make("additive")(idx)


IDX = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"idx": [[1]]}, "`idx` must be a torch.Tensor, got list"),
        ({"idx": IDX.to("meta")}, "`idx` must be on cpu, got a tensor on meta"),
        ({"labels": 3}, "`labels` must be a torch.Tensor, got int"),
        ({"labels": IDX.int()}, "`labels` must have dtype int64, got torch.int32"),
        ({"labels": IDX.to("meta")}, "`labels` must be on cpu, got a tensor on meta"),
        (
            {"labels": IDX[:, :3]},
            "`labels` must have the shape of `idx`, (1, 4), with at least 2 tokens, got (1, 3)",
        ),
        (
            {"idx": IDX[:, :1], "labels": IDX[:, :1]},
            "`labels` must have the shape of `idx`, (1, 1), with at least 2 tokens, got (1, 1)",
        ),
        (
            {"labels": IDX - 1},
            "`labels` must hold tokens from 0 to vocab_size - 1 = 255, or -100, got -1",
        ),
        ({"attention_mask": 1}, "`attention_mask` must be a torch.Tensor, got int"),
        ({"attention_mask": IDX[:, :2]}, "`attention_mask` must have shape (1, 4), got (1, 2)"),
        (
            {"attention_mask": torch.zeros(1, 4)},
            "`attention_mask` must have dtype bool or int64, with zeros for padding, "
            "got torch.float32",
        ),
        ({"attention_mask": IDX - 7}, "`attention_mask` must consist of zeros and ones, got -7"),
        (
            {"last": 1.0},
            "`last` must be from 1 to 4, the tokens of `idx`, and without `labels`, got 1.0",
        ),
    ],
)
def test_what_forward_refuses(options: dict[str, object], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(sentence)}$"):
        make("ddl-cc")(**({"idx": IDX} | options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"idx": IDX[0]}, "`idx` must have shape (batch, tokens), got (4,)"),
        ({"temperature": -1}, "`temperature` must be at least 0, got -1"),
        ({"temperature": math.nan}, "`temperature` must be at least 0, got nan"),
        ({"temperature": "1"}, "`temperature` must be at least 0, got '1'"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"top_k": 2.5}, "`top_k` must be an integer of at least 1, got 2.5"),
        ({"top_p": 0}, "`top_p` must be above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "`top_p` must be above 0 and at most 1, got 1.01"),
        ({"top_p": math.nan}, "`top_p` must be above 0 and at most 1, got nan"),
        ({"top_p": True}, "`top_p` must be above 0 and at most 1, got True"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be an integer of at least 0, got -1"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens` must be an integer of at least 0, got 2.5"),
    ],
)
def test_what_generate_refuses(options: dict[str, object], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(sentence)}$"):
        make("ddl-cc").generate(**({"idx": IDX, "max_new_tokens": 1} | options))
