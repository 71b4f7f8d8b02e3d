"""An annealed model in nanoGPT's scripts: what counts as a step, resuming, compilation, DDP."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddl.nanogpt import convert
from tests.support.helpers import assert_same_gradients, gradients
from tests.support.nanogpt_cases import (
    F64,
    OTHERS,
    VARIANTS,
    annealed,
    groups,
    make,
    same,
    step,
    tokens,
    variants,
)
from tests.support.nanogpt_standin import GPT
from tests.support.tolerances import assert_close

STEP = "transformer.h.0.anneal.step"


def start(steps: int = 6, **options: Any) -> GPT:
    return convert(make(), **options, start="additive", anneal_steps=steps)


def configure(model: GPT) -> torch.optim.Optimizer:
    return model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")


def count(model: nn.Module) -> int:
    """The steps that the model has counted."""
    return next(x.item() for name, x in model.state_dict().items() if name.endswith(STEP))


# --- what counts ---------------------------------------------------------------------------------


def test_a_step_counts_once_however_many_forwards() -> None:
    model = start()
    optimizer = configure(model)
    for expected in (1, 2):
        for seed in range(3):  # gradient accumulation
            (model(*tokens(seed))[1] / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(*tokens())
        model.train()
        assert count(model) == expected


def trained(model: nn.Module, seed: int = 0) -> None:
    """Give the model's parameters gradients."""
    model(*tokens(seed))[1].backward()


def test_an_optimizer_of_ones_own() -> None:
    """It counts, and so does the one that takes its place."""
    model = start()
    for expected in (1, 2):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), 0)
        assert count(model) == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for expected, name in ((3, "ln_1"), (4, "ln_2"), (5, "ln_2")):  # a part alone
        model.zero_grad()
        model.requires_grad_(False).transformer.h[1].get_submodule(name).requires_grad_(True)
        step(model, optimizer, 0)
        assert count(model) == expected


def test_steps_that_train_nothing() -> None:
    model, other = start(), start()
    optimizer = configure(model)
    optimizer.step()  # no gradients yet
    step(other, configure(other), 0)
    assert (count(model), count(other)) == (0, 1)
    step(other, torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1e-3), 0)
    assert (count(model), count(other)) == (0, 2)


class Outer(torch.optim.Optimizer):
    """An optimizer that has another one do its steps, as ZeroRedundancyOptimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD([p for g in self.param_groups for p in g["params"]], lr=1e-3)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("clear", [False, True], ids=["", "cleared in between"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Outer])
def test_several_optimizers_count_once(kind: Any, clear: bool) -> None:
    """For matrices and for all else, in whatever order they step."""
    model = start()
    halves = [[p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (0, 1)]
    optimizers = [kind(half) for half in halves]
    for expected in (1, 2, 3, 4):
        trained(model, expected)
        for optimizer in optimizers:
            optimizer.step()
            assert count(model) == expected
            if clear:
                optimizer.zero_grad()
        model.zero_grad()
        if expected == 2:
            optimizers[1] = kind(halves[1])


def test_an_optimizer_in_the_backward() -> None:
    """Each parameter is stepped by its own as soon as it has its gradient."""
    model = start()
    own = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda p: own[p].step())
    for expected in (1, 2):
        trained(model, expected)
        assert count(model) == expected


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips(fused: bool) -> None:
    """A fused optimizer looks at the gradients itself."""
    model, scaler = start(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for expected, spoilt in ((1, False), (1, True), (2, False)):
        optimizer.zero_grad()
        scaler.scale(model(*tokens())[1]).backward()
        if spoilt:
            model.lm_head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert count(model) == expected


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step() -> None:
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for expected in (1, 2):
        trained(model)
        compiled()
        assert count(model) == expected


def test_a_part_outlives_its_model() -> None:
    model = start()
    transformer, head = model.transformer, model.lm_head
    del model
    optimizer = torch.optim.SGD(transformer.parameters(), lr=1e-3)
    x = transformer.wte(tokens()[0])
    for block in transformer.h:
        x = block(x)
    head(transformer.ln_f(x)).sum().backward()
    optimizer.step()
    assert transformer.h[0].anneal.step == 1


def test_one_optimizer_of_two_models() -> None:
    models = nn.ModuleList([start(), start()])
    optimizer = torch.optim.SGD(models.parameters(), lr=1e-3)
    for model in models:
        trained(model)
    optimizer.step()
    assert [count(model) for model in models] == [1, 1]


def test_the_groups_of_the_optimizer_are_as_without() -> None:
    """The count is no parameter."""
    model, other = start(**VARIANTS["tc"]), convert(make(), **VARIANTS["tc"])
    assert groups(model, configure(model)) == groups(other, configure(other))
    assert model.get_num_params() == other.get_num_params()
    assert set(model.state_dict()) - set(other.state_dict()) == {STEP}


@variants
def test_gates_and_values_learn_from_the_second_step(options: dict[str, Any]) -> None:
    model = start(**options)
    optimizer = configure(model)
    new = {name: p for name, p in model.named_parameters() if "gate" in name or "value" in name}
    first = {name: p.clone() for name, p in new.items()}
    step(model, optimizer, 0)
    assert all(torch.equal(p, first[name]) for name, p in new.items())
    step(model, optimizer, 0)
    assert not any(torch.equal(p, first[name]) for name, p in new.items())


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@variants
def test_resuming_goes_on_as_if_nothing_happened(options: dict[str, Any], prefix: str) -> None:
    """In the middle of annealing, as nanoGPT resumes; the four steps after it reach a = 1."""
    model = start(**options)
    optimizer = configure(model)
    for seed in range(3):
        step(model, optimizer, seed)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    file = io.BytesIO()
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = start(**options)
    resumed.load_state_dict({n.removeprefix("_orig_mod."): x for n, x in saved["model"].items()})
    other = configure(resumed)
    other.load_state_dict(saved["optimizer"])
    for seed in range(3, 8):
        assert count(resumed) == count(model) == min(seed, 6)
        assert step(resumed, other, seed) == step(model, optimizer, seed)
    assert resumed.transformer.h[0].anneal.done
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


@pytest.mark.parametrize("assign", [False, True])
def test_loading_says_whether_it_is_done(assign: bool) -> None:
    model = start(2)
    for steps in (2, 1):
        other = annealed({}, steps, of=2, dtype=torch.float32)
        model.load_state_dict(other.state_dict(), assign=assign)
        assert model.transformer.h[0].anneal.done == (steps == 2)
        assert torch.equal(model(*tokens())[0], other(*tokens())[0])


def test_a_checkpoint_of_a_model_without_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*anneal\.step"):
        start().load_state_dict(convert(make()).state_dict())


def test_copies_go_their_own_way() -> None:
    """deepcopy and pickle keep the count, and the original's optimizer does not advance them."""
    model = start()
    optimizer = configure(model)
    step(model, optimizer, 0)
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin, expected = copied(model), count(model)
        assert count(twin) == expected
        assert same(twin, model)
        step(model, optimizer, 0)
        assert (count(twin), count(model)) == (expected, expected + 1)
        step(twin, configure(twin), 0)
        assert (count(twin), count(model)) == (expected + 1, expected + 1)


