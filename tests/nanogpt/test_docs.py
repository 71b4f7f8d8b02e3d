"""docs/nanogpt.md is true: its Python and its commands run, and the lines that its diffs add."""

from __future__ import annotations

import json
import os
import re
import shlex
import string
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddl import DeltaResidual
from ddl.lab import cli
from ddl.nanogpt import convert
from tests.support import ROOT, nanogpt_standin
from tests.support.eval_cases import datasets_in
from tests.support.nanogpt_cases import added, groups, make, same, step, tokens
from tests.support.nanogpt_folder import run_script, write_folder
from tests.support.nanogpt_standin import GPT, GPTConfig

PAGE = ROOT / "docs" / "nanogpt.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
DIFFS = [text for language, text in BLOCKS if language == "diff"]
(BY_HAND,) = DIFFS
BLOCK = """\
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
"""  # nanoGPT's lines before the hunk that changes it
HUNK = re.compile(r"^@@ -(\d+),(\d+) \+(\d+),(\d+) @@\n", flags=re.MULTILINE)


def hunks(diff: str) -> list[list[str]]:
    """Return the lines of each hunk, with their sign."""
    return [body.splitlines() for body in HUNK.split(diff)[5::5]]


def after(hunk: list[str]) -> str:
    """Return the text after the hunk is applied."""
    return "\n".join(line[1:] for line in hunk if line[:1] != "-") + "\n"


def plus(hunk: list[str]) -> str:
    return textwrap.dedent("\n".join(line[1:] for line in hunk if line[:1] == "+")) + "\n"


def execute(source: str, names: dict[str, Any]) -> None:
    exec(compile(source, "docs/nanogpt.md", "exec"), names)


def test_hunks_are_counted_right() -> None:
    """`patch` rejects hunks with wrong counts."""
    moved = 0
    for numbers, lines in zip(HUNK.findall(BY_HAND), hunks(BY_HAND), strict=True):
        start, old, new_start, new = map(int, numbers)
        signs = [line[:1] or " " for line in lines]
        assert (signs.count(" ") + signs.count("-"), signs.count(" ") + signs.count("+")) == (
            old,
            new,
        )
        assert new_start == start + moved
        moved += new - old


def test_python_runs() -> None:
    idx, targets = tokens()
    names = {"GPT": GPT, "GPTConfig": GPTConfig, "model_args": {"bias": False}, "torch": torch}
    for text in PYTHON:
        execute(text, names | {"idx": idx, "targets": targets})


# --- by hand --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand() -> type[GPT]:
    """The stand-in with the page's Block and parameter groups."""
    imports, block, optimizer_groups = hunks(BY_HAND)
    names: dict[str, Any] = {"nn": nn, **vars(nanogpt_standin)}
    execute(plus(imports), names)
    execute(BLOCK + after(block), names)

    class HandGPT(GPT):
        def configure_optimizers(
            self, weight_decay: float, learning_rate: float, betas: Any, device_type: str
        ) -> torch.optim.AdamW:
            local = {**names, "self": self, "weight_decay": weight_decay}
            execute(plus(optimizer_groups), local)
            return torch.optim.AdamW(local["optim_groups"], lr=learning_rate, betas=betas)

    HandGPT.block = names["Block"]
    return HandGPT


def test_by_hand_is_convert(by_hand: type[GPT]) -> None:
    """Both have the same state dict, names included, and compute the same function of it."""
    hand, converted = by_hand(GPTConfig(dropout=0.2)), convert(make(dropout=0.2))
    assert not same(hand, converted)
    assert list(hand.state_dict()) == list(converted.state_dict())
    converted.load_state_dict(hand.state_dict())
    assert same(hand, converted)
    other = by_hand(GPTConfig(dropout=0.2))
    other.load_state_dict(converted.state_dict())
    assert same(other, converted)


def test_by_hand_keeps_its_initialisation(by_hand: type[GPT]) -> None:
    """nanoGPT's `apply(self._init_weights)` skips gates and values."""
    for module in by_hand(GPTConfig()).modules():
        if isinstance(module, DeltaResidual):
            assert not module.gate.weight.any()
            assert not module.gate.bias.any()
            assert (module.value.bias == 1).all()
            assert module.value.weight.std() > 0.05  # std 0.125 for d = 16, nanoGPT's would be 0.02


