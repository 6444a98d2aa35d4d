"""What drafters promise apart from training and decoding: Medusa heads start as the target's own, n-grams look back."""

import copy
import random

import pytest
import torch
from fakes import VOCAB, target_of

from paceline.models.drafter import Context, Drafter, Shape, build, methods, options
from paceline.models.errors import Refusal
from paceline.models.target import Target

IDS = torch.tensor([[5, 9, 2, 40, 9, 2]])


@pytest.fixture(scope="module", params=["llama", "granite", "phi"])  # plain, with a multiplier, with a bias
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


def medusa(target: Target, ids: torch.Tensor | None = None, **more) -> Drafter:
    opts = options("medusa")(name="medusa", heads=3, draft_vocab=None if ids is None else len(ids), **more)
    drafter = build(opts, Shape.of(target), ids)
    drafter.start(target)
    drafter.borrow(target)
    return drafter


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("ids", [None, torch.tensor([0, 7, 8, 63])], ids=["all ids", "some ids"])
@torch.no_grad()
def test_fresh_heads_say_what_the_target_says(target: Target, output: str, ids: torch.Tensor | None) -> None:
    drafter = medusa(target, ids, output=output, blocks=2)
    hidden, last = target(IDS, drafter.taps)
    theirs = target.head.rows(ids)(last)
    if output == "own" and target.head.bias is not None:
        theirs -= target.head.rows(ids).bias  # heads have none, nor do the engines that read them
    for depth in range(3):
        feature, state = drafter.step(drafter.read(hidden), IDS, depth, Context(IDS, IDS[:, 0]))
        assert torch.equal(feature, hidden)
        torch.testing.assert_close(drafter.head(state, depth), theirs, atol=1e-5, rtol=1e-5)


def test_every_head_and_block_has_weights_of_its_own(target: Target) -> None:
    drafter = medusa(target, blocks=2)
    places = [parameter.data_ptr() for parameter in drafter.parameters()]
    assert len(places) == len(set(places)) == 3 * (2 * 2 + 1)
    assert target.head.weight.data_ptr() not in places


def test_a_gradient_reaches_a_shared_head_only_where_it_is_trained(target: Target) -> None:
    drafter, weight = medusa(target, output="shared"), target.head.weight
    for trained in (False, True):
        state = torch.randn(4, 32, requires_grad=True)
        try:
            weight.requires_grad_(trained)
            drafter.head(drafter.blocks[0](state), 0).sum().backward()  # type: ignore[union-attr, operator]
            assert (weight.grad is not None) == trained and state.grad is not None
        finally:
            weight.grad = None
            weight.requires_grad_(False)
        assert all(parameter.grad is not None for parameter in drafter.blocks[0].parameters())
    assert set(drafter.state_dict()) == {name for name, _ in drafter.named_parameters()}, (
        "what is borrowed is not saved"
    )


def test_a_shared_head_that_was_not_lent_is_loud(target: Target) -> None:
    drafter = build(options("medusa")(name="medusa", output="shared"), Shape.of(target))
    with pytest.raises(RuntimeError, match="borrow"):
        drafter.head(torch.zeros(1, 32), 0)


@pytest.mark.parametrize("name", ["medusa", "eagle"])
@torch.no_grad()
def test_a_copy_has_weights_of_its_own_and_shares_what_is_the_targets(name: str, target: Target) -> None:
    opts = options(name)(name=name, output="shared").fitted(target)
    drafter = build(opts, Shape.of(target))
    drafter.borrow(target)
    copied = copy.deepcopy(drafter)
    places = [{parameter.data_ptr() for parameter in one.parameters()} for one in (drafter, copied)]
    assert not places[0] & places[1]
    ours, theirs = drafter.borrowed, copied.borrowed
    assert theirs.head is not None and ours.head is not None and theirs.head.weight is ours.head.weight
    assert theirs.embed == ours.embed  # of the very same target
    state = torch.randn(4, 32)
    assert copied.head(state, 0).equal(drafter.head(state, 0))


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    assert {"medusa", "ngram"} <= set(methods())
    with pytest.raises(Refusal, match=r"no such method; one of draft, eagle, .*medusa, .*ngram"):
        build(options("ngram")(name="medussa"), Shape(32, 3, VOCAB))


# ---------------------------------------------------------------- n-grams


def lookup(text: list[int], depths: int, **more: int) -> list[int | None]:
    """What n-grams draft after this text, fed in two pieces; None is silence."""
    drafter = build(options("ngram")(name="ngram", **more), Shape(32, 3, VOCAB))
    history, half = drafter.memory(1, len(text)), len(text) // 2
    history[0].extend(text[:1])
    for piece in (text[1:half], text[half:]):
        tokens = torch.tensor([[*piece, 63, 63]])  # padding, not to be remembered
        ctx = Context(torch.zeros_like(tokens), torch.tensor([len(piece)]), history)
        feature, state = drafter.step(drafter.read(torch.zeros(1, tokens.shape[1], 0)), tokens, 0, ctx)
    feature, state = feature[:, len(piece) - 1, None], state[:, len(piece) - 1, None]
    drafts: list[int | None] = []
    for depth in range(depths):
        if depth:
            feature, state = drafter.step(feature, torch.tensor([[drafts[-1] or 0]]), depth, ctx)
        logits = drafter.head(state, depth)[0, 0]
        drafts.append(int(logits.argmax()) if logits.max() > -torch.inf else None)
    return drafts


def test_ngrams_repeat_what_followed_the_longest_ending_that_came_before() -> None:
    #               [7 8] 1                [8] 2 (later, but shorter)     [7 8] again
    assert lookup([7, 8, 1, 3, 5, 4, 8, 2, 6, 7, 8], 4) == [1, 3, 5, 4]
    assert lookup([7, 8, 1, 3, 5, 4, 8, 2, 6, 7, 8], 2, longest=1) == [2, 6]
    assert lookup([7, 8, 1, 7, 8, 2, 9, 7, 8], 2) == [2, 9], "of equal ones the last"


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_the_match_is_the_one_that_a_search_of_the_whole_text_finds(shortest: int) -> None:
    def searched(text: list[int], longest: int) -> tuple[int, int]:
        lengths = {
            after: next(
                n for n in range(longest + 1) if n == min(after, longest) or text[after - 1 - n] != text[-1 - n]
            )
            for after in range(1, len(text))
        }
        best = max(lengths.items(), key=lambda found: (found[1], found[0]), default=(-1, 0))
        return best if best[1] >= shortest else (-1, 0)

    drafter = build(options("ngram")(name="ngram", shortest=shortest, longest=4), Shape(32, 3, VOCAB))
    (text,), drawn = drafter.memory(1, 0), random.Random(0)
    for _ in range(200):  # grown by a round's tokens at a time
        text.extend(drawn.choices(range(3), k=drawn.randint(1, 3)))
        assert drafter.last_match(text) == searched(list(text), 4), text


def test_ngrams_are_silent_where_nothing_came_before() -> None:
    assert lookup([1, 2, 3, 4], 2) == [None, None]
    assert lookup([1, 2, 3, 4, 2], 2, shortest=2) == [None, None]


def test_ngrams_go_on_repeating_what_repeats_at_the_texts_end() -> None:
    assert lookup([1, 2, 3, 3], 3) == [3, 3, 3]
    assert lookup([1, 8, 9, 8, 9], 5) == [8, 9, 8, 9, 8]
