"""Which tree pays: what a record says of a tree is what decoding with it does, and the choice follows the costs."""

from collections.abc import Iterator

import pytest
import torch
from fakes import Dictated, slow_greedy, target_of

from paceline.decode import Decoder, tree
from paceline.decode.cost import NODES, WIDTHS, Cost, measure
from paceline.decode.pays import PLAIN, Candidate, Grown, Record, outcome, play, prospect, prospects
from paceline.models import target as targets
from paceline.models.target import Target

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
NEW, DEEPEST = 40, 8
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2], [0, 0, 1], [0, 0, 0, 0]]
RANKS = (0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 12)  # of the true token, place after place
CANDIDATES = [
    PLAIN,
    Candidate("chain", 2, 1),
    Candidate("chain", 6, 5),
    Candidate("static", 4, 2),
    Candidate("static", 10, 6),
    Candidate("dynamic", 64, 6, 8),
    Candidate("dynamic", 12, 4, 8),
    Candidate("dynamic", 12, 4, 3),
    Candidate("dynamic", 64, 6, 8, node_cost=0.03),
    Candidate("dynamic", 24, 6, 8, node_cost=0.01, depth_cost=0.7),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[list[int], list[int]]]:
    return [(prompt, slow_greedy(target, prompt, NEW + DEEPEST)) for prompt in PROMPTS]


def drafter_of(texts: list[tuple[list[int], list[int]]]) -> Dictated:
    return Dictated([prompt + answer for prompt, answer in texts], lambda place: RANKS[place % len(RANKS)])


@pytest.fixture(scope="module")
def record(target: Target, texts: list[tuple[list[int], list[int]]]) -> Record:
    return play(target, drafter_of(texts), [(prompt, answer[:NEW]) for prompt, answer in texts], PATHS)


def decoded(target: Target, drafter: Dictated, candidate: Candidate, prompt: list[int]) -> Iterator[tuple[int, int]]:
    """(place in the answer of the root, accepted drafts) of each round that is far from the end."""
    drafter = None if candidate is PLAIN else drafter
    place = -1
    for emitted in Decoder(target, drafter, candidate.shape(PATHS)).stream([prompt], NEW):
        if 0 <= place < NEW - DEEPEST - 1:
            yield place, emitted.drafted
        place += len(emitted.tokens)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_a_record_says_of_a_tree_what_decoding_with_it_does(
    target: Target, texts: list[tuple[list[int], list[int]]], record: Record, candidate: Candidate
) -> None:
    found, first = outcome(record, candidate, PATHS), 0
    drafter, played = drafter_of(texts), set()
    for (prompt, _), length in zip(texts, record.lengths, strict=True):
        rounds = list(decoded(target, drafter, candidate, prompt))
        assert len(rounds) > 4
        for place, accepted in rounds:
            assert found.accepted[first + place] == accepted, place
            played.add(accepted)
        assert record.context[first] == len(prompt)
        first += length
    assert len(played) > 1 or candidate is PLAIN
    assert int(found.nodes.max()) <= candidate.nodes


