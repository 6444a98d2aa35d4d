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
from torch.nn import functional as F

from paceline.decode.sampler import Place, Sampler
from paceline.models.cache import SLICE
from paceline.models.drafter import Context, Drafter, Levels, Limits, check_depth, check_mass, target_ids
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

    @cached_property
    def lists(self) -> list[tuple[list[int], list[int]]]:
        """Of each row, tokens and parents of its real nodes."""
        each = zip(self.tokens.tolist(), self.parents.tolist(), self.size.tolist(), strict=True)
        return [(tokens[:size], parents[:size]) for tokens, parents, size in each]

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
    known = None if vocab is None or vocab >= drafter.shape.vocab else drafter.ids_below(vocab)
    if sampler is None and shape.depth and tokens.shape[1] <= SLICE:
        whole = _at_once(drafter, shape, feature, tokens, ctx, known)
        if whole is not None:
            return _without_dead(whole, allowed)
    verified = _slices(feature, tokens, ctx)
    for feature, tokens, ctx in verified:
        onward, state = drafter.step(feature, tokens, 0, ctx)
        deeper = _deeper_streams(drafter, shape.depth, onward, tokens, ctx)
    last, onward, state, position = last_of(ctx.count, tokens, onward, state, ctx.positions)
    tree = DraftTree.root(last[:, 0])
    if shape.depth == 0:
        return tree
    level = _Level(onward, state, tree.logp, torch.zeros_like(tree.parents))
    root = _Root(Context(position, torch.ones_like(ctx.count), ctx.memory), deeper)
    if isinstance(shape, StaticShape):
        width = drafter.shape.vocab if vocab is None else vocab
        size = (len(tokens), shape.nodes, width)
        lots = None if sampler is None else _Lots(sampler, places, size, tokens.device)
        tree = _unfold_static(drafter, shape, tree, level, root, known, lots)
    else:
        tree = _unfold_dynamic(drafter, shape, tree, level, root, known)
    return _without_dead(tree, allowed)


def _at_once(
    drafter: Drafter, shape: Shape, feature: Tensor, tokens: Tensor, ctx: Context, known: int | None
) -> DraftTree | None:
    """The same in one call, where the drafter can."""
    if isinstance(shape, DynamicShape):
        limits = Limits(shape.nodes, shape.depth, shape.width, shape.node_cost, shape.depth_cost)
        grown = drafter.unfold_dynamic(feature, tokens, ctx, limits, known)
        return None if grown is None else DraftTree(*grown)
    plan = _plan(shape, tokens.device, drawn=False)
    drafted = drafter.unfold(feature, tokens, ctx, plan.numbers, known)
    return None if drafted is None else plan.tree(*drafted)


def last_of(count: Tensor, *rows: Tensor) -> list[Tensor]:
    """The last real one of each text's rows, [B, J, ...] each: [B, 1, ...]."""
    texts, many = rows[0].shape[:2]
    if many == 1:
        return list(rows)
    at = torch.arange(-1, texts * many - 1, many, device=count.device) + count
    return [part.flatten(0, 1).index_select(0, at)[:, None] for part in rows]


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
    for depth in range(1, depths):
        if drafter.stream(depth) == drafter.stream(depth - 1):
            break
        if drafter.reads_tokens:
            feature, tokens, ctx = ctx.memory.next_depth(depth, feature, tokens, ctx)
            feature, _ = drafter.step(feature, tokens, depth, ctx)
        else:
            at = Context(ctx.positions + depth, ctx.count, ctx.memory)
            feature, state = drafter.step(feature, tokens, depth, at)
            onward, told = last_of(ctx.count, feature, state)
            root[depth] = onward, told
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
    """One level of a static tree of m nodes as indices.

    place [m]: in the `width` children of the nodes unfolded above, one node's behind the other's. Of the g that get
    children themselves, going [g]: which of the m, parent [1, g]: of the nodes above, index [1, g]: in the tree.
    """

    width: int
    place: Tensor
    going: Tensor
    parent: Tensor
    index: Tensor


