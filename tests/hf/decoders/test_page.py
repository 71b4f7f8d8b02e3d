"""docs/decoders.md runs, and the commands take what it saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import hf
from ddl.lab import cli
from ddl.models.tokenizers import ByteTokenizer
from study import finetune
from tests.support import ROOT
from tests.support.decoder_cases import converted, plain
from tests.support.eval_reference import TASKS
from tests.support.sampling import few

TEXT = (ROOT / "docs" / "decoders.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left: dict[str, Any] = {}
    for number, text in enumerate(BLOCKS):
        exec(compile(text, f"decoders.md, block {number}", "exec"), left)
    left["trainer"].train()
    idx = torch.arange(12)[None]
    before, after = left["model"], left["loaded"]
    for name, parameter in left["again"].named_parameters():
        assert name not in left["again"].of_stream() or torch.equal(
            parameter, left["adapter"].get_parameter(name)
        )
    assert after.delta_args == before.delta_args
    assert int(before.model.layers[0].anneal.step) == 2
    assert after(idx).logits.shape == (1, 12, 256)


def saved(folder: Path, variant: str) -> Path:
    """A directory with a converted decoder of bytes and its tokenizer."""
    model = converted(variant, vocab_size=256, max_position_embeddings=96)
    model.save_pretrained(folder)
    hf.to_fast(ByteTokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("variant", few(["channel", "token and conv"], "token and conv"))
def test_commands_take_what_was_saved(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "converted", variant)
    assert cli.main(["inspect", str(folder), "--tokens", "192", "--prompt", "A class"]) == 0
    shown = json.loads((folder / "inspect" / "inspection.json").read_text(encoding="utf-8"))
    assert [sublayer["name"] for sublayer in shown["sublayers"]] == [
        f"model.layers.{layer}.res_{which}" for layer in (0, 1) for which in (1, 2)
    ]
    assert len(shown["lens"]) == 5
    capsys.readouterr()
    command = [
        "eval",
        str(folder),
        "--tasks",
        "local_piqa",
        "--include_path",
        str(TASKS),
        "--limit",
        "2",
    ]
    assert cli.main(command) == 0
    assert "|local_piqa" in capsys.readouterr().out


def test_what_inspect_cannot_say_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Additions between the rewrites, with which `ddl sample` generates all the same."""
    folder = saved(tmp_path / "annealed", "annealed")
    assert cli.main(["inspect", str(folder)]) == 1
    assert "must be a model whose additions are all rewrites" in capsys.readouterr().err
    assert cli.main(["sample", str(folder), "--tokens", "3"]) == 0
    adapter = hf.convert(plain(vocab_size=256), train="stream")
    adapter.save_pretrained(tmp_path / "adapter")
    hf.to_fast(ByteTokenizer()).save_pretrained(tmp_path / "adapter")
    assert cli.main(["inspect", str(tmp_path / "adapter")]) == 1
    assert "ddl.hf.load_adapter" in capsys.readouterr().err


# --- the losses of the page -----------------------------------------------------------------------


def test_the_table_is_current() -> None:
    assert finetune.main(["--page", "--check"]) == 0


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rates or more on a seed, then three seeds with the best, of every variant."""
    text = {
        f"{which} {use}": torch.randint(97, 123, (600,))
        for which in ("first", "second")
        for use in ("train", "held out")
    }
    monkeypatch.setattr(finetune, "texts", lambda: text)
    small = {"STEPS": 2, "FINETUNED": 3, "WARMUP": 1, "WINDOWS": 2, "BATCH": 2, "BLOCK": 16}
    for name, value in small.items():
        monkeypatch.setattr(finetune, name, value)
    records, decoder = tmp_path / "records.jsonl", tmp_path / "decoder"
    arguments = ["--records", str(records), "--decoder", str(decoder)]
    assert finetune.main(arguments) == 0
    kept = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(kept) >= 18
    assert len({record["before"] for record in kept}) == 1
    for variant in finetune.VARIANTS:
        best = finetune.best_rate(variant, records)
        assert best is not None
        tuned = {r["lr"]: r["loss"] for r in kept if (r["variant"], r["seed"]) == (variant, 101)}
        assert best == min(tuned, key=lambda lr: tuned[lr])
        assert min(tuned) < best < max(tuned)
        rates = [r["lr"] for r in kept if r["variant"] == variant and r["seed"] != 101]
        assert rates == [best] * 3
    first, *rows = finetune.table(records).splitlines()[2:6]
    assert first.startswith("| as it was | 0 |")
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in finetune.VARIANTS]
    with_additions, adapter, whole = (int(r.split(" | ")[1].replace(",", "")) for r in rows)
    assert adapter < 0.03 * with_additions < with_additions < whole
    before = records.read_text()
    assert finetune.main(arguments) == 0  # nothing is trained again
    assert records.read_text() == before