def test_by_hand_decays_what_nanogpt_decays(by_hand: type[GPT]) -> None:
    original = make()
    model = by_hand(GPTConfig())
    decayed, kept = groups(model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"))
    by_rule = groups(original, original.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"))
    assert decayed == by_rule[0]
    assert kept == by_rule[1] | added(convert(make())).keys()


def test_by_hand_learns(by_hand: type[GPT]) -> None:
    model = by_hand(GPTConfig())
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    losses = [step(model, optimizer, 0) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_by_hand_is_not_converted(by_hand: type[GPT]) -> None:
    with pytest.raises(TypeError, match=r"ln_1, attn, ln_2, mlp and nothing else, got `res_attn`$"):
        convert(by_hand(GPTConfig()))


# --- from a checkpoint to scores ------------------------------------------------------------------

FIRST_PAGE = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
SHAKESPEARE = set(string.ascii_letters + "\n !$&',-.3:;?")  # shakespeare_char's 65 characters


def test_the_commands_from_a_checkpoint_to_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In nanoGPT's folder, after a training with the first lines of the page."""
    pytest.importorskip("lm_eval")
    folder = write_folder(tmp_path / "nanogpt", PYTHON[0])
    run_script(folder, "train.py", "--max_iters=3", "--block_size=64")
    monkeypatch.chdir(folder)
    (folder / "FILE").write_text("the cat sat on the mat.\n" * 20, encoding="utf-8")
    task = FIRST_PAGE[FIRST_PAGE.index("mkdir -p my_tasks") : FIRST_PAGE.index("ddl eval")]
    assert set("".join(re.findall(r'": "(.*?)"', task))) <= SHAKESPEARE
    subprocess.run(["bash", "-ec", task], check=True)
    scores, ran = [], []
    with datasets_in(tmp_path / "datasets"):
        for language, text in BLOCKS:
            for line in text.splitlines() if language == "bash" else ():
                program, *arguments = shlex.split(line, comments=True)
                ran.append([program, *arguments][: 2 if program == "ddl" else 1])
                if program == "ddl":
                    more = {"inspect": ["--tokens", "64"], "sample": ["--tokens", "4"]}
                    assert cli.main([*arguments, *more.get(arguments[0], [])]) == 0, line
                else:
                    scores.append(lm_eval_of(arguments, folder / "scores.json"))
    assert ran == [
        *(["ddl", name] for name in ("import", "sample", "inspect", "eval")), ["lm_eval"]
    ]  # fmt: skip
    (record,) = folder.glob("shakespeare/eval-*.json")
    (theirs,), ours = scores, json.loads(record.read_text())["runs"][0]["results"]["words"]
    assert theirs["acc,none"] == ours["acc,none"]
    assert "|words" in capsys.readouterr().out


def lm_eval_of(arguments: list[str], out: Path) -> dict[str, Any]:
    """The scores by lm-eval's own command, in a process that has not imported ddl."""
    ran = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments, "--output_path", str(out), "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HOME": str(out.parent / "home"), "HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (written,) = out.parent.glob("scores*.json")
    scores: dict[str, Any] = json.loads(written.read_text())["results"]["words"]
    return scores


# --- the rest of the page -------------------------------------------------------------------------


def test_names_of_the_table() -> None:
    """The table lists exactly what convert adds to the state dict."""
    rows = re.findall(r"^\| `(transformer\.h\..*?)`(?:, `(.*?)`)? \|", TEXT, flags=re.MULTILINE)
    stems = {name.replace(".h.N.", ".h.0.").replace("{L−1}", "1") for name, _ in rows}
    stems |= {
        name.replace(".h.N.", ".h.0.").replace(".weight", bias) for name, bias in rows if bias
    }
    stems |= {name.replace("res_attn", "res_mlp") for name in stems}
    once = ("expand", "anneal")
    stems |= {name.replace(".h.0.", ".h.1.") for name in stems if name.split(".")[3] not in once}
    start: dict[str, Any] = {"start": "additive", "anneal_steps": 1}
    model = convert(make(), value_channels=4, expand="conv", **start)
    assert stems == model.state_dict().keys() - make().state_dict().keys()


def test_a_model_that_erases_nothing() -> None:
    """As many parameters as one that erases; by hand, too."""
    tied, none = (convert(make(), value_channels=4, erase=erase) for erase in ("tied", "none"))
    shapes = lambda model: {n: t.shape for n, t in model.state_dict().items()}  # noqa: E731
    assert shapes(none) == shapes(tied)
    (by_hand,) = re.findall(r"`(DeltaResidual\(.*?\))`", TEXT)
    residual = eval(by_hand, {"DeltaResidual": DeltaResidual, "config": GPTConfig()})
    assert residual.erase == "none"


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
