"""The PyTorch operators; `import ddl.ops` registers them as `torch.ops.ddl`."""

from . import operators

__all__ = ["operators"]
