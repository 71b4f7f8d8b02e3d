"""`ddl.paper` raises InputError for invalid checkpoints and options; the messages are pinned."""

from __future__ import annotations

import collections
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ddl.hf
from ddl.errors import InputError
from ddl.lab import exchange
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.train.runs import RunDirectory, load_config
from ddl.models import GPT
from ddl.models.tokenizers import ByteTokenizer
from ddl.paper import convert, import_checkpoint, revert
from tests.support.hf_cases import byte_pair_files
from tests.support.paper_files import model, write
from tests.support.paper_standin import SIZES, published


def changed(variant: str, **changes: Tensor | None) -> dict[str, Tensor]:
    """Replace or remove tensors of a state dict; __ in a name stands for a dot."""
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
            {"parameterization": "muP"},
            "`parameterization` in config.json must be null, standard, widthmuP, completeP or"
            ' spectralP, got "muP"',
        ),
        (
            {"ddl_sequence_reduction_version": 2},
            "`ddl_sequence_reduction_version` in config.json must be 1, got 2: the models here have"
            " no such option",
        ),
        (
            {"residual_branch_mult": 0},
            "`residual_branch_mult` must be a positive finite number, got 0",
        ),
        ({"block_size": 1e3}, "`block_size` must be an integer of at least 1, got 1000.0"),
        ({"ddl_v_sigmoid": "yes"}, "`ddl_v_sigmoid` must be True or False, got 'yes'"),
        ({"ddl_k_eps": "0"}, "`ddl_k_eps` must be a finite number, got '0'"),
        ({"ddl_beta_init": math.inf}, "`ddl_beta_init` must be a finite number, got inf"),
        ({"rope_base": 10**400}, f"`rope_base` must be a finite number, got {10**400}"),
        (
            {"ddl_state_read_init": "1/m"},
            "`read_init` must be a finite number, got '1/m'",
        ),
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
    with pytest.raises(
        InputError, match=r'^`variant` must be "auto" or "additive" or .*, got \'cc\'$'
    ):
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
        ({"erase": "none"}, "`erase` must be tied in the paper's code, got none"),
        ({"branch_scale": 0.5}, "`branch_scale` must be 1 with the layout c_proj, got 0.5"),
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
    with pytest.raises(InputError, match=r'^`layout` must be "c_proj" or "o_proj", got \'x\'$'):
        revert(config, state, layout="x")  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------


