"""`accelerate launch` and the Trainer: two processes take the steps of one with the whole batch.

In float32, and in bfloat16 by autocast.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import ROOT
from tests.support.hf_cases import names

SCRIPT = """\
import sys

import torch
from transformers import Trainer, TrainingArguments

from ddl.lab.config import GPTConfig
from ddl.hf import from_gpt
from ddl.models import GPT

out, processes = sys.argv[1], int(sys.argv[2])
sizes = {"vocab_size": 61, "block_size": 40, "num_layers": 2, "num_heads": 2, "hidden_size": 32}
starts = torch.randint(61, (64, 1), generator=torch.Generator().manual_seed(2))
rows = [{"input_ids": row, "labels": row} for row in (starts + torch.arange(24)) % 61]
for bf16 in (False, True):
    torch.manual_seed(1)
    model = from_gpt(GPT(GPTConfig(**sizes)))
    arguments = TrainingArguments(
        f"{out}/{bf16}",
        max_steps=4,
        per_device_train_batch_size=8 // processes,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert trainer.accelerator.num_processes == processes
    assert trainer.accelerator.native_amp == bf16
    trainer.save_model()
    trainer.save_state()
"""
PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")


def losses(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [record["loss"] for record in history if "loss" in record]


def launch(folder: Path, *arguments: str) -> None:
    """Run the page's command, without the configuration of whoever runs the tests."""
    (line,) = re.findall(r"^accelerate (launch .*) train\.py$", PAGE, flags=re.MULTILINE)
    home = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(path for path in sys.path if path)
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    free = ["--main_process_port", "0"]  # any port, so that tests do not meet at the default
    done = subprocess.run(
        [*accelerate, *line.split(), *free, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, **home, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_two_processes_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, one, two = tmp_path / "train.py", tmp_path / "one", tmp_path / "two"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script), str(one), "1"])
    runpy.run_path(str(script))
    launch(tmp_path, str(two), "2")

    for bf16, tolerance in {"False": 1e-5, "True": 2e-3}.items():
        alone, together = losses(one / bf16), losses(two / bf16)
        assert len(alone) == 4
        assert together == pytest.approx(alone, rel=0, abs=tolerance)
        assert {"config.json", "model.safetensors", "trainer_state.json"} <= set(names(two / bf16))
        models = [AutoModelForCausalLM.from_pretrained(out / bf16) for out in (one, two)]
        idx = (torch.arange(5)[:, None] + torch.arange(12)) % 61
        of_one, of_two = (model(idx, labels=idx).loss for model in models)
        torch.testing.assert_close(of_two, of_one, rtol=0, atol=10 * tolerance)
        assert of_one < alone[0] - 0.2  # it has learnt something, which the files hold
    assert losses(one / "True") != losses(one / "False")
