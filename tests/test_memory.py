"""What a training step needs beside weights, gradients and moments: how it grows with vocabulary and length.

Counted are bytes of torch's own allocator, at sizes that have the proportions of real ones.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline.data.batch import Batch
from paceline.models import streams
from paceline.models.drafter import Borrowed, Drafter, Shape, build, options
from paceline.models.layers import LayerOptions
from paceline.models.target import Head
from paceline.train import objective as losses
from paceline.train.step import TrainStep

HIDDEN, CHUNK = 16, 64
LAYER = LayerOptions(
    heads=2, kv_heads=1, head_dim=8, intermediate=32, activation="silu", eps=1e-5, rope={"rope_theta": 1e4}
)
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"taps": (1, 2, 3), "unroll": 4, "layer": LAYER},
    "medusa": {"heads": 4},
    "mtp_sequential": {
        "taps": (-1,),
        "modules": 1,
        "unroll": 3,
        "layer": LAYER,
        "hand_on": "raw",
        "position_offset": 0,
        "zero_first": False,
    },
}
any_method = pytest.mark.parametrize("method", METHODS)


def made(method: str, vocab: int, objective: dict[str, float]) -> tuple[Drafter, Head]:
    drafter = build(options(method)(name=method, objective=objective, **METHODS[method]), Shape(HIDDEN, 4, vocab))
    head = Head(torch.randn(vocab, HIDDEN))
    drafter.borrowed = Borrowed(torch.nn.Embedding(vocab, HIDDEN).requires_grad_(False), head)
    return drafter, head


def peak(method: str, length: int, vocab: int, objective: dict[str, float]) -> int:
    """Bytes of a step, at most, beyond what was there before it and beyond the gradients that it leaves."""
    drafter, head = made(method, vocab, objective)
    ids = torch.randint(vocab, (1, length))
    batch = Batch(ids, torch.arange(length)[None], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    hidden, last = torch.randn(1, length, len(drafter.taps) * HIDDEN), torch.randn(1, length, HIDDEN)
    step = TrainStep(drafter, CHUNK)
    most = allocated(lambda: step(batch, hidden, last, head).total.backward())
    return most - sum(p.grad.nbytes for p in drafter.parameters() if p.grad is not None)


def allocated(run: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    held = most = 0
    for size in sizes(seen.profiler.kineto_results.experimental_event_tree()):  # type: ignore[union-attr]
        held += size
        most = max(most, held)
    return most


def sizes(events: list[Any]) -> Iterator[int]:
    """Bytes allocated (freed, where negative), in the order of time."""
    found, left = [], list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return (size for _, size in sorted(found, key=lambda pair: pair[0]))


@pytest.mark.parametrize("objective", [{"ce": 1.0}, {"kl": 1.0}], ids=["ce", "kl"])
@any_method
def test_a_larger_vocabulary_costs_three_chunks_of_it_at_most(
    method: str, objective: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BLOCK", 1 << 13)  # a few rows of a chunk, as of a real one
    small, large = 1000, 4000
    grown = peak(method, 256, large, objective) - peak(method, 256, small, objective)
    assert grown <= 3 * CHUNK * (large - small) * 4


@any_method
def test_four_times_the_length_costs_little_more_than_four_times_the_memory(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores would cost sixteen times as much."""
    monkeypatch.setattr(streams, "ROWS", 16)
    monkeypatch.setattr(streams, "LONG", 128)
    short, long = (peak(method, length, 500, {"kl": 1.0}) for length in (256, 1024))
    assert long <= 4.4 * short


def test_the_measure_sees_what_is_allocated() -> None:
    def two() -> Tensor:
        first = torch.ones(1000)
        return first + 1

    assert 8000 <= allocated(two) < 12000
