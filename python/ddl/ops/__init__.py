"""The PyTorch operators; `import ddl.ops` registers them as `torch.ops.ddl`.

`rewrite`, `read`, `rewrite_read` and `expand` call them, in plain PyTorch on devices without
kernels. `bind` prepares calls for a sequence in pieces.
"""

from .operators import bind, expand, read, rewrite, rewrite_read

__all__ = ["bind", "expand", "read", "rewrite", "rewrite_read"]
