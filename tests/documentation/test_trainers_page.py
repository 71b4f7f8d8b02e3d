"""docs/trainers.md on stand-ins: its code computes what it says, trains, generates and is refused.

The stand-ins have the interfaces of torchtitan and litgpt at the commits that the page names.
"""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddl.optim import matrices_and_others
from tests.nn.test_parallel_refused import PART
from tests.support import ROOT, litgpt_standin, torchtitan_standin
from tests.support.helpers import assert_same_gradients, gradients, randomise_
from tests.support.processes import together
from tests.support.tolerances import assert_close

PAGE = ROOT / "docs" / "trainers.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
*TORCHTITAN, LITGPT = (text for language, text in BLOCKS if language == "python")
MODEL_DIFF, PRETRAIN_DIFF = (text for language, text in BLOCKS if language == "diff")
F32, F64 = torch.float32, torch.float64

VARIANTS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "scalar, token": {"compress": "token"},
    "channel": {"value_channels": 4, "compress": "channel"},
    "token and conv": {"value_channels": 4, "compress": "token", "expand": "conv"},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])  # two documents


def patched(source: str, diff: str) -> str:
    """Apply a diff of one file by its lines, whatever their numbers are."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] in f" {mark}") for mark in "-+")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Any, loss_of: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def goes_on_from_a_file(model: nn.Module, loaded: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file), strict=True)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


# --- torchtitan -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def titan() -> Iterator[dict[str, Any]]:
    """The names of the page's file, run once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in torchtitan_standin.modules().items():
            patch.setitem(sys.modules, name, module)
        names: dict[str, Any] = {"__name__": "delta_llama3"}
        for text in TORCHTITAN:
            exec(compile(text, PAGE.name, "exec", dont_inherit=True), names)
        yield names


def titan_model(names: dict[str, Any], options: dict[str, Any]) -> Any:
    spec = torchtitan_standin.llama3_debugmodel().model_spec
    return names["delta_config"](spec.model, **options).build()


def titan_logits(model: Any, idx: Tensor) -> Tensor:
    return model(idx, POSITIONS, model.get_attention_masks(POSITIONS))


def titan_loss(model: Any, seed: int = 0) -> Tensor:
    idx = tokens(13, seed=seed)
    return F.cross_entropy(titan_logits(model, idx[:-1]), idx[1:])


def titan_written_out(model: Any, idx: Tensor) -> Tensor:
    masks, starts, blocks = model.get_attention_masks(POSITIONS), POSITIONS == 0, model.layers
    X = blocks["0"].delta["expand"](model.tok_embeddings(idx), document_starts=starts)
    for block in blocks.values():
        h = block.attention_norm(block.delta["read_attention"](X, document_starts=starts))
        y = block.attention(h, masks, POSITIONS)
        X = block.delta["residual_attention"](X, y, context=h)
        h = block.ffn_norm(block.delta["read_ffn"](X, document_starts=starts))
        X = block.delta["residual_ffn"](X, block.feed_forward(h), context=h)
    readout = blocks[str(len(blocks) - 1)].delta["readout"]
    return model.lm_head(model.norm(readout(X, document_starts=starts)))


@every_variant
def test_torchtitan_computes_the_equations(titan, options):
    model, idx = titan_model(titan, options).double(), tokens(12)
    randomise_(model)
    actual, expected = titan_logits(model, idx), titan_written_out(model, idx)
    assert_close("logits", actual, expected, F64)
    assert_same_gradients(gradients(actual, {}, model), gradients(expected, {}, model), F64)
    alone = [model(part, torch.arange(len(part))) for part in idx.split([5, 7])]
    assert_close("documents alone", actual, torch.cat(alone), F64, depth=10)


@every_variant
def test_torchtitan_makes_it_on_meta_and_trains_it(titan, options):
    with torch.device("meta"):
        model = titan_model(titan, options)
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.init_states()
    for parameter in model.parameters():
        assert parameter.isfinite().all()
    assert (model.layers["1"].delta["residual_ffn"].value.bias == 1).all()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), titan_loss, 8)
    assert losses[-1] < losses[0] - 0.5
    goes_on_from_a_file(model, titan_model(titan, options))


