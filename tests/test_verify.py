"""What verification promises: the output's distribution is the target's, shown by enumeration and by draws.

The target is a table: six tokens, float64 logits that depend on the last two. The drafter is another such table. All
randomness of a verifier goes through `Sampler.pick` and `Sampler.accepts`, so a sampler that branches there, instead of
drawing, walks every outcome and its probability.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.decode import DraftTree, Sampler, StaticShape, Verdict, chain, grow, reject, typical, verify, walk
from paceline.models.drafter import Context, Drafter, Options, Shape

V = 6
START = (2, 5)  # the text so far; its last token is the root
TARGET, NOISE = 1.5 * torch.randn(2, V, V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
DRAFTER = (TARGET + NOISE) / 2**0.5  # right more often than not

SETTINGS = {
    "T=1": Sampler(temperature=1.0),
    "T=0.7": Sampler(temperature=0.7),
    "top-k 4, top-p 0.8": Sampler(temperature=1.0, top_k=4, top_p=0.8),
}


def processed(logits: Tensor, sampler: Sampler) -> Tensor:
    """[V] logits -> the distribution that temperature, top-k and top-p mean, the slow way."""
    probs = (logits / sampler.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    kept: list[int] = []
    within = probs[order[: sampler.top_k or V]].sum()
    for token in order[: sampler.top_k or V]:
        if kept and float(probs[kept].sum() / within) >= sampler.top_p:
            break
        kept.append(token)
    out = torch.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@cache
def truth(setting: str) -> Tensor:
    """[6, 6, 6]: how the target alone says three tokens."""
    next_token = torch.stack([torch.stack([processed(row, SETTINGS[setting]) for row in rows]) for rows in TARGET])
    first = next_token[START]
    second = next_token[START[1]]  # [a, b]
    return first[:, None, None] * second[:, :, None] * next_token


# ---------------------------------------------------------------- drafting on the tables

# The children of each node in drawing order, by index: a chain of three, and a tree with siblings at two levels.
CHAIN = {0: [1], 1: [2], 2: [3]}
TREE = {0: [1, 2], 1: [3, 4], 2: [5]}
SMALL = {0: [1, 2], 1: [3]}
Draw = Callable[
    [Tensor, int], list[list[int]]
]  # ([R, V] distributions, how many) -> distinct tokens of each row, in order


def likeliest(q: Tensor, many: int) -> list[list[int]]:
    return q.topk(many, dim=-1).indices.tolist()


def draft(
    texts: Sequence[Sequence[int]], shape: dict[int, list[int]], draw: Draw, depth: int, sampled: bool
) -> DraftTree:
    """Trees of `shape`, cut at `depth`, under the last token of each text."""
    nodes = 1 + max(max(children) for children in shape.values())
    rows = len(texts)
    tokens, parents = torch.zeros(rows, nodes, dtype=torch.long), torch.full((rows, nodes), -1)
    tokens[:, 0] = torch.tensor([text[-1] for text in texts])
    before = torch.zeros(rows, nodes, dtype=torch.long)  # the token before each node
    before[:, 0] = torch.tensor([text[-2] for text in texts])
    q = torch.zeros(rows, nodes, V, dtype=torch.float64)
    depths, size = [0] * nodes, 1
    for node, children in shape.items():
        if node >= size or depths[node] == depth:
            continue
        q[:, node] = proposal(before[:, node], tokens[:, node])
        tokens[:, children] = torch.tensor(draw(q[:, node], len(children)))
        for child in children:
            parents[:, child], before[:, child], depths[child] = node, tokens[:, node], depths[node] + 1
        size += len(children)
    sizes = torch.full((rows,), size)
    return DraftTree(tokens[:, :size], parents[:, :size], sizes, q[:, :size, 0] * 0, q[:, :size] if sampled else None)


def proposal(before: Tensor, last: Tensor) -> Tensor:
    """[R], [R] -> q [R, V]: what the drafter draws from, three tokens wide."""
    return three_wide(DRAFTER[before, last]).softmax(-1)


def three_wide(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(3, dim=-1).values[..., -1:], -torch.inf)


def at_nodes(tree: DraftTree, texts: Sequence[Sequence[int]]) -> Tensor:
    """[B, N, V]: the target's logits at the nodes."""
    before = tree.tokens.gather(1, tree.parents.clamp(min=0))
    before[:, 0] = torch.tensor([text[-2] for text in texts])
    return TARGET[before, tree.tokens]


