"""`ddl export`, `ddl import`, and `ddl sample` with the directories that they write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddl.lab.config import RESIDUALS
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer, FileTokenizer, GPT2Tokenizer
from tests.support.hf_cases import a_run, byte_pair_files, names, refused, said
from tests.support.paper_standin import published
from tests.support.prepare_cases import write_tokenizer

FILES = ["config.json", "generation_config.json", "model.safetensors", "modeling_ddl.py"]
FILES += ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_export_and_sample(
    residual: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = a_run(tmp_path / "run", ByteTokenizer(), residual), tmp_path / "deep" / "out"
    expected = (0, f"wrote {out}: {', '.join(FILES)}\n", "")
    assert said(capsys, "export", run, "--hf", str(out)) == expected
    options = ["--prompt", "To be", "--tokens", "20", "--device", "cpu"]
    texts = [said(capsys, "sample", directory, *options)[:2] for directory in (run, str(out))]
    code, text = texts[1]
    assert texts[0] == (code, text.replace("<|endoftext|>", "\ufffd"))  # the byte 255
    assert text.startswith("To be")

    tokenizer, hf = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    ids = tokenizer("To be", return_tensors="pt").input_ids
    greedy = tokenizer.decode(hf.generate(ids, max_new_tokens=20)[0])
    printed = said(capsys, "sample", run, *options, "--temperature", "0")[1]
    assert printed == cli_text(greedy.replace("<|endoftext|>", "\ufffd"))


def cli_text(text: str) -> str:
    from ddl.models.tokenizers import printable

    return f"{printable(text)}\n"


def test_a_tokenizer_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_tokenizer(tmp_path / "given.json").read_text(encoding="utf-8")
    for token in (0, None):
        run = a_run(tmp_path / f"run-{token}", FileTokenizer(text, token), vocab_size=400)
        out = tmp_path / f"out-{token}"
        expected = (0, f"wrote {out}: {', '.join(FILES)}\n", "")
        assert said(capsys, "export", run, "--hf", str(out)) == expected
        options = ["--prompt", "The statement", "--tokens", "9", "--device", "cpu"]
        texts = [said(capsys, "sample", directory, *options)[:2] for directory in (run, str(out))]
        assert texts[0] == texts[1]
        assert texts[0][1].startswith("The statement")
        hf = AutoModelForCausalLM.from_pretrained(out)
        assert hf.generation_config.eos_token_id == token
        capsys.readouterr()


def test_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = a_run(tmp_path / "run", CharTokenizer("abc\n")), str(tmp_path / "out")
    assert said(capsys, "export", run, "--hf", out)[0] == 0
    assert AutoTokenizer.from_pretrained(out)("cab\n").input_ids == [2, 0, 1, 3]
    sentence = "`--prompt` must consist of the 4 characters that the model was trained on, got 'x'"
    for directory in (run, out):
        refused(capsys, sentence, "sample", directory, "--prompt", "x", "--device", "cpu")


def test_byte_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    run, out = a_run(tmp_path / "run", GPT2Tokenizer(), vocab_size=50304), tmp_path / "out"
    files = byte_pair_files(tmp_path / "files")
    code, printed, _ = said(capsys, "export", run, "--hf", str(out))
    assert (code, printed.splitlines()) == (
        0,
        [
            f"wrote {out}: {', '.join(FILES[:4])}",
            "without a tokenizer: GPT-2 tokens need the package tiktoken to be read as text: pip"
            " install tiktoken",
        ],
    )
    sentence = (
        f"`RUN` must have a tokenizer, got {out} without tokenizer.json: save the tokenizer of the"
        " model's training there, by `tokenizer.save_pretrained`"
    )
    refused(capsys, sentence, "sample", str(out), "--device", "cpu")

    whole = tmp_path / "whole"
    export = ["export", run, "--hf", str(whole), "--tokenizer", str(files)]
    assert said(capsys, *export) == (0, f"wrote {whole}: {', '.join(FILES)}\n", "")
    hf = AutoModelForCausalLM.from_pretrained(whole)
    assert hf.generation_config.eos_token_id == 0
    sampled = said(capsys, "sample", str(whole), "--prompt", "def a", "--tokens", "3")
    assert (sampled[0], sampled[1][:5]) == (0, "def a")

    other = a_run(tmp_path / "bytes", ByteTokenizer())
    sentence = (
        "`--tokenizer` must be left out unless the model's tokens are GPT-2's, got"
        f" {files} for bytes"
    )
    new = str(tmp_path / "new")
    refused(capsys, sentence, "export", other, "--hf", new, "--tokenizer", str(files))
    assert not Path(new).exists()


def test_import_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = published("tc-ec", vocab_size=256)
    src, ours, back = (str(tmp_path / name) for name in ("x.pt", "ours", "back"))
    torch.save({"model": theirs.state_dict(), "model_args": theirs.config}, src)
    code, printed, _ = said(capsys, "import", src, ours)
    assert code == 0
    assert printed.splitlines()[0].startswith("ddl-tc: 2 blocks, ")
    assert printed.splitlines()[-1] == f"wrote {ours}: {', '.join(FILES)}"
    idx = torch.randint(256, (2, 9))
    hf = AutoModelForCausalLM.from_pretrained(ours)
    torch.testing.assert_close(hf(idx).logits, theirs(idx), rtol=1e-5, atol=1e-5)
    sampled = said(capsys, "sample", ours, "--prompt", "a", "--tokens", "3", "--device", "cpu")
    assert (sampled[0], sampled[1][:1]) == (0, "a")

    code, printed, _ = said(capsys, "import", ours, back, "--reverse", "--layout", "o_proj")
    assert (code, printed.splitlines()[-1]) == (0, f"wrote {back}: config.json, pytorch_model.bin")
    assert names(tmp_path / "back") == ["config.json", "pytorch_model.bin"]
    assert said(capsys, "import", back, str(tmp_path / "again"))[0] == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(idx).logits, hf(idx).logits)
