"""Refusals: requests that cannot be met. Knows nothing of who asked."""


class Refusal(ValueError):
    """A request that cannot be met: its text is one line that names the option (and the nearest valid value)."""
