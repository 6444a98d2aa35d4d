"""Which rows of a batch take a training step: those that some loss looks at.

That they learn what all rows together would, the drafters' own tests hold against a naive float64 pass (chains.py).
"""

from typing import Any

import pytest
import torch
from chains import states_of, texts
from fakes import target_of

from paceline.data.batch import Batch, pack
from paceline.data.rows import Example
from paceline.models.drafter import Drafter, Shape, build, options
from paceline.models.target import Target
from paceline.train.step import TrainStep, predicted, unrolled, wanted


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


def drafter_of(name: str, target: Target) -> Drafter:
    drafter = build(options(name)(name=name, **DRAFTERS[name]).fitted(target), Shape.of(target))
    drafter.borrow(target)
    for seed, parameter in enumerate(drafter.parameters()):
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return drafter


@pytest.mark.parametrize("name", DRAFTERS)
def test_only_rows_that_some_loss_looks_at_take_a_step_and_they_say_what_they_said_among_all(name: str) -> None:
    target, batch = target_of("llama"), conversations()
    drafter = drafter_of(name, target)
    hidden = states_of(target, drafter, batch)[0]
    there = torch.stack([predicted(batch, k) for k in range(4)]).flatten(1)
    chains = wanted(drafter, batch, there, 2)
    everything, some = unrolled(drafter, batch, hidden, 4), unrolled(drafter, batch, hidden, 4, chains)
    assert [state.shape[1] for state in some] == TAKEN[name]
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
