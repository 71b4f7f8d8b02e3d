"""The PyTorch operators; `import ddl.ops` registers them as `torch.ops.ddl`.

`rewrite`, `read`, `rewrite_read` and `expand` call them: with arguments by name, as `declarations`
has them, and in plain PyTorch on devices without kernels.
"""

from .operators import expand, read, rewrite, rewrite_read

__all__ = ["expand", "read", "rewrite", "rewrite_read"]
