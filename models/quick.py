"""A drafter's own layers in bfloat16 on a CPU, what lies between their products compiled: for decoding.

A draft step has few rows, so that its operators cost more than its products. Knows layers.py, whose forward passes
these take the place of, as packed.py does for a target's. What they cannot do (gradients, another dtype, keys that are
kept otherwise) the layers go on doing themselves. Not bit for bit what those compute: drafts need not be.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drafter import Context
from paceline.models.kernels import LANES, WIDEST, Library, kernels
from paceline.models.layers import Attention, GatedMLP, ResidualLayer, RMSNorm
from paceline.models.packed import Packed, addresses, in_cache
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
    for part in drafter.modules():
        if isinstance(part, ResidualLayer) and functions.tiled and QuickLayer.fits(part):
            part.forward = QuickLayer(part, functions)


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
        attention = self._attention
        keys = _Keys.of(x, angles, depth, ctx, self._kv_heads, self._size, tiled=False) if layer == 0 else None
        if keys is None:
            return type(attention).forward(attention, x, angles, depth, layer, ctx)
        rows, nodes = x.shape[:2]
        qkv = attention.qkv.packed(x)
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        weights = [norm.weight.data_ptr() for norm in norms] or [0, 0]
        seen = qkv.new_empty(rows, nodes, self._heads * self._size)
        at = [part.data_ptr() for part in (seen, qkv, *keys.stacks, *keys.placed)]
        sizes = rows, nodes, keys.reach, self._heads, self._kv_heads, self._size, keys.slots, torch.get_num_threads()
        self._functions.attend(*at, *weights, *sizes, norms[0].eps if norms else 0.0, self._size**-0.5)
        return attention.o_proj(seen)


class QuickLayer:
    """A whole layer in one call, where passes.cpp has products."""

    def __init__(self, layer: Any, functions: Library):
        self._layer, self._functions = layer, functions
        attention, mlp = layer.self_attn, layer.mlp
        self._size = attention.size
        self._heads, self._kv_heads = (p.out_features // self._size for p in (attention.q_proj, attention.k_proj))
        self._inner, self._reads_beside = mlp.up_proj.out_features, layer.norms[0] is not None
        self._eps = layer.norms[2].eps
        self._weights: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_weights": None}  # a copy's lie elsewhere

    @classmethod
    def fits(cls, layer: Any) -> bool:
        parts = layer.self_attn, layer.mlp, *(norm for norm in layer.norms if norm is not None)
        quick = all(isinstance(vars(part).get("forward"), QuickNorm | QuickMLP | QuickAttention) for part in parts)
        alike = {norm.eps for norm in (*layer.norms, layer.self_attn.q_norm) if norm is not None}
        return quick and len(alike) == 1 and bool(cls._addresses(layer))

    @staticmethod
    def _addresses(layer: Any) -> list[int]:
        attention, mlp = layer.self_attn, layer.mlp
        products = attention.qkv.packed, attention.o_proj.forward, mlp.gate_up.packed, mlp.down_proj.forward
        if not all(isinstance(product, Packed) for product in products):
            return []
        beside, before, after, *own = (
            None if norm is None else norm.weight for norm in (*layer.norms, attention.q_norm, attention.k_norm)
        )
        return addresses((before, after, *own), products, attention.size, beside)

    def __call__(self, x: Tensor, *given: Any) -> Tensor:
        *beside, angles, depth, ctx = given
        keys = None
        if all(part.shape == x.shape and _ours(part) for part in (x, *beside)):
            keys = _Keys.of(x, angles, depth, ctx, self._kv_heads, self._size, tiled=True)
        if keys is None:
            return type(self._layer).forward(self._layer, x, *given)
        (rows, nodes, hidden), out = x.shape, x.clone()
        heads = 2 * (self._heads + self._kv_heads) * self._size
        work = x.new_empty(rows * nodes * (hidden * (1 + self._reads_beside) + heads + self._inner))
        if self._weights is None:
            self._weights = torch.tensor([self._addresses(self._layer)])
        table = in_cache(self._weights, [stack[None] for stack in keys.stacks])
        other = beside[0].data_ptr() if self._reads_beside else 0
        at = out.data_ptr(), other, table.data_ptr(), work.data_ptr(), *(part.data_ptr() for part in keys.placed)
        sizes = 1, rows, nodes, keys.reach, hidden, self._inner, self._heads, self._kv_heads, self._size, keys.slots
        self._functions.layers(*at, *sizes, torch.get_num_threads(), self._eps, self._size**-0.5)
        return out


class _Keys(NamedTuple):
    """Where a draft step writes its keys, and whom it may look at.

    stacks: keys and values. placed: committed slots [B], related [B, N, reach], cos and sin of each row, and which of
    those are whose. slots: of a text in the cache.
    """

    stacks: tuple[Tensor, ...]
    placed: tuple[Tensor, ...]
    reach: int
    slots: int

    @classmethod
    def of(
        cls, x: Tensor, angles: tuple[Tensor, Tensor], depth: int, ctx: Context, heads: int, size: int, tiled: bool
    ) -> "_Keys | None":
        """Reserved for a step that reads x [B, N, .]; None where the kernels cannot take it."""
        keys = ctx.memory
        if isinstance(keys, StreamKeys):
            keys = keys.of(depth)
        if not isinstance(keys, TreeKeys) or not _ours(x) or angles[0].shape[-1] != size:
            return None
        stacks = keys.stacked(x.device, heads, size, tiled)
        if not stacks:
            return None
        rows, nodes = x.shape[:2]
        cache, related = keys.reserve(ctx, nodes)
        cos, sin = (part.expand(rows, -1, -1, -1).float().contiguous() for part in angles)  # [B, 1, N, D]
        placed = cache.length.contiguous(), related.contiguous(), cos, sin, torch.arange(rows * nodes)
        return cls(stacks, placed, related.shape[2], stacks[0].shape[-2 if tiled else -1])


def _frozen(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad
