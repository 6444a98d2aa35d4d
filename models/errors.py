"""Refusals: requests that cannot be met. Knows nothing of who asked."""


class Refusal(ValueError):
    """A request that cannot be met: its text is one line that names the option (and the nearest valid value).

    common: all processes of a run meet it, so that one of them may speak for all.
    """

    def __init__(self, text: str = "", common: bool = False):
        super().__init__(text)
        self.common = common
