"""`ddl eval`: score a run or a Hugging Face model with lm-evaluation-harness (lm-eval)."""

from .scores import Record, evaluate, score, tables

__all__ = ["Record", "evaluate", "score", "tables"]
