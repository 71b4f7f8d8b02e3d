"""Results that the Deep Delta Learning papers print: arXiv 2601.00417, text of 12 May 2026.

Tables 1 (small) and 2 (medium): 1-shot accuracies in percent and their average. Table 7: the same,
0-shot. Table 3: perplexities of losses with four digits, so that e to the loss is the perplexity to
1e-3; the first loss has the digits that give all of 17.3616.
"""

from __future__ import annotations

from typing import NamedTuple

from ddl.lab.config.paper_tasks import PAPER


class Row(NamedTuple):
    """A row of a table; the scores are in the order of PAPER."""

    scores: tuple[float, ...]
    average: float

    def by_task(self) -> dict[str, float]:
        return dict(zip(PAPER, self.scores, strict=True))


ONE_SHOT = {
    "small additive": Row((29.01, 55.85, 37.59, 30.20, 65.94, 80.60, 37.87, 51.38), 48.56),
    "small ddl": Row((29.35, 57.49, 38.08, 31.80, 64.85, 78.50, 37.77, 52.01), 48.73),
    "small ddl-tc": Row((28.75, 57.37, 38.41, 34.40, 64.47, 82.00, 38.38, 52.01), 49.47),
    "small ddl-cc": Row((28.33, 57.87, 38.24, 32.20, 64.09, 82.60, 38.43, 52.57), 49.29),
    "medium additive": Row((33.62, 67.05, 47.42, 33.20, 70.24, 87.30, 40.28, 52.57), 53.96),
    "medium ddl-cc": Row((34.39, 65.57, 48.92, 36.00, 69.48, 90.50, 40.53, 55.72), 55.14),
}
ZERO_SHOT = {
    "small additive": Row((28.33, 52.44, 37.60, 33.00, 65.94, 71.20, 37.46, 52.41), 47.30),
    "small ddl-cc": Row((27.90, 51.26, 38.42, 31.40, 64.85, 73.60, 37.77, 52.25), 47.18),
}
# loss → perplexity
PERPLEXITIES = {
    2.85426: 17.3616,
    2.8482: 17.2562,
    2.8329: 16.9947,
    2.6053: 13.5356,
    2.5758: 13.1420,
}
