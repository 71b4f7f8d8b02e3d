"""The matplotlib figures that a function saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure


def saved_figure(draw: Callable[[], object]) -> Figure:
    """Call `draw`; return the one figure that it saves."""
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Figure.savefig

        def savefig(self: Figure, *args: Any, **options: Any) -> None:
            figures.append(self)
            original(self, *args, **options)

        patch.setattr(Figure, "savefig", savefig)
        draw()
    (figure,) = figures
    return figure
