"""Bytes that a forward pass keeps for its backward, counted: on a CPU, and as on a GPU without one.

A fake GPU's tensors have shapes and no data, so the largest models are counted in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ddl.lab.config import TrainConfig
from ddl.models import GPT
from tests.support.forks import forked, pretend_gpu


def kept_bytes(config: TrainConfig, *, sharded: bool, gpu: bool) -> int:
    """Bytes of the distinct storages that autograd saves, parameters and buffers apart.

    sharded: with sublayers in the dtype in which FSDP2 gathers them.
    """
    if not gpu:
        return _count(config, sharded=sharded, gpu=False)
    return forked(lambda: _count(config, sharded=sharded, gpu=True))


def _count(config: TrainConfig, *, sharded: bool, gpu: bool) -> int:
    size = (config.batch_size, config.model.block_size)
    with fake_gpu() if gpu else nullcontext():
        with torch.device("cuda" if gpu else "cpu"):
            model, idx = GPT(config.model), torch.zeros(size, dtype=torch.int64)
        if sharded and config.precision == "bfloat16":
            for module in model.trunk.sublayers.modules():
                _to_bfloat16(module)
        if config.recompute:
            for sublayer in model.trunk.sublayers:
                options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not gpu}
                sublayer.forward = partial(checkpoint, sublayer.forward, **options)
        own = {_storage(t) for t in chain(model.parameters(), model.buffers())}
        found: dict[int, Tensor] = {}  # alive, so that no storage is made where another was

        def pack(tensor: Tensor) -> Tensor:
            found.setdefault(_storage(tensor), tensor)
            return tensor

        mixed = config.precision == "bfloat16"
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            _autocast("cuda" if gpu else "cpu", mixed),
        ):
            loss = model(idx, labels=idx).loss
        assert loss.requires_grad
        return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own)


def kept_states(run: Callable[[], object], numel: int) -> int:
    """The number of distinct storages of this many numbers that autograd saves in `run`."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == numel:
            found.setdefault(_storage(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return len(found)


def kept_states_by_device(
    model: nn.Module, run: Callable[[str], object], numel: int
) -> tuple[int, int, int]:
    """`kept_states` on the CPU, after moving the model to a fake GPU, and after moving it back.

    run: calls the model with inputs on the device that it gets.
    """

    def count() -> tuple[int, int, int]:
        before = kept_states(lambda: run("cpu"), numel)
        with fake_gpu():
            replace_tensors(model, "cuda")
            there = kept_states(lambda: run("cuda"), numel)
            replace_tensors(model, "cpu")
            return before, there, kept_states(lambda: run("cpu"), numel)

    return forked(count)


def replace_tensors(module: nn.Module, device: str) -> None:
    """Do as `module.to(device)` does, which refuses fake tensors; the numbers are lost."""

    def new(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(new(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else new(buffer)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _to_bfloat16(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.detach().bfloat16())


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors without data; attention as on a GPU, where torch takes its flash kernel.

    Enter it in a forked process.
    """

    def flash(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: None, is_causal: bool) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    pretend_gpu()
    with FakeTensorMode(), mock.patch.object(F, "scaled_dot_product_attention", flash):
        yield


@contextmanager
def _autocast(device: str, enabled: bool) -> Iterator[None]:
    """torch.autocast, which refuses a GPU that is not there."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, False)
