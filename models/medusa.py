"""Medusa heads: H independent heads on the frozen target's last hidden state (Cai et al. 2024).

Head k maps the post-norm state at t, which has chosen x[t+1], to x[t+2+k]. It reads no token, so all nodes of one depth
share their logits. Parameter names are those vLLM (up to 0.32) reads, so an export of heads with matrices of their own
can be read there unchanged.
"""

from typing import Any, Literal

from torch import Tensor, nn

from paceline.models.drafter import Borrowed, Context, Count, Drafter, HeadOptions, Shape, method
from paceline.models.layers import ResBlock, checked_map
from paceline.models.target import Head, Target


class MedusaOptions(HeadOptions):
    """blocks: residual layers of each head. output: its `own` matrix, or the target's `shared` one."""

    blocks: Count = 1
    output: Literal["own", "shared"] = "own"


@method("medusa")
class Medusa(Drafter):
    """H heads of L residual layers, each with its own output matrix or all sharing the target's."""

    Options = MedusaOptions
    reads_tokens = False

    def __init__(self, options: MedusaOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        self.max_depth = options.heads
        self.blocks = nn.ModuleList(ResBlock(shape.hidden, options.blocks) for _ in range(options.heads))
        self.token_map: Tensor | None
        self.register_buffer("token_map", None if vocab_map is None else checked_map(vocab_map, shape.vocab))
        width = shape.vocab if vocab_map is None else len(vocab_map)
        own = options.heads if options.output == "own" else 0
        self.lm_heads = nn.ModuleList(nn.Linear(shape.hidden, width, bias=False) for _ in range(own))

    @property
    def vocab_map(self) -> Tensor | None:
        return self.token_map

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        return feature, self.blocks[depth](feature)

    def output(self, depth: int) -> int:
        return depth if self.options.output == "own" else 0

    def head(self, state: Tensor, depth: int) -> Tensor:
        if self.options.output == "own":
            return self.lm_heads[depth](state)
        return self.head_of_target(state)

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        return None, self.lm_heads[depth] if self.options.output == "own" else self.borrowed.head

    def start(self, target: Target) -> None:
        theirs = target.head.rows(self.vocab_map)
        for weight in self.lm_heads.parameters():
            weight.data.copy_(theirs.weight * theirs.scale)

    def borrow(self, target: Target) -> None:
        if self.options.output == "shared":
            self.borrowed = Borrowed(head=target.head.rows(self.vocab_map))

    def engine_config(self) -> dict[str, Any]:
        if self.options.output == "shared":  # vLLM's heads always have matrices of their own
            return {}
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": self.options.heads,
            "num_hidden_layers": self.options.blocks,
            "medusa_fc_bias": True,
            "truncated_vocab_size": self.shape.vocab if self.vocab_map is None else len(self.vocab_map),
        }
