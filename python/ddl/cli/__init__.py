"""The `ddl` command: main.py has the table of commands, each of which is a file here."""

from .main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
