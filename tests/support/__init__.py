"""Helpers shared by tests of several folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository's root
SUPPORT = Path(__file__).resolve().parent
