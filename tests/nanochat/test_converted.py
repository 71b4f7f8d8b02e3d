"""nanochat's model converted: against its equations, with its cache, optimizer and checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import nanochat
from ddl.optim import never_decayed
from tests.support.helpers import gradients, randomise_
from tests.support.nanochat_standin import DTYPE, GPT, Block, GPTConfig, KVCache, norm
from tests.support.processes import together

VARIANTS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "channel": {"value_channels": 3},
    "token and conv": {"value_channels": 2, "compress": "token", "expand": "conv"},
    "raw": {"value_channels": 2, "compress": "token", "value_from": "compressed"},
    "convolved gate": {"gate_from": "convolved", "gate": "mlp", "gate_hidden": 5},
    "v-Map": {"value_channels": 2, "mapping": "v", "compress": "channel"},
    "write-only": {"value_channels": 2, "erase": "none", "rewrites": 2, "branch_scale": 0.7},
}
GATES: dict[str, dict[str, Any]] = {
    "linear": {},
    "mlp": {"gate": "mlp", "gate_hidden": 5},
    "pooled": {"gate_from": "pooled"},
    "convolved": {"gate_from": "convolved"},
    "flatten": {"gate_from": "flatten"},
}
VALUES: dict[str, dict[str, Any]] = {
    "linear": {},
    "sigmoid, raw": {"value": "sigmoid", "value_from": "compressed"},
    "constant": {"value": "constant"},
    "v-Map": {"mapping": "v"},
}
READS: dict[str, dict[str, Any]] = {
    "identity": {},
    "channel": {"value_channels": 2},
    "token": {"value_channels": 2, "compress": "token"},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def compute() -> Iterator[dict[str, torch.dtype]]:
    yield DTYPE
    DTYPE["compute"] = torch.float32


def make(options: dict[str, Any], **config: int) -> Any:
    model = nanochat.converted(GPT, **options)(GPTConfig(**config))
    model.init_weights()
    return model


def in_float64(options: dict[str, Any], compute: Any) -> Any:
    compute["compute"] = torch.float64
    model = make(options).double()
    randomise_(model)
    return model


def tokens(batch: int = 2, time: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(40, (batch, time), generator=torch.Generator().manual_seed(seed))


def written_out(model: Any, idx: Tensor, targets: Tensor | None = None) -> Tensor:
    """The converted model's equations, one Read and one DeltaResidual after the other."""
    angles = model.angles[: idx.shape[1]].to(DTYPE["compute"])
    cos_sin, blocks = (angles.cos(), angles.sin()), model.transformer.h
    x = norm(model.transformer.wte(idx))
    gate = model.smear_lambda * torch.sigmoid(model.smear_gate(x[..., :6]))
    x = x + gate * F.pad(x, (0, 0, 1, 0))[:, :-1]
    expand, readout = blocks[0].expand, blocks[-1].readout
    X, X0 = expand(x), expand(x)
    for i, block in enumerate(blocks):
        X = model.resid_lambdas[i] * X + model.x0_lambdas[i] * X0
        ve = model.value_embeds[str(i)](idx) if i % 2 == 0 else None
        h, raw = block.read_attn(X, return_compressed=True)
        written = block.attn(h, ve, cos_sin, model.windows[i], None)
        X = block.res_attn(X, written, context=h, compressed=raw)
        h, raw = block.read_mlp(X, return_compressed=True)
        X = block.res_mlp(X, block.mlp(h), context=h, compressed=raw)
        if i == len(blocks) // 2:
            half = X
    X = X - model.backout_lambda * half
    _, x = readout(X, return_compressed=True)
    logits = 15 * torch.tanh(model.lm_head(norm(x)) / 15)
    if targets is None:
        return logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@every_variant
