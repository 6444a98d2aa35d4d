"""economize: EAGLE-3 (`eagle3_ttt`) and Medusa (`medusa_ce`), float32 weights under bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.techniques.medusa import MedusaConfig
from economize.train.objective import Batch, TeacherOutputs, build_objective
from economize.train.optim import build_optimizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
    layers = 3  # whose states are given: it computes none of them
    base = LlamaForCausalLM(LlamaConfig(**case["config"] | {"num_hidden_layers": layers})).to(torch.bfloat16)
    base.get_input_embeddings().weight.data.copy_(case["head"])
    base.model.norm.weight.data.copy_(case["norm"])
    hidden = {layers: case["trunk"]}
    if case["method"] == "medusa":
        model = economize.apply(base, MedusaConfig(num_heads=case["depths"], head="own"))
        objective = build_objective("medusa_ce")
    else:
        options = {"draft_vocab": len(case["vocab_map"]), "train_steps": case["depths"], "aux_layers": (1, 2, 3)}
        model = economize.apply(base, Eagle3Config(**options))
        model.techniques["eagle3"].set_draft_vocab(case["vocab_map"])
        objective = build_objective("eagle3_ttt")
        hidden = {0: nn.functional.embedding(case["ids"], case["head"])}
        hidden |= dict(enumerate(case["taps"].chunk(3, -1), 1))
    objective.setup(model)
    model.requires_grad_(False)
    groups = objective.parameter_groups(model)
    learning = [parameter.requires_grad_() for group in groups for parameter in group.params]
    optimizer = build_optimizer(groups, objective.defaults)
    teacher = TeacherOutputs(hidden=hidden, final=case["trunk"], head=model.adapter.logits)
    batch = Batch(case["ids"], case["real"].long(), counted(case["supervised"]))

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective.loss(model, batch, teacher).loss
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def counted(supervised: Tensor) -> Tensor:
    """Its masks stand at the position that predicts the token."""
    return torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], 1).long()
