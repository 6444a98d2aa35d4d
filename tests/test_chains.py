"""Attention of a training step: kernels.cpp against torch's operators, over the rows that a loss looks at.

That these operators, and which rows those are, give the gradients of a naive float64 pass is held by the drafters' own
tests (chains.py).
"""

from typing import Any

import pytest
import torch
from chains import states_of, texts
from fakes import target_of
from torch import Tensor

from paceline.data.batch import Batch, pack
from paceline.data.rows import Example
from paceline.models import streams
from paceline.models.drafter import Context, Drafter, Shape, build, options
from paceline.models.kernels import kernels
from paceline.models.streams import ChainKeys
from paceline.models.target import Target
from paceline.train.step import TrainStep, predicted, unrolled, wanted

compiled = pytest.mark.skipif(kernels() is None, reason="no compiler here")


def looked(
    lengths: list[list[int]], heads: tuple[int, int], size: int, first: int, dtype: torch.dtype, spoilt: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """What four depths of a stream that begins at depth `first` see, and the gradients of all they were made of: texts
    of these lengths, row by row, of which some rows go on.

    The numbers are bfloat16's, whatever computes with them.
    """
    draw = torch.Generator().manual_seed(1)
    document = torch.full((len(lengths), 64), -1)
    for line, row in enumerate(lengths):
        spread = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        document[line, : len(spread)] = 10 * line + spread
    rows = (document.flatten() >= 0).nonzero()[:, 0]
    onward = rows[torch.rand(len(rows), generator=draw) < 0.7]
    keys = ChainKeys(document, lambda depth: int(depth >= first))
    made, seen = [], []

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16).to(dtype)

    for k in range(4):
        places = rows if k == 0 else onward
        made += [numbers(1, len(places), many, size).requires_grad_() for many in (heads[0], heads[1], heads[1])]
        queries, own, values = (part.transpose(1, 2) for part in made[-3:])
        if spoilt and k == 0:
            queries = queries * torch.where(torch.arange(len(rows)) == 3, torch.nan, 1.0)[:, None].to(dtype)
        seen.append(keys.attend(Context(places, places, keys, places=places), first + k, 0, queries, own, values))
    sum((part * numbers(*part.shape)).sum() for part in seen).backward()  # type: ignore[union-attr]
    return seen, [part.grad for part in made if part.grad is not None]


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm())


@compiled
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize(("heads", "size"), [((9, 3), 64), ((4, 4), 32), ((6, 1), 16), ((8, 2), 128)])
def test_kernels_see_what_operators_see_and_give_its_gradients(
    heads: tuple[int, int], size: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [[30, 17], [64], [1, 2, 40]]
    ours = looked(lengths, heads, size, first, torch.bfloat16)
    monkeypatch.setattr(streams, "quick", lambda values: None)
    theirs = looked(lengths, heads, size, first, torch.float32)
    for mine, exact in zip(ours, theirs, strict=True):
        assert len(mine) == len(exact)
        for one, other in zip(mine, exact, strict=True):
            assert one.dtype == torch.bfloat16 and apart(one, other) < 6e-3  # it is rounded once; with 8 bits


@compiled
def test_what_is_no_number_stays_none() -> None:
    seen, gradients = looked([[12, 20]], (4, 2), 32, 0, torch.bfloat16, spoilt=True)
    assert seen[0][0, :, 3].isnan().all() and seen[0][0, :, 12:].isfinite().all(), "another text"
    assert gradients[0][0, 3].isnan().all()


# ---------------------------------------------------------------- rows that a loss looks at


def conversations() -> Batch:
    """Three texts in two rows, of two of which the end is supervised."""
    examples = [
        Example(torch.tensor(words), torch.arange(len(words)) >= begin)
        for words, begin in zip(texts([20, 9, 11]), (12, 9, 5), strict=True)
    ]
    return pack(examples, 20)


DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"join": "attention", "unroll": 4},
    "medusa": {"heads": 4},
    "hydra_heads": {"heads": 4, "prefix": True},
    "mtp": {"heads": 4},
    "mtp_sequential": {"modules": 2, "unroll": 4},
}
# rows of each depth: all 40 of the texts until every stream of keys has begun; then, where x[t + 2 + k] of a later
# depth k is supervised: t = 7 to 16 (8 to 16) of the first text, none of the second, 0 to 7 (1 to 7) of the third
TAKEN = {
    "eagle": [40, 18, 18, 18],
    "medusa": [40, 18, 18, 18],
    "hydra_heads": [40, 18, 18, 18],
    "mtp": [40, 40, 40, 40],
    "mtp_sequential": [40, 40, 16, 16],
}


