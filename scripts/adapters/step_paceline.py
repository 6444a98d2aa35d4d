"""paceline: the step that train/loop.py takes, float32 weights under bfloat16 autocast."""

from pathlib import Path
from typing import Any

import torch
from learner import Learner
from torch import Tensor, nn

from paceline.data.batch import pack
from paceline.data.rows import Example
from paceline.models import formats
from paceline.models.drafter import Shape
from paceline.models.drafter import build as build_drafter
from paceline.models.eagle import EagleOptions
from paceline.models.layers import LayerOptions
from paceline.models.medusa import MedusaOptions
from paceline.models.mtp_sequential import SequentialOptions
from paceline.models.target import Head
from paceline.train.step import TrainStep


def build(case: dict[str, Any]) -> Learner:
    config = case["config"]
    layer = LayerOptions(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        activation="silu",
        eps=config["rms_norm_eps"],
        rope={"rope_type": "default", "rope_theta": config["rope_theta"]},
        qk_norm=case["method"] == "mtp",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    depths, ids = case["depths"], case["vocab_map"]
    if case["method"] == "medusa":
        options: Any = MedusaOptions(name="medusa", heads=depths, objective={case["loss"]: 1.0})
    elif case["method"] == "mtp":
        options = SequentialOptions(
            name="mtp_sequential", modules=1, unroll=depths, hand_on="normed", taps=(-1,), position_offset=0,
            zero_first=False, objective={case["loss"]: 1.0}, decay=0.6, layer=layer,
        )  # fmt: skip
    else:
        options = EagleOptions(
            name="eagle", unroll=depths, draft_vocab=len(ids), taps=tuple(case["taps_at"]), start="head", layer=layer
        )
    shape, target = Shape(config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]), Target(case)
    drafter = build_drafter(options, shape, ids).train()
    drafter.start(target)
    drafter.borrow(target)
    step = TrainStep(drafter)
    if case["compile"]:
        step.fuse(loss_alone=case["compile"] == "loss")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    decay, teacher = torch.tensor([options.decay**k for k in range(depths)]), target.head.rows(ids)

    def given(batch: dict[str, Tensor]) -> tuple[Any, ...]:
        """Rows packed as the loader packs them, and each token's states with it."""
        lengths = batch["real"].sum(1).tolist()
        rows = zip(batch["ids"], batch["supervised"], lengths, strict=True)
        packed = pack([Example(row[:n], mask[:n]) for row, mask, n in rows], -(-max(lengths) // 64) * 64)
        hidden = batch["taps"] if case["method"] == "eagle3" else batch["last"]
        states = (moved(part, packed.document, lengths) for part in (hidden, batch["last"]))
        return packed, *states, teacher, decay / step.counts(packed).learnt.clamp(min=1)

    def loss(given: tuple[Any, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(*given).total

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        formats.written(drafter, "vllm", {}).save(folder)

    return Learner(given, loss, optimizer, save=save)


class Target:
    """What a drafter begins with, and borrows, of the target."""

    def __init__(self, case: dict[str, Any]):
        self.head, self.table = Head(case["head"]), case["head"]
        self.embed = nn.Embedding.from_pretrained(self.table)
        self.final_norm = lambda: case["norm"]


def moved(rows: Tensor, document: Tensor, lengths: list[int]) -> Tensor:
    """[C, L, F], a row for each conversation -> [B, T, F], where its tokens are packed."""
    packed = rows.new_zeros(*document.shape, rows.shape[-1])
    for which, length in enumerate(lengths):
        packed[document == which] = rows[which, :length]
    return packed
