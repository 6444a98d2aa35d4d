"""What growing promises: a node is the drafter's own guess along its path, and the shape says which nodes there are."""

import math
from itertools import combinations, product

import pytest
import torch
from fakes import VOCAB, Dictated
from torch import Tensor, nn

from paceline.decode import DraftTree, DynamicShape, StaticShape, best_static, chain, grow, shape_of, usual_depth
from paceline.models.drafter import Context, Drafter, Options, Shape
from paceline.models.errors import Refusal

H = 8


class Recurrent(Drafter):
    """A random drafter whose feature holds the whole path. `map_` restricts what it drafts."""

    def __init__(self, map_: Tensor | None = None, max_depth: int | None = None, reads_tokens: bool = True):
        super().__init__(Options(name="recurrent"), Shape(H, 2, VOCAB))
        self.max_depth, self.reads_tokens, self.map_ = max_depth, reads_tokens, map_
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.embed = nn.Embedding(VOCAB, H)
            self.mix = nn.Linear(H, H)
            self.heads = nn.ModuleList(nn.Linear(H, VOCAB if map_ is None else len(map_)) for _ in range(4))

    @property
    def vocab_map(self) -> Tensor | None:
        return self.map_

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        assert ctx.positions.shape == tokens.shape or depth > 0
        feature = torch.tanh(self.mix(feature) + (self.embed(tokens) if self.reads_tokens else depth))
        return feature, feature

    def head(self, state: Tensor, depth: int) -> Tensor:
        return self.heads[depth](state)


BRANCHES = StaticShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)))
SHAPES = {
    "chain of 1": chain(1),
    "chain of 4": chain(4),
    "static": BRANCHES,
    "dynamic": DynamicShape(9, 3, 4),
    "large": DynamicShape(30, 4, 3),
}
EVENS = torch.arange(0, VOCAB, 2)


def rows() -> tuple[Tensor, Tensor, Context]:
    """Three batch rows with 3, 1 and 2 newly verified tokens."""
    generator = torch.Generator().manual_seed(5)
    feature = torch.randn(3, 3, H, generator=generator)
    tokens = torch.randint(VOCAB, (3, 3), generator=generator)
    return feature, tokens, Context(torch.arange(3).expand(3, -1), torch.tensor([3, 1, 2]))


def path_of(tree: DraftTree, row: int, node: int) -> list[int]:
    """Node indices from the root to `node`, by the definition."""
    path = [node]
    while (parent := int(tree.parents[row, path[0]])) >= 0:
        path.insert(0, parent)
    return path


@torch.no_grad()
def along(drafter: Drafter, feature: Tensor, tokens: list[int]) -> Tensor:
    """[V]: what the drafter expects after this path, stepping through it alone; -inf where it cannot draft."""
    for depth, token in enumerate(tokens):
        feature, state = drafter.step(
            feature.reshape(1, 1, -1), torch.tensor([[token]]), depth, Context(*2 * [torch.zeros(1, 1)])
        )
    logits = drafter.head(state[0, 0], len(tokens) - 1)
    ids = torch.arange(VOCAB) if drafter.vocab_map is None else drafter.vocab_map
    return torch.full((VOCAB,), -torch.inf).scatter(0, ids, logits.log_softmax(-1))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "drafter", [Recurrent(), Recurrent(EVENS), Recurrent(reads_tokens=False)], ids=["all ids", "some ids", "blind"]
)
@torch.no_grad()
def test_every_node_is_the_drafters_guess_along_its_own_path(drafter: Drafter, shape) -> None:
    feature, tokens, ctx = rows()
    tree = grow(drafter, shape, feature, tokens, ctx)
    for row, last in enumerate((ctx.count - 1).tolist()):
        said = tree.tokens[row].tolist()
        assert said[0] == tokens[row, last] and tree.logp[row, 0] == 0 and tree.parents[row, 0] == -1
        for node in range(1, int(tree.size[row])):
            path = path_of(tree, row, node)
            assert path == sorted(path) and int(tree.depth[row, node]) == len(path) - 1
            assert tree.ancestors[row, node].nonzero()[:, 0].tolist() == path
            logp = along(drafter, feature[row, last], [said[i] for i in path[:-1]])
            torch.testing.assert_close(tree.logp[row, node], tree.logp[row, path[-2]] + logp[said[node]])
        families = [(int(tree.parents[row, node]), said[node]) for node in range(1, int(tree.size[row]))]
        assert len(set(families)) == len(families), "no token is drafted twice under one parent"