def emitted(tree: DraftTree, verdict: Verdict) -> list[list[int]]:
    return [
        [*(row[node] for node in path[1:]), bonus]
        for row, path, bonus in zip(tree.tokens.tolist(), verdict.paths, verdict.bonus, strict=True)
    ]


# ---------------------------------------------------------------- every outcome


class Branching(Sampler):
    """Follows a script of choices, beyond its end the first possible one; `weight` is the chance of them all."""

    def __init__(self, like: Sampler, script: list[int]):
        super().__init__(like.temperature, like.top_k, like.top_p)
        self.script, self.options, self.weight = script, [], 1.0

    def branch(self, chances: dict) -> object:
        possible = [(outcome, chance) for outcome, chance in chances.items() if chance > 0]
        if len(self.options) == len(self.script):
            self.script.append(0)
        outcome, chance = possible[self.script[len(self.options)]]
        self.options.append(len(possible))
        self.weight *= chance
        return outcome

    def pick(self, probs, places, draw=0):
        assert len(probs) == len(places) <= 1
        return [self.branch({token: p / sum(row) for token, p in enumerate(row)}) for row in probs.tolist()]

    def accepts(self, chance, place, draw):
        assert 0 <= chance <= 1
        return self.branch({True: chance, False: 1 - chance})

    def draw(self, probs, places, many, draws):
        rows = []
        for row, place in zip(probs, places, strict=True):
            left, taken = row.clone(), []
            for _ in range(many):  # one after the other; where nothing is left, what is impossible
                taken += self.pick(left[None], [place]) if left.any() else [next(t for t in range(V) if t not in taken)]
                left[taken[-1]] = 0.0
            rows.append(taken)
        return torch.tensor(rows)


def outcomes(run: Callable[[Branching], object], like: Sampler) -> Iterator[tuple[object, float]]:
    """Every result of `run` with its probability."""
    script: list[int] = []
    while True:
        sampler = Branching(like, script)
        yield run(sampler), sampler.weight
        while script and script[-1] + 1 == sampler.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def distribution(verifier, shape: dict[int, list[int]], sampled: bool, setting: str) -> Tensor:
    """[6, 6, 6]: how drafting and verifying, round after round, says three tokens."""

    @cache
    def a_round(text: tuple[int, int], left: int) -> dict[tuple[int, ...], float]:
        """Emitted tokens of one round after `text`, with their probability. At most `left` drafts make sense."""

        def run(sampler: Branching) -> tuple[int, ...]:
            def drawn(q: Tensor, many: int) -> list[list[int]]:
                return sampler.draw(q, [(0, 0)], many, [0]).tolist()

            tree = draft([text], shape, drawn if sampled else likeliest, left, sampled)
            verdict = verifier(tree, at_nodes(tree, [text]), sampler, [(0, 0)])
            return tuple(emitted(tree, verdict)[0][:left])

        found: dict[tuple[int, ...], float] = defaultdict(float)
        for tokens, chance in outcomes(run, SETTINGS[setting]):
            found[tokens] += chance
        return found

    return said(a_round)


def said(a_round: Callable[[tuple[int, int], int], dict[tuple[int, ...], float]]) -> Tensor:
    """[6, 6, 6]: how rounds of these outcomes, one after the other, say three tokens."""
    total = torch.zeros(V, V, V, dtype=torch.float64)
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    while open_texts:
        text, chance = open_texts.popitem()
        if len(text) == 3:
            total[text] += chance
            continue
        for tokens, share in a_round((*START, *text)[-2:], 3 - len(text)).items():
            open_texts[*text, *tokens] = open_texts.get((*text, *tokens), 0.0) + chance * share
    return total


