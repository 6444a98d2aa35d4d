"""Losses behind an output head, whose logits never exist all at once.

The gradients in the head's weights and in the states it reads are taken in the forward pass, chunk by chunk, while the
chunk's logits are there; the backward pass multiplies. So nothing is computed twice, and nothing of the size of a
chunk's logits is kept. Knows no head, loss or drafter.

    Legend: N rows of the states, R of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# What is found in a chunk: an output, the gradient of the sum in it, and what it adds to the sum.
Found = tuple[Tensor, Tensor, Tensor]
# chunk's number, rows [R, H] of each of the states -> outputs, whose graph goes back to these rows and to what learns
Work = Callable[[int, list[Tensor]], Iterator[Found]]


def summed(
    work: Work, places: Sequence[Sequence[Tensor]], states: Sequence[Tensor], learning: Sequence[Tensor]
) -> Tensor:
    """The sum of what `work` finds in all chunks: a scalar, whose gradient can be taken once.

    Args:
        places: for each chunk and each of the states, the rows [R] that `work` is given.
        states: [N, H] each. learning: what else a gradient is wanted in.
    """
    return _Summed.apply(work, places, len(states), *states, *learning)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, places: Sequence[Sequence[Tensor]], count: int, *tensors: Tensor) -> Tensor:
        states, learning = tensors[:count], tensors[count:]
        ctx.states = [torch.zeros_like(state) for state in states]
        ctx.learning = [None] * len(learning)
        total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        kind = total.device.type
        # a weight's 16-bit copy is made anew for each chunk, and is not kept beside those of other heads
        with (
            torch.enable_grad(),
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False),
        ):
            for number, rows in enumerate(places):
                parts = [state.detach()[row].requires_grad_() for state, row in zip(states, rows, strict=True)]
                for output, gradient, value in work(number, parts):
                    total += value.detach()
                    if output.requires_grad:
                        _add(ctx, torch.autograd.grad(output, [*parts, *learning], gradient, allow_unused=True), rows)
                    del output, gradient  # before the next are made
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.states is None:
            raise RuntimeError("the gradient of a sum over chunks can be taken once")
        gradients = [*ctx.states, *ctx.learning]
        ctx.states = ctx.learning = None
        return None, None, None, *(None if part is None else part.mul_(upstream) for part in gradients)


def _add(ctx: Any, found: Sequence[Tensor | None], rows: Sequence[Tensor]) -> None:
    """Gradients in the rows of the states, and in what learns, to those of the chunks before."""
    for whole, row, part in zip(ctx.states, rows, found, strict=False):
        if part is not None:
            whole.index_add_(0, row, part)
    for place, part in enumerate(found[len(rows) :]):
        if part is not None:
            known = ctx.learning[place]
            ctx.learning[place] = part if known is None else known.add_(part)
