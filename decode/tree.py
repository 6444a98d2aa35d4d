"""Draft trees and how they grow: chain, static tree, dynamic tree. A shape says which nodes get children.

Knows a drafter's read/step/head and a sampler only. Does not know the target, its cache or how a tree is verified.

    Legend: B rows, N tree nodes, n nodes of one level, F carried width, D draft vocabulary, M budget of nodes.
    Node 0 is the root: a token the target has already chosen. Draft depth of a node = its distance from the root.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from paceline.decode.sampler import Place, Sampler
from paceline.models.cache import SLICE
from paceline.models.drafter import Context, Drafter, check_depth, check_mass, target_ids
from paceline.models.errors import Refusal


@dataclass
class DraftTree:
    """Candidate continuations of B rows.

    tokens [B, N] target ids; parents [B, N], parents[i] < i, -1 for the root; size [B] real nodes, the root among them;
    logp [B, N] float32, log of the drafter's joint probability down to the node.
    q: None when candidates were chosen deterministically, else [B, N, V]: row i is the float32 distribution over target
    ids that node i's children were really drawn from, one after the other without replacement, in the order in which
    they stand. Of a node without children it may be all 0.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    logp: Tensor
    q: Tensor | None = None

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: (i, j) true where j is i or an ancestor of i."""
        nodes = self.tokens.shape[1]
        own = torch.eye(nodes, device=self.tokens.device)
        seen = own + own[self.parents.clamp(min=0)]  # every node and its parent; the root is its own
        for _ in range((nodes - 1).bit_length()):  # each product doubles the reach
            seen = (seen @ seen).clamp(max=1)
        return seen > 0

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] draft depth of each node, 0 for the root."""
        return self.ancestors.sum(-1) - 1

    @property
    def real(self) -> Tensor:
        """[B, N] bool: nodes that are not padding."""
        return torch.arange(self.tokens.shape[1], device=self.size.device) < self.size[:, None]

    @classmethod
    def root(cls, tokens: Tensor) -> "DraftTree":
        """[B] root tokens alone: plain decoding is a tree without drafts."""
        zero = torch.zeros(len(tokens), 1, dtype=torch.long, device=tokens.device)
        return cls(tokens[:, None], zero - 1, zero[:, 0] + 1, zero.float())