class Unwanted:
    """Its pickle makes a directory if a loader runs the code in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def refused(src: Path, out: Path, pattern: str, **options: Any) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        exchange.import_checkpoint(src, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    src, witness = tmp_path / "x.pt", tmp_path / "witness"
    torch.save({"model": Unwanted(witness)}, src)
    pattern = (
        r"^`\S+x.pt` must hold tensors in plain dicts, got something else: it refers to \S+mkdir$"
    )
    refused(src, tmp_path / "out", pattern)
    assert not witness.exists()
    torch.load(src, weights_only=False)
    assert witness.exists()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    out, src = tmp_path / "out", tmp_path / "x.pt"
    refused(src, out, r"^`src` must be a file with weights, got \S+x.pt: No such file")
    src.write_bytes(b"not a pickle")
    refused(src, out, r"^`\S+x.pt` must hold tensors in plain dicts, got something else: \S")
    src.write_bytes(b"")
    refused(src, out, r"^`\S+x.pt` must hold tensors in plain dicts, got something else: \S")
    torch.save([torch.zeros(1)], src)
    refused(src, out, r"^`\S+x.pt` must hold a state dict, got list$")
    torch.save({"model": {"step": 3}}, src)
    refused(src, out, r"^`src` must hold a state dict, got \S+x.pt with step$")
    torch.save(collections.OrderedDict(model().state_dict()), src)
    (tmp_path / "config.json").write_text("{")
    refused(src, out, r"^`\S+config.json` must be JSON, got Expecting")
    (tmp_path / "config.json").write_text("[]")
    refused(src, out, r"^`\S+config.json` must be a JSON object, got list$")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(src, out, r"^`\S+config.json` must be JSON, got ")
    broken = tmp_path / "x.safetensors"
    broken.write_bytes(b"\0" * 20)
    refused(broken, out, r"^`\S+x.safetensors` must hold tensors in plain dicts, got")


def test_directories_without_a_checkpoint(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    refused(src, out, r"^`src` must name a file with weights, or a .* with none$")
    for name in ("a.pt", "b.pt"):
        torch.save({}, src / name)
    refused(src, out, r"^`src` must name a file with weights, .* with these: a.pt, b.pt$")
    index = src / "model.safetensors.index.json"
    outside, strange = {"a": "../a.pt"}, {"a": ["a.pt"]}
    for files in (outside, strange, {}, [3], None):
        listing = {"weight_map": files}
        index.write_text(json.dumps(listing))
        refused(src, out, r"^`\S+index.json` must map parameters to files beside it")
    index.write_text(json.dumps({"weight_map": {"a": "missing.bin"}}))
    refused(src, out, r"^`src` must be a file with weights, got \S+missing.bin: No such file")


def test_nothing_is_written_for_weights_that_do_not_fit(tmp_path: Path) -> None:
    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    refused(src, out, "ddl-tc model, got 3 missing .* and 3 unknown", variant="ddl-tc")
    state = model().state_dict()
    del state["ln_f.weight"]
    torch.save(state, src)
    refused(src, out, r"got 1 missing \(ln_f.weight\)$")


def test_out_must_be_new_or_empty(tmp_path: Path) -> None:
    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    got = f"{out}, a directory with files: choose another"
    sentence = f"`out` must be a new or empty directory, got {got}"
    for reverse in (False, True):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            import_checkpoint(src, out, reverse=reverse)
    assert (out / "notes").read_text() == "mine"
    with pytest.raises(InputError, match=r"must be a new or empty directory, .*, a file: choose"):
        import_checkpoint(src, out / "notes")
    with pytest.raises(InputError, match=r"^`out` must be .* (Not a directory|File exists)"):
        import_checkpoint(src, out / "notes" / "deep")
    (out / "notes").unlink()
    assert len(import_checkpoint(src, out)) == 3


def test_half_a_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    monkeypatch.setattr(ddl.hf.DDLForCausalLM, "save_pretrained", full)
    refused(src, out, r"^`out` must be writable, got \S+out: No space left on device$")
    monkeypatch.undo()
    import_checkpoint(src, tmp_path / "ours")
    monkeypatch.setattr(torch, "save", full)
    refused(tmp_path / "ours", out, "^`out` must be writable, got", reverse=True)


def test_a_link_to_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: object, folder: Path, *_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    src, real, link = write(tmp_path / "theirs", ".pt"), tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(ddl.hf.DDLForCausalLM, "save_pretrained", half)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(src, link)
    assert sorted(tmp_path.iterdir()) == before
    assert list(real.iterdir()) == []
    import_checkpoint(src, link)
    assert link.is_symlink()
    assert (real / "model.safetensors").stat().st_size > 4


def test_the_wrong_way_round(tmp_path: Path) -> None:
    src, ours, out = write(tmp_path / "theirs", ".pt"), tmp_path / "ours", tmp_path / "out"
    import_checkpoint(src, ours)
    theirs = "^`src` must be a checkpoint of nanoGPT or of the paper's code, got "
    refused(ours, out, f"{theirs}.*, a Hugging Face directory with a model of ddl: other commands")
    refused(
        ours / "model.safetensors", out, f"{theirs}.* of ddl: .* the other way round is --reverse"
    )
    expected = "a run directory of `ddl train` or a Hugging Face directory with a model of ddl"
    pattern = f"^`src` must be {expected}, got {re.escape(str(src.parent))}"
    for text in ('{"n_layer": 2}', '{"architectures": []}', '{"model_type": "nanogpt-pro"}'):
        (src.parent / "config.json").write_text(text)
        said = f"{pattern}, a checkpoint of nanoGPT or of the paper's code, for `ddl import`$"
        refused(src.parent, out, said, reverse=True)
    (src.parent / "config.json").write_text("[" * 100_000)
    refused(src.parent, out, f"{pattern}: its config.json cannot be read: ", reverse=True)
    (src.parent / "config.json").unlink()
    files = byte_pair_files(tmp_path / "files")
    pattern = (
        r"^`tokenizer` must be left out unless the model's tokens are GPT-2's, .* for characters$"
    )
    refused(src, out, pattern, tokenizer=files)
    config = json.loads((ours / "config.json").read_text())
    for odd in ({"dtype": "foo"}, {"id2label": 5}):
        (ours / "config.json").write_text(json.dumps(config | odd))
        refused(ours, out, rf"`{ours}` must hold a model of type ddl, got", reverse=True)
    (ours / "config.json").write_text(json.dumps(config))
    (ours / "model.safetensors").write_bytes(b"damaged")
    refused(ours, out, rf"`{ours}` must hold a model of type ddl, got", reverse=True)
    (ours / "model.safetensors").unlink()
    refused(ours, out, r"must hold a model of type ddl, got Error no file named", reverse=True)


def test_a_run_that_the_paper_does_not_have(tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=61, num_layers=1, hidden_size=24, num_heads=2)
    training = TrainConfig(model=config, data=None, out=tmp_path / "run")
    RunDirectory.create(training, ByteTokenizer()).save(GPT(config))
    assert load_config(tmp_path / "run").model == config
    pattern = "^`value_from` must be compressed in the paper's code, got context$"
    refused(tmp_path / "run", tmp_path / "out", pattern, reverse=True)
    with pytest.raises(
        InputError, match=r"^`src` must be a checkpoint of nanoGPT or of the paper's code, got"
    ):
        import_checkpoint(tmp_path / "run", tmp_path / "out")


def test_heads_of_any_width() -> None:
    config = GPTConfig(vocab_size=61, num_layers=1, hidden_size=25, num_heads=3, head_size=8)
    assert config.head_dim == 8
    assert GPT(config).trunk.sublayers[0].c_proj.weight.shape == (25, 24)
    assert GPTConfig().head_dim == 128
