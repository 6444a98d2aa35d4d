"""Prompts that wait: each takes the place of a text that is finished, and is drafted for as it would be by itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import target_of
from test_packed import compiled, half_target
from test_slices import DRAFTERS, FORK, PROMPTS, drafter

from paceline.decode import Decoder, DraftTree, DynamicShape, Sampler, StaticShape, Stream, walk
from paceline.decode.sampler import Place
from paceline.models.target import Target

NEW = 9
SAMPLER = Sampler(temperature=0.8, seed=2)
Trees = dict[Place, tuple[list[int], list[int], list[float]]]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(num_hidden_layers=4)


def watched(target: Target, drafts: Any, shape: Any) -> tuple[Decoder, Trees]:
    """A decoder, and what it drafts for each text at each place."""
    seen: Trees = {}

    def verify(tree: DraftTree, logits: torch.Tensor, sampler: Sampler, places: Sequence[Place]) -> Any:
        for row, place in enumerate(places):
            assert place not in seen, "a round came twice"
            size = int(tree.size[row])
            parts = tree.tokens[row], tree.parents[row], tree.logp[row]
            seen[place] = tuple(part[:size].tolist() for part in parts)  # type: ignore[assignment]
        return walk(tree, logits, sampler, places)

    return Decoder(target, drafts, shape, verify=verify), seen


def ends(target: Target) -> list[int]:
    """Ids that end some texts early, one of them with its first token."""
    said = Decoder(target).generate(PROMPTS, NEW, sampler=SAMPLER).tokens
    return [said[1][0], said[3][4]]


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("shape", [FORK, DynamicShape(9, 3, 2)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_is_drafted_for_and_written_as_by_itself(
    name: str, shape: StaticShape | DynamicShape, together: int, target: Target
) -> None:
    drafts, eos = drafter(name, target), ends(target)
    decoder, trees = watched(target, drafts, shape)
    stream = decoder.stream(PROMPTS, NEW, sampler=SAMPLER, eos=eos, together=together)
    events = list(stream)
    alone, others = watched(target, drafts, shape)
    for row, prompt in enumerate(PROMPTS):
        one = alone.generate([prompt], NEW, sampler=SAMPLER, eos=eos, rows=[row])
        assert stream.generation.tokens[row] == one.tokens[0]
        assert stream.generation.reports[row] == one.reports[0]
        mine = [event for event in events if event.row == row]
        assert [token for event in mine for token in event.tokens] == one.tokens[0]
        assert [event.finished for event in mine] == [False] * (len(mine) - 1) + [True]
    assert trees.keys() == others.keys()
    for place, (tokens, parents, logp) in trees.items():
        assert (tokens, parents) == others[place][:2]
        assert logp == pytest.approx(others[place][2], abs=1e-4)


def test_no_more_are_decoded_at_once_than_were_asked_for(target: Target) -> None:
    sizes = []

    def verify(tree: DraftTree, *others: Any) -> Any:
        sizes.append(len(tree.tokens))
        return walk(tree, *others)

    stream: Stream = Decoder(target, verify=verify).stream(PROMPTS, NEW, sampler=SAMPLER, eos=ends(target), together=3)
    said = list(stream)
    assert sizes[0] == max(sizes) == 3 and sorted(sizes, reverse=True) == sizes, "full until nobody waits"
    rounds = len(said) - len(PROMPTS)  # each text's first token is no round's
    assert sum(sizes) == rounds and len(sizes) <= rounds / 2
    with pytest.raises(ValueError, match="together: 0"):
        Decoder(target).stream(PROMPTS, NEW, together=0)


@compiled
@pytest.mark.parametrize("name", ["none", "ngram", "medusa", "eagle3", "lookup and eagle3"])
def test_in_bfloat16_too_by_the_kernels(name: str) -> None:
    target = half_target("llama")
    target.exact()
    drafts = None if name == "none" else drafter(name, target)
    if drafts is not None and name != "ngram":
        (drafts.drafter if name.startswith("lookup") else drafts).bfloat16().requires_grad_(False)
    prompts = [[*prompt, 7, 5] for prompt in PROMPTS]  # one row by itself is another product than two
    decoder = Decoder(target, drafts, None if name == "none" else FORK)
    said = decoder.generate(prompts, 30, together=3)
    for row, prompt in enumerate(prompts):
        one = decoder.generate([prompt], 30)
        assert (said.tokens[row], said.reports[row]) == (one.tokens[0], one.reports[0])