# ---------------------------------------------------------------- shapes


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree of ranks: the path (0, 2) is the third-likeliest child of the likeliest child of the root.

    paths: every prefix of a path is a path of the shape too. A chain is the paths (0,), (0, 0), ...
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        known = set(self.paths)
        for path in self.paths:
            if not path or (len(path) > 1 and path[:-1] not in known):
                raise ValueError(f"a static tree lacks the parent of its path {path}")

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def nodes(self) -> int:
        """Nodes of a pass, the root included."""
        return 1 + len(self.paths)

    @property
    def unfolded(self) -> int:
        """Nodes the drafter steps into: those that have children."""
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def levels(self) -> list[list[tuple[int, ...]]]:
        return [sorted(p for p in self.paths if len(p) == d) for d in range(1, self.depth + 1)]

    def numbered(self) -> "StaticShape":
        """The same tree, the children of each node numbered from 0 without gaps: the order they are drawn in."""
        new: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        born: dict[tuple[int, ...], int] = {}
        for path in (path for level in self.levels for path in level):
            parent = path[:-1]
            new[path] = (*new[parent], born.get(parent, 0))
            born[parent] = new[path][-1] + 1
        return StaticShape(tuple(new[path] for path in self.paths))


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2's tree: at each level the `width` likeliest nodes get `width` children; in the end the likeliest stay.

    nodes: how many stay at most, the root included. Source: Li et al. 2024 (EAGLE-2), section 4.
    node_cost, depth_cost: what a node adds to the target's pass, and one more depth to drafting, as shares of a plain
    pass. What a node promises is its probability: those that promise less than they cost are not checked, and where the
    nodes of a level together promise less than a depth costs, none is unfolded; each row's tree is what it would be
    alone. 0 grows the whole tree every time.
    """

    nodes: int
    depth: int
    width: int
    node_cost: float = 0.0
    depth_cost: float = 0.0

    @property
    def unfolded(self) -> int:
        """Most nodes the drafter steps into."""
        return self.width * (self.depth - 1)


Shape = StaticShape | DynamicShape


def check_drawable(shape: Shape) -> None:
    """Refusal: nodes of this shape cannot be drawn at random, since which of them stay depends on what was drawn."""
    if isinstance(shape, DynamicShape):
        raise Refusal(
            "decode.drafts: sampled is not available with decode.tree=dynamic, which keeps nodes by what was drawn: "
            "that is another distribution; nearest: decode.tree=static"
        )


def chain(depth: int) -> StaticShape:
    """The likeliest token at each of `depth` depths."""
    return StaticShape(tuple((0,) * d for d in range(1, depth + 1)))


def best_static(ranks: Tensor, nodes: int, depth: int, width: int = 32) -> StaticShape:
    """The static tree of `nodes` nodes, root included, that accepts most on measured ranks; worthiest path first.

    Args:
        ranks: [P, K] int64, for P positions of text the target wrote: the rank that the drafter, fed the true prefix,
            gave the target's token at depths 0..K-1.

    A tree accepts, at a position, its longest path that starts the position's row of ranks; a path's worth is the share
    of positions that start so. A path is never worth more than its parent, so the worthiest paths form a tree, and no
    other is better.
    """
    worth: dict[tuple[int, ...], int] = {}
    for row in ranks[:, :depth].tolist():
        for d in range(1, len(row) + 1):
            if row[d - 1] >= width:
                break
            worth[tuple(row[:d])] = worth.get(tuple(row[:d]), 0) + 1
    best = sorted(worth, key=lambda path: (-worth[path], len(path), path))
    return StaticShape(tuple(best[: nodes - 1]))


def usual_depth(drafter: Drafter) -> int:
    """Draft tokens in a row where none are asked for: all heads, or without a limit as deep as trained, 4 at least."""
    return drafter.max_depth or max(drafter.unroll, 4)


def shape_of(
    tree: str,
    nodes: int,
    depth: int | None,
    width: int,
    drafter: Drafter | None,
    paths: Sequence[Sequence[int]] = (),
    node_cost: float = 0.0,
    depth_cost: float = 0.0,
) -> Shape:
    """The shape that the `decode` options ask for.

    Args:
        tree: `chain`, `static` or `dynamic`.
        nodes: of a pass, the root included.
        depth: None for the drafter's `usual_depth`.
        paths: the export's static tree, worthiest path first, so that its first `nodes - 1` are the best tree of that
            size. A drafter that has none (n-grams), or none so narrow, drafts a chain instead.
        node_cost, depth_cost: see DynamicShape.

    Raises:
        Refusal: deeper than the drafter's heads.
    """
    if drafter is None:
        return chain(0)
    check_depth(depth, drafter.max_depth)
    depth = depth or usual_depth(drafter)
    if tree == "dynamic":
        return DynamicShape(nodes, depth, width, node_cost, depth_cost)
    fitting = [tuple(path) for path in paths if len(path) <= depth and max(path) < width]
    if tree == "static" and fitting:
        return StaticShape(tuple(fitting[: nodes - 1]))
    return chain(min(depth, nodes - 1))


# ---------------------------------------------------------------- growing


def grow(
    drafter: Drafter,
    shape: Shape,
    feature: Tensor,
    tokens: Tensor,
    ctx: Context,
    allowed: Sequence[int] | None = None,
    vocab: int | None = None,
    sampler: Sampler | None = None,
    places: Sequence[Place] = (),
) -> DraftTree:
    """Unroll the drafter over a tree.

    Args:
        feature: [B, J, F] of the tokens that have become verified since the last call; the last of them chose the root.
        tokens: [B, J] the token that follows each of them; the last real one is the root.
        ctx: positions [B, J] and count [B] of these rows (and the row's memory).
        allowed: per batch row, most draft tokens in a row that still make sense (fewer close to the limit).
        vocab: ids from here on only pad the target's table: they are not drafted, and have no share in probability.
        sampler: draws each node's children from what it makes of the drafter's logits, which the tree keeps as `q`;
            None: the likeliest are drafted. places: as a verifier's, if it draws.

    Raises:
        Refusal: the tree is deeper than the drafter's heads, or cannot be drawn; the drafter's logits are not finite.
    """
    check_depth(shape.depth, drafter.max_depth)
    if sampler is not None:
        check_drawable(shape)
    verified = _slices(feature, tokens, ctx)
    for feature, tokens, ctx in verified:
        onward, state = drafter.step(feature, tokens, 0, ctx)
        deeper = _deeper_streams(drafter, shape.depth, onward, tokens, ctx)
    rows, last = torch.arange(len(tokens), device=tokens.device), ctx.count - 1
    tree = DraftTree.root(tokens[rows, last])
    if shape.depth == 0:
        return tree
    known = None
    if vocab is not None and vocab < drafter.shape.vocab:
        known = vocab if drafter.vocab_map is None else int((drafter.vocab_map < vocab).sum())
    level = _Level(onward[rows, last][:, None], state[rows, last][:, None], tree.logp, torch.zeros_like(tree.parents))
    at = Context(ctx.positions[rows, last][:, None], torch.ones_like(ctx.count), ctx.memory)
    root = _Root(at, deeper)
    if isinstance(shape, StaticShape):
        width = drafter.shape.vocab if vocab is None else vocab
        size = (len(tokens), shape.nodes, width)
        lots = None if sampler is None else _Lots(sampler, places, size, tokens.device)
        tree = _unfold_static(drafter, shape, tree, level, root, known, lots)
    else:
        tree = _unfold_dynamic(drafter, shape, tree, level, root, known)
    return _without_dead(tree, allowed)


def _slices(feature: Tensor, tokens: Tensor, ctx: Context) -> Iterator[tuple[Tensor, Tensor, Context]]:
    """Rows that have become verified, [B, J, .], so many at a time as one call reads. The root's row is in the last:
    where a text ends before another, it waits for that.

        slices of 2    text of 5    0 1 | 2 3 | 4
                       text of 3    0 1 |     | 2
    """
    longest = tokens.shape[1]
    if longest <= SLICE:
        yield feature, tokens, ctx
        return
    for begin in range(0, longest, SLICE):
        end = min(begin + SLICE, longest)
        start = (ctx.count - 1).clamp(max=begin)
        stop = ctx.count if end == longest else (ctx.count - 1).clamp(max=end)
        place = (start[:, None] + torch.arange(end - begin, device=start.device)).clamp(max=longest - 1)
        some = feature.gather(1, place[..., None].expand(-1, -1, feature.shape[-1]))
        yield some, tokens.gather(1, place), Context(ctx.positions.gather(1, place), stop - start, ctx.memory)


def _deeper_streams(
    drafter: Drafter, depths: int, feature: Tensor, tokens: Tensor, ctx: Context
) -> dict[int, tuple[Tensor, Tensor]]:
    """Write the rows that have become verified into the key streams that begin below depth 0.

    feature: [B, J, F] feature' of the rows at depth 0, which `grow` was handed. Returns feature' and state [B, 1, .] of
    the root's row at those depths, where it is verified text as well: for a drafter that reads no tokens.
    """
    root: dict[int, tuple[Tensor, Tensor]] = {}
    rows, last = torch.arange(len(tokens), device=tokens.device), ctx.count - 1
    for depth in range(1, depths):
        if drafter.stream(depth) == drafter.stream(depth - 1):
            break
        if drafter.reads_tokens:
            feature, tokens, ctx = ctx.memory.next_depth(depth, feature, tokens, ctx)
            feature, _ = drafter.step(feature, tokens, depth, ctx)
        else:
            at = Context(ctx.positions + depth, ctx.count, ctx.memory)
            feature, state = drafter.step(feature, tokens, depth, at)
            root[depth] = feature[rows, last][:, None], state[rows, last][:, None]
    return root


@dataclass
class _Root:
    """The root's row, which all nodes go on from; deeper: see `_deeper_streams`."""

    ctx: Context
    deeper: dict[int, tuple[Tensor, Tensor]]


@dataclass
class _Level:
    """Nodes about to get children: feature' [B, n, F], state [B, n, H], logp [B, n], index in the tree [B, n]."""

    feature: Tensor
    state: Tensor
    logp: Tensor
    index: Tensor


class _Lots:
    """Draws children at random, and keeps what from: `q` as in DraftTree."""

    def __init__(self, sampler: Sampler, places: Sequence[Place], shape: tuple[int, int, int], device: torch.device):
        self.sampler, self.places = sampler, places
        self.q = torch.zeros(shape, device=device)

    def draw(self, drafter: Drafter, logits: Tensor, nodes: Tensor, depth: int, many: int) -> tuple[Tensor, Tensor]:
        """logits [B, n, D] at these `nodes` [B, n] of the tree -> log q and draft ids of their children [B, n, many].

        A node's noise is that of its children's text position and its own number, negative to differ from the noise
        that verification draws there.
        """
        rows, n, size = logits.shape
        silent = logits.amax(-1, keepdim=True) == -torch.inf
        q = self.sampler.probs(logits.masked_fill(silent, 0.0)).masked_fill(silent, 0.0)
        places = [(key, position + depth) for key, position in self.places for _ in range(n)]
        draws = [-1 - node for node in nodes.flatten().tolist()]
        ids = self.sampler.draw(q.flatten(0, 1), places, many, draws).view(rows, n, many)
        over_target = q.new_zeros(rows, n, self.q.shape[-1])
        over_target.index_copy_(-1, target_ids(drafter, torch.arange(size, device=q.device)), q)
        self.q.scatter_(1, nodes[..., None].expand_as(over_target), over_target)
        return q.gather(-1, ids).log(), ids


def _children(
    drafter: Drafter, level: _Level, depth: int, width: int, known: int | None, lots: _Lots | None = None
) -> tuple[Tensor, Tensor]:
    """`width` children of each node of a level: target ids and joint log-probabilities [B, n, width].

    The likeliest, or with `lots` those that are drawn. known: the first so many draft ids may be drafted, None for all.
    """
    nodes = level.index.shape[1]
    if lots is None:
        logp, ids = drafter.likeliest(level.state, depth, width, known)
        logp, ids = logp.expand(-1, nodes, -1), ids.expand(-1, nodes, -1)  # one may have spoken for its whole level
    else:
        logits = drafter.head(level.state, depth)[..., :known].float()
        check_mass(drafter, logits.logsumexp(-1))
        width = min(width, logits.shape[-1])
        logp, ids = lots.draw(drafter, logits.expand(-1, nodes, -1), level.index, depth, width)
        ids = target_ids(drafter, ids)
    return ids, logp + level.logp[..., None]


def _descend(
    drafter: Drafter, level: _Level, parent: Tensor, tokens: Tensor, depth: int, root: _Root
) -> tuple[Tensor, Tensor]:
    """Step into the chosen children: parent [B, m] indices within the level, tokens [B, m] -> feature', state.

    A node at depth k stands k places further than the root.
    """
    if depth in root.deeper:
        return root.deeper[depth]
    ctx = root.ctx
    if drafter.reads_tokens:
        feature = level.feature.gather(1, parent[..., None].expand(-1, -1, level.feature.shape[-1]))
    else:  # every node of the level carries the same feature: one is enough
        feature, tokens, parent = level.feature[:, :1], tokens[:, :1], parent[:, :1]
    nodes = tokens.shape[1]
    at = Context((ctx.positions + depth).expand(-1, nodes), torch.full_like(ctx.count, nodes), ctx.memory, parent)
    return drafter.step(feature, tokens, depth, at)


@dataclass(frozen=True)
class _LevelPlan:
    """One level of a static tree as indices: parent [m] within the nodes unfolded above, rank [m] among its children;
    going [g]: which of the m get children themselves, index [g] of these in the tree."""

    parent: Tensor
    rank: Tensor
    width: int
    going: Tensor
    index: Tensor


@lru_cache(maxsize=256)
def _plan(shape: StaticShape, device: torch.device, drawn: bool) -> list[_LevelPlan]:
    """The same every round, so it is made once. drawn: the first so many children, not those of certain ranks."""
    shape = shape.numbered() if drawn else shape
    inner = {path[:-1] for path in shape.paths}
    above: list[tuple[int, ...]] = [()]  # paths of the level above that are unfolded, in its order
    first, plan = 1, []
    for paths in shape.levels:
        parent, rank = [above.index(path[:-1]) for path in paths], [path[-1] for path in paths]
        going = [i for i, path in enumerate(paths) if path in inner]
        lists = (parent, rank, going, [first + i for i in going])
        at = [torch.tensor(numbers, dtype=torch.long, device=device) for numbers in lists]
        plan.append(_LevelPlan(at[0], at[1], 1 + max(rank), at[2], at[3]))
        above = [paths[i] for i in going]
        first += len(paths)
    return plan


def _unfold_static(
    drafter: Drafter,
    shape: StaticShape,
    tree: DraftTree,
    level: _Level,
    root: _Root,
    known: int | None,
    lots: _Lots | None,
) -> DraftTree:
    parts = [tree]
    rows = len(tree.tokens)
    for depth, plan in enumerate(_plan(shape, tree.tokens.device, lots is not None)):
        ids, logp = _children(drafter, level, depth, plan.width, known, lots)
        rank = plan.rank.clamp(max=ids.shape[-1] - 1)
        tokens, joint = ids[:, plan.parent, rank], logp[:, plan.parent, rank]
        joint = joint.masked_fill(plan.rank >= ids.shape[-1], -torch.inf)  # a rank the draft vocabulary has not
        parts.append(DraftTree(tokens, level.index[:, plan.parent], tree.size, joint))
        if len(plan.going):
            parent = plan.parent[plan.going].expand(rows, -1)
            feature, state = _descend(drafter, level, parent, tokens[:, plan.going], depth + 1, root)
            level = _Level(feature, state, joint[:, plan.going], plan.index.expand(rows, -1))
    whole = _joined(parts)
    whole.q = None if lots is None else lots.q
    return whole


def _unfold_dynamic(
    drafter: Drafter, shape: DynamicShape, tree: DraftTree, level: _Level, root: _Root, known: int | None
) -> DraftTree:
    parts = [tree]
    first = 1
    going = torch.ones_like(tree.size, dtype=torch.bool)  # rows that are still unfolded, each by its own promises
    for depth in range(shape.depth):
        ids, logp = _children(drafter, level, depth, shape.width, known)
        rows, n, width = ids.shape
        tokens, joint = ids.reshape(rows, -1), logp.reshape(rows, -1)
        parent = torch.arange(n, device=ids.device).repeat_interleave(width).expand(rows, -1)
        parts.append(DraftTree(tokens, level.index.gather(1, parent), tree.size, joint))
        if depth + 1 < shape.depth:
            likeliest, best = joint.topk(min(shape.width, joint.shape[1]), dim=1)
            promise = likeliest.exp()
            going = going & (promise.sum(1) >= shape.depth_cost)
            worthy = (promise >= shape.node_cost) & going[:, None]
            most = int(worthy.sum(1).max())  # of the row that has most: the others have nothing below the rest
            if not most:
                break
            best, worthy = best[:, :most], worthy[:, :most]
            parent, tokens = parent.gather(1, best), tokens.gather(1, best)
            feature, state = _descend(drafter, level, parent, tokens, depth + 1, root)
            level = _Level(feature, state, joint.gather(1, best).masked_fill(~worthy, -torch.inf), first + best)
        first += n * width
    whole = _joined(parts)
    # a node is never likelier than its parent; equal ones keep the earlier, so the parent of a kept node is kept
    best = whole.logp.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes]
    kept = torch.zeros_like(whole.logp, dtype=torch.bool).scatter(1, best, True)
    return _subset(whole, kept & (whole.logp.exp() >= shape.node_cost))


