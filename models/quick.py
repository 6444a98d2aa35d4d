"""A drafter's own layers in bfloat16 on a CPU, what lies between their products compiled: for decoding.

A draft step has few rows, so that its operators cost more than its products. Knows layers.py, whose forward passes
these take the place of, as packed.py does for a target's. What they cannot do (gradients, another dtype, keys that are
kept otherwise) the layers go on doing themselves. Not bit for bit what those compute: drafts need not be.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drafter import Context, Drafter, DraftStep, Levels, Limits, no_numbers
from paceline.models.kernels import LANES, MOST, WIDEST, Library, kernels
from paceline.models.layers import Angles, Attention, GatedMLP, LookedUp, ResidualLayer, RMSNorm
from paceline.models.packed import Packed, address, addresses, in_cache
from paceline.models.streams import StreamKeys, TreeKeys
from paceline.models.target import Head


def quicken(drafter: Drafter) -> None:
    """Let the packed layers of a drafter, which do not change any more, compute so where kernels.cpp knows how."""
    functions = kernels()
    if functions is None:
        return
    for part in drafter.modules():
        for quick in (QuickNorm, QuickMLP, QuickAttention):
            if type(part) is quick.OF and quick.fits(part):
                part.forward = quick(part, functions)  # type: ignore[method-assign]
    if not functions.tiled:
        return
    for part in drafter.modules():
        if isinstance(part, ResidualLayer) and QuickLayer.fits(part):
            part.forward = QuickLayer(part, functions)
    drafter.likeliest = QuickLikeliest(drafter, functions)  # type: ignore[method-assign]
    tree = QuickTree(drafter, functions)
    drafter.unfold, drafter.unfold_dynamic = tree.static, tree.dynamic  # type: ignore[method-assign]


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
        at = out.data_ptr(), x.data_ptr(), weight.data_ptr()
        self._functions.norm(*at, x.numel() // width, width, torch.get_num_threads(), self._norm.eps)
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

    def __call__(self, x: Tensor, angles: Angles, depth: int, layer: int, ctx: Context) -> Tensor:
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
        sizes = rows, nodes, keys.reach, self._heads, self._kv_heads, self._size, keys.slots, *keys[-2:]
        self._functions.attend(
            *at, *weights, *sizes, torch.get_num_threads(), norms[0].eps if norms else 0.0, self._size**-0.5
        )
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
        self._known: tuple[tuple[int, ...], Tensor] = (), torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_weights": None, "_known": ((), torch.empty(0))}  # a copy's lie elsewhere

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

    @property
    def form(self) -> tuple[int, ...]:
        """Numbers within the MLP, query heads, key heads, numbers of each."""
        return self._inner, self._heads, self._kv_heads, self._size

    @property
    def scales(self) -> tuple[float, float]:
        """What norms add, and what scores are multiplied by."""
        return self._eps, self._size**-0.5

    def table(self, stacks: tuple[Tensor, ...]) -> Tensor:
        """`in_cache` of this layer."""
        if self._weights is None:
            self._weights = torch.tensor([self._addresses(self._layer)])
        stacked_at = tuple(stack.data_ptr() for stack in stacks)
        if stacked_at != self._known[0]:  # the same cache, round after round
            self._known = stacked_at, in_cache(self._weights, stacks)
        return self._known[1]

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
        other = beside[0].data_ptr() if self._reads_beside else 0
        at = [other, *(part.data_ptr() for part in (self.table(keys.stacks), work, *keys.placed))]
        sizes = 1, rows, nodes, keys.reach, hidden, *self.form, *keys[-3:], torch.get_num_threads()
        self._functions.layers(out.data_ptr(), *at, *sizes, *self.scales)
        return out


class QuickLikeliest:
    """What a drafter whose head is a norm and a matrix drafts, in one call."""

    def __init__(self, drafter: Drafter, functions: Library):
        self._drafter, self._functions = drafter, functions

    def __call__(self, state: Tensor, depth: int, many: int, known: int | None = None) -> tuple[Tensor, Tensor]:
        norm: Any
        norm, matrix = self._drafter.output_head(depth)
        packed = _plain(matrix)
        if packed is None or packed.tiles is None or many > MOST or not _ours(state) or not _normed_by(norm):
            return type(self._drafter).likeliest(self._drafter, state, depth, many, known)
        width, hidden = packed.weight.shape
        known = width if known is None else min(known, width)
        many, rows = min(many, known), state.numel() // hidden
        mass, logp = (torch.empty(*state.shape[:-1], n, dtype=torch.float32) for n in (1, many))
        ids, ours = torch.empty(logp.shape, dtype=torch.long), self._drafter.vocab_map
        work = state.new_empty(rows * (hidden + width))
        weights = None if norm is None else norm.weight, packed.tiles, packed.bias, ours
        at = [part.data_ptr() for part in (mass, logp, ids, work, state)] + [address(part) for part in weights]
        sizes = rows, hidden, width, len(packed.tiles), known, many, torch.get_num_threads()
        if not self._functions.likeliest(*at, *sizes, 0.0 if norm is None else norm.eps):
            raise no_numbers(self._drafter)
        return logp, ids


class QuickTree:
    """A drafter's tree in one call, where a step is one layer: see drafts.cpp."""

    def __init__(self, drafter: Drafter, functions: Library):
        self._drafter, self._functions = drafter, functions
        self._step: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_step": None}  # a copy's weights lie elsewhere

    def static(
        self, feature: Tensor, tokens: Tensor, ctx: Context, levels: Levels, known: int | None
    ) -> tuple[Tensor, Tensor] | None:
        given = self._given(feature, tokens, ctx, known)
        if given is None:
            return None
        shape = len(tokens), levels.nodes
        words, logp = torch.empty(shape, dtype=torch.long), torch.empty(shape)
        at = words.data_ptr(), logp.data_ptr(), given.at, levels.plan.data_ptr()
        self._checked(self._functions.unfold(*at, levels.nodes, levels.depth, *given.scales), levels.nodes)
        return words, logp

    def dynamic(
        self, feature: Tensor, tokens: Tensor, ctx: Context, limits: Limits, known: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        given = self._given(feature, tokens, ctx, known) if limits.width <= MOST else None
        if given is None:
            return None
        shape = len(tokens), limits.nodes
        words, parents = (torch.empty(shape, dtype=torch.long) for _ in range(2))
        logp, size = torch.empty(shape), torch.empty(len(tokens), dtype=torch.long)
        at = words.data_ptr(), parents.data_ptr(), logp.data_ptr(), size.data_ptr(), given.at
        self._checked(self._functions.unfold_dynamic(*at, *limits, *given.scales), limits.nodes)
        most = int(size.max())
        return words[:, :most], parents[:, :most], size, logp[:, :most]

    def _given(self, feature: Tensor, tokens: Tensor, ctx: Context, known: int | None) -> "_Given | None":
        step = self._drafter.as_step()
        if step is None:
            return None
        if self._step is None:
            self._step = torch.tensor(self._parts(step))
        if not len(self._step) or not _ours(feature) or feature.shape[-1] != self._drafter.shape.hidden:
            return None
        layer: QuickLayer = step.layer.forward  # type: ignore[assignment]
        _, _, kv_heads, head = layer.form
        angles = step.rotary(ctx.positions, feature.dtype, self._drafter.position_offset)
        keys = _Keys.of(feature, angles, 0, ctx, kv_heads, head, tiled=True)
        if keys is None:
            return None
        width, (length, _, cos, sin, positions) = int(self._step[-3]), keys.placed
        parts = feature, tokens.contiguous(), positions, ctx.count.contiguous()
        tables = self._step, layer.table(keys.stacks), length, cos, sin
        sizes = *feature.shape, *layer.form, *keys[-3:], width if known is None else min(known, width)
        at = [part.data_ptr() for part in (*parts, *tables)]
        numbers = (ctypes.c_long * (len(at) + len(sizes) + 1))(*at, *sizes, torch.get_num_threads())
        return _Given(numbers, layer.scales, (parts, tables))

    def _checked(self, answer: int, nodes: int) -> None:
        if answer < 0:
            raise RuntimeError(f"a tree of {nodes} nodes was asked for, and the drafter's memory made for less")
        if not answer:
            raise no_numbers(self._drafter)

    def _parts(self, step: DraftStep) -> list[int]:
        """`Step` of drafts.cpp; none where the drafter is more than that."""
        drafter, norms = self._drafter, (step.embedding_norm, step.feature_norm, step.norm)
        own, matrix = drafter.output_head(0)
        head, table, layer = _plain(matrix), drafter.borrowed.table, vars(step.layer).get("forward")
        fuse: Any = None if step.fuse is None else vars(step.fuse).get("forward")
        if not isinstance(layer, QuickLayer) or drafter.stream(1) != drafter.stream(0):
            return []
        if head is None or head.tiles is None or table is None or not _frozen(table):
            return []
        if step.fuse is not None and not (isinstance(fuse, Packed) and fuse.tiles is not None):
            return []
        every = [norm for norm in (*norms, own) if norm is not None]
        if (own and step.norm) or not all(map(_normed_by, every)) or {norm.eps for norm in every} - {layer.scales[0]}:
            return []
        before = [None if norm is None else norm.weight for norm in norms[:2]]
        last: Any = step.norm or own
        inside = (None, None) if fuse is None else (fuse.tiles, fuse.bias)
        parts = table, *before, *inside, last and last.weight, head.tiles, head.bias, drafter.vocab_map
        return [*map(address, parts), len(head.weight), len(head.tiles), step.normed]


class _Given(NamedTuple):
    """`Given` of drafts.cpp. kept: what it points to."""

    numbers: ctypes.Array
    scales: tuple[float, float]
    kept: tuple[Any, ...]

    @property
    def at(self) -> int:
        return ctypes.addressof(self.numbers)


def _plain(matrix: nn.Module | Head | None) -> Packed | None:
    """An output matrix, packed, if nothing is done to its logits."""
    if isinstance(matrix, Head):
        return matrix.packed if matrix.scale == 1.0 and matrix.softcap is None else None
    packed = None if matrix is None else vars(matrix).get("forward")
    return packed if isinstance(packed, Packed) else None


def _normed_by(norm: Any) -> bool:
    return norm is None or isinstance(vars(norm).get("forward"), QuickNorm)


class _Keys(NamedTuple):
    """Where a draft step writes its keys, and whom it may look at.

    stacks: keys and values. placed: committed slots [B], related [B, N, reach], cos and sin of `angles` angles, and
    which of those, and `offset`, turns each row [B, N]. slots: of a text in the cache.
    """

    stacks: tuple[Tensor, ...]
    placed: tuple[Tensor, ...]
    reach: int
    slots: int
    offset: int
    angles: int

    @classmethod
    def of(
        cls, x: Tensor, angles: Angles, depth: int, ctx: Context, heads: int, size: int, tiled: bool
    ) -> "_Keys | None":
        """Reserved for a step that reads x [B, N, .]; None where the kernels cannot take it."""
        keys = ctx.memory
        if isinstance(keys, StreamKeys):
            keys = keys.of(depth)
        if not isinstance(keys, TreeKeys) or not _ours(x):
            return None
        if isinstance(angles, LookedUp):  # no text is longer than there is room
            (cos, sin), offset = angles.tables(keys.room + angles.offset), angles.offset
            turn_of = angles.positions.contiguous()
        else:
            cos, sin = (part.expand(len(x), -1, -1, -1).float().contiguous() for part in angles)  # [B, 1, N, D]
            turn_of, offset = torch.arange(cos.shape[0] * cos.shape[2]), 0
        stacks = keys.stacked(x.device, heads, size, tiled) if cos.shape[-1] == size else ()
        if not stacks:
            return None
        cache, related = keys.reserve(ctx, x.shape[1])
        placed = cache.length.contiguous(), related.contiguous(), cos, sin, turn_of
        sizes = related.shape[2], stacks[0].shape[-2 if tiled else -1]
        return cls(stacks, placed, *sizes, offset, cos.numel() // size)


def _frozen(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad
