"""Directories that an earlier `ddl export` wrote load with the Auto classes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

import ddl.hf
from ddl.errors import InputError
from ddl.lab import cli
from ddl.lab.config import GPTConfig
from ddl.lab.load import load, load_for_transformers
from tests.compatibility.cases import EXPORTED, FORMATS, LAST, PROMPT
from tests.support.tolerances import assert_close

FOUND = [path / f"{EXPORTED}-hf" for path in FORMATS]
every_export = pytest.mark.parametrize("export", FOUND, ids=lambda export: export.parent.name)

# A program that has not heard of ddl: only the code in the directory imports it.
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, prompt, out = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
assert not any(name.split(".")[0] == "ddl" for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
torch.save((tokens, model(tokens).logits.detach()), out)
"""


def assert_recorded(export: Path, tokens: Tensor, logits: Tensor) -> None:
    record = safetensors.torch.load_file(export.with_name(f"{EXPORTED}.safetensors"))
    assert torch.equal(tokens, record["tokens"])
    assert_close("logits", logits[:, -LAST:], record["logits"], torch.float32)


@every_export
def test_with_ddl_hf_imported(export: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(export)(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(export)
    assert type(model) is ddl.hf.DDLForCausalLM
    assert_recorded(export, tokens, model(tokens).logits.detach())


@every_export
def test_with_the_code_in_the_directory(export: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits.pt"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(export), PROMPT, str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert_recorded(export, *torch.load(out))


@every_export
def test_with_our_own_loader(export: Path) -> None:
    model, tokenizer = load(export, "cpu")
    assert tokenizer is not None
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    assert_recorded(export, tokens, model(tokens).logits.detach())


@every_export
def test_an_old_run_is_exported_and_evaluated(export: Path, tmp_path: Path) -> None:
    run, out = export.with_name(EXPORTED), tmp_path / "out"
    assert cli.main(["export", str(run), "--hf", str(out)]) == 0
    for path in (run, out):
        model, tokenizer = load_for_transformers(path, "cpu")  # as `ddl eval` does
        tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
        assert_recorded(export, tokens, model(tokens).logits.detach())


@every_export
def test_a_field_of_a_newer_version_is_refused(export: Path, tmp_path: Path) -> None:
    path = tmp_path / "export"
    shutil.copytree(export, path)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(values | {"gate_hiden": 3}), encoding="utf-8")
    sentence = (
        "`config.json` must hold a DDLConfig, got the unknown field 'gate_hiden'; "
        "if a newer ddl-rs wrote it, install that version"
    )
    for read in (AutoModelForCausalLM.from_pretrained, ddl.hf.load, load):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read(path)


@every_export
def test_a_field_that_an_old_file_lacks_takes_its_default(export: Path, tmp_path: Path) -> None:
    path = tmp_path / "export"
    shutil.copytree(export, path)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    default = vars(ddl.hf.DDLConfig())
    fields = GPTConfig.__dataclass_fields__
    kept = {n: value for n, value in values.items() if n not in fields or value != default[n]}
    assert len(kept) < len(values) - 10
    (path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    assert ddl.hf.load(path)[0].config == ddl.hf.load(export)[0].config
