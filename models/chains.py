"""What the chains of a training step look at, by kernels.cpp: for bfloat16 on a CPU. `ChainKeys` is whoever asks, and
computes the same by torch's operators elsewhere.

    Legend: N rows of all texts, R queries, C depths between, Q query heads, S key heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.models.kernels import LANES, WIDEST, Library, kernels


def quick(values: Tensor) -> Library | None:
    """The kernels, where such values [1, S, N, D] can be looked at by them."""
    size = values.shape[-1]
    possible = values.dtype == torch.bfloat16 and values.device.type == "cpu" and size % LANES == 0 and size <= WIDEST
    return kernels() if possible and not torch.compiler.is_compiling() else None


def seen_along_chains(
    functions: Library,
    document: Tensor,
    begun: Tensor,
    places: Tensor,
    lag: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own: Sequence[Tensor],
) -> Tensor:
    """What queries [1, Q, R, D] see, [1, Q, R, D], all computed in float32.

    Args:
        document: [B, T], -1 for padding. begun [N], places [R]: where the rows stand in it, flattened, ascending.
        keys, values: [1, S, N, D]; a query sees those of its document that stand `lag` rows or more before it, and the
            row that it goes on from.
        own: keys and values [1, S, R, D], depth by depth, of which a query sees its own row.
    """
    texts = document.flatten()[begun] + begun // document.shape[1] * (document.max() + 2)
    text, sizes = texts.unique_consecutive(return_inverse=True, return_counts=True)[1:]
    place = torch.searchsorted(begun, places)
    ends = torch.stack([sizes, text[place].bincount(minlength=len(sizes))], 1).cumsum(0)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    bounds = torch.stack([starts, ends], -1).flatten(1)  # [texts, 4]
    return _Seen.apply(functions, bounds, place, lag, *(_by_rows(part) for part in (queries, keys, values, *own)))[None]


def _by_rows(part: Tensor) -> Tensor:
    """[1, S, N, D] -> [N, S, D], one row behind the other: as projections leave it, nothing is copied."""
    return part[0].transpose(0, 1).to(torch.bfloat16).contiguous()


def _addresses(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.long)


class _Seen(torch.autograd.Function):
    """[R, Q, D] queries -> [Q, R, D]."""

    @staticmethod
    def forward(ctx: Any, functions: Library, bounds: Tensor, place: Tensor, lag: int, *parts: Tensor) -> Tensor:
        queries, keys, own = parts[0], parts[1], _addresses(parts[3:])
        out, mass = torch.empty_like(queries), torch.empty(queries.shape[:2], dtype=torch.float32)
        ctx.functions = functions
        ctx.sizes = len(bounds), len(parts[3:]) // 2, queries.shape[1], *keys.shape[1:], lag, torch.get_num_threads()
        at = [part.data_ptr() for part in (out, mass, *parts[:3], own, bounds, place)]
        functions.look_along_chains(*at, *ctx.sizes)
        ctx.save_for_backward(out, mass, bounds, place, *parts)
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, mass, bounds, place, *parts = ctx.saved_tensors
        gradient = gradient.transpose(0, 1).contiguous()
        found, own = [torch.empty_like(part) for part in parts], _addresses(parts[3:])
        by_own = _addresses(found[3:])
        at = [*found[:3], by_own, gradient, out, mass, *parts[:3], own, bounds, place]
        ctx.functions.look_back_along_chains(*(part.data_ptr() for part in at), *ctx.sizes)
        return None, None, None, None, *found
