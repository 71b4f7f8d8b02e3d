"""`ddl.nanogpt.convert` raises for invalid models and options; the messages are pinned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ddl.nanogpt import convert
from tests.support.helpers import Wrapper
from tests.support.nanogpt_cases import F64, B, T, make, same, tokens
from tests.support.nanogpt_standin import GPT


def without(path: str) -> nn.Module:
    model = make()
    parent, _, name = path.rpartition(".")
    del model.get_submodule(parent)._modules[name]
    return model


def changed(path: str, module: nn.Module) -> nn.Module:
    model = make()
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
    return model


def with_own_parameter() -> nn.Module:
    model = make()
    model.transformer.h[1].scale = nn.Parameter(torch.ones(16))
    return model


def lacks(name: str, child: str, got: str) -> str:
    return (
        f"`{name}` must have a module `{child}`, as in nanoGPT's GPT before torch.compile or DDP "
        f"wraps it, got a {got} without it"
    )


MODELS: list[tuple[Any, str]] = [
    (lambda: None, "`model` must be nanoGPT's GPT, got NoneType"),
    (
        lambda: GPT,
        "`model` must be nanoGPT's GPT, got the class GPT: `converted` takes a class",
    ),
    (lambda: nn.Linear(2, 2), lacks("model", "transformer", "Linear")),
    (
        lambda: torch.compile(make(), backend="eager"),
        lacks("model", "transformer", "OptimizedModule"),
    ),
    *(
        (lambda path=f"transformer.{child}": without(path),
         lacks("model.transformer", child, "ModuleDict"))
        for child in ("wte", "h", "ln_f")
    ),
    *(
        (lambda path=f"transformer.h.1.{child}": without(path),
         lacks("model.transformer.h[1]", child, "Block"))
        for child in ("ln_1", "attn", "ln_2", "mlp")
    ),
    (
        lambda: changed("transformer.h", nn.ModuleList()),
        "`model.transformer.h` must be a ModuleList of blocks, got an empty one",
    ),
    (
        lambda: changed("transformer.h", nn.Sequential(nn.Linear(2, 2))),
        "`model.transformer.h` must be a ModuleList of blocks, got Sequential",
    ),
    (
        with_own_parameter,
        "`model.transformer.h[1]` must have ln_1, attn, ln_2, mlp and nothing else, got `scale`",
    ),
]  # fmt: skip


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize(("model", "sentence"), MODELS, ids=[s for _, s in MODELS])
def test_refused_models(model: Any, sentence: str, disable: bool) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        convert(model(), disable=disable)


@pytest.mark.parametrize("disable", [False, True])
def test_a_converted_model_is_not_converted_again(disable: bool) -> None:
    sentence = "`model` must be nanoGPT's GPT as it was made, got one already converted"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert(convert(make()), disable=disable)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"channels": 4},
        TypeError,
        "`channels` must be an option of ddl.nanogpt.convert, got an unknown one: did you mean "
        "`value_channels`?",
    ),
    (
        {"anneal_step": 4},
        TypeError,
        "`anneal_step` must be an option of ddl.nanogpt.convert, got an unknown one: did you mean "
        "`anneal_steps`?",
    ),
    (
        {"zzz": 4},
        TypeError,
        "`zzz` must be an option of ddl.nanogpt.convert, got an unknown one: it has "
        "value_channels, start, anneal_steps, disable, compress, ",
    ),
    ({"norm_eps": 1e-6}, TypeError, "`norm_eps` must be left to the model, got 1e-06"),
    ({"device": "cpu"}, TypeError, "`device` must be left to the model, got 'cpu'"),
    ({"dtype": F64}, TypeError, "`dtype` must be left to the model, got torch.float64"),
    ({"expand": "copy"}, ValueError, '`expand` must be "repeat" or "conv", got \'copy\''),
    ({"value_channels": 0}, ValueError, "`value_channels` must be an integer of at least 1, got 0"),
    ({"compress": "identity", "value_channels": 2}, ValueError, '`compress` must be "channel" or '),
    ({"beta_init": 2.1}, ValueError, "`beta_init` must be between 0 and 2, got 2.1"),
    ({"kernel_size": 3}, ValueError, "`kernel_size` must be left at 4 unless "),
]


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize(
    ("options", "error", "sentence"), OPTIONS, ids=[str(o) for o, _, _ in OPTIONS]
)
def test_refused_options(
    options: dict[str, Any], error: type[Exception], sentence: str, disable: bool
) -> None:
    """An invalid option raises one sentence and leaves the model unchanged."""
    model = make()
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        convert(model, **options, disable=disable)
    assert same(model, make())
    assert type(model) is GPT


def test_a_later_block_takes_no_tensor() -> None:
    model = convert(make())
    with pytest.raises(TypeError, match=r"^`x` must be what the block before returned, got a Ten"):
        model.transformer.h[1](torch.randn(B, T, 16))


@pytest.mark.parametrize("name", ["read_attn", "read_mlp", "res_attn", "res_mlp", "readout"])
def test_wrapped_parts_are_refused(name: str) -> None:
    """Reads and residuals are never called, so wrappers raise; attention and MLP are called."""
    model = convert(make(), value_channels=2)
    block = model.transformer.h[-1]
    expected = model(tokens()[0])[0]
    block.attn, block.mlp, block.ln_1 = map(Wrapper, (block.attn, block.mlp, block.ln_1))
    assert torch.equal(model(tokens()[0])[0], expected)
    setattr(block, name, Wrapper(getattr(block, name)))
    with pytest.raises(TypeError, match=f"^`{name}` must be a (Read|DeltaResidual) with its own"):
        model(tokens()[0])
