"""A small model of the paper's code in every kind of file that `ddl import` reads."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tests.support.paper_standin import PublishedGPT, published

THEIRS = {"ddl_v_sigmoid_scale": 3.0, "ddl_state_dv_shortconv_causal": True}


def model() -> PublishedGPT:
    return published("cc-ec", **THEIRS)


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors so that no two share memory, as safetensors requires."""
    return {name: tensor.clone() for name, tensor in state.items()}


def write(directory: Path, kind: str) -> Path:
    """Write the model as a file or directory of this kind; return the path for `ddl import`."""
    directory.mkdir()
    state, config = model().state_dict(), model().config
    if kind != "model_args":
        (directory / "config.json").write_text(json.dumps(config))
    if kind in (".pt", ".bin", "directory"):
        torch.save(state, directory / f"checkpoint{kind.replace('directory', '.pth')}")
    elif kind == ".safetensors":
        safetensors.torch.save_file(separate(state), directory / f"checkpoint{kind}")
    elif kind == "model_args":
        wrapped = {"model": state, "model_args": config, "iter_num": 7, "rng": torch.zeros(3)}
        torch.save(wrapped, directory / "checkpoint.pt")
    elif kind == "nested":
        wrapped = {"model": {"state_dict": state, "step": 3}}
        torch.save(wrapped, directory / "checkpoint.pt")
    elif kind == "model.safetensors":
        safetensors.torch.save_file(separate(state), directory / kind)
        (directory / "training.bin").write_bytes(b"something else")
    elif kind == "pytorch_model.bin":
        torch.save(state, directory / kind)
    else:  # shards
        names = list(state)
        files = {name: f"shard-{index % 2}.bin" for index, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({n: state[n] for n in names if files[n] == file}, directory / file)
        index = {"metadata": {}, "weight_map": files}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory / f"checkpoint{kind}" if kind.startswith(".") else directory