def test_torchtitans_configuration(titan):
    config = titan["llama3_delta_debugmodel"]()
    model = config.model_spec.model.build()
    assert config.model_spec.parallelize_fn is titan["parallelize"]
    assert (type(model), config.parallelism.spmd_backend) == (
        titan["DeltaModel"],
        "partial_dtensor",
    )
    delta = {id(p) for name, p in model.named_parameters() if ".delta." in name}
    kept, decayed = torchtitan_standin.optimizer_of(config, model, torch.optim.AdamW).param_groups
    assert {id(p) for p in kept["params"]} == delta
    assert (kept["weight_decay"], kept["lr"], decayed["weight_decay"]) == (0.0, 8e-4, 0.1)
    with pytest.raises(RuntimeError, match=r"^not of the Module protocol: \['layers.0.delta'"):
        torchtitan_standin.Llama3Model.verify_module_protocol(model)


def test_torchtitans_matrices(titan):
    model = titan_model(titan, VARIANTS["token and conv"])
    hidden, _ = matrices_and_others(model)
    wanted = {
        id(p)
        for name, p in model.named_parameters()
        if re.search(r"\.(attention|feed_forward)\.", name)
    }
    assert {id(p) for p in hidden[0]["params"]} == wanted


# --- litgpt ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lit() -> dict[str, Any]:
    """The names of litgpt's model.py with the page's changes."""
    source = Path(litgpt_standin.__file__).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": litgpt_standin.__name__}
    code = f"{patched(source, MODEL_DIFF)}\n\n{LITGPT}"
    exec(compile(code, "litgpt/model.py", "exec", dont_inherit=True), names)
    assert names["STREAM"] == VARIANTS["channel"]
    return names


def lit_model(names: dict[str, Any], options: dict[str, Any], **config: Any) -> Any:
    names["STREAM"] = options
    model = names["GPT"](litgpt_standin.Config(**config))
    assert type(model).__name__ == "DeltaGPT"
    return model


def lit_loss(model: Any, seed: int = 0) -> Tensor:
    idx = tokens(3, 13, seed=seed)
    return F.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())


def lit_written_out(model: Any, idx: Tensor) -> Tensor:
    stream, T = model.stream, idx.shape[1]
    rest = (model.cos[:T], model.sin[:T], None, None, None)
    parts = list(zip(stream.reads, stream.residuals, strict=True))
    X = stream.expand(model.transformer.wte(idx))
    for block, attention, mlp in zip(model.transformer.h, parts[::2], parts[1::2], strict=True):
        read, residual = attention
        h = read(X)
        X = residual(X, block.post_attention_norm(block.attn(h, *rest)), context=h)
        read, residual = mlp
        h = read(X)
        X = residual(X, block.post_mlp_norm(block.mlp(h)), context=h)
    return model.lm_head(stream.readout(X))


@pytest.mark.parametrize("post", [False, True], ids=["", "norms behind"])
@every_variant
def test_litgpt_computes_the_equations(lit, options, post):
    model = lit_model(lit, options, post_attention_norm=post, post_mlp_norm=post).double()
    randomise_(model)
    actual, expected = model(tokens(2, 9)), lit_written_out(model, tokens(2, 9))
    assert_close("logits", actual, expected, F64)
    assert_same_gradients(gradients(actual, {}, model), gradients(expected, {}, model), F64)


@every_variant
@torch.inference_mode()
def test_litgpts_cache_gives_what_the_whole_sequence_gives(lit, options):
    model, idx = lit_model(lit, options).double(), tokens(2, 12)
    randomise_(model)
    whole = model(idx)
    model.set_kv_cache(batch_size=2)
    for begin in (5, 1):  # the second prompt begins anew
        parts, start = [], 0
        for length in (begin, 3, *[1] * (9 - begin)):
            positions = torch.arange(start, start + length)
            start += length
            part = idx[:, positions]
            parts.append(model(part, positions, input_pos_maxp1=start))
        assert_close("logits", torch.cat(parts, 1), whole, F64, depth=10)
    with pytest.raises(ValueError, match=r"^`input_pos` must start at 0 or 12, got 7$"):
        model(idx[:, 7:8], torch.tensor([7]), input_pos_maxp1=8)
    model.clear_kv_cache()
    assert torch.equal(model(idx), whole)


