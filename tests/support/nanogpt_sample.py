"""A stand-in for nanoGPT's sample.py, written for these tests: it continues a line break."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from model import GPT, GPTConfig  # type: ignore[import-not-found]

torch.manual_seed(1337)
checkpoint = torch.load("out/ckpt.pt", map_location="cpu")
model = GPT(GPTConfig(**checkpoint["model_args"]))
state_dict = checkpoint["model"]
for name in list(state_dict):
    if name.startswith("_orig_mod."):
        state_dict[name.removeprefix("_orig_mod.")] = state_dict.pop(name)
model.load_state_dict(state_dict)
model.eval()
meta = pickle.loads((Path("data") / checkpoint["config"]["dataset"] / "meta.pkl").read_bytes())
start = torch.tensor([[meta["stoi"]["\n"]]])
with torch.no_grad():
    tokens = model.generate(start, 40, temperature=0.8, top_k=200)[0].tolist()
print("".join(meta["itos"][token] for token in tokens))