@pytest.mark.parametrize("shape", [chain(4), BRANCHES], ids=["chain", "static"])
@torch.no_grad()
def test_a_static_tree_has_the_ranks_it_names(shape: StaticShape) -> None:
    drafter, (feature, tokens, ctx) = Recurrent(), rows()
    tree = grow(drafter, shape, feature, tokens, ctx)
    for row, last in enumerate((ctx.count - 1).tolist()):
        found = set()
        for node in range(1, shape.nodes):
            words = [int(tree.tokens[row, i]) for i in path_of(tree, row, node)]
            ranks = [
                along(drafter, feature[row, last], words[:d]).argsort(descending=True).tolist().index(words[d])
                for d in range(1, len(words))
            ]
            found.add(tuple(ranks))
        assert found == set(shape.paths)


@torch.no_grad()
def test_a_dynamic_tree_keeps_the_likeliest_of_what_was_expanded() -> None:
    drafter, shape, (feature, tokens, ctx) = Recurrent(), DynamicShape(9, 3, 4), rows()
    tree = grow(drafter, shape, feature, tokens, ctx)
    for row, last in enumerate((ctx.count - 1).tolist()):
        level = {(int(tokens[row, last]),): 0.0}
        everything: dict[tuple[int, ...], float] = {}
        for _ in range(shape.depth):
            children = {}
            for path, joint in level.items():
                logp = along(drafter, feature[row, last], list(path))
                children |= {
                    (*path, token): joint + float(logp[token]) for token in logp.topk(shape.width).indices.tolist()
                }
            everything |= children
            level = dict(sorted(children.items(), key=lambda item: -item[1])[: shape.width])
        best = sorted(everything, key=lambda path: -everything[path])[: shape.nodes - 1]
        found = {tuple(int(tree.tokens[row, i]) for i in path_of(tree, row, n)) for n in range(1, int(tree.size[row]))}
        assert found == set(best)


@pytest.mark.parametrize(
    "node_cost, depth_cost", [(0.02, 0.0), (0.0, 0.5), (0.0, 0.13), (0.0, 0.0065), (0.01, 0.35), (0.9, 0.0)]
)
@torch.no_grad()
def test_a_dynamic_tree_leaves_out_what_costs_more_than_it_promises(node_cost: float, depth_cost: float) -> None:
    drafter, (feature, tokens, ctx) = Recurrent(), rows()
    whole, frugal = DynamicShape(40, 4, 4), DynamicShape(40, 4, 4, node_cost, depth_cost)
    together, sizes = grow(drafter, frugal, feature, tokens, ctx), []
    for row in range(len(tokens)):
        here = slice(row, row + 1)
        alone = feature[here], tokens[here], Context(ctx.positions[here], ctx.count[here], ctx.memory)
        every = probabilities(grow(drafter, whole, *alone))
        level, deepest = {path: p for path, p in every.items() if len(path) == 2}, 1
        while level and sum(sorted(level.values())[-frugal.width :]) >= depth_cost and deepest < frugal.depth:
            deepest += 1
            level = {path: p for path, p in every.items() if len(path) == deepest + 1}
        wanted = {path for path, p in every.items() if p >= node_cost and len(path) <= deepest + 1}
        assert set(probabilities(grow(drafter, frugal, *alone))) == wanted
        assert set(probabilities(together, row)) == wanted, "the same beside rows that promise more or less"
        sizes.append(len(wanted))
    assert min(sizes) < whole.nodes


def probabilities(tree: DraftTree, row: int = 0) -> dict[tuple[int, ...], float]:
    """Joint probability by path, the root's token first."""
    return {
        tuple(int(tree.tokens[row, i]) for i in path_of(tree, row, node)): float(tree.logp[row, node].exp())
        for node in range(int(tree.size[row]))
    }


def test_ids_that_only_pad_the_table_are_neither_drafted_nor_counted() -> None:
    feature, tokens, ctx = rows()
    for drafter in (Recurrent(), Recurrent(EVENS)):
        tree = grow(drafter, BRANCHES, feature, tokens, ctx, vocab=10)
        assert int(tree.tokens[:, 1:].max()) < 10
        everything = grow(drafter, StaticShape(tuple((i,) for i in range(20))), feature, tokens, ctx, vocab=10)
        assert everything.size.tolist() == [11 if drafter.vocab_map is None else 6] * 3
        torch.testing.assert_close(everything.logp[:, 1:].exp().sum(1), torch.ones(3))


def test_more_branches_than_draft_ids_are_as_many_as_there_are() -> None:
    feature, tokens, ctx = rows()
    eight = Recurrent(torch.arange(8))
    assert grow(eight, StaticShape(tuple((i,) for i in range(10))), feature, tokens, ctx).size.tolist() == [9, 9, 9]
    assert grow(eight, DynamicShape(64, 1, 10), feature, tokens, ctx).size.tolist() == [9, 9, 9]


