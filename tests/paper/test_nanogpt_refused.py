"""A checkpoint of nanoGPT that cannot be imported: one sentence, no code run, nothing written."""

from __future__ import annotations

import collections
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.errors import InputError
from ddl.lab import cli
from ddl.paper import import_checkpoint
from tests.paper.test_nanogpt import TABLE, HandBlock, additive, by_hand, prefixed, write
from tests.support.nanogpt_cases import VARIANTS, annealed, make_delta
from tests.support.nanogpt_folder import write_meta

F32 = torch.float32
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 64}
ARGS = SIZES | {"bias": True, "dropout": 0.0}
NAME = "transformer.h.1.mlp.c_fc.weight"
DELTA = {"value_channels": 3, "expand": "conv"}


class Unwanted:
    """Its pickle makes a directory if a loader runs the code in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def refused(src: Path, sentence: str, **options: Any) -> None:
    """Importing gives this sentence, in which … is `src`, and leaves nothing beside it."""
    before = sorted(os.listdir(src.parent))
    with pytest.raises(InputError) as caught:
        import_checkpoint(src, src.parent / "ours", **options)
    assert str(caught.value) == sentence.replace("…", str(src / "ckpt.pt"))
    assert sorted(os.listdir(src.parent)) == before


def state(**changes: Tensor | None) -> dict[str, Tensor]:
    """The additive model's state dict with tensors replaced or removed; __ stands for a dot."""
    tensors = dict(additive().state_dict())
    for key, tensor in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if tensor is not None:
            tensors[key.replace("__", ".")] = tensor
    return tensors


def args(**changes: Any) -> dict[str, Any]:
    """model_args with entries replaced, or left out if None."""
    return {name: value for name, value in (ARGS | changes).items() if value is not None}


LIST = "n_layer, n_head, n_embd, block_size, bias, vocab_size, dropout"
PARAMETERS = "`src` must have the parameters of nanoGPT's GPT, got … with"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model_args": (
        {"model_args": None},
        "`src` must have nanoGPT's model_args, got … without: its number of heads is nowhere else",
    ),
    "no heads": (
        {"model_args": args(n_head=None)},
        f"`src` must have nanoGPT's model_args, {LIST}, got … without n_head",
    ),
    "heads that do not divide": (
        {"model_args": args(n_head=3)},
        "`src` must have nanoGPT's model_args, got …: `n_head` must be a divisor of n_embd, 16,"
        " got 3",
    ),
    "heads of another type": (
        {"model_args": args(n_head="2")},
        "`src` must have nanoGPT's model_args, got …: `n_head` must be an integer of at least 1,"
        " got '2'",
    ),
    "another model's option": (
        {"model_args": args(rotary=True)},
        f"`src` must have nanoGPT's model_args, {LIST}, got … with rotary",
    ),
    "more layers": (
        {"model_args": args(n_layer=10**9)},
        "`src` must have model_args with n_layer = 2, as its parameters, got … with 1000000000",
    ),
    "another vocabulary": (
        {"model_args": args(vocab_size=65)},
        "`src` must have model_args with vocab_size = 64, as its parameters, got … with 65",
    ),
    "missing": ({"model": state(**{NAME.replace(".", "__"): None})}, f"{PARAMETERS} no {NAME}"),
    "no embedding": (
        {"model": state(transformer__wte__weight=None)},
        f"{PARAMETERS} no transformer.wte.weight",
    ),
    "unknown": (
        {"model": state(transformer__extra=torch.ones(2))},
        f"{PARAMETERS} transformer.extra, which is not one",
    ),
    "shape": (
        {"model": state(**{NAME.replace(".", "__"): torch.ones(2)})},
        f"{PARAMETERS} shape (2,) instead of (64, 16) for {NAME}",
    ),
    "integers": (
        {"model": state(**{NAME.replace(".", "__"): torch.ones(64, 16, dtype=torch.int8)})},
        f"`src` must hold floating-point tensors, got … with torch.int8 for {NAME}",
    ),
    "no numbers": (
        {"model": state(**{NAME.replace(".", "__"): torch.ones(64, 16, device="meta")})},
        f"`src` must hold floating-point tensors, got … with no numbers for {NAME}",
    ),
    "no tensor": (
        {"model": {**state(), "transformer.note": "text"}},
        "`src` must hold floating-point tensors, got … with str for transformer.note",
    ),
    "twice": (
        {"model": {**state(), f"_orig_mod.{NAME}": torch.ones(1)}},
        f"`src` must have each parameter once, got … with {NAME} twice",
    ),
    "an untied head": (
        {"model": state(lm_head__weight=torch.ones(64, 16))},
        "`src` must have lm_head.weight equal to transformer.wte.weight, to which nanoGPT ties it,"
        " got … with another",
    ),
    "an untied head that torch compares with nothing": (
        {"model": state(lm_head__weight=torch.ones(64, 16).to(torch.float8_e5m2))},
        "`src` must have lm_head.weight equal to transformer.wte.weight, to which nanoGPT ties it,"
        " got … with another",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), BAD.values(), ids=BAD)
