"""GPTConfig raises for invalid values, with the modules' messages and its own field names."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from ddl.errors import InputError
from ddl.lab.config import PRESETS, GPTConfig, OptimConfig, TrainConfig
from ddl.options import MixerKind, Residual, quoted

TINY = PRESETS["tiny"].model
MIXERS = get_args(MixerKind)
EXPANDED = 'residual="ddl-cc" or "ddl-cc-noec" or "ddl-tc" or "ddl-tc-noec" or "expanded"'
COMPRESSED = EXPANDED + ' or "additive-conv"'
FACTORED = 'compress_parameterization="factored"'
MOST = 2**63 - 1

VALUES: list[tuple[dict[str, object], str]] = [
    (
        {"residual": "dll"},
        f"`residual` must be {quoted(get_args(Residual))}, got 'dll'",
    ),
    (
        {"residual": ["ddl"]},
        f"`residual` must be {quoted(get_args(Residual))}, got ['ddl']",
    ),
    ({"num_layers": 0}, "`num_layers` must be an integer of at least 1, got 0"),
    ({"num_layers": 2**63}, f"`num_layers` must be at most {2**14}, got {2**63}"),
    ({"vocab_size": 2**63}, f"`vocab_size` must be at most {MOST}, got {2**63}"),
    ({"num_layers": math.inf}, "`num_layers` must be an integer of at least 1, got inf"),
    ({"value_channels": 2.5}, "`value_channels` must be an integer of at least 1, got 2.5"),
    ({"hidden_size": 62}, "`hidden_size` must be a multiple of 2·num_heads = 4, got 62"),
    ({"mlp_size": 0}, "`mlp_size` must be an integer of at least 1, got 0"),
    ({"read_init": 2**63}, f"`read_init` must be a finite number, got {2**63}"),
    ({"rope_base": 10**30}, f"`rope_base` must be a positive finite number, got {10**30}"),
    ({"read_init": math.inf}, "`read_init` must be a finite number, got inf"),
    ({"head_size": 7}, "`head_size` must be even, got 7"),
    ({"head_size": 0}, "`head_size` must be an integer of at least 1, got 0"),
    ({"rope_base": 10**400}, f"`rope_base` must be a positive finite number, got {10**400}"),
    ({"beta_init": 3}, "`beta_init` must be between 0 and 2, got 3"),
    ({"beta_init": -1}, "`beta_init` must be between 0 and 2, got -1"),
    ({"value_init": math.nan}, "`value_init` must be a finite number, got nan"),
    ({"value_init": 10**400}, f"`value_init` must be a finite number, got {10**400}"),
    ({"eps_k": -1.0}, "`eps_k` must be a positive finite number, got -1.0"),
    ({"eps_k": 1e-19}, "`eps_k` must be at least 1e-18, got 1e-19"),
    ({"gate": "tanh"}, '`gate` must be "linear" or "mlp", got \'tanh\''),
    ({"compress_causal": "no"}, "`compress_causal` must be True or False, got 'no'"),
    (
        {"value": "constant", "mapping": "v"},
        '`value` must be "linear" or "sigmoid" with mapping="v", got "constant"',
    ),
    *(
        (
            {"mapping": "v", "direction": "attention", **single},
            '`direction` must be "linear", "mean" or "flatten" with 1 value channel, got '
            '"attention"',
        )
        for single in ({"residual": "ddl"}, {"value_channels": 1})
    ),
]

# (changes, of which the first has no effect; the message after "must be left at")
UNUSED: list[tuple[dict[str, object], str]] = [
    ({"gate_hidden": 64}, '128 unless gate="mlp", got 64'),
    ({"value_scale": 2.0}, '4.0 unless value="sigmoid", got 2.0'),
    *(
        ({"value_init": 0.0, **other}, '1.0 unless value="linear" and mapping="k", got 0.0')
        for other in ({"value": "sigmoid"}, {"mapping": "v"})
    ),
    ({"value_constant": 1.0}, '2.0 unless value="constant", got 1.0'),
    *(
        (
            {"value_from": "compressed", **other},
            '\'context\' unless mapping="k" and value="linear" or "sigmoid", got \'compressed\'',
        )
        for other in ({"value": "constant"}, {"mapping": "v"})
    ),
    ({"gate_kernel_size": 3, "gate_from": "pooled"}, '4 unless gate_from="convolved", got 3'),
    ({"direction": "mean"}, "'linear' unless mapping=\"v\", got 'mean'"),
    (
        {"direction_hidden": 64, "mapping": "v"},
        '128 unless direction="mean" or "flatten" or "attention", got 64',
    ),
    (
        {"value_channels": 8, "residual": "ddl"},
        f'4 unless {EXPANDED} or "hc" or "mhc" or "independent-hc" or "gated", got 8',
    ),
    ({"mixer_gated": True}, f"False unless mixer={quoted(MIXERS)}, got True"),
    ({"mixer_layers": (0,)}, f"None unless mixer={quoted(MIXERS)}, got (0,)"),
    (
        {"mixer_n": 2, "mixer": "deltanet"},
        f"1 unless mixer={quoted(MIXERS[1:])}, got 2",
    ),
    ({"gated_rank": 8, "residual": "hc"}, 'None unless residual="gated", got 8'),
    (
        {"sublayers_per_block": 1, "residual": "hc"},
        'None unless residual="attention-residual", got 1',
    ),
    ({"read_init": 0.5, "residual": "ddl"}, f"None unless {COMPRESSED}, got 0.5"),
    ({"read_init": 0.5, "residual": "additive"}, f"None unless {COMPRESSED}, got 0.5"),
    ({"sublayers_per_compressor": 1, "residual": "ddl"}, f"2 unless {COMPRESSED}, got 1"),
    (
        {"compress_parameterization": "factored", "residual": "ddl"},
        f"'direct' unless {COMPRESSED}, got 'factored'",
    ),
    (
        {"compress_kernel_size": 3, "residual": "ddl-cc"},
        f'4 unless residual="ddl-tc" or "ddl-tc-noec" or "additive-conv" or {FACTORED}, got 3',
    ),
    *(
        (
            {"compress_causal": True, **other},
            f'False unless residual="ddl-cc" or "ddl-cc-noec" or "expanded" and {FACTORED}, '
            "got True",
        )
        for other in (
            {"residual": "ddl-cc"},
            {"residual": "ddl-tc", "compress_parameterization": "factored"},
        )
    ),
    (
        {"expand_kernel_size": 3, "residual": "ddl-tc-noec"},
        '4 unless residual="ddl-cc" or "ddl-tc", got 3',
    ),
]
UNUSED_SENTENCES = [
    (changes, f"`{next(iter(changes))}` must be left at {s}") for changes, s in UNUSED
]


@pytest.mark.parametrize(("changes", "sentence"), VALUES + UNUSED_SENTENCES)
def test_a_config(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        replace(TINY, **changes)


def test_a_mixer_in_no_layer_is_refused() -> None:
    expected = "one or more numbers of layers from 0 on, each once, or None"
    with pytest.raises(InputError, match=rf"^`mixer_layers` must be {expected}, got \(\)$"):
        replace(TINY, mixer="deltanet", mixer_layers=())


@pytest.mark.parametrize("changes", [changes for changes, _ in UNUSED])
def test_without_the_option_that_has_no_effect_the_rest_is_right(
    changes: dict[str, object],
) -> None:
    name, *_ = changes
    replace(TINY, **{**changes, name: getattr(GPTConfig, name)})


def test_numbers_of_numpy_become_pythons() -> None:
    """NumPy numbers become Python numbers, because JSON cannot hold the former."""
    config = GPTConfig(num_layers=np.int64(2), beta_init=np.float32(0.5))
    assert (config.num_layers, config.beta_init) == (2, 0.5)
    assert (type(config.num_layers), type(config.beta_init)) == (int, float)
    training = TrainConfig(steps=np.int32(3), optim=OptimConfig(lr=np.float64(0.5)))
    assert (type(training.steps), type(training.optim.lr)) == (int, float)