def test_an_average_of_weights_follows() -> None:
    """torch copies buffers into the average; that it is done is seen by the buffer alone."""
    model = start(2, **VARIANTS["cc"])
    optimizer, average = configure(model), torch.optim.swa_utils.AveragedModel(model)
    for seed in range(3):
        step(model, optimizer, seed)
        average.update_parameters(model)
        assert count(average) == count(model) == min(seed + 1, 2)
    average.module.load_state_dict(model.state_dict())
    done = average.module(*tokens())[0]
    average.module.transformer.h[0].anneal.done = False
    assert torch.equal(average.module(*tokens())[0], done)


# --- the rest of nanoGPT's scripts ---------------------------------------------------------------


@variants
def test_generate_and_crop(options: dict[str, Any]) -> None:
    """With the a of the moment: what generates is what was trained."""
    model = annealed(options, 3, of=10, dtype=torch.float32).eval()
    model.crop_block_size(8)
    idx, targets = tokens(time=8)
    assert_close("last", model(idx)[0], model(idx, targets)[0][:, -1:], torch.float32)
    greedy = model.generate(idx[:, :3], 4, top_k=1)
    for t in range(3, 7):
        logits = model(greedy[:, :t], greedy[:, :t])[0][:, -1]
        assert torch.equal(greedy[:, t], logits.argmax(-1))
    assert count(model) == 3


def test_moving() -> None:
    model = start(**VARIANTS["tc"]).to(torch.bfloat16)
    optimizer = configure(model)
    for _ in range(2):
        step(model, optimizer, 0)
    assert (model.state_dict()[STEP].dtype, count(model)) == (torch.int64, 2)
    assert model(*tokens())[0].dtype == torch.bfloat16
    on_meta = convert(make().to("meta"), start="additive", anneal_steps=6)
    assert {buffer.device.type for buffer in on_meta.buffers()} == {"meta"}
    assert on_meta(tokens()[0].to("meta"))[0].shape == (2, 1, 64)
    on_meta(*(x.to("meta") for x in tokens()))[1].backward()
    configure(on_meta).step()  # a count without memory does not say whether it is done
    on_meta.to_empty(device="cpu").load_state_dict(start().state_dict())
    assert count(on_meta) == 0


@pytest.mark.parametrize("name", ["m1", "cc", "tc", "branches"])
def test_activation_checkpointing(name: str) -> None:
    model = annealed((VARIANTS | OTHERS)[name], 3, of=10)
    expected = gradients(model(*tokens())[0], {}, model)
    for block in model.transformer.h:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    assert_same_gradients(gradients(model(*tokens())[0], {}, model), expected, F64)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [pytest.param("m1", marks=pytest.mark.exhaustive), "tc"])
def test_a_changing_a_compiles_once_and_its_end_once_more(name: str) -> None:
    """Full graphs train as eager steps do, before a = 1 and after."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    model, twin = start(3, **VARIANTS[name]), start(3, **VARIANTS[name])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer, other = configure(model), configure(twin)
    for seed, expected in enumerate([1, 1, 1, 2, 2]):
        assert step(compiled, optimizer, seed) == pytest.approx(step(twin, other, seed), rel=1e-5)
        assert len(graphs) == expected
    assert count(compiled) == 3
    for parameter, same_there in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, same_there)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ddp(tmp_path: Any) -> None:
    """At a = 0, too, every parameter has a gradient."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = DistributedDataParallel(start(3, **VARIANTS["tc"]))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        losses = [step(wrapped, optimizer, 0) for _ in range(5)]
        assert losses[-1] < losses[0]
        assert count(wrapped) == 3
        assert STEP in dict(wrapped.module.named_buffers())
    finally:
        torch.distributed.destroy_process_group()
