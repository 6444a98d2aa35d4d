"""What long jobs show while they work: a bar on a terminal, a line now and then anywhere else.

Knows counts and clocks. Does not know what is counted.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

EVERY = 30.0  # seconds between lines where there is no terminal
T = TypeVar("T")


class Bar:
    """A running count with a note beside it. most: seconds after which the job ends anyway."""

    def __init__(self, console: Console, what: str, total: int | None, done: int, most: float | None):
        self.count, self._note = done, ""
        self._console, self._what, self._total, self._done, self._most = console, what, total, done, most
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def advance(self, note: str | None = None, by: int = 1) -> None:
        """note: None leaves it as it is."""
        self.count += by
        if note is not None:
            self._note = note

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each counts once the next is asked for."""
        for item in items:
            yield item
            self.advance()

    def say(self) -> None:
        """A line, now, where there is no terminal that shows the bar."""
        if not self._console.is_terminal:
            _print(self._console, f"{self._what} {self}")

    def drawn(self) -> Table:
        """As a terminal shows it."""
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(self._total, self.count, width=20, pulse=self._total is None)
        row.add_row(Text(self._what), bar, Text(str(self)))
        return row

    def __str__(self) -> str:
        """`12/96, 3.1/min, 0:03:52 spent, 0:27:05 left, NOTE`, as far as it is known."""
        pace = (self.count - self._done) / self.seconds
        parts = [f"{self.count:,}" + ("" if self._total is None else f"/{self._total:,}")]
        if pace:
            parts.append(f"{pace:,.1f}/s" if pace >= 1 else f"{60 * pace:.1f}/min")
        parts.append(f"{_clock(self.seconds)} spent")
        left = [self._most - self.seconds] if self._most is not None else []
        if pace and self._total is not None:
            left.append((self._total - self.count) / pace)
        if left:
            parts.append(f"{_clock(max(min(left), 0.0))} left")
        return ", ".join([*parts, self._note] if self._note else parts)


@contextmanager
def progress(
    what: str, total: int | None, done: int = 0, console: Console | None = None, most: float | None = None
) -> Iterator[Bar]:
    """A bar on the console, stderr unless another is given; every half minute a line where that is no terminal."""
    console = console or Console(stderr=True)
    bar = Bar(console, what, total, done, most)
    if console.is_terminal and not console.quiet:
        with Live(get_renderable=bar.drawn, console=console) as screen:
            yield bar
            screen.transient = bar.count == done  # there was nothing to do
    else:
        with _now_and_then(EVERY, bar.say):
            yield bar


@contextmanager
def status(say: Callable[[], str], console: Console) -> Iterator[None]:
    """What `say` has to say, for work that is done elsewhere: anew every second, or every half minute in a line."""
    if console.is_terminal:
        with console.status(say()) as line, _now_and_then(1.0, lambda: line.update(say())):
            yield
    else:
        with _now_and_then(EVERY, lambda: _print(console, say())):
            yield


@contextmanager
def _now_and_then(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """`act` every so many seconds, in a thread: a single step may take minutes."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
