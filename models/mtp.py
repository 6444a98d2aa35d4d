"""Parallel MTP: a decoder layer for each depth, all on the same trunk output, and the target's own output head.

After Gloeckle et al. 2024, for a trunk whose own head has chosen x[t+1]: layer k predicts x[t+2+k]. It reads no token,
so all nodes of one depth share their logits; it attends over the verified text in a key stream of its own.

    feature   the trunk's output before its final norm: the residual stream, from which a decoder layer can go on
    state     norm_k(layer_k(feature)), in the place of the target's last state, which is what its output head reads

Knows no tree, mask or loss: `Context.memory` says what is seen.
"""

from torch import Tensor, nn

from paceline.models.drafter import Borrowed, Context, Drafter, HeadOptions, Shape, method
from paceline.models.layers import (
    DecoderLayer,
    LayeredOptions,
    RMSNorm,
    Rotary,
    checked_map,
    copy_layer,
    silence,
)
from paceline.models.streams import StreamKeys
from paceline.models.target import Head, Target, rope_frequencies


class MtpOptions(HeadOptions, LayeredOptions):
    """heads: layers, one a depth."""

    taps: tuple[int, ...] | None = None

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        return (layers,)


@method("mtp")
class Mtp(Drafter):
    """A layer and a norm for each depth; the output matrix is the target's."""

    Options = MtpOptions
    reads_tokens = False

    def __init__(self, options: MtpOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.max_depth = options.heads
        self.layers = nn.ModuleList(DecoderLayer(shape.hidden, options.layer) for _ in range(options.heads))
        self.norms = nn.ModuleList(RMSNorm(shape.hidden, eps=options.layer.eps) for _ in range(options.heads))
        self.rotary = Rotary(*rope_frequencies(options.layer.rope or {}, options.layer.head_dim or 0))
        self.token_map: Tensor | None
        self.register_buffer("token_map", None if vocab_map is None else checked_map(vocab_map, shape.vocab))

    @property
    def vocab_map(self) -> Tensor | None:
        return self.token_map

    def stream(self, depth: int) -> int:
        return depth

    def memory(self, rows: int, room: int) -> StreamKeys:
        return StreamKeys(rows, room, self.stream, self.reads_tokens)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        angles = self.rotary(ctx.positions, feature.dtype)
        return feature, self.norms[depth](self.layers[depth](feature, angles, depth, ctx))

    def head(self, state: Tensor, depth: int) -> Tensor:
        return self.head_of_target(state)

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        return None, self.borrowed.head

    def start(self, target: Target) -> None:
        """start=head: the norms are the target's and the layers silent, so that every head says what the target says.

        start=target: the layers are one of the target's own as well; with taps=[that layer], likewise.
        """
        if self.options.start == "random":
            return
        for layer, norm in zip(self.layers, self.norms, strict=True):
            norm.load_state_dict({"weight": target.final_norm()})
            if self.options.start == "target":
                copy_layer(layer, target.layer_tensors(self.options.start_layer))
            else:
                silence(layer)

    def borrow(self, target: Target) -> None:
        self.borrowed = Borrowed(head=target.head.rows(self.vocab_map))
