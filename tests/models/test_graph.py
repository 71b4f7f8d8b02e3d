"""`GPT.generate` on a GPU replays one CUDA graph per token; a stand-in records it on the CPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from ddl.lab.config import RESIDUALS, GPTConfig
from ddl.models import GPT
from ddl.nn.graph import WARM_UP, can_capture
from ddl.recording import record
from tests.support.graphs import Graph, graphs  # noqa: F401
from tests.support.helpers import randomise_

HYBRID: dict[str, object] = {
    "residual": "ddl-tc", "mixer": "deltaproduct", "mixer_layers": (0,), "mixer_n": 2,
}  # fmt: skip


def model_of(residual: str, **options: object) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, object] = {
        "vocab_size": 61, "block_size": 32, "num_layers": 2, "num_heads": 2, "hidden_size": 32,
    }  # fmt: skip
    named = HYBRID if residual == "hybrid" else {"residual": residual}
    model = GPT(GPTConfig(**(sizes | named | options))).double().eval()
    randomise_(model.trunk, std=0.3)
    return model


def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("residual", [*RESIDUALS, "hybrid"])
@pytest.mark.parametrize(("batch", "length"), [(2, 5), (1, 1)])
def test_replays_generate_the_same_text(residual, batch, length, request):
    model, idx = model_of(residual), prompt(batch, length)
    expected = model.generate(idx, 12, temperature=0)
    made: list[Graph] = request.getfixturevalue("graphs")
    assert torch.equal(model.generate(idx, 12, temperature=0), expected)
    (graph,) = made
    eager = WARM_UP + (length > 1)
    assert graph.replays == 12 - eager


def test_a_window_that_moves_ends_the_replays(request):
    model, idx = model_of("ddl-tc"), prompt(1, 20)
    expected = model.generate(idx, 20, temperature=0)
    made = request.getfixturevalue("graphs")
    assert torch.equal(model.generate(idx, 20, temperature=0), expected)
    (graph,) = made
    assert graph.replays == 32 + 1 - 20 - 1 - WARM_UP


def test_states_without_attention_have_no_window(request):
    model, idx = model_of("additive", mixer="deltanet"), prompt(1, 20)
    expected = model.generate(idx, 30, temperature=0)
    made = request.getfixturevalue("graphs")
    assert torch.equal(model.generate(idx, 30, temperature=0), expected)
    assert made[0].replays == 30 - 1 - WARM_UP


def test_samples_are_drawn_outside_the_graph(request):
    model, idx = model_of("ddl-cc"), prompt(2, 3)
    sample = {"temperature": 0.8, "top_k": 9}
    expected = model.generate(idx, 12, generator=torch.Generator().manual_seed(3), **sample)
    request.getfixturevalue("graphs")
    actual = model.generate(idx, 12, generator=torch.Generator().manual_seed(3), **sample)
    assert torch.equal(actual, expected)


def test_each_call_has_a_graph_of_the_weights_of_then(graphs):  # noqa: F811
    model, idx = model_of("ddl-cc"), prompt(1, 3)
    first = model.generate(idx, 8, temperature=0)
    with torch.no_grad():
        randomise_(model.trunk, std=0.5)
    second = model.generate(idx, 8, temperature=0)
    assert len(graphs) == 2
    assert not torch.equal(first, second)


def test_a_graph_and_its_cache_go_with_the_call(graphs):  # noqa: F811
    """Memory of a GPU is not left to the garbage collector."""
    model, idx = model_of("ddl-tc"), prompt(1, 3)
    gc.collect()
    gc.disable()
    try:
        model.generate(idx, 8, temperature=0)
        graph = weakref.ref(graphs.pop())
        assert graph() is None
    finally:
        gc.enable()


GPU = torch.device("cuda")


def test_what_is_watched_is_not_captured():
    model = model_of("ddl-cc")
    assert can_capture(model, GPU)
    assert not can_capture(model, torch.device("cpu"))
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(model.trunk.sublayers[1], register)(lambda *_: None)
        assert not can_capture(model, GPU)
        handle.remove()
    with record(model):
        assert not can_capture(model, GPU)
    assert can_capture(model, GPU)
    model.trunk.sublayers[0].compile(backend="eager")
    assert not can_capture(model, GPU)


def test_the_stand_in_sees_a_past_that_moves(graphs, monkeypatch):  # noqa: F811
    """A cache whose tensors are new at every step is stale in a replay."""
    model, idx = model_of("ddl-tc"), prompt(1, 5)
    expected = model.generate(idx, 12, temperature=0)
    monkeypatch.setattr("ddl.nn.history.History.commit", moving_commit)
    assert not torch.equal(model.generate(idx, 12, temperature=0), expected)


def moving_commit(self):
    self._kept |= {name: new.clone() for name, new in self._new.items()}
    self._new = {}
