"""The PyTorch operators; `import ddl.ops` registers them as `torch.ops.ddl`.

`rewrite`, `read`, `rewrite_read` and `expand` call them: with arguments by name, as `declarations`
has them, and in plain PyTorch on devices without kernels. The `bind_cached_…`
functions prepare calls for a sequence in pieces.
"""

from .operators import (
    bind_cached_expand,
    bind_cached_read,
    bind_cached_rewrite_read,
    expand,
    read,
    rewrite,
    rewrite_read,
)

__all__ = [
    "bind_cached_expand",
    "bind_cached_read",
    "bind_cached_rewrite_read",
    "expand",
    "read",
    "rewrite",
    "rewrite_read",
]
