"""The README is true: its Python runs, and its commands, targets and files exist."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddl import DeltaResidual
from tests.support import ROOT
from tests.support.decoder_cases import plain
from tests.support.nanogpt_standin import GPT, MLP, Block, CausalSelfAttention, GPTConfig

DOCS = sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "\n".join(text for language, text in BLOCKS if language == "bash")
PYTHON = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the README's snippets run."""
    path = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def namespace(folder: Path) -> dict:
    """Run the README's Python in order, starting from nanoGPT's model.py; return its names."""
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "Block": Block,
        "CausalSelfAttention": CausalSelfAttention,
        "MLP": MLP,
        "config": GPTConfig(n_layer=2, n_head=4, n_embd=64, bias=False),
        "GPT": GPT,
        "model": plain(),
    }
    assert PYTHON, "the README has Python blocks"
    for number, text in enumerate(PYTHON, start=1):
        exec(compile(text, f"README.md, python block {number}", "exec"), names)
    return names


def test_python_blocks_run(namespace):
    assert {"rewrite", "DeltaBlock", "GPT", "stream"} <= namespace.keys()
    sizes = GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=16)
    for model in (namespace["GPT"](sizes), namespace["model"]):
        assert any(isinstance(module, DeltaResidual) for module in model.modules())


def test_the_box_runs(folder):
    """Its two lines of code convert models, and its command is understood."""
    from ddl.lab.cli.command import parse
    from ddl.lab.config import PRESETS, TrainConfig

    box = re.search(r"<!-- which-variant: begin.*?-->\n(.*?)<!--", README, re.DOTALL)[1]
    assert len(box.splitlines()) <= 12
    names = {"GPT": GPT, "model": plain()}
    for code in re.findall(r"`(import .*?)`", box):
        exec(compile(code, "README.md, the box", "exec"), names)
    gpt = names["GPT"](GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=16))
    for model in (gpt, names["model"]):
        rewrites = [module for module in model.modules() if isinstance(module, DeltaResidual)]
        assert rewrites
        assert {residual.erase for residual in rewrites} == {"none"}
    (command,) = re.findall(r"`ddl train demo (.*?)`", box)
    config = parse(TrainConfig, shlex.split(command), default=PRESETS["demo"])
    assert (config.model.residual, config.model.erase) == ("ddl-tc", "none")


def test_nanogpt_block_trains(namespace):
    block = namespace["DeltaBlock"](namespace["config"])
    x = torch.randn(2, 8, 64, requires_grad=True)
    block(x).square().mean().backward()
    gradients = {name: p.grad for name, p in block.named_parameters()}
    assert x.grad is not None
    gradients["x"] = x.grad
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name


def test_stream_gives_a_normalised_readout(namespace):
    h = namespace["h"]
    assert h.shape == namespace["tok_emb"].shape
    torch.testing.assert_close(h.square().mean(-1), torch.ones(h.shape[:-1]), rtol=1e-2, atol=0)


def test_make_targets_exist():
    named = set(re.findall(r"`make ([a-z-]+)", README))
    named |= set(re.findall(r"^make ([a-z-]+)", SHELL, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{p.name}" for p in DOCS)])
def test_extras_exist(path):
    named = re.findall(r"pip install '?[\w.-]+\[([\w,]+)\]", (ROOT / path).read_text("utf-8"))
    known = set(importlib.metadata.metadata("ddl-rs").get_all("Provides-Extra"))
    assert {extra for extras in named for extra in extras.split(",")} <= known
    assert named or path != "README.md"


def test_ddl_subcommands_exist(capsys):
    from ddl.lab.cli import main

    named = set(re.findall(r"^ddl ([a-z]+)", SHELL, flags=re.MULTILINE))
    assert {"train", "sample", "export", "eval", "import"} <= named
    for subcommand in sorted(named):
        with pytest.raises(SystemExit) as stop:
            main([subcommand, "--help"])
        assert stop.value.code in (0, None), capsys.readouterr().err


def test_the_way_from_text_to_scores(folder, capsys):
    """The lines that need neither a network nor a checkpoint run as they are."""
    from ddl.lab.cli import main

    block = next(text for language, text in BLOCKS if language == "bash" and "ddl train" in text)
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [command[0] for command in commands] == ["train", "sample", "export", "eval", "import"]
    for command in commands[:3]:
        short = ["--steps", "2"] if command[0] == "train" else []
        assert main([*command, *short]) == 0, capsys.readouterr().err
    assert "The statement" in capsys.readouterr().out
    assert (folder / "tiny-hf" / "model.safetensors").exists()
    assert main(commands[4]) == 1
    assert "`SRC` must" in capsys.readouterr().err


def test_the_gate_runs_the_commands_for_a_clone():
    (block,) = (text for language, text in BLOCKS if language == "bash" and "make " in text)
    commands = re.findall(r"^make ([a-z-]+)", block, flags=re.MULTILINE)
    assert commands == ["demo", "test"]
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [name for name in commands if f"\nstep make {name}" not in gate] == []


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^":]+)"', README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_list_of_rooms_is_whole():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listing = re.search(r"^## The rooms$.*?^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    listed = {line.split()[0].rstrip("/") for line in listing[1].splitlines() if line.strip()}
    assert [path for path in listed if not (ROOT / path).exists()] == []
    apart = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    python = {p for p in (ROOT / "python" / "ddl").iterdir() if not p.name.startswith("_native")}
    python |= set((ROOT / "python" / "ddl" / "lab").iterdir())
    rooms = {p for p in python if p.name not in apart | {"lab"}} | {
        p for p in (ROOT / "src").iterdir() if p.is_dir()
    }
    assert {str(room.relative_to(ROOT)) for room in rooms} <= listed


def test_files_that_are_not_edited_by_hand_are_listed():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Files that are not edited by hand")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")][1:]
    words = re.findall(r"[^\s,]+", " ".join(cells).replace("\\", ""))
    globs = [word for word in words if "." in word or "*" in word]
    assert [glob for glob in globs if not list(ROOT.glob(glob))] == []
    listed = {path for glob in globs for path in ROOT.glob(glob)}
    made = [ROOT / "tests/costs/recorded.json", ROOT / "Cargo.lock"]
    for folder in ("benchmarks/results", "study/records"):
        made += (ROOT / folder).iterdir()
    made += [path for path in (ROOT / "docs").iterdir() if path.suffix in (".png", ".svg")]
    made += [p for p in (ROOT / "docs").glob("*.md") if ": begin" in p.read_text(encoding="utf-8")]
    assert set(made) - listed == {ROOT / "docs" / "ddl.svg"}  # drawn by hand
