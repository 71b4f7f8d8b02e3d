"""Record the files that the present code writes: `python -m tests.compatibility.write VERSION`.

VERSION names the release that is about to write them. A format that is recorded never changes, so
an existing one is not overwritten.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from ddl.lab import cli
from ddl.lab.train.runs import PLOT, load_run
from ddl.ops.declarations import BACKWARDS
from tests.compatibility import cases
from tests.compatibility.options import choices, command_lines
from tests.support import ROOT
from tests.support.helpers import randomise_

CHARACTERS = "characters"  # nanoGPT's files of a text, for a run with a character tokenizer
# Long enough that attention is sharp and every parameter matters to the logits.
TRAIN = (
    "--model.hidden-size 8 --model.block-size 16 --model.num-layers 2 --device cpu --batch-size 4"
    " --steps 300 --optim.lr 3e-2 --optim.warmup-steps 10 --log-every 100 --eval-every 150"
    " --eval-batches 2"
)


def write_characters() -> int:
    """Write nanoGPT's train.bin, val.bin and meta.pkl of a text; return the number of tokens."""
    text = (ROOT / "LICENSE-MIT").read_text(encoding="utf-8")
    table = dict(enumerate(sorted(set(text))))
    token = {character: index for index, character in table.items()}
    tokens = np.array([token[character] for character in text], dtype=np.uint16)
    folder = Path(CHARACTERS)
    folder.mkdir()
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": table, "stoi": token}))
    tokens[:-200].tofile(folder / "train.bin")
    tokens[-200:].tofile(folder / "val.bin")
    return len(table)


def ddl(command: str) -> None:
    code = cli.main(command.split())
    assert code == 0, f"`ddl {command}` ended with status {code}"


def write_runs(out: Path) -> None:
    """Train a model with each residual, record its logits, and export one.

    Paths are relative to the current directory, because config.json holds them.
    """
    known = write_characters()
    ddl(f"train tiny {TRAIN} --model.residual additive --out additive")
    data = f"--data {CHARACTERS} --model.vocab-size {known}"
    ddl(f"train tiny {TRAIN} --model.residual ddl-tc {data} --out ddl-tc")
    for name in cases.RUNS:
        model, tokenizer = load_run(Path(name), torch.device("cpu"))
        idx = torch.tensor([tokenizer.encode(cases.PROMPT)])
        record = {"tokens": idx, "logits": cases.call(model, {"idx": idx, "last": cases.LAST})}
        safetensors.torch.save_file(record, out / f"{name}.safetensors")
        shutil.copytree(name, out / name, ignore=shutil.ignore_patterns(PLOT))  # nothing reads it
    ddl(f"export {cases.EXPORTED} --hf {cases.EXPORTED}-hf")
    shutil.copytree(f"{cases.EXPORTED}-hf", out / f"{cases.EXPORTED}-hf")


def write_prepared(out: Path) -> None:
    """Prepare a text, in shards that end within it."""
    Path("lines.txt").write_text((ROOT / "LICENSE-MIT").read_text(encoding="utf-8"), "utf-8")
    options = "--tokenizer bytes --separator \\n --validation 0.2 --shard-tokens 1 --workers 1"
    ddl(f"prepare lines.txt lines.txt --out {cases.PREPARED} {options}")
    shutil.copytree(cases.PREPARED, out / cases.PREPARED)


def write_modules(out: Path) -> None:
    """Record every case's state dict, and an output with it."""
    out.mkdir()
    for name, case in cases.MODULES.items():
        module = case.make()
        randomise_(module)
        record = {f"state.{key}": tensor.clone() for key, tensor in module.state_dict().items()}
        record |= {f"given.{key}": tensor.clone() for key, tensor in case.given.items()}
        record["output"] = cases.call(module, case.given)
        safetensors.torch.save_file(record, out / f"{name}.safetensors")


def write_program(out: Path) -> None:
    """Export a module that calls every operator, and record an output of it."""
    module, (x,) = cases.Program().eval(), cases.X.values()
    randomise_(module)
    program = torch.export.export(module, (x,))
    for node in program.graph.nodes:  # the paths of this machine
        node.meta.pop("stack_trace", None)
    torch.export.save(program, out / "program.pt2")
    record = {"x": x, "output": cases.call(module, {"x": x})}
    safetensors.torch.save_file(record, out / "program.safetensors")


def write_text(out: Path) -> None:
    """Record the operators' schemas, and the commands' options."""
    schemas = [getattr(torch.ops.ddl, forward.name).default._schema for forward, _ in BACKWARDS]
    texts = {"operators": schemas, "commands": command_lines(), "choices": choices()}
    for name, lines in texts.items():
        text = "".join(f"{line}\n" for line in lines)
        (out / f"{name}.txt").write_text(text, encoding="utf-8")


def write(version: str) -> Path:
    """Record the format of a version; return its folder. Exits if there is one already."""
    final = cases.FOLDER / version
    if final.exists():
        raise SystemExit(f"{final} exists: a recorded format never changes, name a new version")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        try:
            out = Path(version)
            out.mkdir()
            write_runs(out)
            write_prepared(out)
            write_modules(out / "modules")
            write_program(out)
            write_text(out)
            (out / cases.SUMS).write_text(cases.sums(out), encoding="utf-8")
            shutil.copytree(out, final)
        finally:
            os.chdir(before)
    return final


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compatibility.write", description=__doc__
    )
    parser.add_argument("version", help="the version that writes these files, such as 0.2")
    folder = write(parser.parse_args().version)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"wrote {folder}: {len(files)} files, {size:,} bytes")


if __name__ == "__main__":
    main()
