"""Prompt lookup: drafts what followed the last occurrence of the text's own ending. Nothing is trained (Saxena 2023).

The training-free reference every trained drafter should beat. What it remembers of each row is the row's verified text.
"""

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


class Texts(list[list[int]]):
    """The verified tokens of each row."""

    def select(self, rows: list[int]) -> "Texts":
        return Texts(self[row] for row in rows)


@method("ngram")
class Ngram(Drafter):
    """The carried feature is where in the row's own text to read on; the state is the token there, or -1."""

    Options = NgramOptions
    first_row = -1

    def __init__(self, options: NgramOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.taps = ()

    def memory(self, rows: int, room: int) -> "Texts":
        return Texts([] for _ in range(rows))

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

    def last_match(self, text: list[int]) -> tuple[int, int]:
        """Where the text went on after the longest, and of these the latest, earlier occurrence of its own ending, and
        that ending's length; (-1, 0) where none is as long as `shortest`."""
        best = -1, 0
        for after in range(len(text) - 1, 0, -1):
            length = 0
            while length < min(after, self.options.longest) and text[after - 1 - length] == text[-1 - length]:
                length += 1
            if length > best[1]:
                best = after, length
                if length == self.options.longest:
                    break
        return best if best[1] >= self.options.shortest else (-1, 0)
