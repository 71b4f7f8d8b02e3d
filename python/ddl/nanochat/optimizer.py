"""The stream's parameters beside nanochat's in one optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddl.nanogpt.mixin import derived

OF_THE_STREAM = "ddl"  # a group's key


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
