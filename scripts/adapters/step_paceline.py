"""paceline: the step that train/loop.py takes, float32 weights under bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch import pack
from paceline.data.rows import Example
from paceline.models.drafter import Borrowed, Shape
from paceline.models.drafter import build as build_drafter
from paceline.models.eagle import EagleOptions
from paceline.models.layers import LayerOptions
from paceline.models.medusa import MedusaOptions
from paceline.models.mtp_sequential import SequentialOptions
from paceline.models.target import Head
from paceline.train.step import TrainStep


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
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
    )
    depths, ids = case["depths"], case["vocab_map"]
    if case["method"] == "medusa":
        options: Any = MedusaOptions(name="medusa", heads=depths, objective={"ce": 1.0})
    elif case["method"] == "mtp":
        options = SequentialOptions(
            name="mtp_sequential", modules=1, unroll=depths, hand_on="normed", taps=(-1,), position_offset=0,
            zero_first=False, objective={"ce": 1.0}, decay=0.6, layer=layer,
        )  # fmt: skip
    else:
        options = EagleOptions(
            name="eagle", unroll=depths, draft_vocab=len(ids), taps=tuple(case["taps_at"]), layer=layer
        )
    shape = Shape(config["hidden_size"], config["num_hidden_layers"], config["vocab_size"])
    drafter = build_drafter(options, shape, ids).train()
    for name, parameter in drafter.named_parameters():
        if "lm_head" in name:
            parameter.data.copy_(case["head"] if ids is None else case["head"][ids])
    head = Head(case["head"]).rows(ids)
    drafter.borrowed = Borrowed(nn.Embedding.from_pretrained(case["head"]), head)

    # rows packed as the loader packs them, and each token's states with it
    lengths = case["real"].sum(1).tolist()
    examples = [
        Example(row[:n], mask[:n]) for row, mask, n in zip(case["ids"], case["supervised"], lengths, strict=True)
    ]
    batch = pack(examples, -(-max(lengths) // 64) * 64)
    hidden, last = (case["taps"], case["last"]) if case["method"] == "eagle3" else (case["last"], case["last"])
    hidden, last = (moved(part, batch.document, lengths) for part in (hidden, last))

    step = TrainStep(drafter)
    if case["compile"]:
        step.fuse(loss_alone=case["compile"] == "loss")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    weight = torch.tensor([options.decay**k for k in range(depths)]) / step.counts(batch).learnt
    learning = list(drafter.parameters())

    def one() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(batch, hidden, last, head, weight).total
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return one


def moved(rows: Tensor, document: Tensor, lengths: list[int]) -> Tensor:
    """[C, L, F], a row for each conversation -> [B, T, F], where its tokens are packed."""
    packed = rows.new_zeros(*document.shape, rows.shape[-1])
    for which, length in enumerate(lengths):
        packed[document == which] = rows[which, :length]
    return packed
