"""`ddl.nanogpt.convert` raises for invalid models and options; the messages are pinned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddl.nanogpt import convert
from tests.support.helpers import Wrapper
from tests.support.nanogpt_cases import F64, B, T, make, same, tokens
from tests.support.nanogpt_standin import GPT, Block


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


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.ln_1(x)), 0.5, self.training)
        return x + self.mlp(self.ln_2(x))


class Gated(Block):
    """Evaluates otherwise than it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class Masked(Block):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class ByWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1.weight * x)
        return x + self.mlp(self.ln_2(x))


def with_block(change: Any) -> GPT:
    """A model whose output projections are zero, so that its blocks add nothing."""
    model = make(dropout=0.1)
    for block in model.transformer.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
    change(model.transformer.h[1])
    return model


def replaced(block: Any) -> None:
    forward = block.forward
    block.forward = lambda x: x + forward(x)


ELSE = "one that computes something else"
FORWARDS: dict[str, tuple[Any, str]] = {
    **{
        kind.__name__: (kind, ELSE) for kind in (Halved, Parallel, PostNorm, Dropped, Gated, Masked)
    },
    "ByWeight": (ByWeight, "one that raises AttributeError: 'StandIn' object has no attribute 'we"),
    "replaced": (replaced, "one that raises TypeError: "),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("change", "got"), FORWARDS.values(), ids=FORWARDS)
def test_other_forwards_are_refused(change: Any, got: str, device: str) -> None:
    kind = isinstance(change, type)
    model = with_block(lambda b: setattr(b, "__class__", change) if kind else change(b)).to(device)
    sentence = (
        "`model.transformer.h[1]` must have a forward that computes x + attn(ln_1(x)), then x + "
        f"mlp(ln_2(x)), got {got}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}"):
        convert(model)
    assert type(model) is GPT


class Reordered(Block):
    """The same in other words, with an argument that is left out."""

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        x = torch.add(self.attn(self.ln_1(x), past), x)
        x += checkpoint(self.mlp, self.ln_2(x), use_reentrant=False)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "__class__", Reordered),
        lambda block: block.compile(backend="eager"),
        lambda block: setattr(block, "forward", torch.compile(block.forward, backend="eager")),
        lambda block: block.eval(),
    ],
    ids=["reordered", "compiled in place", "compiled forward", "in evaluation mode"],
)
def test_forwards_that_add(change: Any, dtype: torch.dtype) -> None:
    """torch's random state and the blocks' modes stay as they are."""
    model = with_block(change).to(dtype)
    state, modes = torch.get_rng_state(), [m.training for m in model.transformer.h.modules()]
    convert(model, disable=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.transformer.h.modules()] == modes
    assert isinstance(convert(model), GPT)


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