EXACT = [
    (walk, CHAIN, False),
    (walk, TREE, False),
    (reject, CHAIN, False),
    (reject, TREE, False),
    (reject, CHAIN, True),
    (reject, SMALL, True),
]
NAMES = ["walk chain", "walk tree", "reject chain", "reject tree", "reject sampled chain", "reject sampled tree"]
exactly = pytest.mark.parametrize(("verifier", "shape", "sampled"), EXACT, ids=NAMES)


@exactly
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_three_token_output_has_the_targets_probability(verifier, shape, sampled, setting) -> None:
    found = distribution(verifier, shape, sampled, setting)
    assert abs(float(found.sum()) - 1) < 1e-9
    assert float((found - truth(setting)).abs().max()) <= 1e-6


# ---------------------------------------------------------------- draws, and verifiers broken on purpose


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p of these counts [cells] under these expectations; rare cells are pooled, impossible ones must be empty."""
    if bool(counts[expected == 0].any()):
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    there = expected > 0
    statistic = ((counts[there] - expected[there]) ** 2 / expected[there]).sum()
    return float(torch.special.gammaincc((there.sum() - 1) / 2, statistic / 2))


def drawn(
    verifier, shape: dict[int, list[int]], sampled: bool, setting: str, rows: int = 20_000, seed: int = 0
) -> float:
    """p of the chi-square of `rows` three-token outputs drawn with the sampler's real noise."""
    like = SETTINGS[setting]
    sampler = Sampler(like.temperature, like.top_k, like.top_p, seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(q: Tensor, many: int) -> list[list[int]]:
        return (
            torch.multinomial(q, many, replacement=False, generator=generator).tolist()
            if sampled
            else likeliest(q, many)
        )

    texts = [list(START) for _ in range(rows)]
    live = list(range(rows))
    while live:
        now = [texts[row] for row in live]
        tree = draft(now, shape, draw, 3, sampled)
        verdict = verifier(tree, at_nodes(tree, now), sampler, [(row, len(texts[row])) for row in live])
        for row, tokens in zip(live, emitted(tree, verdict), strict=True):
            texts[row] += tokens
        live = [row for row in live if len(texts[row]) < len(START) + 3]
    index = torch.tensor([text[2:5] for text in texts]) @ torch.tensor([V * V, V, 1])
    return chi_square(torch.bincount(index, minlength=V**3).double(), rows * truth(setting).flatten())


@exactly
def test_twenty_thousand_draws_fit_the_target(verifier, shape, sampled) -> None:
    assert drawn(verifier, shape, sampled, "T=0.7") > 1e-3


def bonus_unprocessed(verifier, tree, logits, sampler, places):
    verdict = verifier(tree, logits, sampler, places)
    ends = [path[-1] for path in verdict.paths]
    raw = logits[torch.arange(len(ends)), ends].softmax(-1)
    there = [(row, position + len(path) - 1) for (row, position), path in zip(places, verdict.paths, strict=True)]
    return Verdict(verdict.paths, sampler.pick(raw, there, draw=9))


def other_q(verifier, tree, logits, sampler, places):
    flat = (tree.q > 0).to(tree.q.dtype)
    return verifier(
        DraftTree(tree.tokens, tree.parents, tree.size, tree.logp, flat / flat.sum(-1, keepdim=True).clamp(min=1)),
        logits,
        sampler,
        places,
    )


@pytest.mark.parametrize(
    ("verifier", "shape", "sampled"),
    [
        (partial(bonus_unprocessed, walk), CHAIN, False),
        (partial(bonus_unprocessed, reject), SMALL, True),
        (partial(other_q, reject), CHAIN, True),
        (partial(other_q, reject), SMALL, True),
    ],
    ids=["walk: bonus unprocessed", "reject: bonus unprocessed", "chain: another q", "tree: another q"],
)
def test_a_broken_verifier_is_found_out(verifier, shape, sampled) -> None:
    assert drawn(verifier, shape, sampled, "T=0.7") < 1e-6


@pytest.mark.parametrize(("sampled", "shape"), [(False, TREE), (True, SMALL)])
@pytest.mark.parametrize("fault", ["not taken", "not renormalised"])
def test_a_broken_residual_is_found_out(fault: str, sampled: bool, shape, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: Tensor, q: Tensor | None, tokens: list[int]) -> Tensor:
        if fault == "not taken":
            return p
        chosen = torch.zeros_like(p).scatter(1, torch.tensor(tokens, dtype=torch.long)[:, None], torch.inf)
        return (p - (chosen if q is None else q)).clamp(min=0)

    monkeypatch.setattr(verify, "_residual", broken)
    assert drawn(reject, shape, sampled, "T=0.7") < 1e-6


# ---------------------------------------------------------------- drafts drawn by grow itself


class Table(Drafter):
    """Drafts from DRAFTER: the feature is the last token but one, the state both."""

    def __init__(self, vocab_map: Tensor | None = None):
        super().__init__(Options(name="table"), Shape(1, 1, V))
        self.map_ = vocab_map

    @property
    def vocab_map(self) -> Tensor | None:
        return self.map_

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        return tokens[..., None], torch.cat([feature, tokens[..., None]], -1)

    def head(self, state: Tensor, depth: int) -> Tensor:
        logits = three_wide(DRAFTER[state[..., 0], state[..., 1]].float())
        return logits if self.map_ is None else logits[..., self.map_]


def grown(
    texts: Sequence[Sequence[int]],
    shape: StaticShape,
    sampler: Sampler,
    left: int,
    places: Sequence[tuple[int, int]],
    drafter: Drafter,
) -> DraftTree:
    before, last = torch.tensor([text[-2:] for text in texts]).unbind(1)
    ctx = Context(torch.zeros(len(texts), 1, dtype=torch.long), torch.ones(len(texts), dtype=torch.long))
    allowed = [left] * len(texts)
    return grow(drafter, shape, before[:, None, None], last[:, None], ctx, allowed, V, sampler, places)


# With a gap in the ranks, as measured trees have: drawn, the children are the first two.
DRAWN = {"chain": chain(2), "tree": StaticShape(((0,), (3,), (3, 1)))}
FEW = torch.tensor([1, 2, 3, 4, 5])  # a draft vocabulary
any_drawn = pytest.mark.parametrize("shape", DRAWN.values(), ids=DRAWN)
whose = pytest.mark.parametrize("drafter", [Table(), Table(FEW)], ids=["all ids", "some ids"])


@whose
@any_drawn
def test_a_node_is_drawn_from_the_distribution_that_the_tree_says(shape: StaticShape, drafter: Table) -> None:
    """Every outcome of growing, its chance multiplied from the tree's own q, without replacement."""
    sampler = SETTINGS["top-k 4, top-p 0.8"]
    ids = FEW if drafter.map_ is not None else torch.arange(V)
    trees = list(outcomes(lambda s: grown([START], shape, s, 3, [(0, 0)], drafter), sampler))
    assert len(trees) > 3
    for tree, chance in trees:
        assert isinstance(tree, DraftTree) and tree.q is not None
        expected, words = 1.0, tree.tokens[0].tolist()
        for node in range(int(tree.size[0])):
            children = [c for c in range(1, int(tree.size[0])) if tree.parents[0, c] == node]
            parent = START[0] if node == 0 else words[tree.parents[0, node]]
            if children:
                own = torch.zeros(V, dtype=torch.float64)
                own[ids] = processed(three_wide(DRAFTER[parent, words[node]])[ids], sampler)
                torch.testing.assert_close(tree.q[0, node].double(), own, atol=1e-6, rtol=0)
            left = tree.q[0, node].clone()
            for child in children:
                expected *= float(left[words[child]] / left.sum())
                left[words[child]] = 0.0
        assert abs(chance - expected) < 1e-6
    assert abs(sum(chance for _, chance in trees) - 1) < 1e-6


@any_drawn
@pytest.mark.parametrize(
    ("setting", "drafter"), [("T=1", Table(FEW)), ("top-k 4, top-p 0.8", Table())], ids=["some ids", "all ids"]
)
def test_every_output_of_drawn_drafts_has_the_targets_probability(setting: str, shape, drafter: Table) -> None:
    @cache
    def a_round(text: tuple[int, int], left: int) -> dict[tuple[int, ...], float]:
        def run(sampler: Branching) -> tuple[int, ...]:
            tree = grown([text], shape, sampler, left, [(0, 0)], drafter)
            return tuple(emitted(tree, reject(tree, at_nodes(tree, [text]), sampler, [(0, 0)]))[0][:left])

        found: dict[tuple[int, ...], float] = defaultdict(float)
        for tokens, chance in outcomes(run, SETTINGS[setting]):
            found[tokens] += chance
        return found

    assert float((said(a_round) - truth(setting)).abs().max()) <= 1e-6


def drawn_by_grow(shape: StaticShape, drafter: Drafter, setting: str, faulty=None, rows: int = 20_000) -> float:
    """p of the chi-square of `rows` three-token outputs, all with the sampler's real noise. faulty: changes a tree."""
    sampler = SETTINGS[setting]
    texts, live = [list(START) for _ in range(rows)], list(range(rows))
    while live:
        now = [texts[row] for row in live]
        places = [(row, len(texts[row])) for row in live]
        tree = grown(now, shape, sampler, 3, places, drafter)
        if faulty is not None:
            faulty(tree)
        verdict = reject(tree, at_nodes(tree, now), sampler, places)
        for row, tokens in zip(live, emitted(tree, verdict), strict=True):
            texts[row] += tokens
        live = [row for row in live if len(texts[row]) < len(START) + 3]
    index = torch.tensor([text[2:5] for text in texts]) @ torch.tensor([V * V, V, 1])
    return chi_square(torch.bincount(index, minlength=V**3).double(), rows * truth(setting).flatten())


@any_drawn
def test_twenty_thousand_outputs_of_drawn_drafts_fit_the_target(shape: StaticShape) -> None:
    assert drawn_by_grow(shape, Table(), "T=0.7") > 1e-3


def _of_temperature_1(tree: DraftTree) -> None:
    assert tree.q is not None
    tree.q = (tree.q**0.7) / (tree.q**0.7).sum(-1, keepdim=True).clamp(min=1e-9)


def _of_the_node_before(tree: DraftTree) -> None:
    assert tree.q is not None
    tree.q = tree.q.roll(1, 1)


@any_drawn
@pytest.mark.parametrize("fault", [_of_temperature_1, _of_the_node_before])
def test_a_q_that_was_not_drawn_from_is_found_out(fault: Callable[[DraftTree], None], shape: StaticShape) -> None:
    assert drawn_by_grow(shape, Table(), "T=0.7", fault, rows=5_000) < 1e-6


# ---------------------------------------------------------------- inputs, repetition, greedy


def batch(sampled: bool) -> tuple[DraftTree, Tensor]:
    texts = [[a, b] for a, b in product(range(V), repeat=2)]
    generator = torch.Generator().manual_seed(0)
    tree = draft(texts, TREE, lambda q, many: torch.multinomial(q, many, generator=generator).tolist(), 3, sampled)
    return tree, at_nodes(tree, texts)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, seed=5), Sampler(1.0, 3, 0.9)], ids=["greedy", "T", "top"])
