"""Packing lets no document see another, and every rank count sees the same documents in the same steps."""

import random
from collections import Counter
from itertools import product

import pytest
import torch

from paceline.data.batch import Batch, Loader, pack
from paceline.data.conversations import Example


def documents(count: int, longest: int = 200, seed: int = 0) -> list[Example]:
    """Document i is filled with the id i, so that it can be recognised anywhere."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, longest) for _ in range(count)]
    return [Example(torch.full((n,), i), torch.arange(n) >= n // 2) for i, n in enumerate(sizes)]


def contents(batch: Batch) -> Counter[int]:
    """Tokens per document id."""
    return Counter(batch.ids[batch.document >= 0].tolist())


def test_packed_documents_are_whole_apart_and_start_at_position_zero() -> None:
    examples = documents(50)
    batch = pack(examples, 256)
    assert batch.tokens == sum(map(len, examples))
    assert batch.ids.shape[1] % 64 == 0 and batch.ids.shape[1] <= 256
    for i, example in enumerate(examples):
        row, column = torch.nonzero(batch.document == i, as_tuple=True)
        assert row.unique().numel() == 1
        here = slice(int(column[0]), int(column[0]) + len(example))
        assert column.tolist() == list(range(here.start, here.stop))
        assert batch.ids[row[0], here].equal(example.ids)
        assert batch.supervised[row[0], here].equal(example.supervised)
        assert batch.positions[row[0], here].tolist() == list(range(len(example)))


def test_padding_belongs_to_no_document_and_is_never_supervised() -> None:
    batch = pack(documents(5), 256)
    padded = batch.document < 0
    assert padded.any() and (batch.document[padded] == -1).all()
    assert not batch.supervised[padded].any() and not batch.ids[padded].any()


def test_packing_wastes_little() -> None:
    examples = documents(200)
    batch = pack(examples, 512)
    assert batch.tokens / batch.ids.numel() > 0.95


def test_document_longer_than_the_width_is_kept_whole() -> None:
    batch = pack([Example(torch.arange(100), torch.ones(100, dtype=torch.bool))], 64)
    assert batch.ids.shape == (1, 128) and batch.tokens == 100


def test_a_budget_of_tokens_is_met_by_the_first_step_that_reaches_it() -> None:
    loader = Loader(documents(20), 300)
    read = [step.tokens for epoch in range(3) for (step,) in loader.batches(epoch)]
    for budget in (1, read[0], read[0] + 1, sum(read) // 2, sum(read)):
        steps = loader.steps_of(budget)
        assert sum(read[: steps - 1]) < budget <= sum(read[:steps])
    assert loader.steps_of(sum(read)) == len(read) > 3 * 3


def test_no_documents_is_one_row_of_padding() -> None:
    batch = pack([])
    assert batch.ids.shape == (1, 64) and batch.tokens == 0 and not batch.supervised.any()
    assert batch.to("cpu").ids.dtype == torch.long


@pytest.mark.parametrize(("world", "accumulate"), list(product((1, 2, 3), (1, 2))))
def test_steps_hold_the_same_documents_however_they_are_shared(world: int, accumulate: int) -> None:
    examples = documents(101)
    alone = Loader(examples, 1000, seed=3)
    ranks = [Loader(examples, 1000, accumulate, world, rank, seed=3) for rank in range(world)]
    assert {loader.steps() for loader in ranks} == {alone.steps()}
    seen: Counter[int] = Counter()
    for (whole,), *shares in zip(alone.batches(1), *(loader.batches(1) for loader in ranks), strict=True):
        assert whole.tokens <= 1000
        assert [len(share) for share in shares] == [accumulate] * world
        together = sum((contents(batch) for share in shares for batch in share), Counter())
        assert together == contents(whole)
        seen += together
    assert seen == {i: len(example) for i, example in enumerate(examples)}  # all, each once


def test_micro_batches_are_balanced_by_tokens() -> None:
    for share in Loader(documents(300), 4000, accumulate=4).batches(0):
        sizes = [batch.tokens for batch in share]
        assert max(sizes) - min(sizes) <= 200  # never more than the longest document


def test_rank_without_documents_still_takes_part() -> None:
    examples = documents(3, longest=50)
    loaders = [Loader(examples, 1, 2, 4, rank) for rank in range(4)]
    steps = list(zip(*(loader.batches(0) for loader in loaders), strict=True))
    assert len(steps) == 3  # every document is longer than the budget: a step of its own
    for shares in steps:
        batches = [batch for share in shares for batch in share]
        assert sorted(batch.tokens > 0 for batch in batches) == [False] * 7 + [True]
        assert all(batch.ids.shape == (1, 64) for batch in batches)


def test_long_document_is_a_step_of_its_own() -> None:
    examples = [Example(torch.full((n,), i), torch.ones(n, dtype=torch.bool)) for i, n in enumerate([10, 500, 10, 10])]
    steps = [contents(batch) for (batch,) in Loader(examples, 100).batches(0)]
    assert Counter({1: 500}) in steps


def test_order_follows_seed_and_epoch_and_starts_where_asked() -> None:
    examples = documents(60)

    def order(loader: Loader, epoch: int, start: int = 0) -> list[list[int]]:
        return [batch.ids.flatten().tolist() for (batch,) in loader.batches(epoch, start)]

    loader = Loader(examples, 500, seed=1)
    assert order(loader, 0) == order(Loader(examples, 500, seed=1), 0)
    assert order(loader, 0) != order(loader, 1)
    assert order(loader, 0) != order(Loader(examples, 500, seed=2), 0)
    assert order(loader, 1, start=4) == order(loader, 1)[4:]
    assert loader.steps() == len(order(loader, 0))


def test_number_of_shapes_is_bounded() -> None:
    widths = {batch.ids.shape[1] for (batch,) in Loader(documents(300, longest=512), 1500).batches(0)}
    assert all(width % 64 == 0 for width in widths) and len(widths) <= 8
