"""Frozen bfloat16 layers on a CPU, their weights laid out once as its matrix kernels want them.

torch's own bfloat16 linear lays the weight out anew in every call, which for the few rows of a decoding pass costs
about as much as the product itself; and a decoder layer of a small model spends as long between its products as in
them. Knows nn.Linear and the layers of a few transformers classes. The weights stay where they are too: what is packed
takes its memory twice.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.cache import Cache
from paceline.models.kernels import ARENA, kernels


class Packed:
    """A bfloat16 weight [out, in], laid out as a product of few rows reads it; called like F.linear, without its
    gradient. Where passes.cpp has products (a CPU with AMX) they take it, and a row's bits never depend on its company;
    elsewhere oneDNN's do.

    rows: None, or the most that one product of oneDNN takes, and never one alone: it sums the rows of a product one
    like the other, but does it otherwise for a single row, or for more of them than fit one step of its kernel. Of the
    others nothing needs to be asked, but with None what has very many rows may be torch's.
    halves: the weight is two of the same height, of which one may gate the other.
    """

    rows: int | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, halves: bool = False):
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        functions, (width, depth) = kernels(), weight.shape
        self.tiles: Tensor | None = None
        self._functions, self.halves = functions, halves and width % (2 * TILE) == 0
        if functions is not None and functions.tiled and depth % DEEP == 0:
            self.tiles = _in_tiles(self.weight, self.halves)
        else:
            self._laid_out = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)  # rows of a usual pass, as a hint

    def __deepcopy__(self, memo: dict) -> "Packed":
        return self  # what is packed cannot be copied, and never changes

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out]; `added` [..., out] before the sum is rounded."""
        rows = x.numel() // x.shape[-1]
        if x.dtype != torch.bfloat16 or x.requires_grad or (self.tiles is not None and not self._takes(rows)):
            out = F.linear(x, self.weight, self.bias)
            return out if added is None else out + added
        if self.tiles is not None:
            return self._by_tiles(x, added, rows)
        if self.rows is not None and not 2 <= rows <= self.rows:
            return self._by_few(x, added)
        if added is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._laid_out, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, added, self._laid_out, self.bias, "add")

    def gated(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out / 2]: silu of what the first half makes of x, times what the other does."""
        assert self._functions is not None
        width, rows = len(self.weight) // 2, x.numel() // x.shape[-1]
        out = x.new_empty(*x.shape[:-1], width)
        if self.tiles is not None and self.halves and self._takes(rows):
            at = [out.data_ptr(), x.data_ptr(), self.tiles.data_ptr(), address(self.bias)]
            self._functions.gated_linear(*at, rows, x.shape[-1], width, torch.get_num_threads())
        else:
            both = self(x)
            self._functions.gated(out.data_ptr(), both.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def _takes(self, rows: int) -> bool:
        """Whether a product of so many is taken in tiles."""
        return rows <= MANY or self.rows is not None

    def _by_tiles(self, x: Tensor, added: Tensor | None, rows: int) -> Tensor:
        assert self._functions is not None and self.tiles is not None
        x, added = x.contiguous(), None if added is None else added.contiguous()
        out = x.new_empty(*x.shape[:-1], len(self.weight))
        at = out.data_ptr(), x.data_ptr(), self.tiles.data_ptr(), address(self.bias), address(added)
        sizes = rows, x.shape[-1], len(self.weight), len(self.tiles), self.halves, torch.get_num_threads()
        self._functions.linear(*at, *sizes)
        return out

    def _by_few(self, x: Tensor, added: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) == 1:
            both = None if added is None else added.reshape(1, -1).expand(2, -1).contiguous()
            out = self(flat.expand(2, -1).contiguous(), both)[:1]
        elif len(flat) == 0:
            out = flat.new_empty(0, len(self.weight))
        else:
            assert self.rows is not None
            parts = -(-len(flat) // self.rows)  # of nearly equal size, so none is a single row
            more = [None] * parts if added is None else added.reshape(len(flat), -1).tensor_split(parts)
            out = torch.cat([self(part, one) for part, one in zip(flat.tensor_split(parts), more, strict=True)])
        return out.reshape(*x.shape[:-1], -1)


TILE, DEEP = 16, 32  # as in passes.cpp
MANY = 512  # rows from which torch's products, which lay the weight out anew, are as quick


def _in_tiles(weight: Tensor, halves: bool) -> Tensor:
    """[out, in] -> [pairs, in / DEEP, 2, DEEP / 2, TILE, 2], two columns of tiles a pair: neighbours, or with `halves`
    one of each half."""
    width, depth = weight.shape
    pairs = -(-width // (2 * TILE))
    if width < pairs * 2 * TILE:
        weight = F.pad(weight, (0, 0, 0, pairs * 2 * TILE - width))
    parts = weight.view(2, pairs, TILE, depth // DEEP, DEEP // 2, 2).transpose(0, 1) if halves else weight
    parts = parts.reshape(pairs, 2, TILE, depth // DEEP, DEEP // 2, 2)
    out = ARENA.bfloat16(pairs * 2 * TILE * depth).view(pairs, depth // DEEP, 2, DEEP // 2, TILE, 2)
    return out.copy_(parts.permute(0, 3, 1, 4, 2, 5))


def address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()


def packable(weight: Tensor) -> bool:
    """Whether there is anything to gain, and this machine's torch can do it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Beside:
    """Linear layers that read the same rows; packed, they are one product. No module: the layers stay their owner's.

    halves: see `Packed`.
    """

    def __init__(self, *parts: nn.Linear, halves: bool = False):
        self.parts, self._halves = parts, halves
        self.packed: Packed | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in] -> [..., out] of each."""
        if self.packed is None or x.dtype != torch.bfloat16 or x.requires_grad:
            return tuple(part(x) for part in self.parts)
        return self.packed(x).split([part.out_features for part in self.parts], -1)

    def pack(self) -> None:
        self.packed = _joined(*self.parts, halves=self._halves)

    def unpack(self) -> None:
        self.packed = None


class PackedLayer:
    """A decoder layer of Llama's make, as its class computes it, in fewer operators: one product for q, k and v, one
    for gate and up, one rotation for q and k, fused norms.

    What it does not do (another cache than ours, gradients) the layer's class goes on doing, with unpacked weights.
    """

    # transformers' classes with exactly these parts, whatever the model: no multipliers, no soft-caps, no other norms
    CLASSES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._attention = layer, attention
        self.size, self.scaling = attention.head_dim, attention.scaling
        self.heads, self.kv_heads = (part.out_features // self.size for part in (attention.q_proj, attention.k_proj))
        self._turned = self.heads + self.kv_heads
        self.into, self.out = _joined(attention.q_proj, attention.k_proj, attention.v_proj), _joined(attention.o_proj)
        self.gate_up, self.down = _joined(mlp.gate_proj, mlp.up_proj, halves=True), _joined(mlp.down_proj)
        self.inner = mlp.up_proj.out_features
        self._act = mlp.act_fn
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.own_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.functions = kernels() if self._plain else None

    @classmethod
    def fits(cls, layer: Any) -> bool:
        known = type(layer).__name__ in cls.CLASSES and type(layer).__module__.startswith("transformers.")
        return (
            known
            and layer.self_attn.config._attn_implementation == "sdpa"
            and getattr(layer.self_attn, "sliding_window", None) is None
            and all(_frozen(part) for part in layer.modules() if isinstance(part, nn.Linear))
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        **others: Any,
    ) -> Tensor:
        """[B, N, H] -> [B, N, H], by the names of transformers' own layers."""
        ours = cache is None or isinstance(cache, Cache)
        if not ours or attention_mask is None or position_embeddings is None or hidden_states.requires_grad:
            words = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, "cache": cache}
            return type(self._layer).forward(self._layer, hidden_states, **words, **others)
        before, after = self.norms
        parts = self.into(self.normed(hidden_states, before)).unflatten(-1, (-1, self.size))  # [B, N, Q + 2 S, D]
        turning, values = parts[:, :, : self._turned], parts[:, :, self._turned :].transpose(1, 2)
        if self.own_norms[0] is not None:
            both = turning.split([self.heads, self._turned - self.heads], 2)
            turning = torch.cat([self.normed(part, norm) for part, norm in zip(both, self.own_norms, strict=True)], 2)
        cos, sin = (part[:, :, None] for part in position_embeddings)
        first, second = turning.chunk(2, -1)
        turned = torch.addcmul(turning * cos, torch.cat([-second, first], -1), sin).transpose(1, 2)
        queries, keys = turned[:, : self.heads], turned[:, self.heads :]
        if cache is not None:
            keys, values = cache.update(keys, values, self._attention.layer_idx)
        seen = F.scaled_dot_product_attention(
            queries, keys, values, attention_mask, scale=self.scaling, enable_gqa=True
        )
        x = self.out(seen.transpose(1, 2).flatten(2), hidden_states)
        normed = self.normed(x, after)
        if self.functions is None:
            gate, up = self.gate_up(normed).chunk(2, -1)
            return self.down(self._act(gate) * up, x)
        return self.down(self.gate_up.gated(normed), x)

    def normed(self, x: Tensor, norm: Any) -> Tensor:
        width = x.shape[-1]
        if self.functions is None or not x.is_contiguous():
            return F.rms_norm(x, (width,), norm.weight, norm.variance_epsilon)
        out = torch.empty_like(x)
        at = out.data_ptr(), x.data_ptr(), norm.weight.data_ptr()
        self.functions.norm(*at, x.numel() // width, width, torch.get_num_threads(), norm.variance_epsilon)
        return out

    @property
    def _plain(self) -> bool:
        """Whether kernels.cpp knows all that lies between its products."""
        weight = self.norms[0].weight
        return (
            self._attention.config.hidden_act in ("silu", "swish")
            and weight.dtype == torch.bfloat16
            and all(width % 16 == 0 for width in (len(weight), self.inner, self.size))
            and self.size <= 256
        )


class PackedTrunk:
    """A trunk whose layers are all packed, from embedding to final norm without what transformers does around them."""

    CLASSES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")

    def __init__(self, trunk: Any):
        self._trunk = trunk
        self._layers: list[PackedLayer] = [layer.forward for layer in trunk.layers]
        self._angles = torch.empty(2, 0, 0)
        functions = [layer.functions for layer in self._layers]
        self._kernels = functions[0] if all(functions) else None
        self._weights: Tensor | None = None
        self._known: tuple[tuple[int, ...], Tensor] = (), torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_weights": None}  # a copy's lie elsewhere

    @property
    def _tiled(self) -> bool:
        """Whether all layers can be one call."""
        if self._weights is None:
            self._weights = self._addresses()
        return len(self._weights) > 0

    def _addresses(self) -> Tensor:
        """[L, 13], or nothing where the layers' products or scales are not as `layers` of passes.cpp wants them."""
        rows = []
        for layer in self._layers:
            norms = [None if norm is None else norm.weight for norm in (*layer.norms, *layer.own_norms)]
            rows.append(addresses(norms, (layer.into, layer.out, layer.gate_up, layer.down), layer.size))
        alike = {(norm.variance_epsilon, layer.scaling) for layer in self._layers for norm in layer.norms}
        return torch.tensor(rows if all(rows) and len(alike) == 1 else [])

    @classmethod
    def fits(cls, trunk: Any) -> bool:
        known = type(trunk).__name__ in cls.CLASSES and type(trunk).__module__.startswith("transformers.")
        return known and all(_is_packed(layer) for layer in trunk.layers)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """By the names of transformers' own trunks; a 4-d mask is added to the scores as it is."""
        trunk = self._trunk
        ours = (cache is None or isinstance(cache, Cache)) and attention_mask is not None and attention_mask.ndim == 4
        if not ours or (inputs_embeds is not None and inputs_embeds.requires_grad):
            words = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            return type(trunk).forward(trunk, **words, cache=cache, inputs_embeds=inputs_embeds, **others)
        x = trunk.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = trunk.rotary_emb(x, position_ids=position_ids)
        for layer in trunk.layers:
            hooked = layer._forward_pre_hooks or layer._forward_hooks  # they read what goes in and comes out
            run = layer if hooked else layer.forward
            x = run(x, attention_mask=attention_mask, position_embeddings=angles, cache=cache)
        return SimpleNamespace(last_hidden_state=self._layers[-1].normed(x, trunk.norm))

    # -- the same pass over our cache, with what kernels.cpp does between the products

    def ready(self, cache: Cache) -> bool:
        """Whether `run` can take this pass: nobody listens at a layer, and the cache is ours and laid out for it."""
        elsewhere = type(cache) is not Cache and type(cache).stacked is Cache.stacked  # has slots of its own
        if self._kernels is None or elsewhere:
            return False
        listened = any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._trunk.layers)
        return not listened and bool(self._stacks(cache))

    @torch.no_grad()
    def run(self, ids: Tensor, tree: Tensor | None, cache: Cache, taps: Sequence[int]) -> dict[int, Tensor]:
        """ids [B, N], tree [B, N, N] as in `Target.forward`; returns the taps and -1, the norm's output, [B, N, H]."""
        assert self._kernels is not None
        rows, nodes = ids.shape
        cache.place(nodes)
        if tree is None:
            tree = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1)
        tree, length, angles = tree.contiguous(), cache.length.contiguous(), self._turns(cache.capacity)
        x, stacks = self._trunk.embed_tokens(ids), self._stacks(cache)
        placed = length.data_ptr(), tree.data_ptr(), angles[0].data_ptr(), angles[1].data_ptr()
        tapped = self._whole(x, stacks, placed, taps) if self._tiled else self._by_layers(x, stacks, placed)
        last = tapped[-1] = torch.empty_like(x)
        norm, x = self._trunk.norm, tapped[len(self._layers)]
        at = last.data_ptr(), x.data_ptr(), norm.weight.data_ptr()
        self._kernels.norm(*at, rows * nodes, x.shape[-1], torch.get_num_threads(), norm.variance_epsilon)
        return {k: tapped[k] for k in (*taps, -1)}

    def _whole(
        self, x: Tensor, stacks: tuple[Tensor, ...], placed: tuple[int, ...], taps: Sequence[int]
    ) -> dict[int, Tensor]:
        """One call for all layers: the inputs of those that `taps` names, and at L what the last returns."""
        assert self._kernels is not None and self._weights is not None
        form, count, (rows, nodes, hidden) = self._layers[0], len(self._layers), x.shape
        tapped = {k: torch.empty_like(x) for k in taps if 0 <= k < count}
        placed_at = tuple(number for stack in stacks for number in (stack.data_ptr(), stack.stride(0)))
        if placed_at != self._known[0]:  # the same cache, round after round
            self._known = placed_at, in_cache(self._weights, stacks)
        table = self._known[1]
        table[:, -1] = 0
        for k, tap in tapped.items():
            table[k, -1] = tap.data_ptr()
        work = x.new_empty(rows * nodes * (hidden + 2 * (form.heads + form.kv_heads) * form.size + form.inner))
        sizes = count, rows, nodes, nodes, hidden, form.inner, form.heads, form.kv_heads, form.size, stacks[0].shape[-2]
        many = 0, 0, torch.get_num_threads()
        scales = form.norms[0].variance_epsilon, form.scaling
        at = x.data_ptr(), 0, table.data_ptr(), work.data_ptr()
        self._kernels.layers(*at, *placed, 0, *sizes, *many, *scales)
        return tapped | {count: x}

    def _by_layers(self, x: Tensor, stacks: tuple[Tensor, ...], placed: tuple[int, ...]) -> dict[int, Tensor]:
        """The same with oneDNN's products. The inputs of all layers, and at L what the last returns."""
        assert self._kernels is not None
        norm, gated, attend = self._kernels.norm, self._kernels.gated, self._kernels.attend
        form, (rows, nodes, hidden) = self._layers[0], x.shape
        slots, threads = stacks[0].shape[-1], torch.get_num_threads()
        sizes = rows, nodes, nodes, form.heads, form.kv_heads, form.size, slots, 0, 0, threads
        keys, values = (stack.unbind() for stack in stacks)
        x, real = x.flatten(0, 1), rows * nodes
        if real == 1 and form.into.rows is not None:
            x = x.repeat(2, 1)  # all the way, rather than in each product
        many = len(x)
        normed, seen, inner = (
            torch.zeros(many, width, dtype=x.dtype) for width in (hidden, form.heads * form.size, form.inner)
        )
        h, s, i = normed.data_ptr(), seen.data_ptr(), inner.data_ptr()
        tapped = {}
        for number, layer in enumerate(self._layers):
            tapped[number] = x
            before, after = layer.norms
            own = [0 if n is None else n.weight.data_ptr() for n in layer.own_norms]
            norm(h, x.data_ptr(), before.weight.data_ptr(), many, hidden, threads, before.variance_epsilon)
            qkv = layer.into(normed)
            written = keys[number].data_ptr(), values[number].data_ptr()
            attend(s, qkv.data_ptr(), *written, *placed, 0, *own, *sizes, before.variance_epsilon, layer.scaling)
            x = layer.out(seen, x)
            norm(h, x.data_ptr(), after.weight.data_ptr(), many, hidden, threads, after.variance_epsilon)
            both = layer.gate_up(normed)
            gated(i, both.data_ptr(), many, form.inner, threads)
            x = layer.down(inner, x)
        tapped[len(self._layers)] = x
        return {k: tap[:real].view(rows, nodes, hidden) for k, tap in tapped.items()}

    def by_few(self, rows: int | None) -> bool:
        """Let no product take more rows than this, nor one alone; None: as it comes. False where `run` cannot be."""
        if self._kernels is None:
            return False
        for layer in self._layers:
            for product in (layer.into, layer.out, layer.gate_up, layer.down):
                product.rows = rows
        return True

    def _stacks(self, cache: Cache) -> tuple[Tensor, ...]:
        form = self._layers[0]
        return cache.stacked(len(self._layers), form.kv_heads, form.size, torch.bfloat16, self._tiled)

    def _turns(self, positions: int) -> Tensor:
        """[2, at least so many positions, D] float32: cosines and sines, as transformers rounds them."""
        if self._angles.shape[1] < positions:
            like, rotary = self._trunk.embed_tokens.weight[:1, None], self._trunk.rotary_emb
            if rotary.rope_type not in ("dynamic", "longrope"):  # these turn all anew where one lies beyond their limit
                positions = 1 << (positions - 1).bit_length()
            self._angles = torch.cat(rotary(like, position_ids=torch.arange(positions)[None])).float().contiguous()
        return self._angles


