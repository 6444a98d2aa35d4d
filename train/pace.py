"""Where a run stands in its schedule when the clock may end it before its last step.

Knows step numbers and seconds. Does not know what a step is.
"""

import math
import statistics
from collections import deque

KNOWN = 16  # steps that are timed before anything is concluded: the first ones compile, or fill memories
RECENT = 64  # steps that are remembered


class Pace:
    """The place of each step in a schedule of `total` steps, and whether it is the last.

    Without a limit a step stands at its own number. With one it stands so much further on that the schedule ends
    when the time does, at the median pace of the latest steps; it never goes back.
    """

    def __init__(self, total: int, minutes: float | None = None, begun: int = 0, seconds: float = 0.0):
        """begun: steps that were taken before, in so many `seconds`."""
        self.total, self.limit = total, math.inf if minutes is None else 60 * minutes
        self._recent = deque([seconds / begun] * KNOWN if begun and seconds else [], maxlen=RECENT)
        self._before, self._place = seconds, 0.0

    def at(self, number: int, seconds: float) -> tuple[float, bool]:
        """(place, last) of step `number`, from 1, after `seconds` of training. The last one outlasts the limit."""
        if self.limit == math.inf:
            return number, number == self.total
        if seconds > self._before:
            self._recent.append(seconds - self._before)
            self._before = seconds
        fits = float(self.total)
        if len(self._recent) >= KNOWN:
            fits = min(fits, number + max(0.0, self.limit - seconds) / statistics.median(self._recent))
        self._place = max(self._place, number * self.total / fits)
        return self._place, number == self.total or seconds >= self.limit
