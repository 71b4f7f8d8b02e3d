"""Deep Delta Learning residuals as fused operators for PyTorch.

    X'  =  X + β k̂ (vᵀ − k̂ᵀ X)          instead of          x' = x + F(x)

`DeltaResidual` replaces one residual addition. `DeltaStream` runs a whole trunk on an expanded
residual stream, with every rewrite fused with the next read. `ddl.functional` has the operators,
`ddl.reference` the equations in plain PyTorch. `record` and `edit` look inside a model that runs.
Source: Deep Delta Learning, arXiv 2601.00417.

Names are imported on first use: `import ddl` alone loads no torch and registers no operators
(`import ddl.ops` does).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddl import functional, reference
    from ddl._native import __version__
    from ddl.nn import DeltaResidual, DeltaStream, Expand, Read
    from ddl.recording import edit, record

__all__ = [
    "DeltaResidual",
    "DeltaStream",
    "Expand",
    "Read",
    "__version__",
    "edit",
    "functional",
    "record",
    "reference",
]

if "_HOMES" in globals():  # a reload keeps the module's names
    from ddl.errors import IMPORTED_ONCE

    raise ImportError(IMPORTED_ONCE)

# torch takes a second to load; `ddl --help` and a mistyped option should not wait for it.
_HOMES = {
    "DeltaResidual": ".nn",
    "DeltaStream": ".nn",
    "Expand": ".nn",
    "Read": ".nn",
    "__version__": "._native",
    "edit": ".recording",
    "record": ".recording",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name], __name__), name)
    else:
        value = import_module(f".{name}", __name__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
