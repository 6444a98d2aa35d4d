"""A long prompt is read a slice at a time, by the target and by its drafter: what follows is what it would be, read at
once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import VOCAB, target_of
from test_held import METHODS, drafter_of
from test_memory import allocated
from torch import Tensor

from paceline.decode import Decoder, DraftTree, DynamicShape, Sampler, StaticShape, chain, tree, walk
from paceline.models import target as targets
from paceline.models.cache import Cache
from paceline.models.drafter import Drafter
from paceline.models.hybrid import Hybrid
from paceline.models.target import Target

SLICE = 4
FORK = StaticShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))
# texts that end in the first slice, at its edge and behind it, and in the others
LENGTHS = (18, 1, 12, 3, 13, 4, 5)
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
# name: method, and what is asked of it: all that keeps keys, in one stream and in several
DRAFTERS: dict[str, tuple[str, ...]] = {name: (name,) for name in ("ngram", *METHODS)} | {
    "hydra_heads with a layer": ("hydra_heads", "method.prefix=true"),
    "mtp_sequential of three": ("mtp_sequential", "method.modules=3", "method.unroll=3"),
    "lookup and eagle3": ("eagle3",),
    "lookup and draft": ("draft",),
}
every = pytest.mark.parametrize("name", DRAFTERS)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(num_hidden_layers=4)


def drafter(name: str, target: Target) -> Drafter:
    made = drafter_of(DRAFTERS[name][0], target, *DRAFTERS[name][1:])
    assert made is not None
    return Hybrid(made, shortest=1) if name.startswith("lookup") else made


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of(rows: int) -> None:
        for module in (targets, tree):
            monkeypatch.setattr(module, "SLICE", rows)

    return of


@pytest.mark.parametrize("shape", [FORK, DynamicShape(9, 3, 2)], ids=["static", "dynamic"])
@every
def test_every_tree_is_that_of_a_prompt_read_at_once(
    name: str, shape: StaticShape | DynamicShape, target: Target, slices: Callable[[int], None]
) -> None:
    grown: list[DraftTree] = []

    def seen(tree: DraftTree, *others: Any) -> Any:
        grown.append(tree)
        return walk(tree, *others)

    decoder = Decoder(target, drafter(name, target), shape, verify=seen)
    runs = []
    for rows in (100, SLICE):
        slices(rows)
        grown.clear()
        made = [decoder.generate(some, 8, sampler=Sampler(0.8, seed=2)) for some in (PROMPTS, PROMPTS[:1])]
        runs.append(([(one.tokens, one.reports) for one in made], list(grown)))
    (whole, trees), (cut, others) = runs
    assert cut == whole
    for ours, theirs in zip(others, trees, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.parents, theirs.parents)
        torch.testing.assert_close(ours.logp, theirs.logp, rtol=1e-4, atol=1e-4)


@every
def test_no_call_takes_more_rows_than_a_slice_and_no_mask_is_larger_than_that_by_the_text(
    name: str, target: Target, slices: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    masks: list[Tensor] = []
    drafts = drafter(name, target)
    place, visible, step = Cache.place, Cache.visible, drafts.step

    def placed(self: Cache, nodes: int, behind: int = 0) -> Tensor:
        widths.append(nodes)
        return place(self, nodes, behind)

    def shown(self: Cache, related: Tensor) -> Tensor:
        masks.append(visible(self, related))
        return masks[-1]

    def stepped(feature: Tensor, tokens: Tensor, *others: Any) -> Any:
        widths.append(tokens.shape[1])
        return step(feature, tokens, *others)

    monkeypatch.setattr(Cache, "place", placed)
    monkeypatch.setattr(Cache, "visible", shown)
    monkeypatch.setattr(drafts, "step", stepped)
    slices(SLICE)
    Decoder(target, drafts, chain(SLICE - 1)).generate(PROMPTS, 3)
    assert max(widths) == SLICE
    assert max(mask.shape[1] for mask in masks) == SLICE and max(mask.shape[2] for mask in masks) < max(LENGTHS) + 9


@pytest.mark.parametrize("name", ["none", "eagle3", "mtp", "draft"])
def test_a_prompt_four_times_as_long_costs_little_more_than_four_times_the_memory(
    name: str, target: Target, slices: Callable[[int], None]
) -> None:
    """Who sees whom, row by row, would cost sixteen times as much."""
    slices(32)
    decoder = Decoder(target, drafter_of(name, target), chain(3))
    short, long = (allocated(lambda n=n: decoder.generate([[*range(VOCAB)] * n], 3)) for n in (4, 16))  # type: ignore[misc]
    assert long <= 4.2 * short