def test_a_long_text_is_recorded_in_slices(
    target: Target, texts: list[tuple[list[int], list[int]]], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, run = [], targets.trunk_pass
    monkeypatch.setattr(targets, "trunk_pass", lambda *a, **b: (widths.append(a[1].shape[1]), run(*a, **b))[1])
    for module in (targets, tree):
        monkeypatch.setattr(module, "SLICE", 4)
    again = play(target, drafter_of(texts), [(prompt, answer[:NEW]) for prompt, answer in texts], PATHS)
    assert max(widths) == 4
    for kind, grown in record.grown.items():
        assert torch.equal(again.grown[kind].true, grown.true) and torch.equal(again.grown[kind].rank, grown.rank)


def test_the_nodes_and_levels_of_a_record_are_those_that_are_grown(
    target: Target, texts: list[tuple[list[int], list[int]]], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, steps, seen = drafter_of(texts), [], []
    step = Dictated.step
    monkeypatch.setattr(Dictated, "step", lambda *a: (steps.append(a[2].shape[1]), step(*a))[1])
    for candidate in CANDIDATES[1:]:
        found = outcome(record, candidate, PATHS)

        def verify(tree, *given, found=found):
            from paceline.decode import walk

            seen.append((tree.tokens.shape[1], steps[1:]))
            steps.clear()
            return walk(tree, *given)

        prompt, place = PROMPTS[0], -1
        for emitted in Decoder(target, drafter, candidate.shape(PATHS), verify).stream([prompt], NEW):
            if 0 <= place < NEW - DEEPEST - 1:
                nodes, unfolded = seen.pop()
                assert nodes == found.nodes[place]
                assert [n for n in found.unfolded[place].tolist() if n] == unfolded
            steps.clear()
            place += len(emitted.tokens)


def costs(node: float, level: float, first: float = 0.001) -> Cost:
    """A pass of 20 ms, and `node` and `level` seconds for each more."""
    passes = [(1, context, n, 0.02 + node * (n - 1)) for context in (32, 288) for n in NODES]
    return Cost({}, passes, [(1, first)], [(1, w, level) for w in WIDTHS], [(1, 0.001)])


def test_the_choice_follows_the_costs(record: Record) -> None:
    assert prospects(record, costs(0.5, 0.001), 1, PATHS)[0].candidate == PLAIN, "no draft is worth a pass each"
    assert prospects(record, costs(0.0, 0.0), 1, PATHS)[0].candidate.nodes == 64
    dear = prospects(record, costs(0.002, 0.0005), 1, PATHS)[0]
    assert 1 < dear.nodes < 16
    best = prospects(record, costs(0.0005, 0.001), 1, PATHS)
    assert [one.tokens_per_second for one in best] == sorted((one.tokens_per_second for one in best), reverse=True)
    (plain,) = (one for one in best if one.candidate == PLAIN)
    assert plain.tokens_per_second == pytest.approx(1 / 0.021) and plain.mean_acceptance_length == 1
    thresholds = sorted({one.candidate.node_cost for one in best if one.candidate.tree == "dynamic"})
    usual = best[0].tokens_per_second * 0.0005  # what a node costs, in the tokens that its time is worth
    assert thresholds == pytest.approx([0, 0.5 * usual, usual, 2 * usual], rel=0.05)


def test_rows_decoded_together_wait_for_the_widest_of_them() -> None:
    promise = torch.tensor([[1.0, 0.9], [1.0, 0.1]]).repeat(4, 1)  # every other place promises a node
    root = torch.tensor([True, False]).expand(8, -1)
    places = torch.zeros(8, 2, dtype=torch.long)
    grown = Grown((~root).long(), places, places, root, promise)
    record, candidate = Record([8], torch.full((8,), 32), {"dynamic": grown}), Candidate("dynamic", 2, 1, 1, 0.5)
    alone, together = (prospect(record, costs(0.02, 0.0), candidate, rows, PATHS) for rows in (1, 4))
    assert (alone.nodes, together.nodes) == (1.5, 1.5) and alone.mean_acceptance_length == 1
    assert alone.tokens_per_second == pytest.approx(8 / (4 * 0.022 + 4 * 0.042))
    assert together.tokens_per_second == pytest.approx(8 / (2 * 0.042))


def test_costs_lie_on_the_lines_between_what_was_measured() -> None:
    cost = Cost(
        {},
        [(1, 32, 1, 1.0), (1, 32, 3, 2.0), (1, 32, 4, 4.0), (1, 288, 1, 1.0 + 256), (4, 32, 1, 9.0)],
        [(1, 0.5), (4, 0.75)],
        [(1, 1, 0.25), (1, 3, 0.75)],
        [(1, 0.125), (4, 0.5)],
    )
    nodes = torch.tensor([1, 2, 3, 4, 5])
    assert cost.target(1, torch.tensor(32.0), nodes).tolist() == [1.0, 1.5, 2.0, 4.0, 6.0]
    assert cost.target(1, torch.tensor(34.0), nodes).tolist() == [3.0, 3.5, 4.0, 6.0, 8.0]
    assert cost.target(5, torch.tensor(32.0), nodes[:1]).tolist() == [9.0], "the nearest number of rows"
    assert cost.drafting(1, torch.tensor([[0, 0], [1, 0], [1, 2]])).tolist() == [0.5, 0.75, 1.25]
    assert cost.others(3) == 0.5


def test_a_machine_is_measured_as_it_decodes(target: Target, texts: list[tuple[list[int], list[int]]]) -> None:
    from paceline.models.drafter import Shape, build, options

    drafter = build(options("medusa")(name="medusa", heads=2), Shape.of(target_of("llama", vocab_size=64)))
    drafter.start(target)
    cost = measure(target, drafter, rows=(1, 3), made={"machine": "this"})
    assert cost.made == {"machine": "this"}
    assert {b for b, *_ in cost.passes} == {b for b, _ in cost.first} == {b for b, _ in cost.rest} == {1, 3}
    assert all(seconds > 0 for *_, seconds in cost.passes + cost.first + cost.rest)
    assert Cost(**cost.as_dict()).target(1, torch.tensor(40.0), torch.tensor([1, 48])).min() > 0
