"""Converted decoders in the Trainer, with checkpointing, LoRA, several processes and hooks."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils import weight_norm
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ddl
from ddl import hf
from ddl.hf.decoders.stream import Pass, Stream
from ddl.nanogpt.annealing import Annealing
from ddl.results import Chain, Write
from tests.support.decoder_cases import VARIANTS, VOCABULARY, converted, plain, tokens
from tests.support.hf_cases import CHECKPOINTING
from tests.support.kept import kept_states_by_device
from tests.support.processes import together
from tests.support.sampling import few

from .test_page import BLOCKS

OPTIONS: dict[str, dict[str, Any]] = {
    "annealed": {
        "value_channels": 2, "compress": "token", "expand": "conv", "anneal_steps": 6,
    },
    "from the start": {"value_channels": 2, "start": None},
    "adapter": {"value_channels": 2, "train": "stream"},
}  # fmt: skip
every = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
SOME = ["channel", "token and conv", "annealed", "adapter"]
some = pytest.mark.parametrize("variant", SOME)


def rows() -> list[dict[str, Tensor]]:
    """Sequences that count upwards, which are easy to learn."""
    starts = torch.randint(VOCABULARY, (64, 1), generator=torch.Generator().manual_seed(2))
    sequences = (starts + torch.arange(24)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in sequences]


def trainer(out: Path, model: Any, **options: Any) -> Trainer:
    common: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 8,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_steps": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
    }
    arguments = TrainingArguments(**{**common, **options})
    return Trainer(model, arguments, train_dataset=rows())


def steps_of(model: nn.Module) -> list[int]:
    return [int(module.step) for module in model.modules() if isinstance(module, Annealing)]


@every
def test_the_trainer_trains_saves_and_goes_on(options, tmp_path):
    model = hf.convert(plain(), **options)
    before = copy.deepcopy(model.state_dict())
    rate = {"learning_rate": 0.1 if model.is_adapter else 0.01}
    run = trainer(tmp_path, model, **rate)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - (0.01 if model.is_adapter else 0.3)
    after = model.state_dict()
    for name in before:
        moved = not torch.equal(before[name], after[name])
        assert moved or not (model.is_adapter and name in model.of_stream() and "scale" in name)
        if model.is_adapter and name not in model.of_stream():
            assert not moved, name
    if options.get("anneal_steps"):
        assert steps_of(model) == [6]
    again = hf.convert(plain(), **options)
    trainer(tmp_path, again, **rate).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, after[name]), name
    saved = {file.name for file in (tmp_path / "checkpoint-8").iterdir()}
    assert {"config.json", "model.safetensors"} <= saved


def test_only_optimizer_steps_count(tmp_path):
    """Several batches to a step; and a loop of one's own."""
    model = hf.convert(plain(), **OPTIONS["annealed"])
    trainer(tmp_path, model, gradient_accumulation_steps=2, max_steps=3).train()
    assert steps_of(model) == [3]
    model = hf.convert(plain(), **OPTIONS["annealed"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    assert steps_of(model) == [2]


def test_steps_of_a_loaded_model_count(tmp_path):
    """Also if LoRA alone is trained, whose matrices belong to the model."""
    hf.convert(plain(), **OPTIONS["annealed"]).save_pretrained(tmp_path)
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    for change in (lambda model: model, lambda model: get_peft_model(model, config)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        adapted = change(model)
        optimizer = torch.optim.AdamW(p for p in adapted.parameters() if p.requires_grad)
        adapted(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        assert steps_of(model) == [1]


@some
def test_recomputed_layers_have_the_same_gradients(variant):
    model, idx = converted(variant).train(), tokens()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(idx, labels=idx).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    getattr(model, f"{CHECKPOINTING}_enable")()
    after = gradients()
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], msg=name)
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": True})
    with pytest.raises(ValueError, match="`gradient_checkpointing_kwargs` must have use_reentra"):
        gradients()


@some
def test_autocast_is_near(variant):
    model, idx = converted(variant), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(idx).logits
    torch.testing.assert_close(found.float(), model(idx).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("variant", ["channel", "token and conv", "adapter"])
def test_lora_beside_a_stream(variant, tmp_path):
    """LoRA trains with the stream's modules, is saved with them and merged."""
    model, idx = converted(variant), tokens()
    config = LoraConfig(
        target_modules=["q_proj", "v_proj"],
        modules_to_save=model.stream_modules,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name and "value" in name:
                parameter.add_(0.3)
    adapted(idx, labels=idx).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    with_gradients = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert trained == with_gradients
    parts = {part for name in trained for part in name.split(".")}
    assert {"lora_A", *model.stream_modules} <= parts
    assert ("scale_1" in parts) == (variant == "adapter")
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    torch.testing.assert_close(loaded(idx).logits, adapted(idx).logits)
    assert not torch.allclose(adapted(idx).logits, converted(variant)(idx).logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(idx).logits, adapted(idx).logits, rtol=1e-4, atol=1e-5)


def test_reads_that_share_a_compression_are_not_copied():
    """PEFT would train a copy for one of them; with compressions of their own it may."""
    options: dict[str, Any] = {"value_channels": 4, "start": None}
    config = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["read_1"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(hf.convert(plain(), **options), config)
    with pytest.raises(TypeError, match=r"^`read_1` must not be among modules_to_save, because"):
        adapted(tokens())
    model = hf.convert(plain(), **options, sublayers_per_compressor=1)
    assert {"read_1", "read_2"} <= set(model.stream_modules)
    assert get_peft_model(model, config)(tokens()).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("variant", few(SOME, "token and conv", "annealed"))
def test_fsdp2_gathers_every_layer(variant, recomputed, tmp_path):
    """Two processes have the gradients of one that sees all sequences."""

    def act(rank: int) -> None:
        model, idx = converted(variant).double().train(), tokens()
        if recomputed:
            getattr(model, f"{CHECKPOINTING}_enable")()
        alone = copy.deepcopy(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        same_gradients(rank, model, alone, idx)
        before = steps_of(model)
        torch.optim.AdamW(model.parameters()).step()
        assert steps_of(model) == [step + 1 for step in before]

    together(2, tmp_path, act)


def same_gradients(rank: int, model: Any, alone: Any, idx: Tensor) -> None:
    """Compare a sharded model's gradients, of one sequence in each process, with those of both."""
    mine = idx[rank : rank + 1]
    model(mine, labels=mine).loss.backward()
    expected: dict[str, Tensor] = {}
    for row in idx:
        alone.zero_grad()
        alone(row[None], labels=row[None]).loss.backward()
        for name, q in alone.named_parameters():
            if q.grad is not None:
                part = q.grad.to(model.dtype) / len(idx)
                expected[name] = part + expected.get(name, 0)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in expected), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected[name], msg=name)


def sharded_by_accelerate(model: Any) -> Any:
    """As accelerate does it with `fsdp_version: 2`; its Accelerator asks for a GPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    # Sums in bfloat16 would be compared with nothing but a tolerance.
    plugin.mixed_precision_policy = dataclasses.replace(
        plugin.mixed_precision_policy, reduce_dtype=torch.float32
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="bf16",
        device=torch.device("cpu"),
        is_main_process=True,
    )
    return fsdp2_prepare_model(accelerator, model)


def sharded_by_the_page(model: Any) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(next(text for text in BLOCKS if "def shard(" in text), names)
    return names["shard"](model)


def sharded_in_layers(model: Any) -> Any:
    """With a policy for the layers alone."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model)


SHARD = [sharded_by_the_page, sharded_by_accelerate, sharded_in_layers]


@pytest.mark.table(1)
@pytest.mark.parametrize("shard", SHARD)
@some
def test_fsdp2_gathers_every_layer_in_bfloat16(variant, shard, tmp_path):
    """The model computes what it does after `model.bfloat16()`; gradients are summed in float32."""

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        model, idx = converted(variant).train(), tokens()
        alone = copy.deepcopy(model)
        alone.model.embed_tokens.register_forward_hook(lambda *given: given[-1].bfloat16())
        for part in (alone.model.layers,) if shard is sharded_in_layers else alone.children():
            part.bfloat16()
        alone.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
        if TorchVersion(torch.__version__) >= "2.15":  # then FSDP2 takes gradients as they come
            for parameter in alone.parameters():
                parameter.grad_dtype = None
        same_gradients(rank, shard(model), alone, idx)

    together(2, tmp_path, act)


@pytest.mark.parametrize(("variant", "expected"), [("channel", (1, 2, 1)), ("adapter", (9, 9, 9))])
def test_the_stored_states_on_a_cpu_on_a_gpu_and_back(variant, expected):
    """Of eight sublayers. Additions store all states, the last one included."""
    model = converted(variant, num_hidden_layers=4, attn_implementation="eager").train()

    def run(device: str) -> Tensor:
        idx = torch.ones(2, 9, dtype=torch.int64, device=device)
        return model(idx, labels=idx, use_cache=False).loss

    numel = 2 * 9 * 32 * VARIANTS[variant]["value_channels"]
    assert kept_states_by_device(model, run, numel) == expected


def test_a_stream_can_be_rebuilt_around_other_tensors():
    """As FSDP2 does it: from torch 2.15 on by a dataclass's fields, before by torch's registry."""
    stream = Stream(torch.randn(2, 3, 4, 1), Pass(None, None, None, None), chain=Chain(4))
    state = 2 * stream.state
    leaves, tree = tree_flatten(stream)
    changed = [state if leaf is stream.state else leaf for leaf in leaves]
    for rebuilt in (dataclasses.replace(stream, state=state), tree_unflatten(changed, tree)):
        assert rebuilt.state is state
        assert (rebuilt.within, rebuilt.write, rebuilt.chain) == (stream.within, None, Chain(4))


def test_parameters_that_hooks_compute():
    """Of modules that are read without a call, the factor of an adapter included."""
    model, idx = converted("adapter"), tokens()
    before, layer = model(idx).logits, model.model.layers[0]
    for part, name in ((layer.scale_1, "weight"), (layer.read_1, "compress_weight")):
        weight_norm(part, name, dim=None)
    torch.testing.assert_close(model(idx).logits, before)
    for part, name in ((layer.scale_1, "weight"), (layer.read_1, "compress_weight")):
        own, before = getattr(part, f"{name}_g"), model(idx).logits
        with torch.no_grad():
            own.add_(1)
        assert not torch.allclose(model(idx).logits, before)
        model(idx, labels=idx).loss.backward()
        assert own.grad.any()


def test_a_stream_keeps_its_dtypes():
    """FSDP2 casts every tensor in a dataclass and in the tuples in it."""
    write = Write(torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 1), torch.rand(2, 3), 0.1)
    within = Pass(None, None, None, torch.tensor(0.3))
    stream = Stream(torch.randn(2, 3, 4, 1), within, write, Chain(4, torch.randn(2, 3, 4, 1)))
    for _ in range(2):  # a rewrite is done in place
        cast = _apply_to_tensors(partial(_cast_fp_tensor, torch.bfloat16), [stream])[0]
        assert cast is not stream
        for name in ("state", "within", "chain"):
            assert getattr(cast, name) is getattr(stream, name)
        assert cast.write == stream.write
        stream.tensor()


@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_on_devices_of_their_own(when, tmp_path):
    """accelerate's hooks bring inputs to the device of each module; offloading is refused."""
    expected, idx = converted("token and conv"), tokens()
    model = plain() if when == "before" else copy.deepcopy(expected)
    for module in (model.model.norm, *model.model.layers.modules()):
        if next(module.parameters(recurse=False), None) is not None:
            add_hook_to_module(module, AlignDevicesHook("cpu"), append=True)
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True))
    if when == "before":
        hf.convert(model, **VARIANTS["token and conv"])
        model.load_state_dict(expected.state_dict())
    assert torch.equal(model(idx).logits, expected(idx).logits)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu")
    places |= {"model.layers.1": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = dispatch_model(expected, places, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(TypeError, match=r"^`read_1` must keep its parameters on the device, beca"):
        offloaded(idx)


@every
def test_what_it_does_can_be_seen_and_changed(options):
    model = hf.convert(plain(), **options)
    for name, parameter in model.named_parameters():
        if ".res_" in name or ".scale_" in name:
            nn.init.normal_(parameter, std=0.3)
    idx = tokens()
    with ddl.record(model, tokens=("beta",)) as recording:
        expected = model(idx).logits
    assert [name.rpartition("layers.")[2] for name in recording.sublayers] == [
        "0.res_1", "0.res_2", "1.res_1", "1.res_2"
    ]  # fmt: skip
    with ddl.edit(model, beta=0.0):
        edited = model(idx).logits
    if model.is_adapter:  # without rewrites it is the model that it was
        torch.testing.assert_close(edited, plain()(idx).logits)
    assert not torch.allclose(edited, expected) or steps_of(model)
    lens = ddl.recording.lens(model, idx, top=3)
    last = expected.softmax(-1).topk(3)
    assert torch.equal(lens.tokens[-1], last.indices)
    torch.testing.assert_close(lens.probabilities[-1], last.values)