def addresses(
    norms: Sequence[Tensor | None], products: Sequence[Packed], size: int, beside: Tensor | None = None
) -> list[int]:
    """Where the weights of a decoder layer lie, as `layers` of passes.cpp takes them; none where it cannot.

    norms: before attention, before the MLP, of queries, of keys; products: into attention, out of it, into the MLP,
    out of it; size: of a head; beside: the norm of what the attention reads beside.
    """
    if any(product.tiles is None for product in products) or not products[2].halves or size % DEEP:
        return []
    tiles = [address(part) for product in products for part in (product.tiles, product.bias)]
    return [address(norm) for norm in norms] + tiles + [address(beside)]


def in_cache(weights: Tensor, stacks: Sequence[Tensor]) -> Tensor:
    """The `addresses` of L layers [L, 13], and of their keys, their values and no tap."""
    table = torch.zeros(len(weights), weights.shape[1] + 3, dtype=torch.long)
    table[:, :-3] = weights
    for column, stack in zip((-3, -2), stacks, strict=True):
        table[:, column] = stack.data_ptr() + torch.arange(len(weights)) * stack.stride(0) * stack.element_size()
    return table


def _joined(*parts: nn.Linear, halves: bool = False) -> Packed:
    """Linear layers that read the same rows, as one."""
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    weights: list[Tensor] = [part.weight for part in parts]
    return Packed(torch.cat(weights), torch.cat(biases) if biases else None, halves)


