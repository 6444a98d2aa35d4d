"""Which tree pays: of all shapes, the one that promises most tokens a second.

A drafter is played over text that the target wrote, without the target: at every place, the largest tree of each kind
is grown, and the nodes that the text confirms are marked. Any smaller tree of that kind can then be judged from the
record: what it would have kept, how far the text follows it, what it would have cost (decode/cost.py).

    Legend: P places of the texts, N nodes of a recorded tree, M nodes and D depths of a candidate.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.decode.cost import Cost
from paceline.decode.progress import progress
from paceline.decode.tree import DynamicShape, Shape, StaticShape, chain, grow
from paceline.models.drafter import Context, Drafter
from paceline.models.target import Target

CHAINS = range(1, 9)
NODES = (4, 8, 12, 16, 24, 32, 48, 64)
DEPTHS = range(2, 7)
WIDTH = 8  # of dynamic trees
ANY = 64  # children that a static tree may name, which are few
FACTORS = (0.0, 0.5, 1.0, 2.0)  # of what a node or a depth costs, below which dynamic trees leave it out
ROUNDS_OF_COSTS = 2  # the threshold depends on the rate that it leads to: so often it is set anew


@dataclass(frozen=True)
class Candidate:
    """The `decode` options of one tree. tree: `plain` (no drafter), chain, static or dynamic."""

    tree: str
    nodes: int = 1
    depth: int = 0
    width: int = 1
    node_cost: float = 0.0
    depth_cost: float = 0.0

    def shape(self, paths: Sequence[Sequence[int]] = ()) -> Shape:
        """paths: the export's static tree, worthiest first."""
        if self.tree == "dynamic":
            return DynamicShape(self.nodes, self.depth, self.width, self.node_cost, self.depth_cost)
        if self.tree == "static":
            fitting = [tuple(path) for path in paths if len(path) <= self.depth]
            return StaticShape(tuple(fitting[: self.nodes - 1]))
        return chain(self.depth)


PLAIN = Candidate("plain")


@dataclass(frozen=True)
class Prospect:
    """A candidate with what it promises: tokens_per_second over all rows, mean_acceptance_length, nodes a pass."""

    candidate: Candidate
    tokens_per_second: float
    mean_acceptance_length: float
    nodes: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.candidate) | {
            "tokens_per_second": self.tokens_per_second,
            "mean_acceptance_length": self.mean_acceptance_length,
            "nodes_per_pass": self.nodes,
        }


# ---------------------------------------------------------------------------------------------------------------------
# The record


@dataclass(frozen=True, eq=False)
class Grown:
    """The largest tree of one kind at P places, level by level, padded to N nodes.

    depth [P, N] int64, -1 where padded; parent [P, N]; rank [P, N] among its siblings; true [P, N] bool, whether the
    text goes through the node; promise [P, N] float32, the drafter's joint probability. Node 0 is the root.
    """

    depth: Tensor
    parent: Tensor
    rank: Tensor
    true: Tensor
    promise: Tensor


@dataclass(frozen=True)
class Record:
    """Texts played over. lengths: places of each text, of P in all; context [P] committed tokens there; by kind."""

    lengths: list[int]
    context: Tensor
    grown: dict[str, Grown]


@torch.no_grad()
def play(
    target: Target,
    drafter: Drafter,
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    paths: Sequence[Sequence[int]] = (),
) -> Record:
    """Grow the largest tree of each kind at every place of (prompt, answer) texts where decoding could begin a round.

    Roots are the tokens of an answer that more than one follows: the last token of an answer is never worth a draft.
    paths: the export's static tree, empty for a drafter that has none.
    """
    played = [(list(prompt), list(answer)) for prompt, answer in texts if len(answer) > 2]
    deepest = drafter.max_depth or max(CHAINS)
    shapes: dict[str, Shape] = {
        "chain": chain(min(max(CHAINS), deepest)),
        "dynamic": DynamicShape(10**6, min(max(DEPTHS), deepest), WIDTH),
    }
    if paths:
        shapes["static"] = StaticShape(tuple(tuple(path) for path in paths if max(path) < drafter.shape.vocab))
    whole = [torch.tensor([prompt + answer], device=target.device) for prompt, answer in played]
    read = [target(ids, drafter.taps, cache=target.new_cache(*ids.shape))[0] for ids in whole]  # as decoding reads them
    grown: dict[str, Grown] = {}
    for kind, shape in shapes.items():
        with progress(f"answers, {kind}", len(played)) as bar:
            trees = [
                tree
                for (prompt, answer), hidden in bar.over(zip(played, read, strict=True))
                for tree in _over(target, drafter, shape, prompt, answer, hidden)
            ]
        if kind != "static" or all(len(depth) == shape.nodes for depth, *_ in trees):
            grown[kind] = Grown(
                *(_stacked(list(part), -1 if n == 0 else 0) for n, part in enumerate(zip(*trees, strict=True)))
            )
    context = [len(prompt) + place for prompt, answer in played for place in range(len(answer) - 2)]
    return Record([len(answer) - 2 for _, answer in played], torch.tensor(context), grown)


