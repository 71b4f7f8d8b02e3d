"""The screen of `ddl explore`: a tab each for the runs and for what is known of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import ClassVar, get_args

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from ddl.lab.config.comparing import Over

from .choice import NOTHING, READING, Choice, joined
from .pages import PAGES, Page
from .watching import Snapshot, View, Watch
from .words import NONE, figure, safe_line, shorten, wrap

RUNS = "runs"
MARK = "●"
COLUMNS = ("", "run", "residual", "step", "val. loss", "state")
NARROWEST = 20  # columns for which content is made; a narrower terminal scrolls sideways
OTHERS = 58  # characters of the columns other than the name
STATES = {"training": "bold", "diverged": "reverse", "damaged": "reverse"}
TERMINATED = 128 + signal.SIGTERM

HELP = """\
1 … 6     the tabs; also Tab, and ← → on their names
n  p      the next and the previous run
↑ ↓       in the list of runs: move; elsewhere: scroll
← →       scroll sideways; Page Up, Page Down, Home, End
space     mark the run, or take its mark away
a         mark all runs, or none

Curves and Compare show the marked runs, or all if none is marked.
The other tabs show the run under the cursor.

v  V      the next and the previous view of the tab: other curves,
          other figures
l         Curves: linear or logarithmic
s         Curves: the training loss smoothed, or as it was recorded
o         Curves: over steps, tokens, FLOPs or seconds
?         this help; ? or Esc closes it
q         quit

