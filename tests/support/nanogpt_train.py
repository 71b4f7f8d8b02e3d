"""A stand-in for nanoGPT's train.py, written for these tests: its options, files and checkpoints.

It copies all that a model meets there: what is made from `model_args`, in which order a checkpoint
is loaded, what a checkpoint holds, the prefix that compilation leaves, and cropping.
"""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import GPT, GPTConfig  # type: ignore[import-not-found]

config: dict[str, Any] = {
    "out_dir": "out", "init_from": "scratch", "dataset": "letters", "max_iters": 4,
    "batch_size": 4, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.0,
    "bias": False, "learning_rate": 1e-2, "compile": False,
}  # fmt: skip
for argument in sys.argv[1:]:
    name, value = argument.removeprefix("--").split("=")
    config[name] = value if isinstance(config[name], str) else ast.literal_eval(value)

out, data = Path(config["out_dir"]), Path("data") / config["dataset"]
vocab_size = pickle.loads((data / "meta.pkl").read_bytes())["vocab_size"]
train_data = np.memmap(data / "train.bin", dtype=np.uint16, mode="r")
torch.manual_seed(1337)
sizes = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
model_args: dict[str, Any] = {name: config[name] for name in sizes} | {"vocab_size": None}
first, checkpoint = 0, None
if config["init_from"] == "scratch":
    model_args["vocab_size"] = vocab_size
    model = GPT(GPTConfig(**model_args))
elif config["init_from"] == "resume":
    checkpoint = torch.load(out / "ckpt.pt", map_location="cpu")
    for name in ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size"):
        model_args[name] = checkpoint["model_args"][name]
    model = GPT(GPTConfig(**model_args))
    state_dict = checkpoint["model"]
    for name in list(state_dict):
        if name.startswith("_orig_mod."):
            state_dict[name.removeprefix("_orig_mod.")] = state_dict.pop(name)
    model.load_state_dict(state_dict)
    first = checkpoint["iter_num"]
else:
    model = GPT.from_pretrained(config["init_from"], {"dropout": config["dropout"]})
    for name in ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size"):
        model_args[name] = getattr(model.config, name)
if config["block_size"] < model.config.block_size:
    model.crop_block_size(config["block_size"])
    model_args["block_size"] = config["block_size"]
optimizer = model.configure_optimizers(0.1, config["learning_rate"], (0.9, 0.95), "cpu")
if checkpoint is not None:
    optimizer.load_state_dict(checkpoint["optimizer"])
if config["compile"]:
    model = torch.compile(model, backend="eager")

for iteration in range(first, config["max_iters"]):
    starts = torch.randint(len(train_data) - config["block_size"] - 1, (config["batch_size"],))
    rows = [train_data[i : i + config["block_size"] + 1].astype(np.int64) for i in starts.tolist()]
    batch = torch.from_numpy(np.stack(rows))
    logits, loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iteration}: loss {loss.item():.4f}")
out.mkdir(exist_ok=True)
checkpoint = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "model_args": model_args,
    "iter_num": config["max_iters"],
    "best_val_loss": torch.tensor(1e9),
    "config": config,
}
torch.save(checkpoint, out / "ckpt.pt")
