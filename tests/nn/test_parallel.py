"""DeltaStream in several processes, under DDP and FSDP2: gradients are those of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.nn.test_stream import make_stream
from tests.support.helpers import assert_same_gradients, normal
from tests.support.processes import together
from tests.support.read_cases import D, T

F64 = torch.float64
COUNT, B = 2, 4  # processes, sequences over all of them

VARIANTS: dict[str, dict[str, Any]] = {
    "identity": {},
    "channel": {"value_channels": 3},
    "token": {"value_channels": 3, "compress": "token", "expand": "conv"},
    "v-map": {"value_channels": 3, "mapping": "v"},
    "mlp-gate": {"value_channels": 2, "gate": "mlp", "gate_hidden": 5},
    "compressed": {"value_channels": 3, "value": "sigmoid", "value_from": "compressed"},
    "branches": {
        "value_channels": 3,
        "expand": "conv",
        "mapping": "v",
        "direction": "attention",
        "direction_hidden": 5,
        "gate_from": "convolved",
    },
}


class Model(nn.Module):
    """A stream with parameters before and behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D, dtype=F64)
        self.stream = make_stream(**options)
        self.head = nn.Linear(D, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stream(self.embed(x)))


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Model) -> nn.Module:
    for sublayer in model.stream.sublayers:
        fully_shard(sublayer)
    fully_shard(model.stream)
    return fully_shard(model)


WRAPPERS = pytest.mark.parametrize("wrap", [fsdp2, ddp], ids=lambda wrap: wrap.__name__)
Change = Callable[[Model], None]


def unchanged(model: Model) -> None:
    pass


def recomputed(model: Model) -> None:
    """Compute the activations of the sublayers again in the backward, by torch's wrapper."""
    for index, sublayer in enumerate(model.stream.sublayers):
        model.stream.sublayers[index] = checkpoint_wrapper(sublayer)


def batch() -> tuple[Tensor, Tensor]:
    return normal(B, T, D, seed=1), normal(B, T, 3, seed=2)


def backward(called: nn.Module, x: Tensor, weights: Tensor) -> None:
    (called(x) * weights).mean().backward()


def named(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, whole, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        name = name.replace("_checkpoint_wrapped_module.", "")
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def of_one_process(**options: Any) -> dict[str, Tensor]:
    model = Model(**options)
    backward(model, *batch())
    return named(model)


def of_several(
    folder: Path,
    wrap: Callable[[Model], nn.Module],
    change: Change = unchanged,
    seen: Callable[[int], slice] = lambda rank: slice(rank * B // COUNT, (rank + 1) * B // COUNT),
    **options: Any,
) -> list[dict[str, Tensor]]:
    """The gradients in each process. seen: the sequences of the batch that a process has."""

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        model = Model(**options)
        change(model)
        called = wrap(model)
        for _ in range(2):  # DDP raises in the second step if one left a parameter unused
            model.zero_grad()
            backward(called, *(part[seen(rank)] for part in batch()))
        torch.save(named(model), folder / f"{rank}.pt")

    return saved_by(folder, act)


def saved_by(folder: Path, act: Callable[[int], None]) -> list[dict[str, Tensor]]:
    """Each process's saved results. They do not destroy their group, as gloo may hang under DDP."""
    together(COUNT, folder, act)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


def check(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for gradients in found:
        assert_same_gradients(gradients, expected, F64, depth=4)


@pytest.mark.table(1)
@WRAPPERS
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_gradients(options: dict[str, Any], wrap: Any, tmp_path: Path) -> None:
    check(of_several(tmp_path, wrap, **options), of_one_process(**options))


@WRAPPERS
def test_a_process_with_other_data_is_noticed(wrap: Any, tmp_path: Path) -> None:
    found = of_several(tmp_path, wrap, seen=lambda rank: slice(0, B // COUNT), value_channels=3)
    with pytest.raises(AssertionError, match=r"^gradient of \S+: max error"):
        check(found, of_one_process(value_channels=3))


@pytest.mark.table(0)
@WRAPPERS
@pytest.mark.parametrize("every", [1, 4])
def test_recomputed_sublayers(every: int, wrap: Any, tmp_path: Path) -> None:
    """Neither states nor activations that the backward computes again change a gradient."""
    options = {"value_channels": 3, "anchor_every": every, "layers": 6}
    check(of_several(tmp_path, wrap, recomputed, **options), of_one_process(**options))


@pytest.mark.parametrize("every", [1, 2])
def test_sublayers_that_are_tensor_parallel_inside(every: int, tmp_path: Path) -> None:
    """Each process has a part of every sublayer, or of every second one, and all of the rest.

    A sublayer returns the sum over the processes itself, for which torch has not waited yet.
    """

    def made() -> Model:
        model = Model(value_channels=3, anchor_every=4)
        for index, old in enumerate(model.stream.sublayers):
            parts = OrderedDict(up=old.up, act=nn.Tanh(), down=old.down)
            model.stream.sublayers[index] = nn.Sequential(parts)
        return model

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (COUNT,))
        model = made()
        for sublayer in model.stream.sublayers[::every]:
            parallelize_module(sublayer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        backward(model, *batch())
        torch.save(named(model), tmp_path / f"{rank}.pt")

    alone = made()
    backward(alone, *batch())
    check(saved_by(tmp_path, act), named(alone))


@pytest.mark.exhaustive
@WRAPPERS
def test_compiled(wrap: Any, tmp_path: Path) -> None:
    """FSDP2 compiles what is between the sublayers and each of these: more graphs than one."""

    def compiled(model: Model) -> None:
        model.stream.compile(backend="aot_eager")

    def counting(model: Model) -> nn.Module:
        called = wrap(model)
        counters.clear()  # the process has those of the tests that ran before it was forked
        backward(called, *batch())
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 1 if wrap is fsdp2 else graphs == 1, graphs
        return called

    options = {**VARIANTS["token"], "layers": 2}
    check(of_several(tmp_path, counting, compiled, **options), of_one_process(**options))
