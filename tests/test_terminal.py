"""What long jobs show: everything on a terminal, nothing in a log."""

from typing import Any

from paceline.scripts.terminal import progress


def test_a_log_sees_no_progress(capsys: Any) -> None:
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
    out, err = capsys.readouterr()
    assert out == ""
    for text in ("prompts", "3/3", "/s", "12.0 tokens/s", "0:00:00"):
        assert text in err