def test_it_computes_the_equations(options, compute, monkeypatch):
    model, idx, targets = in_float64(options, compute), tokens(), tokens(seed=1)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)  # the cap of the logits is in float32
    torch.testing.assert_close(model(idx), written_out(model, idx), rtol=1e-9, atol=1e-9)
    found = gradients(model(idx, targets)[None], {}, model)
    expected = gradients(written_out(model, idx, targets)[None], {}, model)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-11, msg=name)


@every_variant
@torch.inference_mode()
def test_the_engine_takes_token_by_token_what_the_whole_gives(options, compute):
    """A prompt in a cache of one sequence, copied to three, as nanochat's engine does."""
    model = in_float64(options, compute)
    kind, idx = nanochat.cached(KVCache), tokens(3, 9)
    idx[:, :5] = idx[:1, :5]
    prompt, cache = kind(1, 5, model.config), kind(3, 9, model.config)
    found = [model(idx[:1, :5], kv_cache=prompt).expand(3, -1, -1)]
    cache.prefill(prompt)
    found += [model(idx[:, t : t + 1], kv_cache=cache) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(found, 1), model(idx), rtol=1e-6, atol=1e-6)
    alone = nanochat.cached(KVCache)(1, 9, model.config)
    alone.prefill(prompt)  # which the other cache's tokens have not touched
    again = model(idx[:1, 5:], kv_cache=alone)
    torch.testing.assert_close(again, model(idx[:1])[:, 5:], rtol=1e-6, atol=1e-6)
    cache.reset()
    again = model(idx, kv_cache=cache)
    torch.testing.assert_close(again, model(idx), rtol=1e-6, atol=1e-6)


