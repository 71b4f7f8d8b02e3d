"""Parts that cannot be sharded are refused in a sentence, in every process, before any work."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ddl import DeltaResidual, DeltaStream, Expand, Read, functional
from tests.support.helpers import normal
from tests.support.processes import together

D, M, B, T = 4, 3, 2, 5
F32, BF16 = torch.float32, torch.bfloat16
Act = Callable[[Any], object]  # takes the mesh of both processes

PART = (
    " a plain tensor, got a DTensor, of which each process has a part: the stream can be sharded as"
    " a whole, by fully_shard, but neither tensor nor sequence parallelism over it is there"
)
SHARD = (
    "`{}` must be gathered when the operators read it, got a DTensor: give the stream as a whole to"
    " fully_shard, and its sublayers if you like, but no single read or residual, because these are"
    " never called"
)


def stream(**options: Any) -> DeltaStream:
    sublayers = [nn.Linear(D, D) for _ in range(4)]
    return DeltaStream(D, sublayers, **{"value_channels": M, "expand": "conv", **options})


def sharded(path: str, *, then_all: bool = False, **options: Any) -> Act:
    """Give a part of a stream to fully_shard, and call the stream."""

    def act(mesh: Any) -> Tensor:
        module = stream(**options)
        fully_shard(module.get_submodule(path))
        if then_all:
            fully_shard(module)
        return module(normal(B, T, D, dtype=F32))

    return act


def replaced(path: str, **options: Any) -> Act:
    """Replace a parameter by a DTensor, as parallelize_module does."""

    def act(mesh: Any) -> Tensor:
        module = stream(**options)
        owner, _, name = path.rpartition(".")
        part = distribute_tensor(module.get_parameter(path).detach(), mesh, [Replicate()])
        setattr(module.get_submodule(owner), name, nn.Parameter(part))
        return module(normal(B, T, D, dtype=F32))

    return act


def operand(function: Callable[..., object], given: dict[str, Any], name: str) -> Act:
    """Call an operator with one operand as a DTensor."""

    def act(mesh: Any) -> object:
        part = distribute_tensor(given[name], mesh, [Replicate()])
        return function(**{**given, name: part})

    return act


def into_the_residual(name: str) -> Act:
    def act(mesh: Any) -> Tensor:
        given = {"x": normal(B, T, D, M, dtype=F32)}
        for other in ("sublayer_out", "context", "compressed"):
            given[other] = normal(B, T, D, dtype=F32)
        given[name] = distribute_tensor(given[name], mesh, [Shard(1)])
        return DeltaResidual(D, M)(**given)

    return act


class Distributing(nn.Module):
    """A sublayer that returns a DTensor, as RowwiseParallel does with use_local_output=False."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, h: Tensor) -> Tensor:
        return DTensor.from_local(h, self.mesh, [Shard(1)])


