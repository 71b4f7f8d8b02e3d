"""The formulas of benchmarks/scale against models, exactly: parameters and what a forward keeps.

Models of full size are on the meta device, or on a fake GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.config import PUBLISHED, GPTConfig, TrainConfig
from ddl.models import GPT
from tests.benchmarks.test_benchmarks import load
from tests.support.kept import kept_bytes

__all__ = ["load"]

MORE = pytest.mark.exhaustive
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "block_size": 24,
    "num_layers": 3,
    "num_heads": 2,
    "head_size": 10,
    "hidden_size": 32,
}
# Every branch of the formulas; 6 sublayers, so that N = 4 stores 2 states.
VARIANTS: dict[str, dict[str, Any]] = {
    "additive": {"residual": "additive"},
    "ddl": {"residual": "ddl"},
    "ddl-cc": {"residual": "ddl-cc"},
    "ddl-cc stored": {"residual": "ddl-cc", "anchor_every": 1},
    "ddl-cc anchored": {"residual": "ddl-cc", "anchor_every": 4, "value_channels": 3},
    "ddl-cc-noec": {"residual": "ddl-cc-noec"},
    "ddl-tc": {"residual": "ddl-tc", "sublayers_per_compressor": 1, "compress_kernel_size": 3},
    "ddl-tc-noec": {"residual": "ddl-tc-noec", "stream_dtype": "bfloat16"},
}


def config(variant: str, **options: Any) -> TrainConfig:
    return TrainConfig(model=GPTConfig(**SIZES, **VARIANTS[variant]), batch_size=5, **options)


def meta(model: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_a_model(load: Any, variant: str) -> None:
    """Shape by shape in every group."""
    parameters, model = load("scale.parameters"), config(variant).model
    made = meta(model)
    *sublayers, stream, embedding = parameters.groups(model)
    for group, sublayer in zip(sublayers, made.trunk.sublayers, strict=True):
        assert sorted(group.shapes) == sorted(p.shape for p in sublayer.parameters())
        assert group.name == {"Attention": "attention", "SwiGLU": "mlp"}[type(sublayer).__name__]
    assert embedding.shapes == (made.wte.weight.shape,)
    own = [p.shape for n, p in made.named_parameters() if n.startswith("trunk") and "subl" not in n]
    assert sorted(stream.shapes) == sorted(own)
    assert parameters.count(model) == made.num_parameters()
    assert parameters.tensors(model) == len(list(made.parameters()))


@pytest.mark.parametrize(
    "residual",
    [r if r in ("additive", "ddl-cc") else pytest.param(r, marks=MORE) for r in PUBLISHED],
)
def test_parameters_of_the_large_models(load: Any, residual: str) -> None:
    models, count = load("scale.main").MODELS, load("scale.parameters").count
    for config in models.values():
        model = replace(config.model, residual=residual, value_channels=4)
        assert count(model) == meta(model).num_parameters()


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.table
def test_a_forward_keeps_what_the_formula_says(
    load: Any, variant: str, precision: str, recompute: bool, sharded: bool, gpu: bool
) -> None:
    """To the byte: the storages that autograd saves, on a CPU and on a fake GPU."""
    kept = load("scale.activations").kept
    options = config(variant, precision=precision, recompute=recompute)
    where = {"sharded": sharded, "gpu": gpu}
    assert kept(options, **where).all == kept_bytes(options, **where)


@pytest.mark.table(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("every", ["additive", 1, None, 32])
@pytest.mark.parametrize("name", ["124M", *(pytest.param(n, marks=MORE) for n in ("1B", "7B"))])
def test_the_large_models_keep_it_too(load: Any, name: str, every: Any, recompute: bool) -> None:
    """To the byte, on a fake GPU, unsharded for 124M and sharded for the others."""
    kept, main = load("scale.activations").kept, load("scale.main")
    config = main.MODELS[name]
    config = main.additive(config) if every == "additive" else main.anchored(config, every)
    options = replace(config, recompute=recompute)
    where = {"sharded": name != "124M", "gpu": True}
    assert kept(options, **where).all == kept_bytes(options, **where)


@pytest.mark.parametrize(("gpu", "stored"), [(True, 16), (False, 8)])
def test_anchors_save_states_alone(load: Any, gpu: bool, stored: int) -> None:
    """Of 64 states of 7B, the default stores every fourth on a GPU, else every eighth; the rest is
    the same."""
    kept, main = load("scale.activations").kept, load("scale.main")
    one, default = (kept(main.anchored(main.MODELS["7B"], every), gpu=gpu) for every in (1, None))
    state = 4096 * 4096 * 4 * 4  # tokens, d, m, bytes
    assert one.stream - default.stream == (64 - stored) * state
    assert one._replace(stream=0) == default._replace(stream=0)


def test_the_page_has_the_tables(load: Any) -> None:
    """docs/scale.md is what `python benchmarks/scale --write` writes."""
    main = load("scale.main")
    before, inside, after = main.parts(main.PAGE.read_text(encoding="utf-8"))
    assert inside == main.tables(), "run python benchmarks/scale --write"
    assert before + inside + after == main.PAGE.read_text(encoding="utf-8")


def test_the_command(load: Any, capsys: Any, monkeypatch: Any, tmp_path: Any) -> None:
    main = load("scale.main")
    assert main.main([]) == 0
    assert capsys.readouterr().out == f"{main.tables()}\n"
    page = tmp_path / "scale.md"
    monkeypatch.setattr(main, "PAGE", page)
    begin, end = main.MARKS
    page.write_text(f"Before\n{begin}old{end}\nafter\n", encoding="utf-8")
    assert main.main(["--write"]) == 0
    expected = f"Before\n{begin}{main.tables()}{end}\nafter\n"
    assert page.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"residual": "hc"},
            "`residual` must be additive or one of the delta streams, got 'hc'",
        ),
        (
            {"gate": "mlp"},
            "`gate` must be 'linear', the only one that the formulas know, got 'mlp'",
        ),
    ],
)
def test_what_the_formulas_do_not_know(load: Any, options: Any, sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        load("scale.parameters").groups(GPTConfig(**options))
    assert str(raised.value) == sentence