@pytest.mark.parametrize("verifier", [walk, reject, typical])
@pytest.mark.parametrize("sampled", [False, True])
def test_verifying_writes_nothing_and_repeats_itself(verifier, sampler: Sampler, sampled: bool) -> None:
    tree, logits = batch(sampled)
    inputs = [tree.tokens, tree.parents, tree.size, tree.logp, logits, *([tree.q] if sampled else [])]
    before = [tensor.clone() for tensor in inputs]
    places = [(row, 7) for row in range(len(logits))]
    first = verifier(tree, logits, sampler, places)
    assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
    assert verifier(tree, logits, sampler, places) == first


def test_greedy_verifiers_agree_and_follow_the_argmax() -> None:
    tree, logits = batch(False)
    places = [(row, 7) for row in range(len(logits))]
    verdict = walk(tree, logits, Sampler(), places)
    assert verdict == reject(tree, logits, Sampler(), places) == typical(tree, logits, Sampler(), places)
    assert max(map(len, verdict.paths)) == 3, "the toy must accept something"
    for row, path in enumerate(verdict.paths):
        best = logits[row].argmax(-1).tolist()
        assert [int(tree.tokens[row, node]) for node in path[1:]] == [best[node] for node in path[:-1]]
        assert verdict.bonus[row] == best[path[-1]]