def test_damaged(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "out", additive(), **changes), sentence)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {"delta_args": {**DELTA, "gamma": 1}},
        "`src` must have options that ddl.nanogpt.convert takes, got …: ",
    ),
    "contradictory": (
        {"delta_args": {**DELTA, "value_channels": 4}},
        "`src` must have value_channels = 3 in its delta_args, as its parameters, got … with 4",
    ),
    "far too large": (
        {"delta_args": {**DELTA, "expand_kernel_size": 2**40}},
        "`src` must have expand_kernel_size = 4 in its delta_args, as its parameters, got … with"
        f" {2**40}",
    ),
    "of fewer parameters": (
        {"delta_args": {"value_channels": 3}},
        f"{PARAMETERS} transformer.h.0.expand.weight, which is not one; put delta_args beside"
        " model_args",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), OPTIONS.values(), ids=OPTIONS)
def test_options(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = make_delta(DELTA, F32)
    folder = write(tmp_path / "out", model, model=prefixed(model), **changes)
    with pytest.raises(InputError) as caught:
        import_checkpoint(folder, tmp_path / "ours")
    assert str(caught.value).startswith(sentence.replace("…", str(folder / "ckpt.pt")))
    assert not (tmp_path / "ours").exists()


GONE = "which can no longer be built; commit 600add3e is the last that can"


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("gate", "value"), f"`heads` must be 1, got 2, {GONE}"),
        (("gate",), f"`erase` must be 'tied' or 'none', got 'separate', {GONE}"),
    ],
)
def test_rewrites_that_are_gone(names: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    """Shapes alone show several heads, and a gate that erases."""
    tensors = prefixed(make_delta({"value_channels": 2}, F32))
    for name, tensor in tensors.items():
        if name.split(".")[-2] in names:
            tensors[name] = torch.cat((tensor, tensor))
    refused(write(tmp_path / "out", make_delta({}, F32), model=tensors), sentence)


@pytest.mark.parametrize("where", ["metadata", "metadata of a residual", "delta_args"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 4}, f"`heads` must be 1, got 4, {GONE}"),
        ({"erase": "none", "normalize": False}, f"`normalize` must be True, got False, {GONE}"),
        ({"heads": 1, "normalize": True}, None),
    ],
)
def test_options_that_are_gone(
    where: str, options: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    model = make_delta({"value_channels": 2}, F32)
    tensors = model.state_dict() if where == "metadata" else prefixed(model)
    changes: dict[str, Any] = {"model": tensors}
    if where == "metadata":
        tensors._metadata[""]["delta_args"] |= options
    elif where == "delta_args":
        changes["delta_args"] = {"value_channels": 2} | options
    else:
        entries = by_hand(HandBlock).state_dict()._metadata
        for name, entry in entries.items():
            if name.endswith((".res_attn", ".res_mlp")):
                entry["options"] |= options
        changes["model"] = collections.OrderedDict(tensors)
        changes["model"]._metadata = entries
    folder = write(tmp_path / "out", model, **changes)
    if sentence is None:
        assert import_checkpoint(folder, tmp_path / "ours")
    else:
        refused(folder, sentence)


def test_annealed_over_an_unknown_number_of_steps(tmp_path: Path) -> None:
    model = annealed({}, 3, of=7, dtype=F32)
    refused(
        write(tmp_path / "out", model, model=prefixed(model)),
        "`src` must have delta_args with anneal_steps beside model_args, got … with 3 steps of an"
        " unknown number",
    )


def test_by_hand_with_two_kinds_of_rewrites(tmp_path: Path) -> None:
    model = by_hand(HandBlock)
    model.transformer.h[1].res_mlp.eps_k = 0.5
    sentence = "`src` must have the same options for all its rewrites, got … with several"
    refused(write(tmp_path / "out", model), sentence)


def test_another_variant(tmp_path: Path) -> None:
    sentence = "`variant` must be auto or ddl-cc, which … has, got 'ddl-tc'"
    refused(write(tmp_path / "out", make_delta(VARIANTS["cc"], F32)), sentence, variant="ddl-tc")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "model_args", "config", "optimizer", "other"])