def test_a_row_near_its_limit_drafts_less_and_a_silent_one_nothing() -> None:
    feature, tokens, ctx = rows()
    tree = grow(Recurrent(), chain(4), feature, tokens, ctx, allowed=[1, 9, 3])
    assert tree.size.tolist() == [2, 5, 4]
    assert tree.real.sum(1).tolist() == [2, 5, 4] and tree.tokens[0, 2:].tolist() == [0, 0, 0]

    text = list(range(10))
    quiet = Dictated([text], rank=lambda place: None if place == 3 else 0)
    at = Context(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]), [[0]])
    tree = grow(quiet, chain(4), torch.zeros(1, 1, 2), torch.tensor([[1]]), at)
    assert tree.tokens.tolist() == [[1, 2]], "what follows a silent depth is silent too"


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    for shape in (chain(3), DynamicShape(8, 3, 2)):
        with pytest.raises(Refusal, match=r"decode\.depth: 3 is deeper than the drafter's 2 heads; nearest: 2"):
            grow(Recurrent(max_depth=2), shape, *rows())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_named(value: float) -> None:
    drafter = Recurrent()
    drafter.heads[1].bias.data[7] = value
    with pytest.raises(Refusal, match=r"drafter's logits are not finite in torch\.float32"):
        grow(drafter, chain(2), *rows())


# ---------------------------------------------------------------- shapes


def test_a_static_tree_without_a_parent_is_refused() -> None:
    for paths in [((0, 0),), ((),), ((0,), (1, 0))]:
        with pytest.raises(ValueError, match="lacks the parent"):
            StaticShape(paths)


def test_no_tree_of_its_size_accepts_more_than_the_best_static() -> None:
    ranks = torch.randint(3, (40, 3), generator=torch.Generator().manual_seed(6)).clamp(max=2)
    ranks[:25, 0] = 0

    def accepted(paths: set[tuple[int, ...]]) -> int:
        return sum(sum(tuple(row[:d]) in paths for d in (1, 2, 3)) for row in ranks.tolist())

    every = [path for d in (1, 2, 3) for path in product(range(3), repeat=d)]
    trees = (set(paths) for paths in combinations(every, 4))
    most = max(accepted(t) for t in trees if all(len(path) == 1 or path[:-1] in t for path in t))
    best = best_static(ranks, nodes=5, depth=3)
    assert best.nodes == 5 and accepted(set(best.paths)) == most
    for size in range(1, 5):  # its beginnings are the best smaller trees
        assert best.paths[: size - 1] == best_static(ranks, nodes=size, depth=3).paths


def test_a_best_static_tree_obeys_depth_and_width() -> None:
    ranks = torch.tensor([[0, 0, 0], [0, 5, 0], [70, 0, 0]])  # a rank as large as the vocabulary: it cannot be drafted
    best = best_static(ranks, nodes=16, depth=2, width=4)
    assert best.paths == ((0,), (0, 0))


def test_options_ask_for_the_shape_they_name() -> None:
    paths = ((0,), (1,), (0, 0), (3,), (0, 0, 0))
    four = Recurrent(max_depth=4)
    assert shape_of("chain", 16, None, 8, four) == chain(4)
    assert shape_of("chain", 16, 2, 8, four) == chain(2)
    assert shape_of("chain", 3, None, 8, four) == chain(2), "a budget of nodes holds for chains too"
    assert shape_of("static", 4, None, 8, four, paths) == StaticShape(paths[:3])
    assert shape_of("static", 16, 2, 3, four, paths) == StaticShape(((0,), (1,), (0, 0)))
    assert shape_of("static", 16, None, 8, four) == chain(4), "no measured tree: a chain"
    assert shape_of("static", 16, None, 8, four, ((9,), (9, 0))) == chain(4), "none so narrow: a chain, not no drafts"
    assert shape_of("dynamic", 9, None, 3, four) == DynamicShape(9, 4, 3)
    assert shape_of("static", 16, 3, 8, None) == chain(0)
    endless = Recurrent()  # trained to a depth of 1, of no limit
    assert usual_depth(endless) == 4 == usual_depth(four) and shape_of("chain", 16, None, 8, endless) == chain(4)
    assert shape_of("dynamic", 9, 12, 3, endless) == DynamicShape(9, 12, 3)
    with pytest.raises(Refusal, match=r"decode\.depth: 5 is deeper than the drafter's 4 heads; nearest: 4"):
        shape_of("chain", 16, 5, 8, four)


def test_nodes_are_those_of_a_pass() -> None:
    assert (chain(0).nodes, chain(0).depth, chain(3).nodes, BRANCHES.nodes, BRANCHES.depth) == (1, 0, 4, 9, 3)
    assert math.prod(len(level) for level in BRANCHES.levels) == 3 * 3 * 2
    assert DraftTree.root(torch.tensor([5, 6])).ancestors.tolist() == [[[True]], [[True]]]
