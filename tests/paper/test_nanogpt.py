"""A checkpoint of nanoGPT becomes a directory whose model has the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaResidual
from ddl.hf import DDLNanoGPTForCausalLM
from ddl.lab.load import load, load_for_transformers
from ddl.models.tokenizers import CharTokenizer
from ddl.nanogpt import converted
from ddl.paper import import_checkpoint
from tests.support.helpers import randomise_
from tests.support.nanogpt_cases import OTHERS, VARIANTS, annealed, make, make_delta, tokens
from tests.support.nanogpt_folder import write_meta
from tests.support.nanogpt_standin import GPT, Block, GPTConfig
from tests.support.tolerances import assert_close

F32 = torch.float32
TABLE = [chr(40 + i) for i in range(64)]


class HandBlock(Block):
    """docs/nanogpt.md's swap by hand."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.res_attn = DeltaResidual(config.n_embd, **self.options)
        self.res_mlp = DeltaResidual(config.n_embd, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        x = self.res_attn(x, self.attn(h), context=h)
        h = self.ln_2(x)
        return self.res_mlp(x, self.mlp(h), context=h)


class SigmoidBlock(HandBlock):
    options = {"value": "sigmoid", "eps_k": 0.3}  # noqa: RUF012


def by_hand(block: type[HandBlock]) -> GPT:
    class HandGPT(GPT):
        pass

    HandGPT.block = block
    torch.manual_seed(0)
    model = HandGPT(GPTConfig())
    randomise_(model, std=0.7)
    return model


def shaken(kind: type[GPT]) -> GPT:
    torch.manual_seed(0)
    model = kind(GPTConfig())
    randomise_(model, std=0.7)
    return model


def additive(**fields: Any) -> GPT:
    model = make(**fields)
    randomise_(model, std=0.2)
    return model


def write(
    folder: Path, gpt: nn.Module, /, *, table: list[str] | None = TABLE, **changes: Any
) -> Path:
    """Write nanoGPT's ckpt.pt, with these entries changed (None: left out), and meta.pkl."""
    folder.mkdir(exist_ok=True)
    args = {name: value for name, value in vars(gpt.config).items() if name != "flash"}
    checkpoint = {"model": gpt.state_dict(), "optimizer": {}, "model_args": args, "iter_num": 4}
    checkpoint |= {"best_val_loss": torch.tensor(1.5), "config": {"dataset": "letters"}}
    kept = {name: value for name, value in (checkpoint | changes).items() if value is not None}
    torch.save(kept, folder / "ckpt.pt")
    if table is not None:
        write_meta(folder, table)
    return folder


def prefixed(model: nn.Module) -> dict[str, Tensor]:
    """A compiled model's state dict, copied, so that its metadata is lost."""
    return {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}


def is_same(model: GPT, directory: Path) -> None:
    """The directory's model has the logits of `model`, by both of our ways to load it."""
    idx, targets = tokens()
    expected = model.eval()(idx, targets)[0]
    ours, tokenizer = load(directory, "cpu")
    assert_close("logits", ours(idx), expected, F32, depth=8)
    tokenizer = tokenizer.of_training
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.table == TABLE
    theirs, fast = load_for_transformers(directory, "cpu")
    assert isinstance(theirs, DDLNanoGPTForCausalLM)
    assert_close("logits", theirs(idx).logits, expected, F32, depth=8)
    assert fast("*(")["input_ids"] == [2, 0]


CASES: dict[str, Any] = {
    "additive": lambda: additive(bias=False),
    "additive with bias": lambda: additive(dropout=0.2),
    "mask of attention": lambda: additive(flash=False),
    "by hand": lambda: by_hand(HandBlock),
    "by hand with options": lambda: by_hand(SigmoidBlock),
    "half-annealed": lambda: annealed(VARIANTS["tc"], 3, of=7, dtype=F32),
    "annealed": lambda: annealed(VARIANTS["cc"], 7, of=7, dtype=F32),
    "converted class": lambda: shaken(converted(GPT, **OTHERS["papers-code"])),
} | {
    name: lambda options=options: make_delta(options, F32)
    for name, options in (VARIANTS | OTHERS).items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_logits(case: Any, tmp_path: Path) -> None:
    model = case()
    import_checkpoint(write(tmp_path / "out", model), tmp_path / "ours")
    is_same(model, tmp_path / "ours")


@pytest.mark.parametrize("name", OTHERS)
def test_options_beside_model_args(name: str, tmp_path: Path) -> None:
    """`delta_args`, as docs/nanogpt.md has train.py write them."""
    options = OTHERS[name]
    model = make_delta(options, F32)
    args = {**options, "disable": False}
    folder = write(tmp_path / "out", model, model=prefixed(model), delta_args=args)
    import_checkpoint(folder, tmp_path / "ours")
    is_same(model, tmp_path / "ours")


def test_options_of_earlier_names(tmp_path: Path) -> None:
    """`compress_parameterization` was `parameterization`, in delta_args as in the metadata."""
    options = {"value_channels": 2, "compress": "token", "compress_parameterization": "factored"}
    model = make_delta(options, F32)
    args = {"parameterization": "factored", "value_channels": 2, "compress": "token"}
    folder = write(tmp_path / "out", model, model=prefixed(model), delta_args=args)
    import_checkpoint(folder, tmp_path / "ours")
    is_same(model, tmp_path / "ours")


def test_half_annealed_is_said(tmp_path: Path) -> None:
    model = annealed({}, 3, of=7, dtype=F32)
    report = import_checkpoint(write(tmp_path / "out", model), tmp_path / "ours")
    assert report[1] == "on its way from additions to rewrites, after 3 of 7 steps"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["additive", "tc"])
def test_padding_changes_nothing(name: str, side: str, tmp_path: Path) -> None:
    model = CASES[name]()
    import_checkpoint(write(tmp_path / "out", model), tmp_path / "ours")
    hf, _ = load_for_transformers(tmp_path / "ours", "cpu")
    idx, targets = tokens()
    expected = model.eval()(idx, targets)[0]
    mask, padded = torch.ones(2, 12, dtype=torch.int64), torch.full((2, 12), 5)
    real = slice(3, None) if side == "left" else slice(0, 9)
    padded[:, real] = idx
    mask[:, : 3 if side == "left" else 12] = 0 if side == "left" else 1
    mask[:, 9 if side == "right" else 12 :] = 0
    mask[1], padded[1, :9] = 1, idx[1]  # one row without padding
    logits = hf(padded, attention_mask=mask).logits
    assert_close("padded", logits[:1, real], expected[:1], F32, depth=8)
    assert_close("whole", logits[1:, :9], expected[1:], F32, depth=8)


def test_generation_is_nanogpts(tmp_path: Path) -> None:
    """Greedy and beyond the block size, by both classes, alone and in a padded batch."""
    model = make_delta(VARIANTS["cc"], F32).eval()
    import_checkpoint(write(tmp_path / "out", model), tmp_path / "ours")
    idx = tokens()[0][:, :5]
    expected = model.generate(idx, 20, top_k=1)
    ours, _ = load(tmp_path / "ours", "cpu")
    assert torch.equal(ours.generate(idx, 20, temperature=0), expected)
    hf, _ = load_for_transformers(tmp_path / "ours", "cpu")
    choice: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 63}
    assert torch.equal(hf.generate(idx, **choice), expected)
    batch = torch.cat((torch.cat((torch.zeros(1, 2, dtype=torch.int64), idx[:1, :3]), 1), idx[1:]))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    short = {**choice, "max_new_tokens": 9}
    found = hf.generate(batch, attention_mask=mask, **short)
    assert torch.equal(found[:1, 2:], model.generate(idx[:1, :3], 9, top_k=1))
    assert torch.equal(found[1:], expected[1:, :14])


