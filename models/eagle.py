"""EAGLE: one decoder layer on the target's own hidden states, fed its own output from depth to depth.

One drafter, whose options span the family. It reads the token at t+1+k beside the feature of t+k, so each node of a
tree has a state of its own, and attends over the verified text.

    join=fc         (EAGLE-1, HASS; Li et al. 2024)   x = fc [embedding, feature], a layer without input norm;
                    features are the target's post-norm states, and its own output head reads them
    join=attention  (EAGLE-3; Li et al. 2025)         feature = fc [three taps]; q, k and v read [norm embedding,
                    norm feature]; a norm and an output head of its own, which the carried feature does not pass

Parameter names are the official ones. Knows no tree, mask or loss: `Context.memory` says what is seen.
"""

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from paceline.models.drafter import Borrowed, Context, Drafter, DraftStep, Shape, method
from paceline.models.errors import Refusal
from paceline.models.layers import (
    Angles,
    Attention,
    GatedMLP,
    LayeredOptions,
    LayerOptions,
    ResidualLayer,
    RMSNorm,
    Rotary,
    copy_layer,
    silence,
    turned_into_offsets,
)
from paceline.models.streams import TreeKeys
from paceline.models.target import Head, Target, rope_frequencies


class EagleOptions(LayeredOptions):
    """join, output: see the module. fc_bias: of `fc`.

    noise: features are read with uniform noise in (-noise, noise) in training. detach: each depth learns to do with its
    input, not to shape it.
    """

    TRAINING = LayeredOptions.TRAINING | {"noise", "detach"}

    taps: tuple[int, ...] | None = None
    join: Literal["fc", "attention"] = "attention"
    output: Literal["own", "shared"] = "own"
    fc_bias: bool = False
    noise: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    detach: bool = False

    @model_validator(mode="after")
    def _agree(self) -> Self:
        taps = self.taps
        if self.join == "fc" and taps is not None and len(taps) != 1:
            raise Refusal(f"method.taps: {list(taps)}, but join=fc reads one hidden state; nearest: [-1]")
        if taps is not None and (not taps or len(set(taps)) != len(taps)):
            raise Refusal(f"method.taps: {list(taps)} must be distinct layers, at least one; null picks them")
        if self.join == "attention" and self.objective.get("smooth_l1"):
            raise Refusal(
                "method.objective.smooth_l1: join=attention carries features of its own, there are no target's to come "
                "near; nearest: 0"
            )
        return self

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        return (-1,) if self.join == "fc" else default_taps(layers)