@pytest.mark.parametrize("verifier", [walk, reject])
def test_what_matches_after_a_miss_is_not_accepted(verifier) -> None:
    matches = [[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    tokens = torch.tensor([[0, *(1 if match else 3 for match in row)] for row in matches])
    logits = torch.zeros(3, 6, V)
    logits[..., 1] = 5.0  # whatever came before, the target says 1
    chain = torch.arange(-1, 5).expand(3, -1)
    verdict = verifier(DraftTree(tokens, chain, torch.full((3,), 6), tokens * 0.0), logits, Sampler(), [(0, 1)] * 3)
    assert [len(path) - 1 for path in verdict.paths] == [2, 0, 5]
    assert verdict.bonus == [1, 1, 1]


def test_padding_is_never_accepted() -> None:
    tokens = torch.tensor([[2, 1, 1]])  # node 2 is padding, although it carries the target's token
    logits = torch.zeros(1, 3, V)
    logits[0, :, 1] = 5.0
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 1]]), torch.tensor([2]), tokens * 0.0)
    assert walk(tree, logits, Sampler(), [(0, 1)]) == Verdict([[0, 1]], [1])


def test_typical_acceptance_takes_what_is_likely_enough_and_no_more() -> None:
    tokens = torch.tensor([[0, 1, 2, 3]])
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0, 0]]), torch.tensor([4]), tokens * 0.0)
    logits = torch.tensor([0.01, 0.3, 0.6, 0.05, 0.02, 0.02]).log().expand(1, 4, -1)
    assert typical(tree, logits, Sampler(1.0), [(0, 1)]).paths == [[0, 2]]  # of two typical ones the likelier
    alone = DraftTree(tokens[:, [0, 3]], torch.tensor([[-1, 0]]), torch.tensor([2]), tokens[:, :2] * 0.0)
    assert typical(alone, logits[:, :2], Sampler(1.0), [(0, 1)]).paths == [[0]]
    assert typical(alone, logits[:, :2], Sampler(1.0), [(0, 1)], epsilon=0.04).paths == [[0, 1]]