@dataclass(frozen=True)
class _Plan:
    """A static tree's levels, and what does not depend on what is drafted: see DraftTree."""

    levels: list[_LevelPlan]
    parents: Tensor  # [1, N]
    ancestors: Tensor  # [1, N, N]
    numbers: Levels

    def tree(self, tokens: Tensor, logp: Tensor, q: Tensor | None = None) -> DraftTree:
        """tokens, logp [B, N] -> that tree."""
        rows, nodes = tokens.shape
        size = torch.full((rows,), nodes, device=tokens.device)
        whole = DraftTree(tokens, self.parents.expand(rows, -1), size, logp, q)
        whole.ancestors = self.ancestors.expand(rows, -1, -1)
        return whole


@lru_cache(maxsize=256)
def _plan(shape: StaticShape, device: torch.device, drawn: bool) -> _Plan:
    """The same every round, so it is made once. drawn: the first so many children, not those of certain ranks."""
    shape = shape.numbered() if drawn else shape
    inner = {path[:-1] for path in shape.paths}
    above: list[tuple[int, ...]] = [()]  # paths of the level above that are unfolded, in its order
    number: dict[tuple[int, ...], int] = {(): 0}  # of each path's node in the tree
    levels, numbers = [], list[int]()

    def at(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    for paths in shape.levels:
        width = 1 + max(path[-1] for path in paths)
        place = [above.index(path[:-1]) * width + path[-1] for path in paths]
        number |= {path: len(number) + i for i, path in enumerate(paths)}
        going = [path for path in paths if path in inner]
        lists = [paths.index(path) for path in going], [above.index(path[:-1]) for path in going]
        index = [number[path] for path in going]
        levels.append(_LevelPlan(width, at(place), at(lists[0]), at(lists[1])[None], at(index)[None]))
        numbers += [len(paths), width, len(going), *place, *lists[0], *lists[1]]
        above = going
    parents = at([-1, *(number[path[:-1]] for path in number if path)])[None]
    blank = torch.zeros_like(parents)
    ancestors = DraftTree(blank, parents, blank[:, 0], blank.float()).ancestors
    return _Plan(levels, parents, ancestors, Levels(at(numbers), len(number), len(levels)))


def _unfold_static(
    drafter: Drafter,
    shape: StaticShape,
    tree: DraftTree,
    level: _Level,
    root: _Root,
    known: int | None,
    lots: _Lots | None,
) -> DraftTree:
    rows, parts = len(tree.tokens), [(tree.tokens, tree.logp)]
    plan = _plan(shape, tree.tokens.device, lots is not None)
    for depth, of in enumerate(plan.levels):
        ids, logp = _children(drafter, level, depth, of.width, known, lots)
        if (missing := of.width - ids.shape[-1]) > 0:  # ranks that the draft vocabulary has not
            ids, logp = F.pad(ids, (0, missing)), F.pad(logp, (0, missing), value=-torch.inf)
        tokens, joint = (part.flatten(1).index_select(1, of.place) for part in (ids, logp))
        parts.append((tokens, joint))
        if len(of.going):
            parent, going = of.parent.expand(rows, -1), of.going
            feature, state = _descend(drafter, level, parent, tokens.index_select(1, going), depth + 1, root)
            level = _Level(feature, state, joint.index_select(1, going), of.index.expand(rows, -1))
    tokens, logp = (torch.cat(column, 1) for column in zip(*parts, strict=True))
    return plan.tree(tokens, logp, None if lots is None else lots.q)


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
            likeliest, best = (part[:, : shape.width] for part in joint.sort(dim=1, descending=True, stable=True))
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
    kept = None
    if allowed is not None and min(allowed) < tree.tokens.shape[1] - 1:
        kept = tree.depth <= torch.tensor(allowed, device=tree.tokens.device)[:, None]
    if tree.logp.min().item() == -torch.inf:  # rarely, and not worth more than one question each round
        kept = (tree.logp > -torch.inf) & (kept is None or kept)
    return tree if kept is None or bool(kept.all()) else _subset(tree, kept)