def drafter_of(name: str, target: Target, **more: Any) -> Drafter:
    drafter = build(options(name)(name=name, **DRAFTERS[name] | more).fitted(target), Shape.of(target))
    drafter.borrow(target)
    for seed, parameter in enumerate(drafter.parameters()):
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return drafter


@pytest.fixture(autouse=True)
def rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the usual grain all rows of these texts would take every step."""
    monkeypatch.setattr("paceline.train.step.GRAIN", 4)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("grain", [1, 4, 64])
def test_only_rows_that_some_loss_looks_at_take_a_step_and_they_say_what_they_said_among_all(
    name: str, grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.step.GRAIN", grain)
    target, batch = target_of("llama"), conversations()
    drafter = drafter_of(name, target)
    hidden = states_of(target, drafter, batch)[0]
    there = torch.stack([predicted(batch, k) for k in range(4)]).flatten(1)
    chains = wanted(drafter, batch, there, 2)
    everything, some = unrolled(drafter, batch, hidden, 4), unrolled(drafter, batch, hidden, 4, chains)
    rounded = [min(-(-rows // grain) * grain, batch.ids.numel()) for rows in TAKEN[name]]
    assert [state.shape[1] for state in some] == rounded
    for k, (whole, part) in enumerate(zip(everything, some, strict=True)):
        torch.testing.assert_close(part[0], whole.flatten(0, 1)[chains.at(k)])
        standing = torch.isin(there[k].nonzero()[:, 0] - 2 - k, chains.at(k))
        assert standing.all(), "whoever predicts is there"


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_parameter_gets_a_gradient_where_no_chain_or_no_text_is_left(name: str) -> None:
    target, batch = target_of("llama"), conversations()
    drafter = drafter_of(name, target)
    first = torch.zeros_like(batch.supervised)
    first[0, 2] = True  # a token that depth 0 alone predicts
    for supervised in (first, torch.zeros_like(first)):
        given = Batch(batch.ids, batch.positions, batch.document, supervised)
        for part in (given, pack([])):
            TrainStep(drafter)(part, *states_of(target, drafter, part), target.head).total.backward()
            for parameter in drafter.parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all()
            drafter.zero_grad()


@compiled
@pytest.mark.parametrize("name", ["eagle", "mtp", "mtp_sequential"])
def test_kernels_lose_no_more_of_a_bfloat16_step_than_operators_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = target_of("llama"), conversations()
    drafter = drafter_of(name, target, layer={"heads": 4, "kv_heads": 2, "head_dim": 16})
    asked = []

    def gradients(narrow: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, narrow):
            sums = TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head)
        sums.total.backward()
        found = [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
        assert len(found) == len(list(drafter.parameters()))
        drafter.zero_grad()
        return torch.cat(found)

    by_kernels = gradients(True)
    monkeypatch.setattr(streams, "quick", lambda values: asked.append(values.dtype))
    by_operators, exact = gradients(True), gradients(False)
    assert asked[0] == torch.bfloat16, "so kernels took it"
    assert 0 < apart(by_kernels, exact) < 1.1 * apart(by_operators, exact) < 0.1
