"""What lasts from one round of decoding to the next: the texts that are live, and what is held of each.

Knows how texts leave and take the places of others. Does not know how tokens are drafted, verified or chosen.

    Legend: B texts, J rows of each that became verified, H hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.decode.tree import last_of
from paceline.models.cache import Cache


@dataclass
class Verified:
    """Rows of each text that became verified in the last round, which the drafter has still to read.

    hidden [B, J, taps * H]; followers [B, J], the token after each: the last real one is the new root;
    positions [B, J]; count [B] of them real.
    """

    hidden: Tensor
    followers: Tensor
    positions: Tensor
    count: Tensor

    def preceded(self, first: Tensor) -> "Verified":
        """With row -1 in front, which reads the first token [B, 1] and has no feature."""
        none = torch.zeros_like(self.hidden[:, :1])
        return Verified(
            torch.cat([none, self.hidden], 1),
            torch.cat([first, self.followers], 1),
            torch.cat([torch.full_like(first, -1), self.positions], 1),
            self.count + 1,
        )

    @property
    def roots(self) -> Tensor:
        """[B], what the target chose last."""
        return last_of(self.count, self.followers)[0][:, 0]

    def select(self, rows: Tensor) -> "Verified":
        return Verified(self.hidden[rows], self.followers[rows], self.positions[rows], self.count[rows])

    def columns(self, some: slice, count: Tensor) -> "Verified":
        return Verified(self.hidden[:, some], self.followers[:, some], self.positions[:, some], count)


@dataclass
class Live:
    """Texts that are being decoded: which of the prompts, and what is held of each.

    cache: the target's, of all but the root. verified: what the drafter has still to read. memory: the drafter's own.
    """

    prompts: list[int]
    cache: Cache
    verified: Verified
    memory: Any

    def select(self, places: list[int]) -> None:
        """Only these stay."""
        rows = torch.tensor(places, device=self.verified.count.device)
        self.prompts = [self.prompts[place] for place in places]
        self.cache.select(rows)
        self.verified = self.verified.select(rows)
        self.memory = None if self.memory is None else self.memory.select(places)

    def put(self, place: int, other: "Live") -> None:
        """The only text of another, of which one row is to be read, takes this place."""
        self.prompts[place] = other.prompts[0]
        self.cache.put(place, other.cache)
        ours, theirs = self.verified, other.verified
        for part in ("hidden", "followers", "positions"):
            getattr(ours, part)[place, :1] = getattr(theirs, part)[0]
        ours.count[place] = 1
        if self.memory is not None:
            self.memory.put(place, other.memory)
