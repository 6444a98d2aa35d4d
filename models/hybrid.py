"""Lookup and a trained drafter as one: where the text repeats itself, what followed before is drafted first.

The drafter's distribution is mixed with the copied token, which gets what such copies have been worth by the length of
the repeated ending. So a long repetition is copied, as deep as the tree goes and beyond the drafter's own heads, and
elsewhere the drafter drafts as it does alone. Knows any drafter whose depths share one key stream.

    Legend: B rows, N nodes of this call, F width the drafter carries, H hidden, D its vocabulary, V the target's.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.models.drafter import Context, Drafter, Levels, Limits, check_mass, target_ids
from paceline.models.errors import Refusal
from paceline.models.kernels import topmost
from paceline.models.ngram import Ngram, NgramOptions, Texts

# Share of copies that came true, by the length of the ending that had occurred before (the last: that or longer):
# counted over 150 of the bundled conversations.
TRUST = (0.0, 0.18, 0.45, 0.5, 0.64, 0.65, 0.88)
NONE = (-1, -1, 0, -1)


class Memory:
    """What both keep of each row: the verified text, and the drafter's own memory."""

    def __init__(self, texts: Texts, own: Any):
        self.texts, self.own = texts, own

    def select(self, rows: list[int]) -> "Memory":
        return Memory(self.texts.select(rows), None if self.own is None else self.own.select(rows))

    def put(self, place: int, other: "Memory") -> None:
        self.texts.put(place, other.texts)
        if self.own is not None:
            self.own.put(place, other.own)


