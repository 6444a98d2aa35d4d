"""Prompt lookup: drafts what followed the last occurrence of the text's own ending. Nothing is trained (Saxena 2023).

The training-free reference every trained drafter should beat. What it remembers of each row is the row's verified text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.models.drafter import Context, Drafter, Options, Shape, method
from paceline.models.errors import Refusal


class NgramOptions(Options):
    """longest, shortest: length of the ending that is looked for, the longest that occurs before wins."""

    longest: int = Field(default=3, ge=1)
    shortest: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> "NgramOptions":
        if self.shortest > self.longest:
            raise Refusal(
                f"ngram.shortest: {self.shortest} is more than ngram.longest={self.longest}; nearest: {self.longest}"
            )
        return self

    def trained(self) -> bool:
        return False


class Text(list[int]):
    """The verified tokens of a row, which only grow, and where each run of `size` of them occurred."""

    def __init__(self, size: int):
        super().__init__()
        self._size, self._seen = size, size - 1  # tokens behind whose first `_seen` all runs are noted
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def earlier(self) -> Sequence[int]:
        """Behind how many tokens the text's own ending occurred before, earliest first."""
        for after in range(self._seen + 1, len(self)):  # the ending itself is not earlier
            self._ends.setdefault(tuple(self[after - self._size : after]), []).append(after)
            self._seen = after
        return self._ends.get(tuple(self[-self._size :]), ())


class Texts(list[Any]):
    """The verified tokens of each row."""

    def select(self, rows: list[int]) -> "Texts":
        return Texts(self[row] for row in rows)

    def put(self, place: int, other: "Texts") -> None:
        self[place] = other[0]


@method("ngram")
class Ngram(Drafter):
    """The carried feature is where in the row's own text to read on; the state is the token there, or -1."""

    Options = NgramOptions
    first_row = -1

    def __init__(self, options: NgramOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.taps = ()

    def memory(self, rows: int, room: int) -> "Texts":
        return Texts(Text(self.options.shortest) for _ in range(rows))

    def read(self, hidden: Tensor) -> Tensor:
        return hidden.new_full((*hidden.shape[:-1], 2), -1, dtype=torch.long)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        found = feature.tolist()  # per node: where to read now, and where the copied stretch began
        if depth == 0:  # the rows are newly verified text
            for row, (words, count) in enumerate(zip(tokens.tolist(), ctx.count.tolist(), strict=True)):
                ctx.memory[row].extend(words[:count])
                found[row] = [[self.last_match(ctx.memory[row])[0]] * 2] * len(words)
        state = [[ctx.memory[row][at] if at >= 0 else -1 for at, _ in nodes] for row, nodes in enumerate(found)]
        # read past the end of the text, the copy goes on with what it has itself drafted: the stretch repeats
        onward = [
            [[at + 1 if 0 <= at < len(ctx.memory[row]) - 1 else start, start] for at, start in nodes]
            for row, nodes in enumerate(found)
        ]
        as_feature = torch.tensor(onward, device=feature.device)
        return as_feature, torch.tensor(state, device=feature.device)[..., None]

    def head(self, state: Tensor, depth: int) -> Tensor:
        known = state >= 0
        logits = torch.full((*state.shape[:-1], self.shape.vocab), -torch.inf, device=state.device)
        return logits.scatter_(-1, state.clamp(min=0), torch.where(known, 0.0, -torch.inf))

    def last_match(self, text: Text) -> tuple[int, int]:
        """Where the text went on after the longest, and of these the latest, earlier occurrence of its own ending, and
        that ending's length; (-1, 0) where none is as long as `shortest`."""
        best = -1, 0
        for after in reversed(text.earlier()):
            length = self.options.shortest
            while length < min(after, self.options.longest) and text[after - 1 - length] == text[-1 - length]:
                length += 1
            if length > best[1]:
                best = after, length
                if length == self.options.longest:
                    break
        return best
