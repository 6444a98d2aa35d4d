"""What the target says of training text: computed as it is needed, or remembered from the first time on.

Knows the target and batches. Does not know the drafter beyond its taps.

    Legend: B rows, T sequence, H hidden, F = len(taps) * H.
"""

import torch
from torch import Tensor

from paceline.data.batch import Batch, Loader
from paceline.models.target import Target


class Features:
    """The frozen target's hidden states for batches of a loader.

    With `remember`, every example's states are kept in memory, F + H values a token in the target's dtype (H where the
    only tap is -1), and later epochs cost no pass. An example is always computed with those it meets in epoch 0:
    its states do not depend on when they were asked for, so that a resumed run has the same bits.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], loader: Loader, remember: bool):
        self.target, self.taps, self.loader = target, taps, loader
        self._homes = loader.homes() if remember else {}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """hidden [B, T, F], the taps side by side, and last [B, T, H], the output of the final norm."""
        if not self._homes:
            return self._computed(batch)
        for example in batch.members:
            if example not in self._known:
                self._learn(self._homes[example])
        shape, device = batch.ids.shape, batch.ids.device
        sample = self._known[batch.members[0]] if batch.members else self._computed(batch)
        hidden, last = (torch.zeros(*shape, part.shape[-1], dtype=part.dtype, device=device) for part in sample)
        for document, example in enumerate(batch.members):
            there = batch.document == document
            for whole, part in zip((hidden, last), self._known[example], strict=True):
                whole[there] = part.to(device)
        return hidden, last

    def _computed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.target(batch.ids, self.taps, documents=batch.document, positions=batch.positions)

    def _learn(self, home: tuple[int, ...]) -> None:
        batch = self.loader.packed(home).to(self.target.device)
        hidden, last = self._computed(batch)
        for document, example in enumerate(home):
            there = batch.document == document
            kept = last[there].cpu()
            self._known[example] = (kept if self.taps == (-1,) else hidden[there].cpu(), kept)
