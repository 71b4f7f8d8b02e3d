"""Convert the paper's checkpoints to our models and back; compare with the published model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl.errors import InputError
from ddl.lab.config import GPTConfig
from ddl.models import GPT
from ddl.paper import convert, revert, translate
from tests.support.helpers import randomise_
from tests.support.paper_standin import SIZES, PublishedGPT, published
from tests.support.tolerances import assert_close

VARIANTS = {
    "additive": "additive",
    "ddl": "ddl",
    "tc": "ddl-tc-noec",
    "tc-ec": "ddl-tc",
    "cc": "ddl-cc-noec",
    "cc-ec": "ddl-cc",
}
GATES = {
    "linear": {"ddl_beta_single_linear": True},
    "mlp": {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 7},
}
VALUES = {
    "sigmoid": {"ddl_v_sigmoid": True, "ddl_v_sigmoid_scale": 3.0},
    "linear": {"ddl_v_sigmoid": False},
    "constant": {
        "ddl_v_constant": True,
        "ddl_v_constant_value": 1.5,
        "ddl_v_dim1_constant": True,
        "ddl_v_dim1_constant_value": 1.5,
    },
}
CAUSAL = {"centred": False, "causal": True}
CASES = [
    (variant, gate, value, correlation)
    for variant, gate, value, correlation in itertools.product(VARIANTS, GATES, VALUES, CAUSAL)
    if (variant.startswith("cc") or correlation == "centred")
    and (variant != "additive" or (gate, value) == ("linear", "sigmoid"))
]


def options_of(gate: str, value: str, correlation: str) -> dict[str, Any]:
    causal = {"ddl_state_dv_shortconv_causal": CAUSAL[correlation]}
    return GATES[gate] | VALUES[value] | causal


def ours(config: GPTConfig, state: Mapping[str, Tensor]) -> GPT:
    model = GPT(config)
    model.load_state_dict(state)
    return model


def assert_same_outputs(theirs: PublishedGPT, model: GPT, length: int = 24) -> None:
    """Compare logits to the roundings of float32, and to 1e-12 in float64."""
    idx = torch.randint(model.config.vocab_size, (2, length))
    depth = 4 * model.config.num_layers + 1  # sublayers and their rewrites, and the head
    for tokens in (idx, idx[:, :1], idx[:, :2]):
        logits, expected = model(tokens).logits, theirs(tokens)
        assert_close("logits", logits, expected, torch.float32, depth=depth)
    expected = theirs.double()(idx)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.double()(idx).logits, expected, rtol=1e-12, atol=1e-12)


def assert_same_state(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], unused: tuple[str, ...] = ()
) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        if not name.endswith(unused):
            assert torch.equal(actual[name], tensor), name


# --- both directions ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["ddl", "tc-ec", "cc"])
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"residual_branch_mult": 0.3}, {"branch_scale": 0.3}),
        (
            {"parameterization": "widthmuP", "hidden_size_base": 12},
            {"parameterization": "mup", "base_width": 12},
        ),
        (
            {
                "parameterization": "completeP",
                "hidden_size_base": 12,
                "num_hidden_layers_base": 1,
                "residual_branch_mult": None,
            },
            {"parameterization": "completep", "base_width": 12, "base_layers": 1},
        ),
        (
            {
                "parameterization": "spectralP",
                "hidden_size_base": 48,
                "num_hidden_layers_base": 3,
                "residual_branch_mult": 0.6,
            },
            {"parameterization": "completep", "base_width": 48, "branch_scale": 0.4},
        ),
    ],
)
def test_branches_and_logits_that_the_newest_code_scales(
    variant: str, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    theirs = published(variant, **options)
    config, state = convert(theirs.state_dict(), theirs.config)
    for name, value in fields.items():
        assert getattr(config, name) == pytest.approx(value), name
    if config.parameterization != "mup":  # which the code of the layout c_proj has, too
        with pytest.raises(InputError, match="layout c_proj"):
            revert(config, state)
    their_config, back = revert(config, state, layout="o_proj")
    again, same = convert(back, their_config)
    assert_same_state(same, state)
    assert_same_outputs(theirs, ours(config, state))
    assert vars(again) == {name: pytest.approx(value) for name, value in vars(config).items()}


def test_additions_are_scaled_by_the_parameterization_alone() -> None:
    theirs = published("additive")
    deep = {"parameterization": "completeP", "hidden_size_base": 24, "num_hidden_layers_base": 1}
    for given in (deep, deep | {"residual_branch_mult": 0.5}):  # of two layers
        config, state = convert(theirs.state_dict(), theirs.config | given)
        assert (config.times_as_deep, config.branch_scale) == (2, 1)
        assert revert(config, state, layout="o_proj")[0]["num_hidden_layers_base"] == 1
    for given in ({"residual_branch_mult": 0.5}, deep | {"residual_branch_mult": 0.25}):
        with pytest.raises(InputError, match="must be left out of an additive model here"):
            convert(theirs.state_dict(), theirs.config | given)


@pytest.mark.parametrize(("variant", "gate", "value", "correlation"), CASES)
def test_theirs_as_ours_and_back(variant: str, gate: str, value: str, correlation: str) -> None:
    theirs = published(variant, **options_of(gate, value, correlation))
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    config, state = convert(theirs.state_dict(), theirs.config)
    assert config.residual == VARIANTS[variant]
    unused = ("v_proj.weight", "v_proj.bias") if value == "constant" else ()
    their_config, back = revert(config, state)
    assert_same_state(back, before, unused)
    assert all(not back[name].any() for name in back if unused and name.endswith(unused))
    told = {n: v for n, v in theirs.config.items() if n in their_config and "value" not in n}
    assert told == {name: their_config[name] for name in told}
    again, same = convert(back, their_config)
    assert again == config
    assert_same_state(same, state)
    assert_same_outputs(theirs, ours(config, state))


@pytest.mark.parametrize(
    ("variant", "gate", "value", "correlation", "parameterization"),
    [
        (*case, kind)
        for case, kind in itertools.product(CASES, ["direct", "factored"])
        if case[0] not in ("additive", "ddl")
        if kind == "factored" or case[3] == "centred"
    ]
    + [(*case, "none") for case in CASES if case[0] in ("additive", "ddl")],
)
def test_ours_as_theirs(
    variant: str, gate: str, value: str, correlation: str, parameterization: str
) -> None:
    fields: dict[str, Any] = {"residual": VARIANTS[variant], "vocab_size": 61, "num_layers": 2}
    fields |= {"hidden_size": 24, "num_heads": 2, "block_size": 24, "rope_base": 500.0}
    if variant != "additive":
        fields |= {"gate": gate, "value": value, "eps_k": None if gate == "mlp" else 1e-4}
        fields |= {"value_from": "compressed"} if value != "constant" else {}
        fields |= {"value_scale": 2.5} if value == "sigmoid" else {}
    if parameterization != "none":
        fields |= {"value_channels": 3, "compress_parameterization": parameterization}
        taps = parameterization == "factored" or variant.startswith("tc")
        fields |= {"compress_kernel_size": 2} if taps else {}
        fields |= {"compress_causal": True} if CAUSAL[correlation] else {}
    model = GPT(GPTConfig(**fields))
    randomise_(model, std=1)
    their_config, state = revert(model.config, model.state_dict())
    theirs = PublishedGPT(variant, **their_config)
    theirs.load_state_dict(state)
    assert_same_outputs(theirs, model)


@pytest.mark.parametrize(
    "options",
    [
        {"ddl_value_channels": 5, "ddl_state_shortconv_kernel_size": 2},
        {"ddl_value_channels": 3, "ddl_state_shortconv_kernel_size": 3},
        {"ddl_state_shortconv_kernel_size": 1, "input_embed_shortconv_kernel_size": 2},
        {"head_dim": 6, "num_attention_heads": 5, "hidden_size": 20},
        {"head_dim": 128, "ddl_k_eps": 0.05, "rope_base": 100.0},
    ],
)
@pytest.mark.parametrize("variant", ["tc-ec", "cc-ec"])
def test_other_sizes(variant: str, options: dict[str, Any]) -> None:
    theirs = published(variant, **options)
    config, state = convert(theirs.state_dict(), theirs.config)
    assert_same_state(revert(config, state)[1], theirs.state_dict())
    assert_same_outputs(theirs, ours(config, state))


def test_a_long_context() -> None:
    sizes = {"block_size": 1024, "head_dim": 64, "num_attention_heads": 1, "hidden_size": 64}
    theirs = published("additive", **sizes, num_hidden_layers=1)
    assert_same_outputs(theirs, ours(*convert(theirs.state_dict(), theirs.config)), length=1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    theirs = published("tc-ec").to(dtype)
    config, state = convert(theirs.state_dict(), theirs.config)
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert_same_state(revert(config, state)[1], theirs.state_dict())


# --- names ----------------------------------------------------------------------------------------


def newest(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert to the names and shapes of the newest published code, for d = 24 and m = 4."""
    renamed = {}
    for name, tensor in state.items():
        if name.endswith("shortconv.weight"):
            name, tensor = name.replace("shortconv.", ""), tensor.reshape(24, 4, -1)
        if name == "input_embed.conv.weight":
            name, tensor = "input_embed.weight", tensor.reshape(24, 4, -1)
        renamed[name.replace("c_proj", "o_proj")] = tensor
    return renamed