STARTS = torch.zeros(B, T, dtype=torch.bool)
STATE = normal(B, T, D, M, dtype=F32)
WRITE = {
    "direction": normal(B, T, D, dtype=F32),
    "value": normal(B, T, M, dtype=F32),
    "gate": normal(B, T, dtype=F32),
}
HALF = {name: tensor.to(BF16) for name, tensor in {"state": STATE, **WRITE}.items()}
READ = {
    "compress": normal(D, M, 2, dtype=F32),
    "norm_weight": normal(D, dtype=F32),
    "gate_weight": normal(D, dtype=F32),
    "gate_bias": normal(1, dtype=F32).squeeze(),
    "value_weight": normal(M, D, dtype=F32),
    "value_bias": normal(M, dtype=F32),
    "document_starts": STARTS,
}
EXPAND = {"x": WRITE["direction"], "weight": normal(D, M, 2, dtype=F32), "document_starts": STARTS}
EPS: dict[str, Any] = {"eps_k": 0.1}
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, Tensor]]] = {
    "rewrite": (functional.rewrite, EPS, {"state": STATE, **WRITE}),
    "rewrite in half precision": (functional.rewrite, EPS, HALF),
    "read": (functional.read, {}, {"state": STATE, **READ}),
    "rewrite_read": (functional.rewrite_read, EPS, {"state": STATE, **WRITE, **READ}),
    "expand": (functional.expand, {"value_channels": M}, EXPAND),
}
CASES: dict[str, tuple[Act, str]] = {
    f"{call}: {name}": (operand(function, {**options, **tensors}, name), f"`{name}` must be{PART}")
    for call, (function, options, tensors) in CALLS.items()
    for name in tensors
}
CASES |= {
    f"fully_shard: {path}": (sharded(path), SHARD.format(named))
    for path, named in {
        "reads.1": "reads[1]",
        "readout": "readout",
        "residuals.2": "residuals[2].gate",
        "residuals.2.gate": "residuals[2].gate",
        "residuals.2.value": "residuals[2].value",
    }.items()
}
CASES |= {
    "fully_shard: a gate, then the stream": (
        sharded("residuals.1.gate", then_all=True),
        SHARD.format("residuals[1].gate"),
    ),
    "fully_shard: a layer of a gate": (
        sharded("residuals.1.gate.0", gate="mlp"),
        SHARD.format("residuals[1].gate.0"),
    ),
}
CASES |= {
    f"replaced: {path}": (replaced(path, **options), SHARD.format(named))
    for path, named, options in (
        ("reads.0.compress_weight", "reads[0]", {}),
        ("reads.3.norm_weight", "reads[3]", {}),
        ("reads.0.compress_kernel", "reads[0]", {"compress_parameterization": "factored"}),
        ("readout.norm_weight", "readout", {}),
        ("residuals.1.gate.weight", "residuals[1].gate", {}),
        ("residuals.1.gate.bias", "residuals[1].gate", {}),
        ("residuals.1.value.weight", "residuals[1].value", {}),
        ("residuals.1.direction.weight", "residuals[1].direction", {"mapping": "v"}),
        ("residuals.1.gate_pool.weight", "residuals[1].gate_pool", {"gate_from": "convolved"}),
    )
}
CASES |= {
    f"DeltaResidual: {name}": (into_the_residual(name), f"`{name}` must be{PART}")
    for name in ("x", "sublayer_out", "context", "compressed")
}
CASES |= {
    "replaced: expand.weight": (replaced("expand.weight"), f"`weight` must be{PART}"),
    "DeltaStream: x": (
        lambda mesh: stream()(distribute_tensor(WRITE["direction"], mesh, [Shard(1)])),
        f"`x` must be{PART}",
    ),
    "DeltaStream: keep": (
        lambda mesh: stream()(
            WRITE["direction"], keep=distribute_tensor(~STARTS, mesh, [Replicate()])
        ),
        f"`keep` must be{PART}",
    ),
    "DeltaStream: what a sublayer returns": (
        lambda mesh: DeltaStream(D, [nn.Identity(), Distributing(mesh)])(WRITE["direction"]),
        f"`sublayers[1]` must return{PART}",
    ),
    "Read: state": (
        lambda mesh: Read(D, M, compress="channel")(distribute_tensor(STATE, mesh, [Shard(0)])),
        f"`state` must be{PART}",
    ),
    "Expand: x": (
        lambda mesh: Expand(D, M)(distribute_tensor(WRITE["direction"], mesh, [Shard(0)])),
        f"`x` must be{PART}",
    ),
}


def cast(module: nn.Module) -> Tensor:
    """Give a module to fully_shard with a policy of bfloat16, and call it."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    readout: Tensor = fully_shard(module, mp_policy=policy)(normal(B, T, D, dtype=F32))
    assert readout.dtype == BF16
    readout.sum().backward()
    return readout


def cast_around(mesh: Any) -> None:
    """A policy of bfloat16 for the sublayers and the stream's parent, none for the stream."""
    inner = stream()
    for sublayer in inner.sublayers:
        fully_shard(sublayer, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    module = nn.Sequential(fully_shard(inner))
    cast(module)
    assert {parameter.grad.dtype for parameter in module.parameters()} == {F32}


def cast_all(mesh: Any) -> None:
    """A policy of bfloat16 for a stream, or for what is around it, is `stream.bfloat16()`."""
    for module in (stream(), nn.Sequential(stream())):
        whole = copy.deepcopy(module).bfloat16()
        expected = whole(normal(B, T, D, dtype=F32).bfloat16())
        expected.sum().backward()
        assert torch.equal(cast(module), expected)
        for parameter, same in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor().bfloat16(), same.grad)


def sharded_expansion(mesh: Any) -> None:
    """The expansion is a part of the stream that is called."""
    sharded("expand")(mesh)


ACCEPTED = [cast_around, cast_all, sharded_expansion]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each process: every case, with the exception that it raised."""
    folder = tmp_path_factory.mktemp("refused")

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        found = {}
        for case in ACCEPTED:
            case(mesh)
        for name, (case, _) in CASES.items():
            try:
                case(mesh)
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        (folder / f"{rank}.json").write_text(json.dumps(found))

    together(2, folder, act)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, said: list[dict[str, str]]) -> None:
    assert [found[name] for found in said] == [f"TypeError: {CASES[name][1]}"] * 2


def test_every_tensor_of_an_operator_is_a_case() -> None:
    for call, (function, _, tensors) in CALLS.items():
        hints = function.__annotations__
        wanted = {name for name, hint in hints.items() if "Tensor" in hint} - {"return"}
        assert tensors.keys() == wanted, call
