"""Conversion of nanochat's GPT: its blocks replaced, its class extended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.nanogpt.mixin import WithOptions, derived
from ddl.nanogpt.model import converted_class, stream_for, sublayers_of
from ddl.nanogpt.wiring import check_model
from ddl.optim import never_decayed
from ddl.options import Compress, ExpandKind, check_positive

from .block import ADDED, BLOCK, NORM_EPS, DeltaBlock

GPT = TypeVar("GPT", bound=nn.Module)
Class = TypeVar("Class", bound=type[nn.Module])

FIXED = {"norm_eps": NORM_EPS, "norm_affine": False, "anchor_every": 1, "stream_dtype": None}
OF_THE_STREAM = "ddl"  # the key of its group in the optimizer


def convert(
    model: GPT,
    *,
    value_channels: int = 1,
    compress: Compress | None = None,
    expand: ExpandKind = "repeat",
    disable: bool = False,
    **options: Any,
) -> GPT:
    """Turn every residual addition of nanochat's GPT into a rewrite, in place, and return `model`.

    Call it before `init_weights` or `load_state_dict`, `setup_optimizer`, torch.compile and DDP.
    `converted` does it where the model is made.

    Every entry of the state dict keeps its name. Each block in `transformer.h` gains gates and
    values (`res_attn`, `res_mlp`) and compressions (`read_attn`, `read_mlp`); if they have
    parameters, `expand` is new in the first block and `readout` in the last. They are in float32,
    as nanochat's matrices, and initialised as in DeltaStream, by `init_weights`, too. torch's
    random state is left unchanged. Output projections start at zero, as nanochat's do: a fresh
    model writes nothing. `setup_optimizer(…, stream_lr=0.004)` gives the new parameters to AdamW,
    in a group of their own.

    For generation with a cache and reads of several tokens, see `cached`.

    Args:
        model: nanochat's GPT, or a model with the same `transformer` and blocks.
        value_channels, compress, expand: as in DeltaStream.
        disable: leave the model unchanged, so that one flag switches an A/B comparison. Wrong
            arguments still raise.
        options: further options of DeltaStream, including those of DeltaResidual. norm_eps,
            norm_affine, anchor_every, stream_dtype, device and dtype are not allowed: the model
            sets them.

    Raises:
        TypeError: `model` lacks modules of nanochat's GPT or has others; a block's forward computes
            something else; an option is unknown.
        ValueError: `model` is already converted; DeltaStream refuses an option.
    """
    options |= {"value_channels": value_channels, "compress": compress, "expand": expand}
    if _rewrite_blocks(model, disable=disable, **options):
        model.__class__ = derived(type(model), Converted, f"Delta{type(model).__name__}")
    return model


def converted(kind: Class, *, disable: bool = False, **options: Any) -> Class:
    """Return a subclass of nanochat's GPT whose models are converted when they are made.

        GPT = ddl.nanochat.converted(GPT, value_channels=4)  # at the end of nanochat/gpt.py

    Whatever makes a GPT then makes a converted one: base_train on meta, and the checkpoint manager,
    which loads a state dict into it.

    kind: the class. disable: return `kind` itself. options: as in `convert`; they are checked when
    a model is made.

    Raises TypeError if `kind` is no class of modules, ValueError if it is already converted.
    """
    return converted_class(kind, _ConvertedWhenMade, "nanochat", disable, options)


class Converted(WithOptions):
    """Mixin that `convert` and `converted` put before the class of a model."""

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise nanochat's parameters by its method, and the new ones."""
        super().init_weights()  # type: ignore[misc]
        with torch.random.fork_rng():
            self.reset_parameters()

    def setup_optimizer(self, *args: Any, stream_lr: float = 0.004, **kwargs: Any) -> Any:
        """Run nanochat's method on nanochat's parameters, then add the new ones without decay.

        stream_lr: their learning rate in AdamW.
        """
        check_positive("stream_lr", stream_lr)
        with self._without_the_stream():  # nanochat gives all that is in a block to Muon
            optimizer = super().setup_optimizer(*args, **kwargs)  # type: ignore[misc]
        return with_stream(optimizer, never_decayed(self), stream_lr)

    @contextmanager
    def _without_the_stream(self) -> Iterator[None]:
        """Take what the conversion added out of the blocks for a while."""
        blocks: Any = self.transformer.h  # type: ignore[union-attr]
        modules = [dict(block._modules) for block in blocks]
        try:
            for block in blocks:
                for name in ADDED:
                    block._modules.pop(name, None)
            yield
        finally:
            for block, known in zip(blocks, modules, strict=True):
                block._modules.clear()
                block._modules.update(known)  # in their order


class _ConvertedWhenMade(Converted):
    """Mixin that converts a model at the end of its class's `__init__`."""

    options: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _rewrite_blocks(self, **self.options)


def _rewrite_blocks(model: Any, *, disable: bool = False, **options: Any) -> bool:
    """Replace the blocks of `model`; return whether they were: not if `disable`."""
    formula = "x + attn(norm(x), …), then x + mlp(norm(x))"
    needed = (("transformer", "lm_head"), ("wte", "h"))
    check_model(model, "nanochat", needed, BLOCK, formula, _added)
    blocks, weight = model.transformer.h, model.transformer.wte.weight
    stream, known = stream_for(
        sublayers_of(blocks),
        options,
        like=weight,
        dtype=torch.float32,
        own=("disable",),
        fixed=FIXED,
        caller="ddl.nanochat.convert",
    )
    if disable:
        return False
    for number, block in enumerate(blocks):
        blocks[number] = DeltaBlock(block, number, stream)
    model.delta_args = known
    return True


def _added(block: Any, x: Tensor, *args: Any) -> Tensor:
    """The forward of nanochat's Block."""
    x = x + block.attn(F.rms_norm(x, x.shape[-1:]), *args)
    added: Tensor = x + block.mlp(F.rms_norm(x, x.shape[-1:]))
    return added


def with_stream(optimizer: Any, parameters: list[nn.Parameter], lr: float) -> Any:
    """Add parameters to nanochat's optimizer, for torch's AdamW without weight decay.

    nanochat's own AdamW shards rows over the processes, and most of these have fewer rows than
    there are processes. So their gradients are averaged here, and every process does each step.
    The group has the keys of nanochat's, for its schedules.
    """
    group: dict[str, Any] = {"params": parameters, "lr": lr, "betas": (0.9, 0.95), "eps": 1e-10}
    group |= {"weight_decay": 0.0, "kind": "adamw", "initial_lr": lr, OF_THE_STREAM: True}
    torch.optim.AdamW([group])  # completes the group by what torch's AdamW looks up
    optimizer.add_param_group(group)
    optimizer.__class__ = derived(type(optimizer), _WithStream)
    return optimizer


class _WithStream(torch.optim.Optimizer):
    """Mixin before nanochat's optimizer."""

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step nanochat's groups by its own method, then the stream's."""
        groups = self.param_groups
        ours = [group for group in groups if OF_THE_STREAM in group]
        self.param_groups = [group for group in groups if OF_THE_STREAM not in group]
        try:
            result = super().step(*args, **kwargs)
        finally:
            self.param_groups = groups
        adamw = torch.optim.AdamW([torch.zeros(1)])
        adamw.param_groups, adamw.state = ours, self.state
        for group in ours:
            _average([p.grad for p in group["params"] if p.grad is not None])
        adamw.step()
        return result


def _average(gradients: list[torch.Tensor]) -> None:
    """Average gradients over all processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work, gradient in zip(works, gradients, strict=True):
        work.wait()
        gradient /= dist.get_world_size()