# ---------------------------------------------------------------- the sampler


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sampler_means_what_its_options_say(setting: str) -> None:
    for rows in TARGET:
        wanted = torch.stack([processed(row, SETTINGS[setting]) for row in rows])
        torch.testing.assert_close(SETTINGS[setting].probs(rows), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("spread", [0.1, 8.0])  # flat: the nucleus is wider than the partial sort; peaked: it is not
def test_a_nucleus_is_the_same_whichever_way_it_is_found(spread: float) -> None:
    logits = spread * torch.randn(3, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs = Sampler(1.0, top_p=0.9).probs(logits)
    for row, whole in zip(probs, logits.softmax(-1), strict=True):
        order = whole.argsort(descending=True)
        size = int((whole[order].cumsum(0) < 0.9).sum()) + 1
        assert set(row.nonzero()[:, 0].tolist()) == set(order[:size].tolist())
        torch.testing.assert_close(row[order[:size]], whole[order[:size]] / whole[order[:size]].sum())
    torch.testing.assert_close(probs[1:2], Sampler(1.0, top_p=0.9).probs(logits[1:2]), atol=0, rtol=0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-5])
def test_a_temperature_of_nothing_is_greedy(temperature: float) -> None:
    logits = TARGET.flatten(0, 1)
    places = [(row, 0) for row in range(len(logits))]
    sampler = Sampler(temperature)
    assert sampler.choose(logits, places) == logits.argmax(-1).tolist()
    assert not sampler.probs(logits).isnan().any() and bool((sampler.probs(logits).sum(-1) == 1).all())


def test_seeds_rows_positions_and_draws_have_noise_of_their_own() -> None:
    flat = torch.zeros(1, V)
    assert len({Sampler(1.5, seed=seed).choose(flat, [(0, 0)])[0] for seed in range(64)}) == V
    sampler = Sampler(1.0)
    noise = [
        sampler.uniform((row, position), draw) for row in range(10) for position in range(10) for draw in range(10)
    ]
    assert len(set(noise)) == 1000 and all(0 <= u < 1 for u in noise)
    assert abs(sum(noise) / 1000 - 0.5) < 4 * math.sqrt(1 / 12 / 1000)


def test_the_noise_is_splitmix64s() -> None:
    """Against the generator as it is published, one number at a time; the same on every device, and never 0."""
    sampler, places = Sampler(1.0, seed=3), [(0, 0), (41, 7)]
    noise = sampler.exponentials(places, [0, 2], 300)
    for row, (place, draw) in enumerate(zip(places, [0, 2], strict=True)):
        state, expected = sampler._key(place, draw), []
        for _ in range(300):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            expected.append(-math.log((((mixed ^ mixed >> 31) >> 11) + 0.5) / 2**53))
        torch.testing.assert_close(noise[row], torch.tensor(expected), atol=0, rtol=1e-6)
    many = sampler.exponentials([(row, 0) for row in range(100)], [0] * 100, 10_000).double()
    assert abs(many.mean() - 1) < 4e-3 and abs(many.var() - 1) < 12e-3  # four standard errors of a million draws
    assert bool((many > 0).all())


def test_a_pick_has_its_distribution_and_is_the_rows_own() -> None:
    probs = torch.tensor([[0.0, 3.0, 0.5, 0.0, 6.0, 0.5]])  # not normalised
    many = 20_000
    picked = Sampler(1.0).pick(probs.expand(many, -1), [(row, 7) for row in range(many)])
    found = torch.bincount(torch.tensor(picked), minlength=6).double()
    assert found[0] == found[3] == 0, "an impossible token is never picked"
    expected = probs[0].double() / probs.sum() * many
    possible = expected > 0
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 16.3  # chi-square of 3 degrees of freedom, p > 1e-3
    assert picked[41:43] == Sampler(1.0).pick(probs.expand(2, -1), [(41, 7), (42, 7)])
    assert Sampler(1.0).pick(probs[:0], []) == []


def test_rounding_hardly_ever_picks_another_token() -> None:
    """Passes of other widths give logits that differ by some 1e-5: seed for seed, the text must still be the same."""
    noise = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 50_000, generator=noise)  # a tenth of the mass lies in a tail of tiny probabilities
    places = [(row, 0) for row in range(500)]
    exact, rounded = (
        Sampler(1.0).pick((logits + off * torch.randn(500, 50_000, generator=noise)).softmax(-1), places)
        for off in (0.0, 1e-5)
    )
    assert len(set(exact)) > 200 and sum(a != b for a, b in zip(exact, rounded, strict=True)) <= 1
