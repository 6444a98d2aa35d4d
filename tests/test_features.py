"""Remembered hidden states are those that would be computed, and the same bits whenever they are asked for."""

import torch

from paceline.data.batch import Loader
from paceline.data.conversations import Example
from paceline.models.target import Target, folder
from paceline.train.features import Features


def examples() -> list[Example]:
    noise = torch.Generator().manual_seed(0)
    return [
        Example(torch.randint(0, 256, (n,), generator=noise), torch.ones(n, dtype=torch.bool))
        for n in (5, 9, 17, 30, 31, 33, 40)
    ]


def test_remembered_states_are_the_computed_ones_in_any_epoch() -> None:
    target = Target.load(folder("tiny"), "float32", vocab=259)
    loader = Loader(examples(), batch_tokens=64, accumulate=2, seed=1)
    for taps in ((-1,), (0, 2)):
        online, memory = (Features(target, taps, loader, remember) for remember in (False, True))
        for epoch in (0, 1):
            for part in (part for parts in loader.batches(epoch) for part in parts):
                real = part.document >= 0
                for now, then in zip(online.of(part), memory.of(part), strict=True):
                    assert now.shape == then.shape
                    torch.testing.assert_close(then[real], now[real], atol=1e-5, rtol=0)


def test_what_is_remembered_does_not_depend_on_when_it_was_asked_for() -> None:
    target = Target.load(folder("tiny"), "bfloat16", vocab=259)
    loader = Loader(examples(), batch_tokens=64, seed=1)
    whole, resumed = (Features(target, (-1,), loader, True) for _ in range(2))
    for parts in loader.batches(0):
        whole.of(parts[0])
    for parts in loader.batches(3, start=1):
        real = parts[0].document >= 0
        assert torch.equal(whole.of(parts[0])[1][real], resumed.of(parts[0])[1][real])
