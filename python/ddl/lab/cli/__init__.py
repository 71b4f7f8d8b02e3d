"""The `ddl` command: main.py has the table of commands; each command has a file here."""

from .main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
