"""The output of the laboratory: text of files is shown, and never obeyed by a terminal.

Names of tasks, options, samples and paths come from anywhere. A control character in one would move
the cursor or hide what stands before it, and a mark of direction makes a text look like another.
Only rich, through `make_console`, and `unguarded` give a terminal its control sequences.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# C0 without tab and newline, delete and C1, and what overrides the direction of writing.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_BAR = re.compile(r"\r|(?:\x1b\[A)+\Z")  # tqdm: to the start of the line, or up by whole writes


def escaped(text: str) -> str:
    r"""The text with `\x1b` for an escape character, and so on; newlines and tabs stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""The text as `escaped`, with `\n` and `\t`, too: a name in a sentence or in a table."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


class _Guarded:
    """A stream that writes control characters as escapes.

    It obeys no control sequence and so says that it is no terminal: other libraries then leave
    their colours out.
    """

    def __init__(self, stream: TextIO, *, bars: bool) -> None:
        self.unguarded, self._bars = stream, bars

    def write(self, text: str) -> int:
        bar = _BAR.match(text) if self._bars else None
        begin = bar.end() if bar else 0
        self.unguarded.write(text[:begin] + escaped(text[begin:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """In the block, write control characters to standard output and error as escapes.

    If an error ends the block and then the process, its traceback is written so, too.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Guarded(unguarded(sys.stdout), bars=False))
    sys.stderr = cast(TextIO, _Guarded(unguarded(sys.stderr), bars=True))
    try:
        yield
    except Exception:
        sys.excepthook = _print_traceback
        raise
    finally:
        sys.stdout, sys.stderr = before


def _print_traceback(*error: Any) -> None:
    print(escaped("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for control sequences of our own; text of files must be `escaped`."""
    return stream.unguarded if isinstance(stream, _Guarded) else stream


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: a name or a path may have what rich takes for markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as it has to be, because rich would cut numbers to the terminal."""
    needed = console.measure(table, options=console.options.update(width=10**4)).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table, crop=False)
    console.width = width


def make_console(*, stderr: bool = False) -> Console:
    """A console of rich for standard output or error that shows text of files as it is.

    Brackets are no markup and :words: no pictures; of control characters only rich's own pass. It
    raises BrokenPipeError, where rich's own would exit with another status.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Plain(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=escaped(segment.text))

        def on_broken_pipe(self) -> None:
            self.quiet = True  # progress bars print once more on exit
            raise

    file = unguarded(sys.stderr if stderr else sys.stdout)
    return Plain(file=file, markup=False, emoji=False)