class Hybrid(Drafter):
    """A drafter, wrapped. shortest: endings of at least so many tokens are looked for.

    feature' is the drafter's, with (place of the copied token in the row's text, where the copied stretch began, length
    of the match, the copied token) behind, all -1 and 0 where nothing is copied; the state has the last two behind.
    """

    first_row = -1

    def __init__(self, drafter: Drafter, shortest: int):
        super().__init__(drafter.options, drafter.shape)
        if drafter.stream(1) != drafter.stream(0):
            raise Refusal(f"lookup: not for {drafter.options.name}, which keeps keys for each depth; nearest: 0")
        self.drafter, self.window = drafter, drafter.window
        longest = max(len(TRUST) - 1, shortest)
        self.lookup = Ngram(NgramOptions(name="ngram", longest=longest, shortest=shortest), self.shape)

    @property
    def unroll(self) -> int:
        return self.drafter.unroll

    def memory(self, rows: int, room: int) -> Memory:
        return Memory(self.lookup.memory(rows, room), self.drafter.memory(rows, room))

    def read(self, hidden: Tensor) -> Tensor:
        own = self.drafter.read(hidden).float()
        return torch.cat([own, own.new_tensor(NONE).expand(*own.shape[:-1], -1)], -1)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        own, copied = feature[..., : -len(NONE)], self._copied(feature[..., -len(NONE) :].tolist(), tokens, depth, ctx)
        behind = torch.tensor(copied, dtype=torch.float32, device=feature.device)
        own, state = self._drafted(own, tokens, depth, ctx)
        return torch.cat([own.float(), behind], -1), torch.cat([state.float(), behind[..., 2:]], -1)

    def unfold(
        self, feature: Tensor, tokens: Tensor, ctx: Context, levels: Levels, known: int | None
    ) -> tuple[Tensor, Tensor] | None:
        alone = self._alone(feature, tokens, levels.depth, ctx)
        return None if alone is None else self.drafter.unfold(*alone, levels, self._known(known))

    def unfold_dynamic(
        self, feature: Tensor, tokens: Tensor, ctx: Context, limits: Limits, known: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        alone = self._alone(feature, tokens, limits.depth, ctx)
        return None if alone is None else self.drafter.unfold_dynamic(*alone, limits, self._known(known))

    def _alone(
        self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context
    ) -> tuple[Tensor, Tensor, Context] | None:
        """What the drafter reads where nothing is copied and the tree is its own; None: something is, or it has too few
        heads.
        """
        self._note(tokens, ctx)
        if not self._drafts(depth - 1) or any(self.lookup.last_match(text)[0] >= 0 for text in ctx.memory.texts):
            return None
        own = feature[..., : -len(NONE)].to(self.drafter.dtype)
        ahead = max(0, self.drafter.first_row - int(ctx.positions[0, 0]))
        if tokens.shape[1] <= ahead:
            return None
        at = Context(ctx.positions[:, ahead:], ctx.count - ahead, ctx.memory.own)
        return own[:, ahead:].contiguous(), tokens[:, ahead:], at

    def head(self, state: Tensor, depth: int) -> Tensor:
        """[..., V], of which only what the drafter can say and what is copied is possible."""
        own, (length, copied) = state[..., :-2], state[..., -2:].long().unbind(-1)
        logits = state.new_full((*state.shape[:-1], self.shape.vocab), -torch.inf)
        trust = torch.tensor(TRUST, device=state.device)[length.clamp(max=len(TRUST) - 1)]
        if self._drafts(depth):
            said = self.drafter.head(own.to(self.drafter.dtype), depth).float()
            ids = target_ids(self.drafter, torch.arange(said.shape[-1], device=said.device))
            logits[..., ids] = said.log_softmax(-1) + (1 - trust).log()[..., None]
        place = copied.clamp(min=0)[..., None]
        both = torch.logaddexp(logits.gather(-1, place), trust.log()[..., None])
        return logits.scatter(-1, place, both)

    def likeliest(self, state: Tensor, depth: int, many: int, known: int | None = None) -> tuple[Tensor, Tensor]:
        """The same of `head`'s distribution, without spreading it over the target's whole vocabulary."""
        own, (length, copied) = state[..., :-2].to(self.drafter.dtype), state[..., -2:].long().unbind(-1)
        place = copied.clamp(min=0)[..., None]
        trust = torch.tensor(TRUST, device=state.device)[length.clamp(max=len(TRUST) - 1)][..., None]
        if not self._drafts(depth):
            return trust.log(), place
        ids = self.drafter.vocab_map
        known = self._known(known)
        if not bool(trust.any()):
            return self.drafter.likeliest(own, depth, many, known)
        logits = self.drafter.head(own, depth)
        mass, top, drafted = topmost(logits, many, known)
        check_mass(self.drafter, mass)
        drafted = target_ids(self.drafter, drafted)
        at = place if ids is None else torch.searchsorted(ids[:known], place)
        at = at.clamp(max=(logits.shape[-1] if known is None else known) - 1)
        share = torch.where(target_ids(self.drafter, at) == place, logits.gather(-1, at).float(), -torch.inf)
        alone = (1 - trust).log() - mass
        both = torch.cat(
            [
                (top + alone).masked_fill((drafted == place) & (trust > 0), -torch.inf),
                torch.logaddexp(share + alone, trust.log()).masked_fill(trust == 0, -torch.inf),
            ],
            -1,
        )
        logp, order = both.topk(top.shape[-1], dim=-1)
        return logp, torch.cat([drafted, place], -1).gather(-1, order)

    def _known(self, known: int | None) -> int | None:
        """Of the drafter's ids, those below `known` of the target's."""
        return None if known is None else self.drafter.ids_below(known)

    def _drafts(self, depth: int) -> bool:
        return self.drafter.max_depth is None or depth < self.drafter.max_depth

    def _drafted(self, own: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """The drafter's own step; beyond its last head there is none."""
        if not self._drafts(depth):
            return own, own.new_zeros(*own.shape[:-1], 1)
        own = own.to(self.drafter.dtype)
        ctx = Context(ctx.positions, ctx.count, ctx.memory.own, ctx.parents)
        ahead = int(self.drafter.first_row - int(ctx.positions[0, 0])) if depth == 0 else 0
        if ahead > 0:  # row -1, which only the lookup reads; where it is all there is, it stands for none
            rows = slice(ahead if tokens.shape[1] > ahead else 0, None)
            ctx = Context(ctx.positions[:, rows], ctx.count - ahead, ctx.memory)
            onward, state = self.drafter.step(own[:, rows].contiguous(), tokens[:, rows], depth, ctx)
            return tuple(torch.cat([part[:, :1], part], 1)[:, -tokens.shape[1] :] for part in (onward, state))  # type: ignore[return-value]
        return self.drafter.step(own, tokens, depth, ctx)

    def _note(self, tokens: Tensor, ctx: Context) -> None:
        """Newly verified text, unless it was noted."""
        ends = (ctx.positions[:, 0] + ctx.count + 1).tolist()
        for text, words, count, end in zip(ctx.memory.texts, tokens.tolist(), ctx.count.tolist(), ends, strict=True):
            text.extend(words[len(text) - end + count : count])

    def _copied(self, before: list, tokens: Tensor, depth: int, ctx: Context) -> list:
        """[B][N] of what the feature has behind: where the node itself goes on copying."""
        out = []
        if depth == 0:
            self._note(tokens, ctx)
        for text, nodes, words in zip(ctx.memory.texts, before, tokens.tolist(), strict=True):
            if depth == 0:  # newly verified text: the last of the rows matters
                at, length = self.lookup.last_match(text)
                out.append([(at, at, length, text[at]) if at >= 0 else NONE] * len(words))
                continue
            found = []
            for (at, start, length, copy), word in zip(nodes, words, strict=True):
                if word != copy:
                    found.append(NONE)
                    continue
                onward = int(at) + 1 if at + 1 < len(text) else int(start)  # past the end, the stretch repeats
                found.append((onward, int(start), int(length) + 1, text[onward]))
            out.append(found)
        return out
