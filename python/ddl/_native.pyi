from torch import Tensor

__version__: str

_Rewrite = tuple[Tensor, Tensor, Tensor, float]
_Read = tuple[object, ...]
_Optional = tuple[Tensor | None, ...]

def rewrite_read(
    state: Tensor, rewrite: _Rewrite | None, read: _Read | None, outputs: _Optional, threads: int
) -> None: ...
def rewrite_read_backward(
    state: Tensor,
    rewrite: _Rewrite | None,
    read: _Read | None,
    outputs: _Optional,
    incoming: _Optional,
    gradients: _Optional,
    threads: int,
) -> None: ...
def expand_forward(x: Tensor, weight: Tensor | None, state: Tensor, threads: int) -> None: ...
def expand_backward(
    x: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor | None,
    threads: int,
) -> None: ...
