"""Every baseline's training resumes, in few steps; tests/lab/train/test_resume.py has long runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddl.lab.train import train
from ddl.models.config import BASELINES
from tests.lab.train.crash import assert_same, curve, tensors
from tests.lab.train.test_resume import train_in_parts
from tests.support.sampling import few
from tests.support.train_cases import quiet, short


@pytest.mark.parametrize("residual", few(BASELINES[1:], "gated", "expanded"))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, residual: str) -> None:
    config = short(tmp_path, residual, steps=4, log_every=1, eval_every=4, eval_batches=1)
    whole = replace(config, out=tmp_path / "whole")
    train(whole, quiet())
    train_in_parts(config, [2])
    assert curve(config) == curve(whole)
    assert_same(tensors(config), tensors(whole))