@pytest.mark.table
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("read", READS)
@torch.inference_mode()
def test_every_gate_and_value_after_every_read(read, value, gate, compute, monkeypatch):
    """Without a cache, and with one; what a read does not compute is computed behind it."""
    model = in_float64(READS[read] | VALUES[value] | GATES[gate], compute)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)
    idx, cache = tokens(), nanochat.cached(KVCache)(2, 9, model.config)
    expected = written_out(model, idx)
    torch.testing.assert_close(model(idx), expected, rtol=1e-9, atol=1e-9)
    parts = [model(part, kv_cache=cache) for part in idx.split([4, 1, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_a_cache_without_a_history():
    model, idx = make(VARIANTS["channel"]), tokens()
    prompt = KVCache(2, 9, model.config)
    torch.testing.assert_close(model(idx, kv_cache=prompt), model(idx))
    model = make(VARIANTS["token and conv"])
    with pytest.raises(
        TypeError, match=r"^`kv_cache` must be of the class that `ddl.nanochat.cach"
    ):
        model(idx, kv_cache=KVCache(2, 9, model.config))
    kind = nanochat.cached(KVCache)
    with pytest.raises(TypeError, match=r"^`kv_cache` must be of the class that "):
        kind(2, 9, model.config).prefill(prompt)
    assert nanochat.cached(nanochat.cached(KVCache)) is nanochat.cached(KVCache)


@every_variant
def test_a_model_made_on_meta_has_the_distribution_of_one_made_at_once(options):
    kind = nanochat.converted(GPT, **options)
    with torch.device("meta"):
        model = kind(GPTConfig())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for made in (model, kind(GPTConfig())):
        torch.manual_seed(3)
        made.init_weights()
        after = torch.rand(1)
        plain = GPT(GPTConfig())
        torch.manual_seed(3)
        plain.init_weights()
        assert torch.equal(after, torch.rand(1))  # the same batches and samples follow
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, made.get_parameter(name)), name
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert all(p.dtype == torch.float32 for p in never_decayed(model))


def test_disabled_it_is_nanochats_model():
    model = GPT(GPTConfig())
    model.init_weights()
    before, kind = copy.deepcopy(model), type(model)
    assert nanochat.convert(model, value_channels=4, disable=True) is model
    assert nanochat.converted(GPT, disable=True, value_channels=4) is GPT
    assert type(model) is kind
    assert str(model) == str(before)
    assert torch.equal(model(tokens()), before(tokens()))


@pytest.mark.parametrize("by", ["convert", "converted"])
def test_the_optimizer_keeps_nanochats_groups_and_adds_one(by):
    options = VARIANTS["token and conv"]
    model = GPT(GPTConfig())
    model = make(options) if by == "converted" else nanochat.convert(model, **options)
    model.init_weights()
    plain = GPT(GPTConfig()).setup_optimizer(matrix_lr=0.05)
    optimizer = model.setup_optimizer(matrix_lr=0.05, stream_lr=0.01)
    *theirs, ours = optimizer.param_groups
    for group, same in zip(theirs, plain.param_groups, strict=True):
        assert [p.shape for p in group["params"]] == [p.shape for p in same["params"]]
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in same.items() if k != "params"
        }
    assert {id(p) for p in ours["params"]} == {id(p) for p in never_decayed(model)}
    assert (ours["kind"], ours["lr"], ours["initial_lr"], ours["weight_decay"]) == (
        "adamw", 0.01, 0.01, 0.0
    )  # fmt: skip
    every = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    with pytest.raises(ValueError, match=r"^`stream_lr` must be a positive finite number, got 0"):
        model.setup_optimizer(stream_lr=0)


def test_it_learns_and_a_checkpoint_goes_on():
    model, idx = make(VARIANTS["token and conv"], n_layer=2), tokens(4, 12)
    optimizer = model.setup_optimizer(matrix_lr=0.05)
    reference = torch.optim.AdamW(  # of the stream's parameters alone
        [p.detach().clone() for p in optimizer.param_groups[-1]["params"]],
        lr=0.004, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0,
    )  # fmt: skip

    def step(model: Any, optimizer: Any) -> float:
        loss = model(idx[:, :-1], idx[:, 1:])
        model.zero_grad(set_to_none=True)
        loss.backward()
        ours, theirs = optimizer.param_groups[-1]["params"], reference.param_groups[0]["params"]
        for mine, same in zip(ours, theirs, strict=True):
            same.grad = mine.grad.clone()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in range(6):
        losses.append(step(model, optimizer))
        reference.step()
    for mine, same in zip(
        optimizer.param_groups[-1]["params"], reference.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(mine, same)
    assert losses[-1] < losses[0] - 0.3
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    with torch.device("meta"):  # as nanochat's checkpoint manager
        loaded = nanochat.converted(GPT, **VARIANTS["token and conv"])(GPTConfig(n_layer=2))
    loaded.to_empty(device="cpu")
    loaded.init_weights()
    loaded.load_state_dict(saved["model"], strict=True, assign=True)
    resumed = loaded.setup_optimizer(matrix_lr=0.05)
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(3):
        assert step(loaded, resumed) == step(model, optimizer)
    other = nanochat.converted(GPT, **VARIANTS["token and conv"], eps_k=0.5)(GPTConfig(n_layer=2))
    with pytest.raises(RuntimeError, match=r"eps_k"):
        other.load_state_dict(saved["model"])


def test_processes_average_the_streams_gradients_and_stay_together(tmp_path):
    """nanochat averages its own; here the stand-in's are the same in both processes."""

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        model = make(VARIANTS["channel"])
        randomise_(model)
        optimizer = model.setup_optimizer(stream_lr=0.01)
        new = never_decayed(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for parameter in new:
            parameter.grad *= rank - 0.75  # the average is negative, of one process is not
        optimizer.step()
        assert all(p.grad.eq(-0.25).all() for p in new)
        torch.save([p.detach() for p in new], tmp_path / f"{rank}.pt")

    together(2, tmp_path / "said", act)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_the_arithmetic_of_a_state() -> None:
    X, x, λ = torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4), torch.tensor([3.0])
    state = nanochat.State(X, lambda x: x.unsqueeze(-1).expand(*x.shape, 3), lambda X: X.mean(-1))
    opened = x.unsqueeze(-1)
    torch.testing.assert_close((2 * λ * (λ * state) + x).tensor(), 18 * X + opened)
    torch.testing.assert_close((x + λ * state).tensor(), 3 * X + opened)
    torch.testing.assert_close(x - λ * state, x - 3 * X.mean(-1))
    assert state.dtype == X.dtype


def test_copies_and_pickles_are_of_the_same_class():
    for model in (make({"value_channels": 2}), nanochat.convert(GPT(GPTConfig()))):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is type(model)
            assert torch.equal(twin(tokens()), model(tokens()))


@pytest.mark.table(0)
@pytest.mark.parametrize("name", ["token and conv", "scalar"])
def test_it_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model, idx = make(VARIANTS[name], n_layer=2), tokens()
    randomise_(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = gradients(compiled(idx, idx)[None], {}, model)
    expected = gradients(model(idx, idx)[None], {}, model)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=key)
    torch._dynamo.reset()


@every_variant
def test_activations_in_bfloat16(options, compute):
    """Without autocast: nanochat's matrices stay in float32 and are cast in each product."""
    model, idx = make(options), tokens()
    randomise_(model)
    expected = model(idx)
    compute["compute"] = torch.bfloat16
    half = make(options)
    half.load_state_dict(model.state_dict())
    logits = half(idx)
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max() + 0.5
    half(idx, idx).backward()
    assert all(p.grad is not None for p in half.parameters())


def test_what_does_not_fit_is_refused():
    model = make({})
    with pytest.raises(
        ValueError, match=r"^`model` must be nanochat's GPT as it was made, got one "
    ):
        nanochat.convert(model)
    with pytest.raises(ValueError, match=r"^`kind` must be nanochat's class GPT, got one already"):
        nanochat.converted(type(model))
    for other in (3, dict):
        with pytest.raises(TypeError, match=r"^`kind` must be nanochat's class GPT, got "):
            nanochat.converted(other)
    for other in (3, GPT, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"^`model` must "):
            nanochat.convert(other)
    plain = GPT(GPTConfig())
    plain.transformer.h[1].ln = torch.nn.LayerNorm(16)
    expected = r"^`model.transformer.h\[1\]` must have attn, mlp and nothing else.*, got `ln`$"
    with pytest.raises(TypeError, match=expected):
        nanochat.convert(plain)
    plain = GPT(GPTConfig())
    for forward in (
        lambda self, x, *args: x + self.attn(norm(x), *args),
        lambda self, x, *args: Block.forward(self, x, *args) + x,
        lambda self, x, ve, cos_sin, window, cache: Block.forward(self, x, ve, cos_sin, 3, cache),
    ):
        plain.transformer.h[1].__class__ = type("Other", (Block,), {"forward": forward})
        with pytest.raises(
            TypeError, match=r"^`model.transformer.h\[1\]` must have a forward that "
        ):
            nanochat.convert(plain)
    with pytest.raises(TypeError, match=r"^`anchor_every` must be left to the model, got 4$"):
        nanochat.convert(GPT(GPTConfig()), anchor_every=4)
    with pytest.raises(
        TypeError, match=r"^`x` must be what the block before returned, got Tensor$"
    ):
        model.transformer.h[1](torch.zeros(1, 2, 16), None, None, 3, None)
    state = nanochat.State(torch.zeros(1, 2, 4, 1), lambda x: x, lambda X: X)
    for wrong in (lambda: torch.ones(1) / state, lambda: state - torch.ones(1)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match=r"^a State must be scaled by .* one element, got \(4,\)$"):
        torch.ones(4) * state


def test_the_stand_in_is_what_nanochat_does():
    """Its own cached pass equals the whole one, so that a difference above would be ours."""
    model = GPT(GPTConfig())
    randomise_(model)
    cache, idx = KVCache(2, 9, model.config), tokens()
    with torch.inference_mode():
        found = [model(part, kv_cache=cache) for part in idx.split([4, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(found, 1), model(idx), rtol=1e-4, atol=1e-5)
