"""Sequential MTP: a module for each depth, each on the output of the one before (DeepSeek-V3, section 2.2).

    x = eh_proj [enorm embedding, hnorm feature]      out = decoder layer (x)      state = shared_head.norm (out)

Embedding and output head are the target's own. Depth k passes through module k, and beyond the last through the last
again: one module applied at every depth is FastMTP's shape. Each module has a key stream of its own. A verified row at
depth k has read the text up to k tokens further, so the draft at depth k from t sees those up to t - k, and its own
(where DeepSeek's training, whose rows may all look at the text, shows it the k rows between as well).

Parameter names are those of DeepSeek's checkpoints: layers.{L + k}.*, L the target's layers. Knows no tree, mask or
loss: `Context.memory` says what is seen.
"""

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from paceline.models.drafter import Borrowed, Context, Count, Drafter, DraftStep, Shape, method
from paceline.models.errors import Refusal
from paceline.models.layers import (
    DecoderLayer,
    LayeredOptions,
    LayerOptions,
    RMSNorm,
    Rotary,
    checked_map,
    copy_layer,
    silence,
)
from paceline.models.streams import StreamKeys
from paceline.models.target import Head, Target, rope_frequencies


class SequentialOptions(LayeredOptions):
    """modules: how many; the last serves all deeper depths. hand_on: feature' is the state (`normed`) or `raw`, before
    the norm.

    position_offset: added to a row's position. zero_first: the embedding at position 0 counts as 0, as engines have it.
    None is 1, raw, 0 and false, or what an imported checkpoint has.
    """

    CONVENTIONS = frozenset({"taps", "hand_on", "position_offset", "zero_first"})
    USUAL: ClassVar[dict[str, Any]] = {"modules": 1, "hand_on": "raw", "position_offset": 0, "zero_first": False}

    taps: tuple[int, ...] | None = None
    modules: Count | None = None
    hand_on: Literal["raw", "normed"] | None = None
    position_offset: int | None = None
    zero_first: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self._check_all_trained()
        if self.taps is not None and len(self.taps) != 1:
            raise Refusal(f"method.taps: {list(self.taps)}, but MTP reads one hidden state; nearest: [-1]")
        return self

    def _check_all_trained(self) -> None:
        if self.unroll is not None and self.modules is not None and self.unroll < self.modules:
            raise Refusal(
                f"method.unroll: {self.unroll} leaves modules untrained, there are {self.modules}; "
                f"nearest: method.unroll={self.modules}"
            )

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        return (-1,) if self.hand_on == "normed" else (layers,)

    def fitted(self, target: Target) -> Self:
        usual = {name: value for name, value in self.USUAL.items() if getattr(self, name) is None}
        return super().fitted(target).model_copy(update=usual)

    def settled(self) -> dict[str, Any]:
        return super().settled() | {name: getattr(self, name) for name in self.USUAL}

    def check_settled(self) -> None:
        super().check_settled()
        self._check_all_trained()


class MtpModule(DecoderLayer):
    """A decoder layer, and what joins the embedding to the feature that it reads."""

    def __init__(self, hidden: int, options: LayerOptions):
        super().__init__(hidden, options)
        self.enorm = RMSNorm(hidden, eps=options.eps)
        self.hnorm = RMSNorm(hidden, eps=options.eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps=options.eps)})

    def joined(self, feature: Tensor, embedded: Tensor) -> Tensor:
        """[B, N, H] each -> [B, N, H], what the layer goes on from."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(feature)], -1))


@method("mtp_sequential")
class SequentialMtp(Drafter):
    """One or more modules, as deep as asked."""

    Options = SequentialOptions

    def __init__(self, options: SequentialOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.position_offset = options.position_offset or 0
        modules = [MtpModule(shape.hidden, options.layer) for _ in range(options.modules or 1)]
        self.layers = nn.ModuleDict({str(shape.layers + k): module for k, module in enumerate(modules)})
        self._by_depth = tuple(modules)
        self.rotary = Rotary(*rope_frequencies(options.layer.rope or {}, options.layer.head_dim or 0))
        self.token_map: Tensor | None
        self.register_buffer("token_map", None if vocab_map is None else checked_map(vocab_map, shape.vocab))

    @property
    def unroll(self) -> int:
        return self.options.unroll or len(self._by_depth)

    @property
    def vocab_map(self) -> Tensor | None:
        return self.token_map

    def stream(self, depth: int) -> int:
        return min(depth, len(self._by_depth) - 1)

    def memory(self, rows: int, room: int) -> StreamKeys:
        return StreamKeys(rows, room, self.stream)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        if self.borrowed.embed is None:
            raise RuntimeError("MTP reads tokens through the target's embedding: call borrow(target) first")
        embedded = self.borrowed.embed(tokens).to(feature.dtype)
        if self.options.zero_first:
            embedded = embedded.masked_fill((ctx.positions == 0)[..., None], 0)
        module = self._by_depth[self.stream(depth)]
        angles = self.rotary(ctx.positions, feature.dtype, self.position_offset)
        out = module(module.joined(feature, embedded), angles, depth, ctx)
        state = module.shared_head["norm"](out)
        return state if self.options.hand_on == "normed" else out, state

    def head(self, state: Tensor, depth: int) -> Tensor:
        return self.head_of_target(state)

    def as_step(self) -> DraftStep | None:
        if len(self._by_depth) > 1 or self.options.zero_first:
            return None
        (module,), normed = self._by_depth, self.options.hand_on == "normed"
        joined = module.enorm, module.hnorm, module.eh_proj
        return DraftStep(module, self.rotary, *joined, module.shared_head["norm"], normed)

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        return None, self.borrowed.head

    @torch.no_grad()
    def start(self, target: Target) -> None:
        """start=head: the norm is the target's, the layer silent, and what it goes on from the feature alone.

        From the residual stream (taps null, hand_on raw) every depth then says what the target says.
        start=target: the layer is one of the target's own as well.
        """
        if self.options.start == "random":
            return
        for module in self._by_depth:
            module.shared_head["norm"].load_state_dict({"weight": target.final_norm()})
            module.eh_proj.weight.copy_(torch.eye(self.shape.hidden, 2 * self.shape.hidden).roll(self.shape.hidden, 1))
            if self.options.start == "target":
                copy_layer(module, target.layer_tensors(self.options.start_layer))
            else:
                silence(module)

    def borrow(self, target: Target) -> None:
        self.borrowed = Borrowed(target.embed, target.head.rows(self.vocab_map), target.table)
