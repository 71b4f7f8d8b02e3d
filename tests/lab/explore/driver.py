"""Drives the screen of `ddl explore` and reads the characters that it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from textual.pilot import Pilot

from ddl.lab.explore.screen import Explorer
from ddl.lab.explore.watching import Watch

PATIENCE = 20  # looks at the files until something has to be on the screen
NEVER = 1e6  # seconds: the tests say when to look


class Driver:
    """A running screen: keys to press and text to wait for."""

    def __init__(self, app: Explorer, pilot: Pilot[int]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def text(self) -> str:
        """The characters on the screen, without the spaces at the end of lines."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    async def press(self, *keys: str) -> str:
        """Press keys; return the screen afterwards."""
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.text

    async def sees(self, *words: str) -> str:
        """Look at the files until all of the words are on the screen, in one line or wrapped."""
        for _ in range(PATIENCE):
            await self.look()
            wrapped = " ".join(self.text.split())
            if all(word in self.text or word in wrapped for word in words):
                return self.text
        raise AssertionError(f"{words} is not on the screen:\n{self.text}")

    async def look(self) -> str:
        """Look at the files once; return the screen."""
        await self.app.look()
        await self.pilot.pause()
        return self.text

    async def resize(self, width: int, height: int) -> str:
        await self.pilot.resize_terminal(width, height)
        await self.pilot.pause()
        return self.text


def explore(
    paths: Sequence[Path],
    script: Callable[[Driver], Awaitable[None]],
    *,
    size: tuple[int, int] = (80, 24),
    interval: float = NEVER,
) -> None:
    """Show the runs at these paths and follow the script."""

    async def go() -> None:
        app = Explorer(Watch(paths), interval=interval)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await script(Driver(app, pilot))

    asyncio.run(go())
