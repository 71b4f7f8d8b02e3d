"""Costs of operators and steps, counted instead of timed, so that machines agree about it.

recorded.json holds the numbers; `python -m tests.costs --record` writes them again.
"""
