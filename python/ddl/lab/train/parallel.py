"""The model in several processes, by torch's own means: a copy in each (DDP), or shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddl.lab.config import TrainConfig
from ddl.models import GPT
from ddl.ops.private import uncompiled

from .processes import Processes


def spread(
    model: GPT, config: TrainConfig, device: torch.device, processes: Processes
) -> Callable[..., Any]:
    """Put the model where it trains; return what is called in its place.

    fsdp2: the parameters of each sublayer are gathered before it and freed behind it, those of the
    stream around them for the whole stream, because its operators read them between the sublayers.
    With precision bfloat16 the sublayers are gathered in bfloat16, the stream in float32, since
    gates and directions are computed in it. Gradients are summed in float32.
    """
    if config.recompute:
        for sublayer in model.trunk.sublayers:
            sublayer.forward = partial(checkpoint, sublayer.forward, use_reentrant=False)
    sharded = is_sharded(config, processes)
    if sharded:
        _shard(model, device.type, processes.count, bfloat16=config.precision == "bfloat16")
    else:
        model.to(device)
    called: Callable[..., Any] = torch.compile(model) if config.compile else model
    if processes.alone or sharded:
        return called
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        called,
        device_ids=devices,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def is_sharded(config: TrainConfig, processes: Processes) -> bool:
    """Whether each process holds a part of every parameter."""
    return config.parallel == "fsdp2" and not processes.alone


def _shard(model: GPT, device_type: str, count: int, *, bfloat16: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def placement(parameter: nn.Parameter) -> Shard:
        # FSDP2 pads the rows to a multiple of the processes. A gate has one row, a value m, so of
        # 1,024 processes each would gather 1,024 rows.
        by_features = parameter.ndim > 1 and parameter.shape[0] < count
        return Shard(1 if by_features and parameter.shape[1] % count == 0 else 0)

    # The tables of positions are arguments of a sublayer, and stay in float32.
    lower = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    policy = lower if bfloat16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(device_type, (count,))
    for sublayer in model.trunk.sublayers:
        fully_shard(sublayer, mesh=mesh, mp_policy=policy)
    fully_shard(model.trunk, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh)


@contextmanager
def accumulating(called: Any, *, last: bool) -> Iterator[None]:
    """Run one of a step's backward passes; only the last one sums gradients over the processes."""
    if hasattr(called, "no_sync") and not last:
        with called.no_sync():
            yield
        return
    model = uncompiled(called)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    yield


def whole(number: Tensor) -> Tensor:
    """A number that all processes have, as a plain tensor."""
    full = getattr(number, "full_tensor", None)
    return number if full is None else full()
