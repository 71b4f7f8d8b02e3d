from collections.abc import Callable, Sequence

from torch import Tensor

__version__: str

_Rewrite = tuple[Tensor, Tensor, Tensor, float]
_Read = tuple[object, ...]
_Optional = tuple[Tensor | None, ...]
_Allocate = Callable[[Tensor, int], Tensor]

def rewrite_read(
    state: Tensor,
    rewrite: _Rewrite | None,
    read: _Read | None,
    outputs: _Optional,
    threads: int,
    stream: int = 0,
    allocate: _Allocate | None = None,
) -> None: ...
def rewrite_read_backward(
    state: Tensor,
    rewrite: _Rewrite | None,
    read: _Read | None,
    outputs: _Optional,
    incoming: _Optional,
    gradients: _Optional,
    threads: int,
    stream: int = 0,
    allocate: _Allocate | None = None,
) -> None: ...
def expand_forward(
    x: Tensor,
    weight: Tensor | None,
    state: Tensor,
    threads: int,
    stream: int = 0,
    allocate: _Allocate | None = None,
) -> None: ...
def expand_backward(
    x: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor | None,
    threads: int,
    stream: int = 0,
    allocate: _Allocate | None = None,
) -> None: ...
def why_unavailable(index: int) -> str | None: ...
def begin_warmup(architecture: str | None, index: int) -> None: ...
def end_warmup(compile: bool) -> list[tuple[str, str, str, int, int, int, float, bool]]: ...

# Where built with the feature `emulator`, for the tests.
def emulate(
    build: Callable[[str, Sequence[str]], object] | None,
    *,
    multiprocessors: int = 2,
    shared_per_block: int = 65_536,
    cluster: int = 1,
    plan: dict[str, int] | None = None,
) -> None: ...
def pretend_gpu(index: int | None) -> None: ...
