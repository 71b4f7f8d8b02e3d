"""The PyTorch operators; `import ddl.ops` registers them as `torch.ops.ddl`.

`operators` has schemas, implementations and fake implementations; `autograd` saves tensors and
returns gradients; `outputs` allocates outputs; `checks` validates arguments.
"""

from .operators import IMPLEMENTATIONS

__all__ = ["IMPLEMENTATIONS"]