@every_variant
def test_litgpt_trains_it_and_loads_its_checkpoint(lit, options):
    model = lit_model(lit, options)
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    litgpt_standin.initialize_weights(model)
    assert (model.stream.residuals[0].value.bias == 1).all()
    added = [line[1:].strip() for line in PRETRAIN_DIFF.splitlines() if re.match(r"\+[^+]", line)]
    names = {
        "optimizer": "AdamW",
        "model": torch.compile(model),
        "extra_kwargs": {"lr": 1e-2},
        "instantiate_torch_optimizer": lambda name, params, **options: getattr(torch.optim, name)(
            params, **options
        ),
    }
    exec("\n".join(added), names)
    optimizer: Any = names["optimizer"]
    decayed, kept = optimizer.param_groups
    assert (names["strategy"], decayed["weight_decay"], kept["weight_decay"]) == ("ddp", 0.1, 0.0)
    assert {id(p) for p in kept["params"]} == {id(p) for p in model.stream.parameters()}
    losses = train(model, optimizer, lit_loss, 8)
    assert losses[-1] < losses[0] - 0.5
    goes_on_from_a_file(model, lit_model(lit, options))


def test_litgpts_model_in_bfloat16_on_meta_and_its_matrices(lit):
    model = lit_model(lit, VARIANTS["token and conv"])
    hidden, _ = matrices_and_others(model)
    blocks = {id(p) for p in model.transformer.h.parameters()}
    assert {id(p) for p in hidden[0]["params"]} == blocks
    lit_loss(model.to(torch.bfloat16)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.device("meta"):
        model = lit_model(lit, VARIANTS["token and conv"])
        model(torch.randint(0, 1, (2, 9))).sum().backward()
    assert all(p.grad.is_meta for p in model.parameters())


def test_litgpts_model_compiles_as_one_graph(lit):
    torch._dynamo.reset()
    model = lit_model(lit, VARIANTS["token and conv"], n_layer=1)
    randomise_(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = gradients(model(tokens(2, 9)), {}, model)
    actual = gradients(compiled(tokens(2, 9)), {}, model)
    assert_same_gradients(actual, expected, F32)
    torch._dynamo.reset()


def test_other_blocks_of_litgpts_are_refused(lit):
    others = (
        {"parallel_residual": True},
        {"norm_1": False},
        {"norm_2": False},
        {"rope_indices": [0, 1]},
    )
    for config in others:
        with pytest.raises(NotImplementedError, match=r"^a DeltaGPT has norm, attention, norm and"):
            lit_model(lit, {}, **config)


# --- in two processes -----------------------------------------------------------------------------

# torch 2.15 counts FSDP2's marks for profilers among what a policy saves, and then misses one.
# It also leaves gradients in the dtype in which the backward computes them, for norms in float32.
BEFORE_2_15 = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
TITAN_RUNS: dict[str, dict[str, Any]] = {  # of `parallelize`
    "compiled, and recomputed if torch can": {"ac": BEFORE_2_15, "compiled": True},
    "bfloat16": {"dtype": "bfloat16"},
    "whole blocks in float32, one compiled": {"whole": True},
    "whole blocks in bfloat16": {"whole": True, "dtype": "bfloat16"},
}


def dims(mesh: Any, **enabled: bool) -> Any:
    degrees = {"tp_enabled": False, "cp_enabled": False, "pp_enabled": False}
    degrees |= {"dp_replicate_enabled": False, **enabled}
    return SimpleNamespace(**degrees, get_mesh=lambda names: mesh[tuple(names)])


def parallelized(
    names: dict[str, Any],
    model: Any,
    parallel_dims: Any,
    *,
    dtype="float32",
    ac=False,
    compiled=False,
) -> Any:
    compile_config = SimpleNamespace(enable=compiled, components=["model"], backend="aot_eager")
    return names["parallelize"](
        model,
        parallel_dims=parallel_dims,
        training=SimpleNamespace(mixed_precision_param=dtype, mixed_precision_reduce="float32"),
        parallelism=None,
        compile_config=compile_config,
        ac_config=torchtitan_standin.SelectiveAC.Config() if ac else None,
        dump_folder="",
    )


def in_whole_blocks(model: Any, mesh: Any, dtype: str = "float32") -> None:
    """Shard as torchtitan's own function, one block compiled."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, dtype), reduce_dtype=F32, cast_forward_inputs=False
    )
    model.layers["1"].compile(backend="aot_eager", fullgraph=True)
    for part in (model.tok_embeddings, [model.norm, model.lm_head], *model.layers.values(), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def worst_gradient(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to its norm, or to that of a bias's weight."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        beside = expected.get(name.removesuffix("bias") + "weight", expected[name])
        scale = max(expected[name].norm(), beside.norm())  # the terms of a bias's may cancel
        worst = max(worst, ((grad - expected[name]).norm() / scale).item())
    return worst


def mean_gradients(model: nn.Module, loss_of: Any) -> dict[str, Tensor]:
    """Of both processes' losses, in float32."""
    found: list[dict[str, Tensor]] = []
    for rank in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        found.append({name: p.grad.float() for name, p in model.named_parameters()})
    return {name: (grad + found[1][name]) / 2 for name, grad in found[0].items()}


def lowered(model: Any, dtype: str = "float32", whole: bool = False) -> Any:
    """A copy; if the dtype is bfloat16, all is in it, or without `whole` all but the stream."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if dtype == "bfloat16" and (whole or ".delta." not in name):
            parameter.data = parameter.bfloat16()
            if not BEFORE_2_15:
                parameter.grad_dtype = None
    return model


def refusal(act: Any) -> str:
    try:
        act()
    except (NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def said(titan, lit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("trainers")
    options = VARIANTS["token and conv"]
    plain, lit_plain = titan_model(titan, options), lit_model(lit, options)
    for model in (plain, lit_plain):
        randomise_(model)

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        found: dict[str, Any] = {}
        for name, run in TITAN_RUNS.items():
            alone = lowered(plain, run.get("dtype", "float32"), run.get("whole", False))
            with torch.device("meta"):
                model = titan_model(titan, options)
            if run.get("whole"):
                in_whole_blocks(model, mesh, run.get("dtype", "float32"))
            else:
                parallelized(titan, model, dims(mesh), **run)
            model.to_empty(device="cpu")
            with torch.no_grad():
                model.init_states()
                for key, parameter in model.named_parameters():
                    key = key.replace("_checkpoint_wrapped_module.", "")
                    if "compress_weight" in key:  # the current token's mean
                        start = parameter.full_tensor()
                        assert (start[..., 0] == 0.25).all()
                        assert not start[..., 1:].any()
                    full = distribute_tensor(plain.get_parameter(key), parameter.device_mesh)
                    parameter.copy_(full.redistribute(placements=parameter.placements))
            titan_loss(model, rank).backward()
            found[name] = worst_gradient(model, mean_gradients(alone, titan_loss))
        for name, dtype in {"litgpt": F32, "litgpt, bf16-true": torch.bfloat16}.items():
            model = DistributedDataParallel(copy.deepcopy(lit_plain).to(dtype))
            lit_loss(model, rank).backward()
            alone = mean_gradients(copy.deepcopy(lit_plain).to(dtype), lit_loss)
            found[name] = worst_gradient(model, alone)
        split, alone = copy.deepcopy(plain), copy.deepcopy(plain)
        titan["split"](split, mesh)
        for model in (split, alone):
            titan_loss(model).backward()
        expected = {key: p.grad for key, p in alone.named_parameters()}
        found["tensor parallel sublayers"] = worst_gradient(split, expected)
        found |= refused(mesh)
        (folder / f"{rank}.json").write_text(json.dumps(found))

    def refused(mesh: Any) -> dict[str, str]:
        part = distribute_tensor(torch.randn(12, 16), mesh, [Shard(0)])
        outside = copy.deepcopy(plain)
        parts = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        ways = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": parts}
        parallelize_module(outside.layers["1"].feed_forward, mesh, ways)
        found = {
            "x": refusal(lambda: plain.layers["0"](part, None)),
            "sublayer_out": refusal(lambda: titan_logits(outside, tokens(12))),
        }
        for name in ("tp", "cp", "pp"):
            enabled = dims(mesh, **{f"{name}_enabled": True})
            found[name] = refusal(lambda enabled=enabled: parallelized(titan, plain, enabled))
        return found

    together(2, folder, act)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


NAMES = [*TITAN_RUNS, "tensor parallel sublayers", "litgpt", "litgpt, bf16-true"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_two_processes_are_those_of_one(name, said):
    rounded = name == "litgpt, bf16-true"  # DDP averages in the dtype of the parameters
    assert said[name] < (5e-3 if rounded else 1e-5)


def test_what_is_refused(said):
    assert [said[name] for name in ("x", "sublayer_out")] == [
        f"TypeError: `{name}` must be{PART}" for name in ("x", "sublayer_out")
    ]
    ours = "NotImplementedError: a DeltaModel has data parallelism only"
    assert [said[name] for name in ("tp", "cp", "pp")] == [ours] * 3
