"""What long jobs show: a bar on a terminal, and a line now and then in a log."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from paceline.decode import progress as shown
from paceline.decode.progress import Bar, progress, status


def until(log: io.StringIO, text: str) -> None:
    """Wait for it to be logged."""
    deadline = time.monotonic() + 60
    while text not in log.getvalue():
        assert time.monotonic() < deadline, log.getvalue()
        time.sleep(0.01)


def test_a_log_has_a_line_now_and_then_however_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "EVERY", 0.02)
    log = io.StringIO()
    with progress("prompts", 3, console=Console(file=log)) as bar:
        until(log, "prompts 0/3, 0:00:00 spent\n")
        bar.advance("12.0 tokens/s")
        until(log, " left, 12.0 tokens/s\n")
    lines = log.getvalue()
    time.sleep(0.1)
    assert log.getvalue() == lines, "once it is over nothing more is said"


def test_a_short_job_says_nothing_in_a_log(capsys: Any) -> None:
    with progress("prompts", 3) as bar:
        bar.advance("12.0 tokens/s")
    assert bar.count == 1 and capsys.readouterr() == ("", "")


def test_a_terminal_sees_count_rate_note_and_times(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    with progress("prompts", 3, done=1) as bar:
        for _ in range(2):
            bar.advance("12.0 tokens/s")
        bar.say()
    out, err = capsys.readouterr()
    assert out == ""
    for text in ("prompts", "3/3", "/s", "12.0 tokens/s", "0:00:00"):
        assert text in err


def test_time_left_is_that_of_the_pace_since_the_start_and_no_more_than_there_is(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    nowhere = Console(file=io.StringIO())
    bars = [Bar(nowhere, "step", total, 1_000, most) for total, most in ((2_500, None), (2_500, 50.0), (None, None))]
    now[0] += 20.0
    for bar in bars:
        bar.advance("loss 2.31", by=10)
    assert [str(bar) for bar in bars] == [
        "1,010/2,500, 30.0/min, 0:00:20 spent, 0:49:40 left, loss 2.31",
        "1,010/2,500, 30.0/min, 0:00:20 spent, 0:00:30 left, loss 2.31",
        "1,010, 30.0/min, 0:00:20 spent, loss 2.31",
    ]
    assert list(bars[0].over("ab")) == ["a", "b"] and str(bars[0]).startswith("1,012/2,500, 36.0/min, ")
    bars[0].say()
    assert nowhere.file.getvalue() == f"step {bars[0]}\n"  # type: ignore[attr-defined]


def test_what_is_done_elsewhere_is_told_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "EVERY", 0.02)
    log, news = io.StringIO(), iter(range(1_000_000))
    with status(lambda: f"[job] {next(news)}", Console(file=log)):
        until(log, "[job] 0\n[job] 1\n")
