"""Text of files and models, as terminals and pages may show it, and the console that prints it.

Names of tasks and sublayers, options, samples and paths come from anywhere. A control character in
one would be obeyed by a terminal, a mark of direction makes a text look like another one, and rich
takes brackets for markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "\ufffd"
# C0 without tab and newline, delete and C1; marks of direction, separators of lines and paragraphs,
# and format characters that Unicode advises against. Text in Arabic or Hebrew needs no mark: its
# letters have a direction.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
_HIDDEN = re.compile(f"[{_OBEYED}\ud800-\udfff]")
_CONTROL = re.compile(f"[{_OBEYED}]")


def visible(text: str) -> str:
    """The text with U+FFFD for what a terminal would obey or UTF-8 cannot encode.

    Newlines and tabs stay. It is as many characters long as before, for tables.
    """
    return _HIDDEN.sub(UNKNOWN, text)


def one_line(text: object) -> str:
    """The text as `visible`, with U+FFFD for newlines and tabs, too: a name in a table."""
    return visible(str(text)).replace("\n", UNKNOWN).replace("\t", UNKNOWN)


def escaped(text: str) -> str:
    r"""The text with \u001b for an escape, and so on, which JSON reads as that character.

    Surrogates stay: a stream writes them as escapes, or they are bytes of a path.
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def make_console(**options: Any) -> Console:
    """A console for what files, users and models say; every other console of rich would obey it.

    Brackets are no markup and :words: no pictures; of control characters only rich's own pass. It
    raises BrokenPipeError, where rich's own would exit with another status. options: of rich's.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Plain(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

        def on_broken_pipe(self) -> None:
            self.quiet = True  # progress bars print once more on exit
            raise

    return Plain(markup=False, emoji=False, **options)