def _frozen(layer: nn.Module) -> bool:
    """Whether it is a linear layer that can be packed: one of torch's own, not trained."""
    return type(layer) is nn.Linear and packable(layer.weight) and not layer.weight.requires_grad


def _besides(module: nn.Module) -> list[Beside]:
    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, Beside)]


def pack_weights(module: nn.Module) -> None:
    """Let frozen decoder layers and linear layers in `module` compute with packed weights. They must not change or move
    afterwards."""
    for part in module.modules():
        if PackedLayer.fits(part):
            part.forward = PackedLayer(part)
    for part in module.modules():
        if PackedTrunk.fits(part):
            part.forward = PackedTrunk(part)
    layers = [part for part in module.modules() if isinstance(part.__dict__.get("forward"), PackedLayer)]
    inside = {id(inner) for layer in layers for inner in layer.modules()}
    for beside in _besides(module):
        if all(_frozen(part) for part in beside.parts):
            beside.pack()
            inside |= {id(part) for part in beside.parts}
    for part in module.modules():
        if id(part) not in inside and isinstance(part, nn.Linear) and _frozen(part):
            part.forward = Packed(part.weight, part.bias)  # type: ignore[assignment, method-assign]


def unpack_weights(module: nn.Module) -> None:
    """Let the layers in `module` compute with their weights again, which may then change."""
    for beside in _besides(module):
        beside.unpack()
    for part in module.modules():
        if _is_packed(part):
            del part.forward


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), (Packed, PackedLayer, PackedTrunk))
