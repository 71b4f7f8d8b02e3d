"""A checkpoint of nanoGPT that cannot be imported: one sentence, no code run, nothing written."""

from __future__ import annotations

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
from tests.support.nanogpt_cases import VARIANTS, make_delta

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


FIT = "`src` must have options in model_args and delta_args that its model takes, got …"
PARAMETERS = "`src` must hold the parameters of nanoGPT's GPT with its model_args, got"
SHAPES = "the parameters must have the config's shapes, got"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model_args": (
        {"model_args": None},
        "`src` must have nanoGPT's model_args, got … without n_layer, n_head, n_embd, block_size",
    ),
    "no heads": (
        {"model_args": args(n_head=None)},
        "`src` must have nanoGPT's model_args, got … without n_head",
    ),
    "heads that do not divide": (
        {"model_args": args(n_head=3)},
        f"{FIT}: `n_head` must be a divisor of n_embd, 16, got 3",
    ),
    "heads of another type": (
        {"model_args": args(n_head="2")},
        f"{FIT}: `n_head` must be an integer of at least 1, got '2'",
    ),
    "another model's option": (
        {"model_args": args(rotary=True)},
        f"{FIT}: NanoGPTConfig.__init__() got an unexpected keyword argument 'rotary'",
    ),
    "another vocabulary": (
        {"model_args": args(vocab_size=65)},
        f"{SHAPES} (64, 16) instead of (65, 16) for transformer.wte.weight, (64, 16) instead of"
        " (65, 16) for lm_head.weight",
    ),
    "missing": (
        {"model": state(**{NAME.replace(".", "__"): None})},
        f"{PARAMETERS} 1 missing ({NAME})",
    ),
    "unknown": (
        {"model": state(transformer__extra=torch.ones(2))},
        f"{PARAMETERS} 1 unknown (transformer.extra)",
    ),
    "shape": (
        {"model": state(**{NAME.replace(".", "__"): torch.ones(2)})},
        f"{SHAPES} (2,) instead of (64, 16) for {NAME}",
    ),
    "integers": (
        {"model": state(**{NAME.replace(".", "__"): torch.ones(64, 16, dtype=torch.int8)})},
        f"`src` must hold floating-point tensors, got torch.int8 for {NAME}",
    ),
    "no tensor": (
        {"model": {**state(), "transformer.note": "text"}},
        "`src` must hold floating-point tensors, got str for transformer.note",
    ),
    "twice": (
        {"model": {**state(), f"_orig_mod.{NAME}": torch.ones(1)}},
        f"`src` must hold {NAME} once, got {NAME} and _orig_mod.{NAME}",
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
    "none": ({}, "`src` must have delta_args beside model_args, got … with unknown options of"),
    "unknown": ({"delta_args": {**DELTA, "gamma": 1}}, FIT),
    "of other shapes": ({"delta_args": {**DELTA, "value_channels": 4}}, SHAPES),
    "of fewer parameters": (
        {"delta_args": {"value_channels": 3}},
        "`src` must hold the parameters of nanoGPT's GPT with its delta_args, got 1 unknown"
        " (transformer.h.0.expand.weight)",
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
    changes: dict[str, Any] = {}
    if where == "metadata":
        changes["model"] = model.state_dict()
        changes["model"]._metadata[""]["delta_args"] |= options
    elif where == "delta_args":
        changes = {"model": prefixed(model), "delta_args": {"value_channels": 2} | options}
    else:
        model = by_hand(HandBlock)
        changes["model"] = model.state_dict()
        for name, entry in changes["model"]._metadata.items():
            if name.endswith((".res_attn", ".res_mlp")):
                entry["options"] |= options
    folder = write(tmp_path / "out", model, **changes)
    if sentence is None:
        assert import_checkpoint(folder, tmp_path / "ours")
    else:
        refused(folder, sentence)


def test_by_hand_with_two_kinds_of_rewrites(tmp_path: Path) -> None:
    model = by_hand(HandBlock)
    model.transformer.h[1].res_mlp.eps_k = 0.5
    got = "… with several options of its rewrites"
    sentence = f"`src` must have delta_args beside model_args, got {got}"
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
    with pytest.raises(InputError, match="of ddl: other commands take it as it is"):
        import_checkpoint(tmp_path / "ours", tmp_path / "again")