def oldest(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert to the names and shapes of the first published code, which used nn.Conv1d."""
    renamed = {}
    for name, tensor in state.items():
        if name.endswith("shortconv.weight"):
            name, tensor = name.replace("shortconv", "shortconv.conv"), tensor[:, None]
        elif name.endswith(("compress.weight", "readout.weight")):
            name, tensor = name.replace(".weight", ".shortconv.weight"), tensor[:, None]
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [newest, oldest])
def test_layouts(variant: str, layout: Any) -> None:
    theirs = published(variant)
    expected = convert(theirs.state_dict(), theirs.config)
    renamed = layout(theirs.state_dict())
    config, state = convert(renamed, theirs.config)
    assert config == expected[0]
    assert_same_state(state, expected[1])
    assert_same_state(revert(config, state)[1], theirs.state_dict())
    assert_same_state(revert(config, state, layout="o_proj")[1], newest(theirs.state_dict()))


@pytest.mark.parametrize(
    "wrap",
    ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."],
)
def test_wrapped_names(wrap: str) -> None:
    theirs = published("cc-ec")
    wrapped = {wrap + name: tensor for name, tensor in theirs.state_dict().items()}
    inside = {n.replace("h.1.", "h.1._orig_mod."): t for n, t in wrapped.items()}
    expected = convert(theirs.state_dict())
    assert convert(wrapped)[0] == convert(inside)[0] == expected[0]
    assert_same_state(convert(inside)[1], expected[1])


@pytest.mark.parametrize("dropped", ["lm_head.weight", "transformer.wte.weight"])
def test_a_tied_head_may_be_stored_once(dropped: str) -> None:
    theirs = published("ddl")
    state = theirs.state_dict()
    del state[dropped]
    config, converted = convert(state, theirs.config)
    assert_same_state(revert(config, converted)[1], theirs.state_dict())


def test_the_papers_sizes_are_recognised() -> None:
    """The sizes 12 blocks, d = 768 and 50,304 tokens are recognised from shapes alone."""
    with torch.device("meta"):
        expected = GPT(GPTConfig(value="sigmoid", value_from="compressed", eps_k=1e-5))
    their_config, theirs = revert(expected.config, expected.state_dict())
    assert their_config["head_dim"] == 128
    assert theirs["transformer.h.11.mlp.c_fc2.weight"].shape == (2048, 768)
    assert theirs["lm_head.weight"].shape == (50304, 768)
    config, _ = convert({n: t for n, t in theirs.items() if n != "lm_head.weight"})
    factored = {"compress_parameterization": "factored"}
    assert config == GPTConfig(**(vars(expected.config) | factored))


# --- options that do not follow from the weights --------------------------------------------------


@pytest.mark.parametrize("variant", ["ddl", "cc-ec"])
def test_defaults_are_the_published_ones_and_are_told(variant: str) -> None:
    theirs = PublishedGPT(variant, **{n: v for n, v in SIZES.items() if n != "block_size"})
    theirs.randomise_()
    translated = translate(theirs.state_dict())
    causal = {"ddl_state_dv_shortconv_causal": False} if variant == "cc-ec" else {}
    assert translated.assumed == causal | {
        "block_size": 1024,
        "rope_base": 10000.0,
        "ddl_k_eps": 1e-5,
        "ddl_v_constant": False,
        "ddl_v_sigmoid": True,
        "ddl_v_sigmoid_scale": 4.0,
        "ddl_beta_init": 1.0,
    }
    assert translated.config.block_size == 1024
    assert translated.unused == []
    assert_same_outputs(theirs, ours(translated.config, translated.state))
    told = translate(theirs.state_dict(), translated.assumed)
    assert (told.config, told.assumed) == (translated.config, {})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mlp_size", [20, 64])
def test_the_width_of_the_mlp_follows_from_the_weights(variant: str, mlp_size: int) -> None:
    """64 is ⌊8d/3⌋, which the published DDL models always have; the baseline has an option."""
    theirs = published(variant)
    for block in theirs.transformer.h:
        for name in ("c_fc1", "c_fc2", "c_proj"):
            linear = getattr(block.mlp, name)
            rows, columns = (mlp_size, 24) if name != "c_proj" else (24, mlp_size)
            linear.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
    config, state = convert(theirs.state_dict(), theirs.config)
    assert (config.mlp_size, config.mlp_hidden) == (20 if mlp_size == 20 else None, mlp_size)
    assert_same_outputs(theirs, ours(config, state))
    if variant == "additive":
        their_config, back = revert(config, state)
        assert their_config.get("intermediate_size") == config.mlp_size
        assert_same_state(back, theirs.float().state_dict())
        assert convert(back, their_config)[0] == config


def test_the_initial_value_of_the_read_goes_both_ways() -> None:
    for given in (None, 0.5, 1):
        config, state = convert(published("tc-ec").state_dict(), {"ddl_state_read_init": given})
        assert config.read_init == given
        assert revert(config, state)[0]["ddl_state_read_init"] == given
    assert convert(published("ddl").state_dict(), {"ddl_state_read_init": 0.5})[0].read_init is None


def test_unused_projections_are_told_and_may_be_missing() -> None:
    theirs = published("tc", **VALUES["constant"])
    translated = translate(theirs.state_dict(), theirs.config)
    assert len(translated.unused) == 8
    assert all("v_proj" in name for name in translated.unused)
    without = {n: t for n, t in theirs.state_dict().items() if "v_proj" not in n}
    assert_same_state(convert(without, theirs.config)[1], translated.state)


def test_the_scalar_state_has_its_own_name_for_the_constant() -> None:
    theirs = published("ddl")
    for name in ("ddl_v_constant", "ddl_v_dim1_constant"):
        assert convert(theirs.state_dict(), {name: True})[0].value == "constant"
    both = {"ddl_v_constant": True, "ddl_v_dim1_constant": False}
    assert convert(theirs.state_dict(), both)[0].value == "sigmoid"
    assert convert(published("tc").state_dict(), both)[0].value == "constant"


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (2, 2), (3, 2), (0.5, 0.5)])
def test_a_gate_that_starts_shut_or_open(given: float, kept: float) -> None:
    assert convert(published("ddl").state_dict(), {"ddl_beta_init": given})[0].beta_init == kept
