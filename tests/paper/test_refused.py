"""What `ddl.paper` refuses, sentence by sentence, and the options that GPTConfig has for it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.config import GPTConfig
from ddl.errors import InputError
from ddl.models import GPT
from ddl.paper import convert, revert
from tests.support.paper_standin import SIZES, published


def changed(variant: str, **changes: Tensor | None) -> dict[str, Tensor]:
    """A state dict with other tensors, or without them; __ stands for a dot."""
    state = published(variant).state_dict()
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    return state


ONE = torch.zeros(1)
BAD_STATES = {
    "missing": (
        changed("cc", readout__read=None, transformer__h__1__compress__weight=None),
        "`state_dict` must hold the parameters of a published ddl-cc-noec model, got 2 missing"
        " (transformer.h.1.compress.weight, readout.read)",
    ),
    "unknown": (
        changed("ddl", transformer__wpe__weight=ONE, bias=ONE),
        "`state_dict` must hold the parameters of a published ddl model, got 2 unknown"
        " (transformer.wpe.weight, bias)",
    ),
    "both": (
        changed("tc-ec", ln_f__weight=None, norm__weight=ONE),
        "`state_dict` must hold the parameters of a published ddl-tc model, got 1 missing"
        " (ln_f.weight) and 1 unknown (norm.weight)",
    ),
    "half a gate": (
        changed("ddl", transformer__h__0__ddl_attn__beta_out__weight=ONE),
        None,
    ),
    "a block less": (
        {n: t for n, t in changed("ddl").items() if ".h.0." not in n},
        "`state_dict` must hold the blocks transformer.h.0, .1, … of the paper's code, got blocks"
        " 1",
    ),
    "another model": (
        {"layers.0.weight": ONE, "embed": ONE},
        "`state_dict` must hold the blocks transformer.h.0, .1, … of the paper's code, got the keys"
        " layers.0.weight, embed",
    ),
    "nothing": (
        {},
        "`state_dict` must hold the blocks transformer.h.0, .1, … of the paper's code, got nothing",
    ),
    "shape": (
        changed("cc", transformer__h__1__attn__c_k__weight=torch.zeros(24, 12)),
        "the parameters must have the config's shapes, got (24, 12) instead of (24, 24) for"
        " transformer.h.1.attn.c_k.weight",
    ),
    "kernels of two sizes": (
        changed("tc", transformer__h__1__compress__shortconv__weight=torch.zeros(96, 3)),
        "the parameters must have the config's shapes, got (96, 3) instead of (96, 4) for"
        " transformer.h.1.compress.shortconv.weight",
    ),
    "dimensions": (
        changed("cc", readout__weight=torch.zeros(96)),
        "`readout.weight` must have shape (rows, kernel_size), got (96,)",
    ),
    "untied": (
        changed("ddl", lm_head__weight=torch.zeros(61, 24)),
        "`lm_head.weight` must be equal to `transformer.wte.weight`, got another tensor",
    ),
    "integers": (
        changed("ddl", ln_f__weight=torch.zeros(24, dtype=torch.int64)),
        "`state_dict` must hold floating-point tensors, got torch.int64 for ln_f.weight",
    ),
    "no tensor": (
        changed("ddl") | {"step": 3},
        "`state_dict` must hold floating-point tensors, got int for step",
    ),
    "sparse": (
        changed("ddl", ln_f__weight=torch.ones(24).to_sparse()),
        "`state_dict` must hold floating-point tensors, got torch.sparse_coo for ln_f.weight",
    ),
    "two layouts": (
        changed("ddl", transformer__h__0__attn__o_proj__weight=torch.zeros(24, 24)),
        "`state_dict` must be of one layout, got transformer.h.0.attn.c_proj.weight and"
        " transformer.h.0.attn.o_proj.weight",
    ),
    "a name twice": (
        changed("ddl", module__ln_f__weight=ONE),
        "`state_dict` must hold ln_f.weight once, got ln_f.weight and module.ln_f.weight",
    ),
    "heads": (
        changed("ddl", transformer__h__0__attn__q_rms__weight=torch.ones(25)),
        "`num_heads` must be an integer of at least 1, got 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states(case: str) -> None:
    state, sentence = BAD_STATES[case]
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$" if sentence else "missing"):
        convert(state)


def test_long_lists_are_cut() -> None:
    state = {n: t for n, t in changed("cc").items() if ".ddl_attn." not in n and ".mlp." not in n}
    with pytest.raises(InputError, match=r"got 14 missing \((\S+, ){11}\S+ and 2 more\)$"):
        convert(state)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"hidden_size": 32, "vocab_size": 61, "ddl_beta_single_linear": False},
            "`config.json` must agree with the weights, got hidden_size = 32 instead of 24,"
            " ddl_beta_single_linear = false instead of true",
        ),
        (
            {"num_attention_heads": 6, "head_dim": 4},
            "`config.json` must agree with the weights, got num_attention_heads = 6 instead of 2,"
            " head_dim = 4 instead of 12",
        ),
        (
            {"rope_ratio": 0.5},
            "`rope_ratio` in config.json must be 1, got 0.5: the models here have no such option",
        ),
        (
            {"q_activation": "silu"},
            '`q_activation` in config.json must be null or "identity", got "silu": the models here'
            " have no such option",
        ),
        (
            {"use_qk_rmsnorm": False},
            "`use_qk_rmsnorm` in config.json must be true, got false: the models here have no such"
            " option",
        ),
        (
            {"parameterization": "completeP"},
            "`parameterization` in config.json must not scale logits or residual, got completeP:"
            " the models here have no such option",
        ),
        ({"block_size": 1e3}, "`block_size` in config.json must be a whole number, got 1000.0"),
        ({"block_size": True}, "`block_size` in config.json must be a whole number, got true"),
        (
            {"ddl_v_sigmoid": "yes"},
            '`ddl_v_sigmoid` in config.json must be true or false, got "yes"',
        ),
        ({"ddl_k_eps": None}, "`ddl_k_eps` in config.json must be a number, got null"),
        ({"ddl_beta_init": math.inf}, "`ddl_beta_init` must be a finite number, got inf"),
        ({"rope_base": 10**400}, f"`rope_base` must be a finite number, got {10**400}"),
        ({"ddl_k_eps": 0}, "`eps_k` must be a positive finite number, got 0.0"),
    ],
)
def test_bad_configs(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        convert(published("cc").state_dict(), config)


def test_a_named_variant_is_held_against_the_weights() -> None:
    state = published("tc").state_dict()
    assert convert(state, variant="ddl-tc-noec")[0].residual == "ddl-tc-noec"
    with pytest.raises(InputError, match=r"ddl-tc model, got 1 missing \(input_embed\.conv"):
        convert(state, variant="ddl-tc")
    with pytest.raises(InputError, match=r"^`variant` must be one of auto, additive, .* got 'cc'$"):
        convert(state, variant="cc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "`value_from` must be compressed in the paper's code, got context"),
        (
            {"value": "constant", "sublayers_per_compressor": 1},
            "`sublayers_per_compressor` must be 2 in the paper's code, got 1",
        ),
        (
            {
                "value": "constant",
                "compress_parameterization": "factored",
                "compress_kernel_size": 5,
            },
            "`compress_kernel_size` must be at most value_channels = 4 in the paper's code, got 5",
        ),
    ],
)
def test_what_the_paper_does_not_have(fields: dict[str, Any], sentence: str) -> None:
    config = GPTConfig(vocab_size=61, num_layers=1, hidden_size=24, num_heads=2, **fields)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        revert(config, GPT(config).state_dict())


def test_revert_wants_the_configs_state() -> None:
    config, state = convert(published("cc").state_dict(), SIZES)
    del state["wte.weight"]
    sentence = r"of the config's model, got 1 missing \(wte.weight\) and 1 unknown \(x\)$"
    with pytest.raises(InputError, match=sentence):
        revert(config, state | {"x": ONE})
    with pytest.raises(InputError, match=r"got \(1,\) instead of \(61, 24\) for wte.weight$"):
        revert(config, state | {"wte.weight": ONE})
    with pytest.raises(InputError, match=r"^`layout` must be one of c_proj, o_proj, got 'x'$"):
        revert(config, state, layout="x")  # type: ignore[arg-type]


def test_heads_of_any_width() -> None:
    config = GPTConfig(vocab_size=61, num_layers=1, hidden_size=25, num_heads=3, head_size=8)
    assert config.head_dim == 8
    assert GPT(config).trunk.sublayers[0].c_proj.weight.shape == (25, 24)
    assert GPTConfig().head_dim == 128
