"""Frozen bfloat16 layers on a CPU, their weights laid out once as its matrix kernels want them.

torch's own bfloat16 linear lays the weight out anew in every call, which for the few rows of a decoding pass costs
about as much as the product itself; and a decoder layer of a small model spends as long between its products as in
them. Knows nn.Linear and the layers of a few transformers classes. The weights stay where they are too: what is packed
takes its memory twice.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.cache import Cache


class Packed:
    """A bfloat16 weight [out, in] as oneDNN wants it; called like F.linear, without its gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)  # rows of a usual pass, as a hint

    def __deepcopy__(self, memo: dict) -> "Packed":
        return self  # what is packed cannot be copied, and never changes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.dtype != torch.bfloat16 or x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._laid_out, self.bias, "none", [], "")


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
    """Linear layers that read the same rows; packed, they are one product. No module: the layers stay their owner's."""

    def __init__(self, *parts: nn.Linear):
        self.parts = parts
        self._packed: Packed | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in] -> [..., out] of each."""
        if self._packed is None or x.dtype != torch.bfloat16 or x.requires_grad:
            return tuple(part(x) for part in self.parts)
        return self._packed(x).split([part.out_features for part in self.parts], -1)

    def pack(self) -> None:
        self._packed = _joined(*self.parts)

    def unpack(self) -> None:
        self._packed = None


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
        self._size = attention.head_dim
        self._heads, kv_heads = (part.out_features // self._size for part in (attention.q_proj, attention.k_proj))
        self._turned = self._heads + kv_heads
        self._in, self._out = _joined(attention.q_proj, attention.k_proj, attention.v_proj), _joined(attention.o_proj)
        self._gate_up, self._down = _joined(mlp.gate_proj, mlp.up_proj), _joined(mlp.down_proj)
        self._act = mlp.act_fn
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._own_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)

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
        before, after = self._norms
        parts = self._in(_normed(hidden_states, before)).unflatten(-1, (-1, self._size))  # [B, N, Q + 2 S, D]
        turning, values = parts[:, :, : self._turned], parts[:, :, self._turned :].transpose(1, 2)
        if self._own_norms[0] is not None:
            both = turning.split([self._heads, self._turned - self._heads], 2)
            turning = torch.cat([_normed(part, norm) for part, norm in zip(both, self._own_norms, strict=True)], 2)
        cos, sin = (part[:, :, None] for part in position_embeddings)
        first, second = turning.chunk(2, -1)
        turned = torch.addcmul(turning * cos, torch.cat([-second, first], -1), sin).transpose(1, 2)
        queries, keys = turned[:, : self._heads], turned[:, self._heads :]
        if cache is not None:
            keys, values = cache.update(keys, values, self._attention.layer_idx)
        seen = F.scaled_dot_product_attention(
            queries, keys, values, attention_mask, scale=self._attention.scaling, enable_gqa=True
        )
        x = hidden_states + self._out(seen.transpose(1, 2).flatten(2))
        gate, up = self._gate_up(_normed(x, after)).chunk(2, -1)
        return x + self._down(self._act(gate) * up)


class PackedTrunk:
    """A trunk whose layers are all packed, from embedding to final norm without what transformers does around them."""

    CLASSES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")

    def __init__(self, trunk: Any):
        self._trunk = trunk

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
        return SimpleNamespace(last_hidden_state=_normed(x, trunk.norm))


def _joined(*parts: nn.Linear) -> Packed:
    """Linear layers that read the same rows, as one."""
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    weights: list[Tensor] = [part.weight for part in parts]
    return Packed(torch.cat(weights), torch.cat(biases) if biases else None)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


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