def test_no_code_of_a_checkpoint_runs(where: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    nested = {"a": [{"b": (Unwanted(witness),)}]}
    folder = write(tmp_path / "out", additive(), **{where: nested})
    with pytest.raises(InputError, match=r"got something else: it refers to \S+mkdir$"):
        import_checkpoint(folder, tmp_path / "ours")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    torch.load(folder / "ckpt.pt", weights_only=False)
    assert witness.exists()


@pytest.mark.parametrize("nested", [False, True])
def test_no_code_of_meta_runs(nested: bool, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    folder = write(tmp_path / "out", additive(), table=None)
    unwanted = Unwanted(witness)
    itos = {0: [unwanted]} if nested else unwanted
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": itos, "stoi": {}}))
    with pytest.raises(InputError, match=r"meta.pkl` must be nanoGPT's meta.pkl, .*mkdir$"):
        import_checkpoint(folder, tmp_path / "ours")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    pickle.loads((folder / "meta.pkl").read_bytes())
    assert witness.exists()


@pytest.mark.parametrize("bytes_left", [0, 1, 1000, -100])
def test_truncated(bytes_left: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive())
    file = folder / "ckpt.pt"
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(InputError, match=r"ckpt.pt` must hold tensors in plain dicts") as caught:
        import_checkpoint(folder, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_several_checkpoints(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive())
    (folder / "older.pt").write_bytes((folder / "ckpt.pt").read_bytes())
    (folder / "ckpt.pt").rename(folder / "newer.pt")
    refused(
        folder,
        f"`src` must name a file with weights, or a directory with one, got {folder} with these:"
        " newer.pt, older.pt",
    )
    assert import_checkpoint(folder / "older.pt", tmp_path / "ours")


def test_characters_of_another_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", additive(), table=TABLE[1:])
    expected = "64 characters, the model's vocabulary"
    got = "63: `--tokenizer` names the directory of another"
    refused(folder, f"`{folder}/meta.pkl` must have {expected}, got {got}")
    (tmp_path / "empty").mkdir()
    refused(
        folder,
        f"`tokenizer` must be a directory with meta.pkl, got {tmp_path}/empty without",
        tokenizer=tmp_path / "empty",
    )


def test_a_dataset_outside_of_data_is_not_read(tmp_path: Path) -> None:
    write_meta(tmp_path, TABLE)
    (tmp_path / "a").mkdir()
    for number, dataset in enumerate(("../..", str(tmp_path), "..", 7)):
        config = {"dataset": dataset}
        folder = write(tmp_path / "a" / "out", additive(), table=None, config=config)
        out = tmp_path / f"ours-{number}"
        assert import_checkpoint(folder, out)[1].startswith("tokens: unknown")


def test_other_commands_name_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "out", additive())
    for command in (["export", "--hf", str(tmp_path / "hf")], ["eval", "--tasks", "capitals"]):
        assert cli.main([command[0], str(folder), *command[1:]]) == 1
        told = capsys.readouterr().err
        assert told.endswith(
            f"got {folder}, a checkpoint of nanoGPT or of the paper's code, for `ddl import`\n"
        )


def test_there_is_no_way_back_to_the_papers_code(tmp_path: Path) -> None:
    import_checkpoint(write(tmp_path / "out", additive()), tmp_path / "ours")
    sentence = f"`src` must be a model with the papers' blocks for `reverse`, got {tmp_path}/ours"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)} with nanoGPT's$"):
        import_checkpoint(tmp_path / "ours", tmp_path / "back", reverse=True)
    assert not (tmp_path / "back").exists()
    with pytest.raises(InputError, match="of ddl: `ddl sample`, `ddl eval` and `ddl export` take"):
        import_checkpoint(tmp_path / "ours", tmp_path / "again")
