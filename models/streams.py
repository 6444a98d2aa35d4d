"""Who sees whom: the keys of drafters that attend, kept for them by whoever calls `step`.

Every attention layer of a drafter writes into a stream. In it, a row at depth k of the chain that begins at t sees the
rows that need only verified text (those written at the stream's first depth, up to t) and its own chain's, itself
included. `ChainKeys` is that over all positions of a text at once, in training; `TreeKeys` over the nodes of a tree
that grows behind the verified text. Neither knows tokens, weights or rotary angles.

    Legend: B rows of the batch, N rows of this call, T sequence, Q query heads, S key heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.models.cache import Cache
from paceline.models.chains import quick, seen_along_chains
from paceline.models.drafter import Context
from paceline.models.kernels import Library


class Keys(Protocol):
    """What `Context.memory` is to a drafter that attends."""

    def attend(self, ctx: Context, depth: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the keys and values [B, S, N, D] of a `step`; returns what its queries [B, Q, N, D] see, [B, Q, N, D].

        layer: number of the attention layer within the module that writes into this stream.
        """


class ChainKeys:
    """Training: position t of every document is a chain of its own, and all chains take their steps together.

    stream: depth -> stream, the drafter's. Costs one causal attention, and one score a row for each depth before.
    reads_tokens: the drafter's; rows of one that reads none are verified text at every depth.

    Rows that are some of a batch (`Context.places`) stand in one line, [1, heads, N, D]. Kernels take them as they are;
    torch's operators, by which this is known to be right, where their texts lie in the batch.
    """

    def __init__(self, document: Tensor, stream: Callable[[int], int], reads_tokens: bool = True):
        self._document, self._stream, self._reads_tokens = document, stream, reads_tokens
        self._begun: dict[tuple[int, int], int] = {}  # (stream, layer) -> its first depth
        self._written: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._places: dict[tuple[int, int], list[Tensor]] = {}  # of what was written, where not everywhere

    def attend(self, ctx: Context, depth: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        where, places = (self._stream(depth), layer), ctx.places
        first = self._begun.setdefault(where, depth)
        written = self._written.setdefault(where, [])
        functions = None if places is None else quick(values)
        if places is not None and functions is None:
            queries, keys, values = (self._laid_out(part, places) for part in (queries, keys, values))
        written.append((keys, values))
        if functions is not None and places is not None:
            return self._in_line(functions, where, places, queries)
        seen = self._everywhere(first, queries, written)
        return seen if places is None else seen.transpose(0, 1).flatten(1, 2)[:, places][None]

    def _in_line(self, functions: Library, where: tuple[int, int], places: Tensor, queries: Tensor) -> Tensor:
        """What the rows [1, Q, R, D] at some places of the flattened batch see, by kernels.cpp."""
        at, written = self._places.setdefault(where, []), self._written[where]
        at.append(places)
        own = [
            part if there is places else part[:, :, torch.searchsorted(there, places)]
            for there, pair in zip(at[1:], written[1:], strict=True)
            for part in pair
        ]
        lag = self._begun[where] if self._reads_tokens else 0
        return seen_along_chains(functions, self._document, at[0], places, lag, queries, *written[0], own)

    def _laid_out(self, part: Tensor, places: Tensor) -> Tensor:
        """[1, S, N, D] -> [B, S, T, D], nothing where no row stands."""
        whole = part.new_zeros(part.shape[1], self._document.numel(), part.shape[3]).index_copy(1, places, part[0])
        return whole.unflatten(1, self._document.shape).transpose(0, 1)

    def _everywhere(self, first: int, queries: Tensor, written: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What queries [B, Q, T, D] at all places see."""
        length, parts = queries.shape[2], tuple(part for pair in written for part in pair)
        if len(written) == 1 and length <= LONG:
            keys, values = parts
            visible = self._visible(first)[:, None]
            return F.scaled_dot_product_attention(queries, keys, values, visible, enable_gqa=True)
        # a few rows at a time, whose scores are computed again in the backward pass: memory grows with the length, not
        # its square. A compiled unroll spares what it need not keep by itself, and is to be one graph for all widths.
        rows = LONG if torch.compiler.is_compiling() and length <= LONG else ROWS
        if length <= rows:
            return self._rows(queries, first, 0, *parts)
        blocks = [
            checkpoint(self._rows, block, first, index * rows, *parts, use_reentrant=False)
            for index, block in enumerate(queries.split(rows, 2))
        ]
        return torch.cat(blocks, 2)

    def _rows(self, queries: Tensor, first: int, start: int, *written: Tensor) -> Tensor:
        """What the rows from `start` on see. written: keys and values of all rows, depth by depth."""
        stop = start + queries.shape[2]
        keys, values = (part[:, :, :stop] for part in written[:2])
        chain = [part[:, :, start:stop] for part in written[2:]]
        return _with_own_chain(queries, keys, values, chain, self._visible(first, start, stop))

    def open(self, ctx: Context, rows: int) -> tuple[None, Tensor]:
        """As `TreeKeys.open`: nothing is kept, and the rows of depth 0 see their document up to themselves."""
        return None, self._visible(0)

    def _visible(self, first: int, start: int = 0, stop: int | None = None) -> Tensor:
        """[B, N, stop] bool, for the N rows from `start` on: which of those written at the stream's first depth the
        query at t may look at.

        Such a row needs the text up to `first` tokens further: the query has that up to t - first. Its own it sees too.
        """
        place = torch.arange(self._document.shape[1], device=self._document.device)[:stop]
        back = place[start:, None] - place
        same = self._document[:, start:stop, None] == self._document[:, None, :stop]
        return same & ((back >= (first if self._reads_tokens else 0)) | (back == 0))


ROWS, LONG = 128, 1024  # rows of a text that look at a time; up to so many, the first depth's all do


def _with_own_chain(queries: Tensor, keys: Tensor, values: Tensor, chain: Sequence[Tensor], visible: Tensor) -> Tensor:
    """One softmax over the rows of the first depth that are `visible` [B, N, M] to the N queries, and each row's own at
    every later depth.

    keys, values: [B, S, M, D] of the first depth. chain: keys and values [B, S, N, D], depth by depth.
    """
    rows, heads, length, size = queries.shape
    q = queries.reshape(rows, keys.shape[1], -1, length, size) * size**-0.5  # [B, S, Q / S, N, D]
    scores = (q @ keys[:, :, None].transpose(-1, -2)).float()
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    own = [(q * k[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for k in chain[::2]]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(values.dtype)
    out = weights[..., : keys.shape[2]] @ values[:, :, None]
    for place, v in enumerate(chain[1::2], start=keys.shape[2]):
        out = out + weights[..., place : place + 1] * v[:, :, None]
    return out.reshape(rows, heads, length, -1)


@lru_cache(maxsize=16)
def _before(rows: int, device: torch.device) -> Tensor:
    """[N, N] bool, (i, j) true where j is i or before it. Asked for every round, as the next."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


@lru_cache(maxsize=16)
def _alone(rows: int, device: torch.device) -> Tensor:
    return torch.eye(rows, dtype=torch.bool, device=device)


class TreeKeys:
    """Decoding: the verified rows of B texts, and behind them the nodes that this round has unfolded.

    A call without parents brings newly verified rows: they stay, and the nodes drafted before are forgotten.
    room: slots of the longest row, verified and drafted. One stream; lag: the depth at which it begins, if tokens are
    read: what a verified row sees is what it saw as a draft, itself and those at least so many places before.
    """

    def __init__(self, rows: int, room: int, lag: int = 0):
        self._rows, self.room, self.lag = rows, room, lag
        self._cache: Cache | None = None
        self._fresh: Tensor | None = None  # [B] verified rows that every layer has not written yet
        self._lineage: Tensor | None = (
            None  # [B, n, m] bool: of the m nodes drafted, who each of the last n descends from
        )
        self._visible = torch.empty(0)

    def attend(self, ctx: Context, depth: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer == 0:
            self.open(ctx, keys.shape[2])
        assert self._cache is not None
        seen = self._cache.update(keys, values, layer)
        return F.scaled_dot_product_attention(queries, *seen, self._visible[:, None], enable_gqa=True)

    def stacked(self, device: torch.device, heads: int, size: int, tiled: bool) -> tuple[Tensor, ...]:
        """The buffers of the one layer there is, for a module that attends by kernels.cpp (by passes.cpp, if `tiled`);
        none where it cannot."""
        return () if self.lag > 1 else self._begun(device).stacked(1, heads, size, torch.bfloat16, tiled)

    def _begun(self, device: torch.device) -> Cache:
        if self._cache is None:
            self._cache = Cache(self._rows, self.room, device)
        return self._cache

    def open(self, ctx: Context, rows: int) -> tuple[Cache, Tensor]:
        """Reserve slots for a call of so many rows, which `attend` does itself, and settle what they may look at.

        Returns, for a module that attends by itself, the cache it has to write into, layer by layer, and [B, N, reach]
        bool, which of the slots that the cache then shows are visible to each row.
        """
        cache, related = self.reserve(ctx, rows)
        visible = cache.visible(related)
        if ctx.parents is None and self.lag > 1:
            place = torch.arange(visible.shape[2], device=visible.device)
            back = cache.length[:, None, None] + place[:rows, None] - place
            visible = visible & ((back >= self.lag) | (back == 0))
        self._visible = visible
        return cache, visible

    def reserve(self, ctx: Context, rows: int) -> tuple[Cache, Tensor]:
        """As `open`, but of the M slots behind the committed ones only: [B, N, M] bool."""
        cache, count, parents = self._begun(ctx.count.device), ctx.count, ctx.parents
        self._commit(cache)
        if parents is None:
            self._lineage, self._fresh = None, count
            cache.place(rows)
            related = _before(rows, count.device).expand(len(count), -1, -1)
        else:
            related = _alone(rows, count.device).expand(len(count), -1, -1)
            above = 0 if self._lineage is None else self._lineage.shape[2]  # children of the root: that is verified
            if self._lineage is not None:
                lineage = self._lineage.gather(1, parents[..., None].expand(-1, -1, above))
                related = torch.cat([lineage, related], 2)
            cache.place(rows, behind=above)
            self._lineage = related
        return cache, related

    def _commit(self, cache: Cache) -> None:
        if self._fresh is not None:
            cache.keep(self._fresh.new_empty(len(self._fresh), 0), self._fresh)
            self._fresh = None

    def select(self, rows: list[int]) -> "TreeKeys":
        """Finished rows leave the batch: only these stay."""
        if self._cache is not None:
            self._commit(self._cache)
            self._cache.select(torch.tensor(rows, device=self._cache.length.device))
        self._rows, self._lineage = len(rows), None
        return self

    def put(self, place: int, other: "TreeKeys") -> None:
        """The only row of another takes this place."""
        if other._cache is not None:
            other._commit(other._cache)
            mine = self._begun(other._cache.length.device)
            self._commit(mine)
            mine.put(place, other._cache)
        elif self._cache is not None:
            self._commit(self._cache)
            self._cache.length[place] = 0
        self._lineage = None


class StreamKeys:
    """Decoding with several streams: `TreeKeys` for each. Streams begin one after the other, each at its first depth.

    A row that reads tokens becomes verified later the deeper it is: the last row of every depth waits, as the feature'
    that it hands on, for the token that the depth below reads beside it. stream, reads_tokens: the drafter's.
    """

    def __init__(self, rows: int, room: int, stream: Callable[[int], int], reads_tokens: bool = True):
        self._rows, self._room, self._stream, self._reads_tokens = rows, room, stream, reads_tokens
        self._keys: dict[int, TreeKeys] = {}
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # depth -> feature' [B, 1, F], whether there is one [B]

    def attend(self, ctx: Context, depth: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.of(depth).attend(ctx, depth, layer, queries, keys, values)

    def of(self, depth: int) -> TreeKeys:
        """What the rows of a depth write into."""
        stream = self._stream(depth)
        if stream not in self._keys:
            self._keys[stream] = TreeKeys(self._rows, self._room, depth if self._reads_tokens else 0)
        return self._keys[stream]

    def next_depth(self, depth: int, feature: Tensor, tokens: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Context]:
        """Of verified rows one depth above, with the feature' [B, J, F] they hand on: those that `depth` can now read.

            depth 0   feature f1 f2 f3   tokens x2 x3 x4   positions 1 2 3
            depth 1   feature f0 f1 f2   tokens x2 x3 x4   positions 1 2 3     f0 waited, f3 waits for x5

        Where nothing waited, before the first such row, they begin with f1, x3 and position 2.
        """
        nobody = feature.new_zeros(feature[:, :1].shape), torch.zeros_like(ctx.count, dtype=torch.bool)
        waiting, there = self._waiting.get(depth, nobody)
        line = torch.cat([waiting, feature], 1)
        rows, places = torch.arange(len(line), device=line.device), torch.arange(feature.shape[1], device=line.device)
        self._waiting[depth] = line[rows, ctx.count][:, None], there | (ctx.count > 0)
        skipped = (~there).long()
        place = places + skipped[:, None]
        feature = line.gather(1, place[..., None].expand(-1, -1, line.shape[-1]))
        place = place.clamp(max=feature.shape[1] - 1)
        count = (ctx.count - skipped).clamp(min=0)
        return feature, tokens.gather(1, place), Context(ctx.positions.gather(1, place), count, self)

    def select(self, rows: list[int]) -> "StreamKeys":
        """Finished rows leave the batch: only these stay."""
        self._rows = len(rows)
        self._keys = {stream: keys.select(rows) for stream, keys in self._keys.items()}
        self._waiting = {depth: (feature[rows], there[rows]) for depth, (feature, there) in self._waiting.items()}
        return self

    def put(self, place: int, other: "StreamKeys") -> None:
        """The only row of another takes this place."""
        for stream in self._keys.keys() | other._keys.keys():
            lag = (self._keys.get(stream) or other._keys[stream]).lag
            mine = self._keys.setdefault(stream, TreeKeys(self._rows, self._room, lag))
            mine.put(place, other._keys.get(stream) or TreeKeys(1, 0, lag))
        for depth in self._waiting.keys() | other._waiting.keys():
            feature, there = self._waiting.get(depth) or other._waiting[depth]
            many = self._rows, *feature.shape[1:]
            nobody = feature.new_zeros(many), there.new_zeros(self._rows)
            waiting = self._waiting.setdefault(depth, nobody)
            theirs = other._waiting.get(depth) or (feature.new_zeros(1, *many[1:]), there.new_zeros(1))
            for part, new in zip(waiting, theirs, strict=True):
                part[place] = new[0]