def default_taps(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high hidden state: the official inputs of layers 2, L // 2 and L - 3, where distinct.

    Refusal: a single layer has no three.
    """
    low, middle, high = 2, layers // 2, layers - 3
    if low < middle < high:
        return low, middle, high
    if layers >= 4:
        return 1, layers // 2, layers - 1
    if layers >= 2:
        return layers - 2, layers - 1, -1
    raise Refusal("method.taps: this target has 1 layer, too few for three taps; nearest: method.taps=[0,-1]")


class EagleLayer(ResidualLayer):
    """A decoder layer; `inputs` is what its attention reads beside the residual stream."""

    def __init__(self, hidden: int, join: str, options: LayerOptions):
        super().__init__()
        wide = join == "attention"
        self.self_attn = Attention(hidden * (1 + wide), hidden, options)
        self.mlp = GatedMLP(hidden, options)
        self.post_attention_layernorm = RMSNorm(hidden, eps=options.eps)
        self.input_layernorm = RMSNorm(hidden, eps=options.eps) if wide else None  # of the embedding
        self.hidden_norm = RMSNorm(hidden, eps=options.eps) if wide else None

    @property
    def norms(self) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm]:
        return self.input_layernorm, self.hidden_norm, self.post_attention_layernorm

    def forward(self, feature: Tensor, embedded: Tensor, angles: Angles, depth: int, ctx: Context) -> Tensor:
        """[B, N, H] each -> [B, N, H]."""
        x = feature
        if self.input_layernorm is not None and self.hidden_norm is not None:
            x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        x = feature + self.self_attn(x, angles, depth, 0, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


@method("eagle")
class Eagle(Drafter):
    """One layer, applied again at every depth: as deep as asked."""

    Options = EagleOptions

    def __init__(self, options: EagleOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        hidden, wide = shape.hidden, options.join == "attention"
        inputs = len(self.taps) if wide else 2
        self.fc = nn.Linear(inputs * hidden, hidden, bias=options.fc_bias) if inputs > 1 else None
        layer = EagleLayer(hidden, options.join, options.layer)
        if wide:
            self.midlayer = layer
            self.norm = RMSNorm(hidden, eps=options.layer.eps)
        else:
            self.layers = nn.ModuleList([layer])
        self._layer = (layer,)  # not as a second child
        self.rotary = Rotary(*rope_frequencies(options.layer.rope or {}, options.layer.head_dim or 0))
        self._mapped: tuple[tuple[int, int], Tensor] | None = None
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        offsets, known = turned_into_offsets(vocab_map, shape.vocab)
        self.register_buffer("d2t", offsets)
        self.register_buffer("t2d", known)
        if options.output == "own":
            self.lm_head = nn.Linear(hidden, shape.vocab if vocab_map is None else len(vocab_map), bias=False)

    @property
    def vocab_map(self) -> Tensor | None:
        if self.d2t is None:
            return None
        if torch.compiler.is_compiling():
            return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        now = self.d2t.data_ptr(), self.d2t._version
        if self._mapped is None or self._mapped[0] != now:  # asked for at every depth
            self._mapped = now, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        return self._mapped[1]

    @property
    def detach(self) -> bool:  # type: ignore[override]
        return self.options.detach

    def memory(self, rows: int, room: int) -> TreeKeys:
        return TreeKeys(rows, room)

    def read(self, hidden: Tensor) -> Tensor:
        feature = hidden.to(self.dtype)
        if self.options.join == "attention" and self.fc is not None:
            feature = self.fc(feature)
        if self.training and self.options.noise:
            feature = feature + self.options.noise * (2 * torch.rand_like(feature) - 1)
        return feature

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        if self.borrowed.embed is None:
            raise RuntimeError("EAGLE reads tokens through the target's embedding: call borrow(target) first")
        embedded = self.borrowed.embed(tokens).to(feature.dtype)
        if self.options.join == "fc" and self.fc is not None:
            feature = self.fc(torch.cat([embedded, feature], -1))
        angles = self.rotary(ctx.positions, feature.dtype, self.position_offset)
        out = self._layer[0](feature, embedded, angles, depth, ctx)
        return out, out

    def head(self, state: Tensor, depth: int) -> Tensor:
        if self.options.join == "attention":
            state = self.norm(state)
        if self.options.output == "own":
            return self.lm_head(state)
        return self.head_of_target(state)

    def as_step(self) -> DraftStep:
        return DraftStep(self._layer[0], self.rotary, fuse=self.fc if self.options.join == "fc" else None)

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        norm = self.norm if self.options.join == "attention" else None
        return norm, self.lm_head if self.options.output == "own" else self.borrowed.head

    @torch.no_grad()
    def start(self, target: Target) -> None:
        """start=head: the final norm and the output rows are the target's; the rest passes the highest tap on.

        start=target: the decoder layer is one of the target's own as well, and does not look at the embedding yet.
        """
        if self.options.start == "random":
            return
        if self.options.start == "target":
            self._copy_layer(target)
        else:
            silence(self._layer[0])
        if self.fc is not None:  # the last part of what it reads is the feature, or the highest tap
            nn.init.zeros_(self.fc.weight)
            self.fc.weight[:, -self.shape.hidden :].copy_(torch.eye(self.shape.hidden))
            if self.fc.bias is not None:
                nn.init.zeros_(self.fc.bias)
        if self.options.join == "attention":
            self.norm.weight.copy_(target.final_norm())
        if self.options.output == "own":
            rows = target.head.rows(self.vocab_map)
            self.lm_head.weight.copy_(rows.weight * rows.scale)

    def _copy_layer(self, target: Target) -> None:
        theirs, layer = target.layer_tensors(self.options.start_layer), self._layer[0]
        if layer.hidden_norm is not None:
            theirs["hidden_norm.weight"] = theirs["input_layernorm.weight"]
            theirs["input_layernorm.weight"] = target.layer_tensors(0)["input_layernorm.weight"]  # reads embeddings
        copy_layer(layer, theirs)

    def check_vocabulary(self) -> None:
        ids = self.vocab_map
        if ids is not None and self.t2d is not None and not torch.equal(self.t2d.nonzero()[:, 0], ids):
            raise ValueError("tensor t2d marks other tokens than d2t leads to")

    def borrow(self, target: Target) -> None:
        head = target.head.rows(self.vocab_map) if self.options.output == "shared" else None
        self.borrowed = Borrowed(target.embed, head, target.table)

    def engine_config(self) -> dict[str, Any]:
        layer, rope, taps = self.options.layer, self.options.layer.rope or {}, list(self.taps)
        apart = (
            "rope_theta",
            "max_position_embeddings",
            "partial_rotary_factor",
        )  # said at the top, as before version 5
        scaling = {key: value for key, value in rope.items() if key not in apart}
        kind = scaling.get("rope_type", "default")
        config = {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "intermediate_size": layer.intermediate,
            "hidden_act": layer.activation,
            "rms_norm_eps": layer.eps,
            "rope_scaling": None if kind == "default" else scaling | {"type": kind},  # official code reads `type`
            **{name: rope[name] for name in apart if rope.get(name) is not None},
            "attention_bias": bool(layer.qkv_bias),
            "tie_word_embeddings": False,
        }
        if self.options.join == "fc":
            return config | {"architectures": ["LlamaForCausalLM"], "bias": self.options.fc_bias}
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.shape.vocab if self.d2t is None else len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": taps,  # vLLM: after so many layers
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]},  # SGLang: after layer k
            # without `norm_output`: to SpecForge it means another thing than to vLLM and SGLang
            **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm"), False),
        }