def _over(
    target: Target, drafter: Drafter, shape: Shape, prompt: list[int], answer: list[int], hidden: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """(depth, parent, rank, true, promise) of the tree at every place of one text, each [N]."""
    ahead = prompt + answer
    words = torch.tensor([ahead], device=target.device)
    memory = drafter.memory(1, words.shape[1] + 1 + shape.unfolded)
    known = 0
    for root in range(len(prompt), words.shape[1] - 2):
        rows = slice(known, root)
        feature, tokens = hidden[:, rows], words[:, known + 1 : root + 1]
        positions = torch.arange(known, root, device=words.device)[None]
        if drafter.first_row < 0 and known == 0:
            feature = torch.cat([torch.zeros_like(feature[:, :1]), feature], 1)
            tokens = torch.cat([words[:, :1], tokens], 1)
            positions = torch.cat([positions[:, :1] - 1, positions], 1)
        count = torch.tensor([tokens.shape[1]], device=words.device)
        ctx = Context(positions, count, memory)
        tree = grow(drafter, shape, drafter.read(feature), tokens, ctx, None, target.vocab)
        known = root
        yield (*_marked(tree.tokens[0].tolist(), tree.parents[0].tolist(), ahead[root:]), tree.logp[0].exp())


def _marked(tokens: list[int], parents: list[int], text: list[int]) -> tuple[Tensor, ...]:
    """(depth, parent, rank, true) of a tree's nodes, each [N]; text: what follows, from the root's own token on."""
    depth, rank, true, born = [0], [0], [True], [0] * len(tokens)
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        depth.append(depth[parent] + 1)
        rank.append(born[parent])
        born[parent] += 1
        true.append(true[parent] and text[depth[-1] : depth[-1] + 1] == [token])
    return torch.tensor(depth), torch.tensor([0, *parents[1:]]), torch.tensor(rank), torch.tensor(true)


def _stacked(rows: list[Tensor], padding: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding).cpu()


# ---------------------------------------------------------------------------------------------------------------------
# Judging a candidate


@dataclass(frozen=True)
class Outcome:
    """Of a candidate at each place: accepted [P] drafts, nodes [P] of the pass, unfolded [P, D] nodes by depth."""

    accepted: Tensor
    nodes: Tensor
    unfolded: Tensor


def outcome(record: Record, candidate: Candidate, paths: Sequence[Sequence[int]] = ()) -> Outcome:
    """What the candidate would have done at every place of the record."""
    if candidate.tree == "plain":
        none = torch.zeros(len(record.context), dtype=torch.long)
        return Outcome(none, none + 1, none[:, None])
    grown = record.grown[candidate.tree]
    if candidate.tree == "dynamic":
        order, worthy, unfolded = _reach(grown, replace(candidate, nodes=0))
        nodes = worthy.clamp(max=candidate.nodes)
        confirmed = grown.true.gather(1, order).cumsum(1)
        return Outcome(confirmed.gather(1, nodes[:, None] - 1)[:, 0] - 1, nodes, unfolded)
    shape = candidate.shape(paths)
    assert isinstance(shape, StaticShape)
    if candidate.tree == "chain":
        kept = (grown.depth >= 0) & (grown.depth <= candidate.depth)
    else:
        whole = StaticShape(tuple(tuple(path) for path in paths))
        chosen = set(shape.paths)
        kept = torch.tensor([True, *(path in chosen for level in whole.levels for path in level)]).expand(
            len(grown.depth), -1
        )
    inner = {path[:-1] for path in shape.paths}
    unfolded = torch.tensor([sum(len(path) == depth for path in inner) for depth in range(1, shape.depth + 1)])
    return Outcome((kept & grown.true).sum(1) - 1, kept.sum(1), unfolded.expand(len(kept), -1))


@lru_cache(maxsize=1)
def _reach(grown: Grown, candidate: Candidate) -> tuple[Tensor, Tensor, Tensor]:
    """What decode/tree.py would grow (see DynamicShape) before it counts nodes, from the nodes of the largest tree.

    Returns the nodes' order [P, N], likeliest first, how many of them [P] are worth their cost, and unfolded [P, D].
    """
    open_ = grown.depth == 0  # nodes that are unfolded
    there, none = open_.clone(), torch.tensor(-1.0)
    going = torch.ones(len(there), dtype=torch.bool)
    unfolded = []
    for depth in range(1, candidate.depth + 1):
        level = (grown.depth == depth) & open_.gather(1, grown.parent) & (grown.rank < candidate.width)
        there |= level
        promise, best = grown.promise.where(level, none).topk(min(candidate.width, level.shape[1]), dim=1)
        worthy = (promise > 0) & (promise >= candidate.node_cost)
        going = going & worthy.any(1) & (promise.clamp(min=0).sum(1) >= candidate.depth_cost)
        going = going & (depth < candidate.depth)
        open_ = torch.zeros_like(there).scatter(1, best, worthy & going[:, None])
        unfolded.append(open_.sum(1))
    promise = grown.promise.where(there & (grown.promise >= candidate.node_cost), none)
    ordered = promise.sort(dim=1, descending=True, stable=True)
    return ordered.indices, (ordered.values > 0).sum(1), torch.stack(unfolded, 1)


def prospect(record: Record, cost: Cost, candidate: Candidate, rows: int, paths: Sequence[Sequence[int]]) -> Prospect:
    """Decode the record's texts with the candidate, on paper.

    A round stands where the one before ended, so that places count as often as decoding visits them. Rows decoded
    together are rounds drawn at random: the widest of them sets what all cost.
    """
    found = outcome(record, candidate, paths)
    visited = torch.tensor(list(_visited(record.lengths, found.accepted.tolist())))
    if rows > 1:
        shuffled = visited[torch.randperm(len(visited), generator=torch.Generator().manual_seed(0))]
        visited = shuffled.repeat(-(-rows // len(shuffled)))
        visited = visited[: len(visited) // rows * rows]
    together = visited.view(-1, rows)
    nodes = found.nodes[together].amax(1)
    seconds = cost.target(rows, record.context[together].double().mean(1), nodes) + cost.others(rows)
    if candidate.tree != "plain":
        seconds = seconds + cost.drafting(rows, found.unfolded[together].amax(1))
    tokens = float((found.accepted[visited] + 1).sum())
    return Prospect(
        candidate, tokens / float(seconds.sum()), tokens / len(visited), float(found.nodes[visited].double().mean())
    )


def _visited(lengths: list[int], accepted: list[int]) -> Iterator[int]:
    first = 0
    for length in lengths:
        place = 0
        while place < length:
            yield first + place
            place += accepted[first + place] + 1
        first += length


def prospects(record: Record, cost: Cost, rows: int, paths: Sequence[Sequence[int]] = ()) -> list[Prospect]:
    """Every candidate of the grid, the most promising first.

    A node is worth its cost while its probability times the time a token takes is more than it adds to the pass: the
    threshold depends on the rate, and is set anew from the best rate found (Dinkelbach 1967, for the maximum of a
    ratio). Promises are the drafter's own, which may be too sure or too timid: hence FACTORS.
    """
    deepest = {kind: int(grown.depth.max()) for kind, grown in record.grown.items()}
    candidates = [PLAIN, *(Candidate("chain", d + 1, d) for d in CHAINS if d <= deepest["chain"])]
    if "static" in record.grown:
        candidates += [Candidate("static", n, d, ANY) for d in _depths(deepest["static"]) for n in NODES]
    found = [prospect(record, cost, candidate, rows, paths) for candidate in candidates]
    dynamic: list[Prospect] = []
    for _ in range(ROUNDS_OF_COSTS):
        rate = max(one.tokens_per_second for one in found + dynamic)
        node, level = min(rate * cost.of_node(rows), 0.49), rate * cost.of_depth(rows, WIDTH)  # the root stays anyway
        dynamic = [
            prospect(record, cost, Candidate("dynamic", n, d, WIDTH, round(f * node, 4), round(f * level, 4)), rows, ())
            for d in _depths(deepest["dynamic"])
            for f in FACTORS
            for n in NODES
        ]
    return sorted(found + dynamic, key=lambda one: -one.tokens_per_second)


def _depths(most: int) -> list[int]:
    return [d for d in DEPTHS if d <= most] or [most]