The files are read again all the time, and never written."""


class Pane(ScrollableContainer, can_focus=True):
    """The content of a tab, which is made for the size that it has."""

    def __init__(self, page: Page) -> None:
        super().__init__(id=f"pane-{page.title.lower()}")
        self.page = page
        self.shown = Text()
        self._choice = Choice()

    def compose(self) -> ComposeResult:
        yield Static()

    def show(self, choice: Choice) -> None:
        """Show another choice; what has not changed is left alone, and where it is scrolled to."""
        self._choice = choice
        width, height = self.scrollable_content_region.size
        if not width:
            return
        content = Text(READING)
        if choice.snapshot.read:
            content = self.page.content(choice, max(width, NARROWEST), height)
        if content != self.shown:
            self.shown = content
            self.query_one(Static).update(content)

    def on_resize(self, event: events.Resize) -> None:
        self.show(self._choice)


class HelpScreen(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close"),
    ]

    def compose(self) -> ComposeResult:
        with ScrollableContainer(id="help"):
            yield Static(Text(HELP))


class Explorer(App[int]):
    """`ddl explore`.

    interval: seconds between two looks at the files.
    """

    TITLE = "ddl explore"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    TabPane { padding: 0; }
    Pane { scrollbar-size: 1 1; scrollbar-gutter: stable; }
    Pane Static { width: auto; height: auto; }
    DataTable { height: 1fr; scrollbar-size: 1 1; }
    #about { height: auto; max-height: 8; }
    HelpScreen { align: center middle; }
    #help { width: 72; max-width: 100%; height: auto; max-height: 100%; border: round $primary;
            background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i), f"tab({i})", show=False) for i in range(1, len(PAGES) + 2)),
        Binding("n", "run(1)", "Next run"),
        Binding("p", "run(-1)", "Previous"),
        Binding("space", "mark", "Mark"),
        Binding("a", "mark_all", "All", show=False),
        Binding("v", "view(1)", "View"),
        Binding("V", "view(-1)", show=False),
        Binding("l", "log", "Log"),
        Binding("s", "smooth", "Smooth"),
        Binding("o", "over", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, watch: Watch, *, interval: float = 1.0) -> None:
        super().__init__()
        self.files, self.interval = watch, interval
        self.snapshot = Snapshot()
        self.marked: set[str] = set()  # paths
        self.chosen: str | None = None  # the path of the run under the cursor
        self.views: dict[str, int] = {}
        self.log_scale, self.smooth = False, True
        self.over: Over = "steps"
        self._cells: list[list[Text]] = []
        self._looking = asyncio.Lock()
        self.animation_level = "none"  # over a slow connection nothing may run behind the keys

    def compose(self) -> ComposeResult:
        with TabbedContent(id="tabs"):
            with TabPane("1 Runs", id=RUNS), Vertical():
                yield DataTable(cursor_type="row")
                yield Static(id="about")
            for number, page in enumerate(PAGES, start=2):
                with TabPane(f"{number} {page.title}", id=page.title.lower()):
                    yield Pane(page)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, TERMINATED)
        self.run_worker(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.interval)

    async def look(self) -> None:
        """Read what is new in another thread, which leaves the screen free, and show it."""
        async with self._looking:
            snapshot = await asyncio.to_thread(self.files.poll)
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self.refresh_content()

    # --- what is shown ----------------------------------------------------------------------------

    @property
    def choice(self) -> Choice:
        """The choice of the tab in front."""
        views = self.snapshot.views
        marked = tuple(view for view in views if str(view.path) in self.marked)
        page = self.page
        drawn = (self.log_scale, self.smooth, self.over)
        choice = Choice(self.snapshot, self.current, marked or views, 0, *drawn)
        if page is None:
            return choice
        last = max(0, len(page.views(choice)) - 1)
        return choice._replace(view=min(self.views.get(page.title, 0), last))

    @property
    def current(self) -> View | None:
        """The run under the cursor; the first if it has vanished."""
        views = self.snapshot.views
        first = views[0] if views else None
        return next((view for view in views if str(view.path) == self.chosen), first)

    @property
    def page(self) -> Page | None:
        """The page of the tab in front; None for the list of runs."""
        active = self.query_one(TabbedContent).active
        return next((page for page in PAGES if page.title.lower() == active), None)

    def refresh_content(self) -> None:
        """Show what is read and chosen, in the tab in front."""
        if self.page is not None:
            self.query_one(f"#pane-{self.page.title.lower()}", Pane).show(self.choice)
            return
        self._show_runs()

    def _show_runs(self) -> None:
        table = self.query_one(DataTable)
        cells = [self._row(view) for view in self.snapshot.views]
        if cells != self._cells or not table.columns:
            self._cells = cells
            table.clear(columns=True)
            # textual measures cells later, and would miss those that are replaced meanwhile.
            for number, heading in enumerate(COLUMNS):
                widest = max((row[number].cell_len for row in cells), default=0)
                table.add_column(heading, width=max(widest, cell_len(heading)))
            table.add_rows(cells)
        if self.current is not None:
            self.chosen = str(self.current.path)
            table.move_cursor(row=self.snapshot.views.index(self.current), animate=False)
        self._show_about()

    def _show_about(self) -> None:
        """The current run's directory and problems, below the list."""
        width = max(20, self.size.width - 1)
        current, notes = self.current, self.snapshot.notes
        lines = [] if current is None else [safe_line(current.path), *current.problems]
        lines += notes
        if current is None:
            lines.append(NOTHING if self.snapshot.read else READING)
        self.query_one("#about", Static).update(joined(*(wrap(line, width) for line in lines)))

    def _row(self, view: View) -> list[Text]:
        run, config = view.run, view.config
        done = run.step if run.step is not None else len(run.records) and run.records[-1]["step"]
        steps = f"{done:,}" if config is None else f"{done:,}/{config.steps:,}"
        return [
            Text(MARK if str(view.path) in self.marked else " "),
            Text(shorten(view.name, max(12, self.size.width - OTHERS))),
            Text(NONE if config is None else config.model.residual),
            Text(steps, justify="right"),
            Text(figure(run.final.loss if run.final is not None else None), justify="right"),
            Text(view.state, style=STATES.get(view.state, "")),
        ]

    # --- keys and events --------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self.refresh_content()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        page = self.page
        target = DataTable if page is None else f"#pane-{page.title.lower()}"
        self.query_one(target).focus()
        self.refresh_content()
        self.refresh_bindings()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        views = self.snapshot.views
        late = event.cursor_row != event.data_table.cursor_row  # of rows that were replaced since
        if event.cursor_row < len(views) and not late:
            self.chosen = str(views[event.cursor_row].path)
            self._show_about()

    def check_action(self, action: str, parameters: Sequence[object]) -> bool | None:
        """Keys that do nothing in the tab in front are not in the footer."""
        title = self.page.title if self.page is not None else None
        if action in ("log", "smooth", "over"):
            return title == "Curves"
        if action == "view":
            return self.page is not None and len(self.page.views(self.choice)) > 1
        return True

    def action_tab(self, number: int) -> None:
        self.query_one(TabbedContent).active = (
            RUNS if number == 1 else PAGES[number - 2].title.lower()
        )

    def action_run(self, step: int) -> None:
        views = self.snapshot.views
        if self.current is not None:
            self.chosen = str(views[(views.index(self.current) + step) % len(views)].path)
            self.refresh_content()
            self.refresh_bindings()

    def action_view(self, step: int) -> None:
        page = self.page
        if page is not None:
            choice = self.choice
            self.views[page.title] = (choice.view + step) % len(page.views(choice))
            self.refresh_content()

    def action_mark(self) -> None:
        if self.current is not None:
            self.marked ^= {str(self.current.path)}
            self.refresh_content()

    def action_mark_all(self) -> None:
        every = {str(view.path) for view in self.snapshot.views}
        self.marked = set() if self.marked >= every else every
        self.refresh_content()

    def action_log(self) -> None:
        self.log_scale = not self.log_scale
        self.refresh_content()

    def action_smooth(self) -> None:
        self.smooth = not self.smooth
        self.refresh_content()

    def action_over(self) -> None:
        axes = get_args(Over)
        self.over = axes[(axes.index(self.over) + 1) % len(axes)]
        self.refresh_content()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())
