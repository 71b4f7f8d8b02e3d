"""The operators as PyTorch sees them; `import ddl.ops` registers `torch.ops.ddl`.

`operators` has schemas, kernels and fake kernels; `autograd` saves tensors for the backward;
`outputs` allocates what an operator returns; `checks` refuses arguments in a sentence.
"""

from .operators import KERNELS

__all__ = ["KERNELS"]
