"""A schedule that ends with the time: where each step stands in it."""

import pytest

from paceline.train.pace import KNOWN, Pace


def played(pace: Pace, durations: list[float], number: int = 0, seconds: float = 0.0) -> list[tuple[float, bool]]:
    """Where each step stands, until one is the last."""
    told = []
    for duration in durations:
        number += 1
        told.append(pace.at(number, seconds))
        seconds += duration
        if told[-1][1]:
            break
    return told


def test_without_a_limit_and_with_time_enough_a_step_stands_at_its_number() -> None:
    for pace in (Pace(100), Pace(100, minutes=2)):
        told = played(pace, [1.0] * 200)
        assert told == [(number, number == 100) for number in range(1, 101)]


def test_the_schedule_ends_when_the_time_does() -> None:
    told = played(Pace(1000, minutes=1), [0.5] * 1000)
    assert len(told) == 121 and told[-1][1]
    places = [place for place, _ in told]
    assert places == sorted(places) and places[KNOWN - 1] == KNOWN
    assert places[KNOWN + 1] == pytest.approx(1000 * (KNOWN + 2) / 121, rel=0.01) and places[-1] == pytest.approx(1000)


def test_slow_first_steps_conclude_nothing_and_a_slow_epoch_is_made_good() -> None:
    compiled = played(Pace(100, minutes=2), [20.0, 20.0] + [0.7] * 98)
    assert [place for place, _ in compiled] == list(range(1, 101))
    told = played(Pace(100, minutes=1), [1.0] * 20 + [0.2] * 80)  # 36 seconds; it seems to be too much for 60
    places = [place for place, _ in told]
    assert places[19] > 30 and places == sorted(places)
    assert told[-1] == (100, True)


def test_a_run_goes_on_where_it_stood() -> None:
    whole = played(Pace(1000, minutes=1), [0.5] * 1000)
    after = played(Pace(1000, 1, begun=60, seconds=30.0), [0.5] * 1000, 60, 30.0)
    assert len(after) == len(whole) - 60
    assert [place for place, _ in after] == pytest.approx([place for place, _ in whole[60:]])
