"""Owns what a training step is fed: `Batch`, the packing of documents into rows, and the order of an epoch.

Knows no tokenizer, no model and no process group; world size and rank are numbers it is told.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from paceline.data.rows import Example, lengths

OPEN = 16  # steps that are filled at a time
WIDE = 512  # tokens of a row of several examples: in wider ones attention costs more than is saved of padding
MULTIPLE = 64  # row widths are multiples of this, so that kernels and allocators meet few different shapes


@dataclass(frozen=True)
class Batch:
    """Packed rows. A token may look only at tokens of its own document; padding is document -1."""

    ids: Tensor  # int64 [B, T], 0 where padded
    positions: Tensor  # int64 [B, T], from 0 in every document
    document: Tensor  # int64 [B, T], index of the example that was packed, -1 where padded
    supervised: Tensor  # bool [B, T]
    members: tuple[int, ...] = ()  # what the loader calls these examples: document d is its example members[d]

    def to(self, device: torch.device | str) -> Batch:
        parts = (self.ids, self.positions, self.document, self.supervised)
        ids, positions, document, supervised = (part.to(device, non_blocking=True) for part in parts)
        return Batch(ids, positions, document, supervised, self.members)

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.document >= 0).sum())


def pack(examples: Sequence[Example], width: int = 0) -> Batch:
    """First fit, longest first, into rows of `width` tokens (or of the longest example, if that is longer).

    T is the fullest row, rounded up to a multiple of 64; no example gives one row of padding, so that a rank without
    work still takes part in the step.
    """
    width = max([width, *map(len, examples)])
    rows: list[list[int]] = []
    filled: list[int] = []
    for i in sorted(range(len(examples)), key=lambda i: -len(examples[i])):
        size = len(examples[i])
        row = next((r for r, used in enumerate(filled) if used + size <= width), len(rows))
        if row == len(rows):
            rows.append([])
            filled.append(0)
        rows[row].append(i)
        filled[row] += size
    shape = (max(len(rows), 1), _rounded(max(filled, default=1)))
    ids = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    document = torch.full(shape, -1)
    supervised = torch.zeros(shape, dtype=torch.bool)
    for r, members in enumerate(rows):
        start = 0
        for i in members:
            here = slice(start, start := start + len(examples[i]))
            ids[r, here] = examples[i].ids
            positions[r, here] = torch.arange(len(examples[i]))
            document[r, here] = i
            supervised[r, here] = examples[i].supervised
    return Batch(ids, positions, document, supervised)


@dataclass(frozen=True)
class Loader:
    """Every example once per epoch, in optimiser steps of at most `batch_tokens` tokens over all ranks together.

    Which examples make a step depends on (seed, batch_tokens) alone, never on how many processes or micro-batches share
    it; a longer example is a step of its own. Every rank gets equally many steps and micro-batches. What is packed
    together stays together, and with its rank, in all epochs; each has an order of steps of its own. So what the target
    says of a micro-batch is, to the bit, the same whenever it is asked, and may be remembered.
    """

    examples: Sequence[Example]
    batch_tokens: int
    accumulate: int = 1
    world: int = 1
    rank: int = 0
    seed: int = 0

    def steps(self) -> int:
        """Optimiser steps in an epoch; the same on every rank."""
        return len(self._groups)

    def steps_of(self, tokens: int) -> int:
        """Optimiser steps, over as many epochs as it takes, that read `tokens` tokens or the first few more."""
        taken = epoch = 0
        while True:
            for group in self._order(epoch):
                taken += 1
                tokens -= sum(self._sizes[i] for i in group)
                if tokens <= 0:
                    return taken
            epoch += 1

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """Per optimiser step from `start` on: this rank's `accumulate` micro-batches, balanced by tokens."""
        for group in self._order(epoch)[start:]:
            yield [self.packed(part) for part in self._parts(group)[self.rank :: self.world]]

    def parts(self) -> Iterator[list[int]]:
        """The examples of every micro-batch of this rank, where it has any."""
        for group in self._groups:
            yield from filter(None, self._parts(group)[self.rank :: self.world])

    @property
    def packing(self) -> dict[str, int]:
        """All that says which examples are packed together."""
        return {"batch_tokens": self.batch_tokens, "parts": self.world * self.accumulate, "seed": self.seed}

    @cached_property
    def _sizes(self) -> list[int]:
        return lengths(self.examples)

    def _parts(self, group: list[int]) -> list[list[int]]:
        """A step's examples divided over the micro-batches of all ranks, balanced by tokens."""
        parts: list[list[int]] = [[] for _ in range(self.world * self.accumulate)]
        load = [0] * len(parts)
        for i in sorted(group, key=lambda i: -self._sizes[i]):
            lightest = load.index(min(load))
            parts[lightest].append(i)
            load[lightest] += self._sizes[i]
        return parts

    def _order(self, epoch: int) -> list[list[int]]:
        """The steps of an epoch; those of the first stand in shuffled order as they are."""
        order = list(self._groups)
        if epoch:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    @cached_property
    def _groups(self) -> list[list[int]]:
        """First fit, in shuffled order: each example goes into the first of the open steps that has room for it.

        The oldest open step is closed when there are more than OPEN: what a step holds comes from one stretch of the
        order, and the time this takes does not grow faster than the data.
        """
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}/0").shuffle(order)
        groups: list[list[int]] = []
        room: list[int] = []
        for i in order:
            size = self._sizes[i]
            first = max(0, len(groups) - OPEN)
            step = next((g for g in range(first, len(groups)) if size <= room[g]), len(groups))
            if step == len(groups):
                groups.append([])
                room.append(self.batch_tokens)
            groups[step].append(i)
            room[step] -= size
        return groups

    def packed(self, part: Sequence[int]) -> Batch:
        """These examples as one micro-batch."""
        examples = [self.examples[i] for i in part]
        width = min(WIDE, sum(map(len, examples)))  # one row for all; `pack` widens it for a longer example
        return replace(pack(examples, width), members=tuple(part))


def _rounded(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE
