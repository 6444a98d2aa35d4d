"""A conversation's caches: what is held is what would have been read anew, for every family of drafter."""

import pytest
import torch
from fakes import target_of

from paceline.conf.entry import load
from paceline.decode import Decoder, Held, Sampler, chain, tree
from paceline.models import target as targets
from paceline.models.cache import SLICE
from paceline.models.drafter import Drafter, Shape, build, options
from paceline.models.target import Target

FIRST, SECOND, OTHER = [3, 1, 4, 1, 5, 9], [2, 6, 5], [3, 1, 4, 2, 2]
METHODS = {
    "medusa": "medusa",
    "hydra_heads": "medusa",
    "eagle3": "eagle",
    "mtp": "mtp",
    "mtp_sequential": "mtp",
    "draft": "draft",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(num_hidden_layers=4)


def drafter_of(name: str, target: Target, *options_: str) -> Drafter | None:
    """Untrained, random enough to draft varied nonsense."""
    if name in ("none", "ngram"):
        return None if name == "none" else build(options("ngram")(name="ngram"), Shape.of(target))
    own = [] if name == "draft" else ["method.draft_vocab=null"]
    asked = load(METHODS[name], "target=tiny", f"method={name}", *own, *options_).method
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build(asked.fitted(target), Shape.of(target))
        drafter.borrow(target)
        drafter.start(target)
        for parameter in drafter.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return drafter.eval()


@pytest.mark.parametrize("rows", [SLICE, 4])
@pytest.mark.parametrize("name", ["none", "ngram", *METHODS])
def test_what_is_held_decodes_like_what_is_read_anew(
    name: str, rows: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (targets, tree):
        monkeypatch.setattr(module, "SLICE", rows)
    decoder = Decoder(target, drafter_of(name, target), chain(3))
    held, sampler = Held(), Sampler(temperature=0.8, seed=1)
    said = decoder.generate([FIRST], 10, held=held, sampler=sampler)
    prompt = FIRST + said.tokens[0] + SECOND
    for words, least in ((prompt, len(FIRST) + 9), (OTHER, 3), (prompt, 3), (prompt, len(prompt) - 1)):
        kept = decoder.generate([words], 10, held=held, sampler=sampler)
        fresh = decoder.generate([words], 10, sampler=sampler)
        assert kept.tokens == fresh.tokens and kept.report == fresh.report and kept.gained == fresh.gained
        assert fresh.reused == 0 and least <= kept.reused < len(words)
        assert held.cache is not None and held.cache.length.tolist() == [len(held.ids)]


def test_a_stream_that_was_dropped_or_failed_leaves_nothing_wrong_behind(target: Target) -> None:
    decoder, held = Decoder(target, drafter_of("medusa", target), chain(3)), Held()
    expected = decoder.generate([FIRST], 12).tokens
    stream = decoder.stream([FIRST], 12, held=held)
    for _ in range(3):
        next(stream)

    def failing(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Decoder(target, decoder.drafter, chain(3), verify=failing).generate([FIRST], 12, held=held)
    assert decoder.generate([FIRST], 12, held=held).tokens == expected


def test_an_interrupt_while_states_are_joined_leaves_no_ids_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    held.add(FIRST, torch.zeros(1, len(FIRST), 5))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, "cat", interrupted)
        held.add(SECOND, torch.zeros(1, len(SECOND), 5))
    assert held.ids == FIRST and held.hidden is not None and held.hidden.shape == (1, len(FIRST), 5)


def test_a_conversation_that_outgrows_its_cache_is_read_again(target: Target) -> None:
    decoder, held = Decoder(target), Held(least=0)
    text = list(FIRST)
    reused = []
    for _ in range(5):
        made = decoder.generate([text], 8, held=held)
        assert made.tokens == decoder.generate([text], 8).tokens
        reused.append(made.reused)
        text += made.tokens[0] + SECOND
    assert reused.count(0) == 2 and reused[1] > 0  # there is room for twice as much each time: 30, then 74
    with pytest.raises(ValueError, match="one conversation"):
        decoder.generate([FIRST, FIRST], 2, held=held)
