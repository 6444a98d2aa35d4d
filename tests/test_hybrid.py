"""Lookup and a trained drafter as one: the right text, copies where it repeats itself, own drafts elsewhere."""

from typing import Any

import pytest
import torch
from chains import PROMPTS, TREE
from fakes import Dictated, slow_greedy, target_of
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.decode import Decoder, DynamicShape, Sampler, chain
from paceline.models.drafter import Context, Drafter, Shape, build, options
from paceline.models.errors import Refusal
from paceline.models.hybrid import TRUST, Hybrid
from paceline.models.target import Target

NEW = 24
SHAPES = {"chain": chain(3), "deep": chain(6), "static": TREE, "dynamic": DynamicShape(12, 5, 3, 0.01, 0.1)}


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


def drafter_of(target: Target, name: str) -> Drafter:
    """Untrained; of heads two, of EAGLE one with a draft vocabulary of some ids."""
    made = {"medusa": {"heads": 2}, "eagle": {"draft_vocab": 24}, "draft": {"target_layers": (0, 1)}, "mtp": {}}[name]
    known = torch.arange(0, 48, 2) if "draft_vocab" in made else None
    drafter = build(options(name)(name=name, **made).fitted(target), Shape.of(target), known)
    drafter.start(target)
    drafter.borrow(target)
    return drafter.eval()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["medusa", "eagle", "draft"])
def test_the_output_is_the_targets_in_a_ragged_batch(target: Target, name: str, shape: str) -> None:
    drafter = Hybrid(drafter_of(target, name), shortest=1)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], *PROMPTS[:2]]
    out = Decoder(target, drafter, SHAPES[shape]).generate(prompts, NEW)
    assert out.tokens == [slow_greedy(target, prompt, NEW) for prompt in prompts]
    warm = Sampler(0.9, seed=4)
    plain = Decoder(target).generate(prompts, NEW, sampler=warm)
    assert Decoder(target, drafter, SHAPES[shape]).generate(prompts, NEW, sampler=warm).tokens == plain.tokens


class Asked(TorchDispatchMode):
    """Counts the single numbers that Python asks of tensors: on a GPU, each waits for all that was begun."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_more_rows_ask_for_no_more_numbers(target: Target) -> None:
    decoder = Decoder(target, Hybrid(drafter_of(target, "medusa"), shortest=1), chain(3))
    asked = []
    for rows in (1, 4):
        with Asked() as numbers:
            passes = decoder.generate([[5, 6, 7, 5, 6]] * rows, NEW).passes
        asked.append((passes, numbers.count))
    assert asked[0] == asked[1]


def logits(drafter: Drafter, text: list[int], path: list[int]) -> torch.Tensor:
    """[V] of what follows `path`, drafted behind `text`; float32 log-probabilities."""
    memory = drafter.memory(1, len(text) + len(path) + 1)
    places = torch.arange(-1, len(text) - 1)[None]
    feature = drafter.read(torch.zeros(1, len(text), 32 * len(drafter.taps)))
    ctx = Context(places, torch.tensor([len(text)]), memory)
    feature, state = drafter.step(feature, torch.tensor([text]), 0, ctx)
    feature, state = feature[:, -1:], state[:, -1:]
    for depth, word in enumerate(path, start=1):
        at = Context(places[:, -1:] + depth, torch.tensor([1]), memory, torch.zeros(1, 1, dtype=torch.long))
        feature, state = drafter.step(feature, torch.tensor([[word]]), depth, at)
    return drafter.head(state, len(path))[0, 0].log_softmax(-1)


@torch.no_grad()
def test_a_copy_gets_its_trust_and_the_drafter_the_rest(target: Target) -> None:
    own = Dictated([[1, 2, 3, 9, 1, 2, 3, *range(40, 50)]], lambda place: 0)
    text = [1, 2, 3, 9, 1, 2, 3]  # three tokens that occurred before, then followed by 9
    for path, copied, trust in (
        ([], 9, TRUST[3]),
        ([9], 1, TRUST[4]),
        ([9, 1], 2, TRUST[5]),
        ([9, 1, 2, 3], 9, TRUST[6]),
    ):
        mixed, alone = logits(Hybrid(own, 1), text, path).exp(), logits(own, text, path).exp()
        expected = (1 - trust) * alone
        expected[copied] += trust
        torch.testing.assert_close(mixed, expected)
    for path in ([40], [9, 5]):  # off the copy
        torch.testing.assert_close(logits(Hybrid(own, 1), text, path), logits(own, text, path))
    torch.testing.assert_close(logits(Hybrid(own, 4), text, []), logits(own, text, [])), "too short a match"


@torch.no_grad()
def test_copies_go_deeper_than_heads_and_beyond_a_draft_vocabulary(target: Target) -> None:
    heads = Hybrid(drafter_of(target, "medusa"), 1)
    assert heads.max_depth is None
    text = [1, 2, 3, 9, 1, 2, 3]
    deep = logits(heads, text, [9, 1, 2])
    assert deep.argmax() == 3 and deep[3] > -1e-6 and (deep.exp() > 0).sum() == 1
    narrow = Hybrid(drafter_of(target, "eagle"), 1)
    said = logits(narrow, text, [])
    assert said[9] > torch.tensor(TRUST[3]).log() - 1e-4, "9 is none of its own ids"
    assert set((said > -torch.inf).nonzero().flatten().tolist()) == {9, *range(0, 48, 2)}


def test_keys_by_depth_are_refused(target: Target) -> None:
    with pytest.raises(Refusal, match="lookup: not for mtp"):
        Hybrid(drafter_of(target, "mtp"), 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_the_likeliest_are_those_of_the_whole_distribution(target: Target, name: str) -> None:
    hybrid = Hybrid(drafter_of(target, name), shortest=1)
    own = 2 * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    length = torch.tensor([[0, 1, 2, 6, 3], [9, 0, 4, 1, 5]])
    copied = torch.tensor([[-1, 3, 4, 38, 7], [12, -1, 1, 30, 39]])  # the drafter of even ids cannot say some
    copies = torch.stack([length, copied], -1).float()
    for depth in (0, 1):
        state = torch.cat([own, copies], -1)
        logp, ids = hybrid.likeliest(state, depth, 6)
        wanted = hybrid.head(state, depth).log_softmax(-1).topk(6, dim=-1)
        torch.testing.assert_close(logp, wanted.values, atol=1e-5, rtol=0)
        assert ids.equal(wanted.indices)
        assert int(hybrid.likeliest(state, depth, 6, known=40)[1].max()) < 40 <= int(ids.max())
    if name == "medusa":  # no third head: there are only copies
        logp, ids = hybrid.likeliest(torch.cat([own[..., :1], copies], -1), 2, 6)
        assert (logp > -torch.inf).equal(length[..., None] > 0)
        assert ids[length > 0].flatten().tolist() == copied[length > 0].tolist()