def test_a_loss_and_its_gradients(tmp_path: Path) -> None:
    model = make_delta(VARIANTS["cc"], F32)
    import_checkpoint(write(tmp_path / "out", model), tmp_path / "ours")
    hf, _ = load_for_transformers(tmp_path / "ours", "cpu")
    idx, _ = tokens()
    loss = model(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())[1]
    found = hf(idx, labels=idx).loss
    torch.testing.assert_close(found, loss)
    found.backward()
    loss.backward()
    name = "transformer.h.0.res_attn.value.weight"
    torch.testing.assert_close(hf.get_parameter(name).grad, model.get_parameter(name).grad)


# --- the tokenizer --------------------------------------------------------------------------------


def test_meta_is_found_in_nanogpts_data(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive(), table=None)
    data = tmp_path / "data" / "letters"
    data.mkdir(parents=True)
    write_meta(data, TABLE)
    import_checkpoint(folder, tmp_path / "ours")
    is_same(additive(), tmp_path / "ours")


def test_meta_by_the_option(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive(), table=list(reversed(TABLE)))
    write_meta(tmp_path, TABLE)
    import_checkpoint(folder, tmp_path / "ours", tokenizer=tmp_path)
    is_same(additive(), tmp_path / "ours")


def test_without_meta_it_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive(), table=None)
    report = import_checkpoint(folder, tmp_path / "ours")
    line = "tokens: unknown, because no meta.pkl was found: `--tokenizer` names its directory"
    assert report[1] == line
    assert load(tmp_path / "ours", "cpu").tokenizer is None


def test_ckpt_is_taken_among_others(tmp_path: Path) -> None:
    """nanoGPT writes it; copies of earlier ones may lie beside it."""
    model = additive()
    folder = write(tmp_path / "out", model)
    torch.save({"model": make().state_dict()}, folder / "ckpt-1000.pt")
    import_checkpoint(folder, tmp_path / "ours")
    is_same(model, tmp_path / "ours")