def _joined(parts: list[DraftTree]) -> DraftTree:
    tokens, parents, logp = (
        torch.cat([getattr(part, name) for part in parts], 1) for name in ("tokens", "parents", "logp")
    )
    return DraftTree(tokens, parents, parts[0].size * 0 + tokens.shape[1], logp)


def _subset(tree: DraftTree, kept: Tensor) -> DraftTree:
    """The nodes marked in `kept` [B, N], in order; parents of kept nodes must be kept."""
    rows, nodes = kept.shape
    size = kept.sum(1)
    order = (~kept).long().sort(dim=1, stable=True).indices[:, : int(size.max())]
    place = torch.zeros(rows, nodes, dtype=torch.long, device=kept.device)
    place.scatter_(1, order, torch.arange(order.shape[1], device=kept.device).expand(rows, -1))
    parents = tree.parents.gather(1, order)
    parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
    subset = DraftTree(tree.tokens.gather(1, order), parents, size, tree.logp.gather(1, order))
    padding = ~subset.real
    return DraftTree(
        subset.tokens.masked_fill(padding, 0),
        subset.parents.masked_fill(padding, 0),
        size,
        subset.logp.masked_fill(padding, -torch.inf),
        None if tree.q is None else tree.q.gather(1, order[..., None].expand(-1, -1, tree.q.shape[-1])),
    )


def _without_dead(tree: DraftTree, allowed: Sequence[int] | None) -> DraftTree:
    """Drop nodes that the drafter gave no probability, and those deeper than a row may still emit."""
    kept = tree.logp > -torch.inf
    if allowed is not None and min(allowed) < tree.tokens.shape[1] - 1:
        kept = kept & (tree.depth <= torch.tensor(allowed, device=kept.device)[:, None])
    return tree if bool(kept.all()) else _subset(tree, kept)
