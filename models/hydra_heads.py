"""Hydra heads: Medusa's heads, each of which reads the embeddings of the tokens drafted before it too.

Head k maps [h_t, e(x[t+1]), .. e(x[t+1+k])] to x[t+2+k], so that each node of a tree has a state of its own: feature'
grows by an embedding a depth. With `prefix` (Hydra++) a decoder layer over the verified text comes between the target
and the heads; it is the only part that attends. Source: Ankner et al. 2024, sections 3 and 4.

Knows no tree, mask or loss: `Context.memory` says what is seen.
"""

from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.drafter import Borrowed, Context, Count, Drafter, HeadOptions, Options, Shape, method
from paceline.models.errors import Refusal
from paceline.models.layers import DecoderLayer, LayeredOptions, ResBlock, Rotary, checked_map, copy_layer, silence
from paceline.models.streams import TreeKeys
from paceline.models.target import Head, Target, rope_frequencies


class HydraOptions(HeadOptions, LayeredOptions):
    """blocks: residual layers of each head. output: its `own` matrix, or the target's `shared` one.

    prefix: whether a decoder layer comes before the heads; `layer` and `start=target` are about it.
    """

    blocks: Count = 1
    output: Literal["own", "shared"] = "own"
    prefix: bool = False

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.start == "target" and not self.prefix:
            raise Refusal("method.start: target is about a layer, and method.prefix=false has none; nearest: head")
        return self

    def fitted(self, target: Target) -> Self:
        return super().fitted(target) if self.prefix else Options.fitted(self, target)

    def settled(self) -> dict[str, Any]:
        return super().settled() if self.prefix else Options.settled(self)


class Join(nn.Module):
    """A residual layer from `inputs` to `hidden`: R x + SiLU(W x + b)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Linear(inputs, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., hidden]."""
        return self.res_connection(x) + F.silu(self.linear(x))


@method("hydra_heads")
class HydraHeads(Drafter):
    """H heads of L residual layers, the first of which joins what the head reads."""

    Options = HydraOptions

    def __init__(self, options: HydraOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.max_depth = options.heads
        hidden, heads = shape.hidden, range(options.heads)
        self.joins = nn.ModuleList(Join((k + 2) * hidden, hidden) for k in heads)
        self.blocks = nn.ModuleList(ResBlock(hidden, options.blocks - 1) for _ in heads)
        self.prefix = DecoderLayer(hidden, options.layer) if options.prefix else None
        layer = options.layer
        self.rotary = Rotary(*rope_frequencies(layer.rope or {}, layer.head_dim or 0)) if options.prefix else None
        self.token_map: Tensor | None
        self.register_buffer("token_map", None if vocab_map is None else checked_map(vocab_map, shape.vocab))
        width = shape.vocab if vocab_map is None else len(vocab_map)
        own = heads if options.output == "own" else ()
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in own)

    @property
    def vocab_map(self) -> Tensor | None:
        return self.token_map

    def memory(self, rows: int, room: int) -> TreeKeys | None:
        return None if self.prefix is None else TreeKeys(rows, room)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        if self.borrowed.embed is None:
            raise RuntimeError("Hydra heads read tokens through the target's embedding: call borrow(target) first")
        if depth == 0 and self.prefix is not None and self.rotary is not None:
            feature = self.prefix(feature, self.rotary(ctx.positions, feature.dtype), depth, ctx)
        feature = torch.cat([feature, self.borrowed.embed(tokens).to(feature.dtype)], -1)  # [B, N, (depth + 2) * H]
        return feature, self.blocks[depth](self.joins[depth](feature))

    def output(self, depth: int) -> int:
        return depth if self.options.output == "own" else 0

    def head(self, state: Tensor, depth: int) -> Tensor:
        if self.options.output == "own":
            return self.lm_heads[depth](state)
        return self.head_of_target(state)

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        return None, self.lm_heads[depth] if self.options.output == "own" else self.borrowed.head

    @torch.no_grad()
    def start(self, target: Target) -> None:
        """start=head: each head says what the target says, and hears no token yet.

        start=target: the layer before the heads is one of the target's own.
        """
        if self.options.start == "random":
            return
        rows = target.head.rows(self.vocab_map)
        for weight in self.lm_heads.parameters():
            weight.copy_(rows.weight * rows.scale)
        for part in self.joins.modules():
            if isinstance(part, Join):
                part.res_connection.weight.copy_(torch.eye(*part.res_connection.weight.shape))
                for parameter in part.linear.parameters():
                    nn.init.zeros_(parameter)
        if self.prefix is not None and self.options.start == "target":
            copy_layer(self.prefix, target.layer_tensors(self.options.start_layer))
        elif self.prefix is not None:
            silence(self.prefix)

    def borrow(self, target: Target) -> None:
        head = target.head.rows(self.vocab_map) if self.options.output == "shared" else None
        self.borrowed = Borrowed(target.embed, head)
