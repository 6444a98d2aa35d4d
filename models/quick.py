"""A drafter's own layers in bfloat16 on a CPU, what lies between their products compiled: for decoding.

A draft step has few rows, so that its operators cost more than its products. Knows layers.py, whose forward passes
these take the place of, as packed.py does for a target's. What they cannot do (gradients, another dtype, keys that are
kept otherwise) the layers go on doing themselves. Not bit for bit what those compute: drafts need not be.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drafter import Context
from paceline.models.kernels import LANES, WIDEST, Library, kernels
from paceline.models.layers import Attention, GatedMLP, RMSNorm
from paceline.models.streams import StreamKeys, TreeKeys


def quicken(drafter: nn.Module) -> None:
    """Let the packed layers of a drafter, which do not change any more, compute so where kernels.cpp knows how."""
    functions = kernels()
    if functions is None:
        return
    for part in drafter.modules():
        for quick in (QuickNorm, QuickMLP, QuickAttention):
            if type(part) is quick.OF and quick.fits(part):
                part.forward = quick(part, functions)  # type: ignore[method-assign]


def _ours(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and not x.requires_grad and x.is_contiguous()


class QuickNorm:
    OF = RMSNorm

    def __init__(self, norm: Any, functions: Library):
        self._norm, self._functions = norm, functions

    @staticmethod
    def fits(norm: Any) -> bool:
        return _frozen(norm.weight) and len(norm.weight) % LANES == 0 and norm.eps is not None

    def __call__(self, x: Tensor) -> Tensor:
        if not _ours(x):
            return type(self._norm).forward(self._norm, x)
        weight, out = self._norm.weight, torch.empty_like(x)
        width = len(weight)
        self._functions.norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, self._norm.eps)
        return out


class QuickMLP:
    OF = GatedMLP

    def __init__(self, mlp: Any, functions: Library):
        self._mlp = mlp

    @staticmethod
    def fits(mlp: Any) -> bool:
        return mlp.gate_up.packed is not None and mlp.act is F.silu and mlp.up_proj.out_features % LANES == 0

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self._mlp
        if not _ours(x):
            return type(mlp).forward(mlp, x)
        return mlp.down_proj(mlp.gate_up.packed.gated(x))


class QuickAttention:
    OF = Attention

    def __init__(self, attention: Any, functions: Library):
        self._attention, self._functions = attention, functions
        self._size = attention.size
        self._kv_heads = attention.k_proj.out_features // self._size
        self._heads = attention.q_proj.out_features // self._size

    @staticmethod
    def fits(attention: Any) -> bool:
        norms = [norm.weight for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        return (
            attention.qkv.packed is not None
            and attention.size % LANES == 0
            and attention.size <= WIDEST
            and all(map(_frozen, norms))
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], depth: int, layer: int, ctx: Context) -> Tensor:
        attention, keys = self._attention, ctx.memory
        if isinstance(keys, StreamKeys):
            keys = keys.of(depth)
        stacks: tuple[Tensor, ...] = ()
        if isinstance(keys, TreeKeys) and layer == 0 and _ours(x) and angles[0].shape[-1] == self._size:
            stacks = keys.stacked(x.device, self._kv_heads, self._size)
        if not stacks:
            return type(attention).forward(attention, x, angles, depth, layer, ctx)
        rows, nodes = x.shape[:2]
        qkv = attention.qkv.packed(x)
        cache, related = keys.reserve(ctx, nodes)
        related, length = related.contiguous(), cache.length.contiguous()
        cos, sin = (part.expand(rows, -1, -1, -1).float().contiguous() for part in angles)  # [B, 1, N, D]
        turn_of = torch.arange(rows * nodes)
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        weights = [norm.weight.data_ptr() for norm in norms] or [0, 0]
        seen = qkv.new_empty(rows, nodes, self._heads * self._size)
        at = [part.data_ptr() for part in (seen, qkv, *stacks, length, related, cos, sin, turn_of)]
        sizes = rows, nodes, related.shape[2], self._heads, self._kv_heads, self._size, cache.capacity, torch.get_num_threads()
        self._functions.attend(*at, *weights, *sizes, norms[0].eps if norms else 0.0, self._size**-0.5)
        return attention.o_proj(seen)


def _frozen(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad
