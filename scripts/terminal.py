"""What scripts show while they work. Knows no model and no data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Rate(ProgressColumn):
    """How many a second, or a minute where that is less than one."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{60 * speed:.1f}/min", style="progress.data.speed")


class Bar:
    """A running count with a note beside it."""

    def __init__(self, show: Progress, task, done: int):
        self._show, self._task = show, task
        self.count = done
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def advance(self, note: str = "", by: int = 1) -> None:
        self.count += by
        self._show.update(self._task, completed=self.count, note=note)


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Bar]:
    """A progress bar with count, rate, note, time spent and time left; where there is no terminal it prints nothing."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as show:
        yield Bar(show, show.add_task(what, total=total, completed=done, note=""), done)
