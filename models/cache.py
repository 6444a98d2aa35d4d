"""The one KV cache: a preallocated buffer per layer, a committed length per row, draft nodes in the slack behind.

Knows where rows lie. Does not know tokens, trees or which row the target accepted: `Target.forward` says where a
pass writes, and `keep` is told which of the rows just written stay.

    slot      0 ........ length-1 | length ... length+N-1
    holds     committed, slot=position | the N nodes of the last pass, in node order

Drafters that attend keep their keys in one too, and write a tree level by level: each `behind` those before it.
"""

import torch
from torch import Tensor
from transformers import Cache as TransformersCache

from paceline.models.errors import Refusal
from paceline.models.kernels import kernels

# Rows of a text that are read in one pass, of the target or of a drafter: a mask of who sees whom is never larger than
# this by the text's length, where that of a whole text grows with its square. So many rows keep a processor's products
# as busy as more would, and prompts of usual length are one pass.
SLICE = 1024
BLOCK = 32  # slots that passes.cpp reads at a time


class Cache(TransformersCache):
    """Keys and values of B rows, seen by transformers as one of its own caches.

    Legend: B rows, N nodes of one pass, S `capacity` slots, J rows kept.
    `length` [B] counts the committed slots of each row. The first pass makes the buffers, [B, heads, S, dim] a layer.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu"):
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: tuple[Tensor, ...] = ()
        self._tiled = False
        self._reach, self._placed = 0, (0, 0)

    def place(self, nodes: int, behind: int = 0) -> None:
        """Reserve `slots` for the next pass, row b's nodes right behind its committed ones.

        Args:
            behind: slots left between, for passes before this one that were not committed either.

        Raises:
            Refusal: the pass does not fit the capacity (both numbers named).
        """
        longest = int(self.length.max()) + behind
        if longest + nodes > self.capacity:
            raise Refusal(f"the cache holds {self.capacity} tokens, {longest} + {nodes} were asked for")
        self._reach, self._placed = longest + nodes, (nodes, behind)

    @property
    def slots(self) -> Tensor:
        """[B, N] of the pass being run."""
        nodes, behind = self._placed
        return self.length[:, None] + torch.arange(behind, behind + nodes, device=self.length.device)

    def visible(self, related: Tensor) -> Tensor:
        """Who the pass being run may look at: [B, N, reach] bool, every committed slot of its row, and of the slack
        what `related` [B, N, M] says (M slots from the row's length on)."""
        slack = torch.arange(related.shape[2], device=related.device) + self.length[:, None]
        known = torch.arange(self._reach, device=related.device) < self.length[:, None]
        known = known[:, None].expand(-1, related.shape[1], -1)
        return known.scatter(2, slack[:, None].expand(-1, related.shape[1], -1), related)

    def stacked(
        self, layers: int, heads: int, size: int, dtype: torch.dtype, tiled: bool = False
    ) -> tuple[Tensor, ...]:
        """The buffers of all layers as one each: keys [layers, B, heads, dim, slots], a number of all side by side,
        and values [layers, B, heads, slots, dim]; with `tiled` it is the values that lie so. slots: S, rounded up.
        Made by the first pass; none where that wrote by `update`, or as the other kind of pass wants them."""
        if not self.keys:
            self._tiled = tiled
            shape, device = (layers, len(self.length), heads), self.length.device
            slots = -(-self.capacity // BLOCK) * BLOCK
            across, along = (
                torch.zeros(*shape, *last, dtype=dtype, device=device) for last in ((size, slots), (slots, size))
            )
            self._stack(across, along)
        if tiled != self._tiled:
            return ()
        return self._stacks[::-1] if tiled else self._stacks

    def _stack(self, across: Tensor, along: Tensor) -> None:
        """Buffers [layers, B, heads, dim, slots] and [layers, B, heads, slots, dim]."""
        self._stacks = across, along
        pair = list(across.transpose(-1, -2)), list(along)
        self.keys, self.values = pair[::-1] if self._tiled else pair

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """transformers' door: write [B, heads, N, dim] at the placed slots, return what the pass may look at."""
        while len(self.keys) <= layer_idx:  # layers come in order; a slot never written must still be finite
            for buffers, new in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(new.new_zeros(*new.shape[:2], self.capacity, new.shape[-1]))
        out = []
        for buffer, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if len(self.length) == 1:
                start = self._reach - new.shape[2]
                buffer[:, :, start : self._reach] = new
            else:
                rows = torch.arange(len(buffer), device=buffer.device)[:, None]
                buffer[rows, :, self.slots] = new.transpose(1, 2)  # [B, N, heads, dim]
            out.append(buffer[:, :, : self._reach])
        return out[0], out[1]

    def keep(self, nodes: Tensor, count: Tensor) -> None:
        """Commit nodes of the last pass and forget its others.

        Args:
            nodes: [B, J] node indices of the last pass, in the order in which they are committed; ascending in a row.
            count: [B] how many of the J are meant in each row (the rest is padding).
        """
        if nodes.shape[1]:
            self._move(nodes, count)
        self.length = self.length + count

    def _move(self, nodes: Tensor, count: Tensor) -> None:
        # node indices ascend, so nodes[j] >= j: a row never overwrites one that is still to be moved
        functions = kernels() if self._stacks and self._stacks[0].device.type == "cpu" else None
        if functions is not None and self._stacks[0].dtype == torch.bfloat16:
            at = *self._stacks, nodes.contiguous(), self.length.contiguous(), count.contiguous()
            layers, batch, heads, slots, size = self._stacks[1].shape
            functions.move(*(part.data_ptr() for part in at), layers, batch, heads, size, nodes.shape[1], slots)
            return
        there = torch.arange(nodes.shape[1], device=nodes.device)
        if not bool(((nodes != there) & (there < count[:, None])).any()):
            return
        source = self.length[:, None] + torch.where(there < count[:, None], nodes, there)
        rows, target = torch.arange(len(nodes), device=nodes.device)[:, None], self.length[:, None] + there
        stacks = (self._stacks[0].transpose(-1, -2), self._stacks[1]) if self._stacks else ()
        for stack in stacks:
            stack[:, rows, :, target] = stack[:, rows, :, source]
        for buffer in () if stacks else (*self.keys, *self.values):
            buffer[rows, :, target] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch ([R] indices): finished rows leave."""
        self.length = self.length[rows]
        if self._stacks:
            self._stack(*(stack[:, rows] for stack in self._stacks))
            return
        self.keys = [buffer[rows] for buffer in self.keys]
        self.values = [buffer[rows] for buffer in self.values]

    def put(self, place: int, other: "Cache") -> None:
        """Have `place` hold what the only row of another cache holds, of the same layers: a text takes another's place.

        Raises:
            Refusal: it holds more than there is room for (both numbers named).
        """
        if not self.keys and other.keys:
            if other._stacks:
                layers, _, heads, _, size = other._stacks[1].shape
                self.stacked(layers, heads, size, other._stacks[0].dtype, other._tiled)
            else:
                wide = len(self.length), self.capacity
                self.keys, self.values = (
                    [old.new_zeros(wide[0], old.shape[1], wide[1], old.shape[3]) for old in part]
                    for part in (other.keys, other.values)
                )
        known = int(other.length[0])
        if known > self.capacity:
            raise Refusal(f"the cache holds {self.capacity} tokens, {known} were asked for")
        self.length[place] = known
        alike = bool(self._stacks and other._stacks) and self._tiled == other._tiled
        if alike and known:
            for (mine, theirs), along in zip(zip(self._stacks, other._stacks, strict=True), (-1, -2), strict=True):
                mine[:, place].narrow(along, 0, known).copy_(theirs[:, 0].narrow(along, 0, known))
        elif known:
            for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
                mine[place, :, :known] = theirs[0, :, :known]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.length.max())

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_max_length(self) -> int:
        return self.capacity
