"""FLOPs of plain PyTorch, counted while it runs: products of matrices, and all other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

# 1 for each number of the output: functions of one or two numbers, and what is added to a product.
ELEMENTWISE = {
    *("add", "sub", "rsub", "mul", "div", "neg", "pow", "exp", "sqrt", "rsqrt", "reciprocal"),
    *("tanh", "sigmoid", "silu", "addmm", "baddbmm", "softplus"),
}
# 1 for each number of the input. The gradient of an embedding adds each token's row.
REDUCTIONS = {"sum", "mean", "embedding_dense_backward"}
# So many for each number of the output. The derivative of a function of one number is another one,
# and its product with the gradient an operation of its own.
SEVERAL = {
    "tanh_backward": 2,
    "sigmoid_backward": 2,
    "silu_backward": 2,
    "softplus_backward": 2,
    "_safe_softmax": 5,
    "_softmax": 5,  # largest, difference, exp, sum, quotient
    "_log_softmax": 5,  # largest, difference, exp, sum, difference
    "_softmax_backward_data": 4,  # product, sum, difference, product
    "_log_softmax_backward_data": 4,  # exp, sum, product, difference
}
# Products of matrices, which torch's FlopCounterMode counts; and what moves, makes or compares
# numbers, or works on one number of a token.
FREE = {
    *("mm", "bmm", "embedding", "nll_loss_forward", "nll_loss_backward"),
    *("view", "_unsafe_view", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand"),
    *("slice", "slice_backward", "select", "select_backward", "cat", "stack", "constant_pad_nd"),
    *(
        "new_empty_strided",
        "new_empty",
        "new_zeros",
        "zeros",
        "unbind",
        "zeros_like",
        "empty_like",
        "copy",
        "detach",
        "clone",
        "repeat",
        "full",
        "new_full",
        "scalar_tensor",
        "where",
    ),
}


class Counted(NamedTuple):
    """FLOPs in products of matrices, and in all other work."""

    matrix: float
    other: float


class _Others(TorchDispatchMode):
    """Counts what is no product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, tuple) else made
        if isinstance(first, Tensor) and first.is_floating_point():
            self.total += _count(func.overloadpacket.__name__.removesuffix("_"), first, args)
        return made


def _count(name: str, made: Tensor, args: Any) -> int:
    if name == "pow" and args[1] == 1:  # in the derivative of a square: a copy
        return 0
    if name in ELEMENTWISE:
        return made.numel()
    if name in SEVERAL:
        return SEVERAL[name] * made.numel()
    if name in REDUCTIONS:
        return args[0].numel()
    assert name in FREE, f"an operation that nobody counts: {name}"
    return 0


def count(run: Callable[[], Tensor]) -> tuple[Counted, Counted]:
    """Count the forward pass that `run` is and the backward pass of its result, all ones."""
    with sdpa_kernel(SDPBackend.MATH):
        result, forward = _counted(run)
        ones = torch.ones_like(result)
        _, backward = _counted(lambda: result.backward(ones))
    return forward, backward


def _counted(run: Callable[[], Any]) -> tuple[Any, Counted]:
    others, products = _Others(), FlopCounterMode(display=False)
    with products, others:
        result = run()
    return result, Counted(products.get_total_flops(), others.total)
