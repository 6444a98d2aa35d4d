"""Layers that several drafters are made of. Knows no method."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drafter import Context, Options
from paceline.models.errors import Refusal
from paceline.models.packed import Beside
from paceline.models.target import Target, rope_frequencies


class ResBlock(nn.Module):
    """L residual layers x + SiLU(W x + b), each with its own weights and the identity at the start (W = 0, b = 0).

    Source: Medusa (Cai et al. 2024), section 2.1; there the bias starts random, so a fresh head is not the identity.
    """

    def __init__(self, hidden: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def checked_map(vocab_map: Tensor, vocab: int) -> Tensor:
    """A draft vocabulary as every drafter stores it: [D] int64, ascending, each id once and below `vocab`."""
    ids = vocab_map.long()
    if ids.ndim != 1 or len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise ValueError(f"a draft vocabulary is an ascending list of distinct ids below {vocab}")
    return ids.clone()


def turned_into_offsets(vocab_map: Tensor | None, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """A draft vocabulary as EAGLE-3 stores it: d2t [D] int64, target id - draft id; t2d [V] bool, what it holds."""
    if vocab_map is None:
        return None, None
    ids = checked_map(vocab_map, vocab)
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids.to(known.device)] = True
    return ids - torch.arange(len(ids), device=ids.device), known


# ---------------------------------------------------------------- a decoder layer


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm of the last dimension, in the dtype of what it reads: fused, float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


LARGEST = 2**20  # heads or numbers in a row: what is larger is a fault, and would be allocated before it is noticed
Size = Annotated[int, Field(ge=1, le=LARGEST)]


class LayerOptions(BaseModel):
    """What a decoder layer is made of; None: as the target's own layers.

    rope: transformers' `rope_parameters` (rope_type, rope_theta, ...). qk_norm: RMSNorm over each head of q and k.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    intermediate: Size | None = None
    activation: str | None = None
    eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    rope: dict[str, Any] | None = None
    qk_norm: bool | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        return self.checked()

    def checked(self) -> Self:
        """Itself. Refusal: no layer can be made so, whatever the target."""
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise Refusal(f"method.layer.activation: {self.activation} is not one of {', '.join(ACTIVATIONS)}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            below = max(n for n in range(1, self.kv_heads) if self.heads % n == 0)
            raise Refusal(f"method.layer.kv_heads: {self.kv_heads} cannot share {self.heads} heads; nearest: {below}")
        if self.head_dim and self.head_dim % 2:
            raise Refusal(
                f"method.layer.head_dim: {self.head_dim} is odd, rotary turns pairs; nearest: {self.head_dim + 1}"
            )
        if self.rope is not None:
            rope_frequencies(self.rope, self.head_dim or 64)
        return self


class LayeredOptions(Options):
    """The options of methods that are made of decoder layers. layer: what these are made of.

    start: first weights: `random`; `head`: the target's final norm and output rows, the layers silent; `target`: one of
    the target's layers too. start_layer: which, -1 the last.
    """

    TRAINING = Options.TRAINING | {"start", "start_layer"}

    start: Literal["random", "head", "target"] = "random"
    start_layer: int = -1
    layer: LayerOptions = LayerOptions()

    def fitted(self, target: Target) -> Self:
        form = target.layer_form() | {k: v for k, v in self.layer.model_dump().items() if v is not None}
        layer = LayerOptions.model_construct(**form).checked()
        return super().fitted(target).model_copy(update={"layer": layer})

    def settled(self) -> dict[str, Any]:
        return super().settled() | {f"layer.{name}": value for name, value in self.layer}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass
class LookedUp:
    """The angles of rows at `positions` [B, N], turned by `offset` more: as cos and sin when they are unpacked; what
    takes them from `tables` itself spares that."""

    rotary: "Rotary"
    positions: Tensor
    dtype: torch.dtype
    offset: int

    def __iter__(self) -> Iterator[Tensor]:
        positions = self.positions.clamp(min=0) + self.offset
        tables = self.tables(int(positions.max()) + 1 if positions.numel() else 0)
        return (table[positions][:, None].to(self.dtype) for table in tables)

    def tables(self, reach: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first positions, of `reach` at least: [P, 2 * frequencies] float32."""
        return self.rotary.tables(reach, self.dtype)


Angles = tuple[Tensor, Tensor] | LookedUp


class Rotary:
    """Rotary angles of positions. No module, so that no cast to 16 bits reaches the frequencies.

    frequencies [D / 2] float32 (fewer where only the first part of a head turns); scaling multiplies cos and sin.
    """

    def __init__(self, frequencies: Tensor, scaling: float = 1.0):
        self.frequencies, self.scaling = frequencies.float(), scaling
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype, offset: int = 0) -> Angles:
        """[B, N] -> cos, sin [B, 1, N, 2 * frequencies] of those positions + offset, computed in float32.

        A position below 0 is padding, and taken as 0.
        """
        elsewhere = positions.device.type != "cpu" or torch.compiler.is_compiling()
        if elsewhere or torch.is_grad_enabled() or offset < 0:  # a table begins at 0
            return self._angles(positions.clamp(min=0) + offset, dtype)
        return LookedUp(self, positions, dtype, offset)  # decoding asks for few at a time, again and again

    def tables(self, reach: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `LookedUp`; rounded as those in `dtype` are."""
        tables = self._tables.get(dtype)
        if tables is None or len(tables[0]) < reach:
            cos, sin = self._angles(torch.arange(1 << reach.bit_length())[None], dtype)
            tables = self._tables[dtype] = cos[0, 0].float(), sin[0, 0].float()
        return tables

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def turned(x: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of [B, heads, N, D]; what lies beyond the angles' width stays."""
    cos, sin = angles
    width = cos.shape[-1]
    turning = x[..., :width]
    first, second = turning.chunk(2, -1)
    out = turning * cos + torch.cat([-second, first], -1) * sin
    return out if width == x.shape[-1] else torch.cat([out, x[..., width:]], -1)


class Attention(nn.Module):
    """Grouped-query attention whose keys the caller keeps. inputs: width of what is read; hidden: of the result."""

    def __init__(self, inputs: int, hidden: int, options: LayerOptions):
        super().__init__()
        heads, kv_heads, self.size = _known(options.heads), _known(options.kv_heads), _known(options.head_dim)
        bias = bool(options.qkv_bias)
        self.q_proj = nn.Linear(inputs, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, hidden, bias=bool(options.out_bias))
        self.qkv = Beside(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RMSNorm(self.size, eps=options.eps) if options.qk_norm else None
        self.k_norm = RMSNorm(self.size, eps=options.eps) if options.qk_norm else None

    def forward(self, x: Tensor, angles: Angles, depth: int, layer: int, ctx: Context) -> Tensor:
        """[B, N, inputs] -> [B, N, hidden]."""
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        seen = ctx.memory.attend(ctx, depth, layer, turned(q, angles), turned(k, angles), v)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, hidden: int, options: LayerOptions):
        super().__init__()
        width, bias = _known(options.intermediate), bool(options.mlp_bias)
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.gate_up = Beside(self.gate_proj, self.up_proj, halves=True)
        self.act = ACTIVATIONS[options.activation or "silu"]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down_proj(self.act(gate) * up)


class ResidualLayer(nn.Module):
    """Attention and a gated MLP, each of which adds to what goes through."""

    self_attn: Attention
    mlp: GatedMLP

    @property
    def norms(self) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm]:
        """Of what the attention reads beside, if it does; of what it reads; of what the MLP reads."""
        raise NotImplementedError


class DecoderLayer(ResidualLayer):
    """A layer as Llama's: x + attention(norm x), and to that its MLP(norm x). Parameter names are Llama's."""

    def __init__(self, hidden: int, options: LayerOptions):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps=options.eps)
        self.self_attn = Attention(hidden, hidden, options)
        self.post_attention_layernorm = RMSNorm(hidden, eps=options.eps)
        self.mlp = GatedMLP(hidden, options)

    @property
    def norms(self) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm]:
        return None, self.input_layernorm, self.post_attention_layernorm

    def forward(self, x: Tensor, angles: Angles, depth: int, ctx: Context) -> Tensor:
        """[B, N, H] -> [B, N, H]."""
        x = x + self.self_attn(self.input_layernorm(x), angles, depth, 0, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


@torch.no_grad()
def silence(layer: nn.Module) -> None:
    """Let a layer add nothing to its residual stream at first."""
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        for parameter in layer.get_submodule(part).parameters():
            nn.init.zeros_(parameter)


@torch.no_grad()
def copy_layer(layer: nn.Module, theirs: dict[str, Tensor]) -> None:
    """Fill a layer with a target's (`Target.layer_tensors`); where q, k and v read an embedding too, it is silent.

    Raises Refusal where a shape differs.
    """
    for name, own in layer.named_parameters():
        weight = theirs[name] if name in theirs else torch.empty(0)
        if weight.ndim == 2 and own.shape == (len(weight), 2 * weight.shape[1]):  # q, k, v: the embedding's half
            weight = torch.cat([torch.zeros_like(weight), weight], 1)
        if own.shape != weight.shape:
            raise Refusal(
                f"method.layer: {name} would be {list(own.shape)}, the target's is {list(weight.shape)}; "
                "leave method.layer to the target, or method.start=head"
            )
        own.copy_(weight)


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("options of a layer that follow the target have to be settled first: Options.fitted(target)")
    return value
