"""economize: EAGLE-3 (`eagle3_ttt`) and Medusa (`medusa_ce`), float32 weights under bfloat16 autocast."""

import json
import re
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.techniques.medusa import MedusaConfig
from economize.train.objective import Batch, TeacherOutputs, build_objective
from economize.train.optim import build_optimizer
from learner import Learner, save_heads
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

FILE = "model.safetensors"
LAYERS = 3  # whose states are given: it computes none of them


def build(case: dict[str, Any]) -> Learner:
    base = LlamaForCausalLM(LlamaConfig(**case["config"] | {"num_hidden_layers": LAYERS})).to(torch.bfloat16)
    base.get_input_embeddings().weight.data.copy_(case["head"])
    base.model.norm.weight.data.copy_(case["norm"])
    if case["method"] == "medusa":
        model = economize.apply(base, MedusaConfig(num_heads=case["depths"], head="own"))
        objective = build_objective("medusa_ce")
    else:
        options = {"draft_vocab": len(case["vocab_map"]), "train_steps": case["depths"], "aux_layers": (1, 2, 3)}
        model = economize.apply(base, Eagle3Config(**options))
        model.techniques["eagle3"].set_draft_vocab(case["vocab_map"])
        objective = build_objective("eagle3_ttt")
    objective.setup(model)
    model.requires_grad_(False)
    groups = objective.parameter_groups(model)
    for group in groups:
        for parameter in group.params:
            parameter.requires_grad_()

    def given(batch: dict[str, Tensor]) -> tuple[Batch, TeacherOutputs]:
        hidden = {LAYERS: batch["trunk"]}
        if case["method"] == "eagle3":
            taps = batch["taps"].chunk(3, -1)
            hidden = {0: nn.functional.embedding(batch["ids"], case["head"]), **dict(enumerate(taps, 1))}
        teacher = TeacherOutputs(hidden=hidden, final=batch["trunk"], head=model.adapter.logits)
        return Batch(batch["ids"], batch["real"].long(), counted(batch["supervised"])), teacher

    def loss(given: tuple[Batch, TeacherOutputs]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return objective.loss(model, *given).loss

    def save(folder: Path) -> None:
        """It writes no format of others: its tensors and sizes, as the formats that it reads have them."""
        tensors = model.techniques[case["method"]].state_dict()
        if case["method"] == "medusa":
            tensors = {name.removeprefix("heads.").replace("blocks.", ""): part for name, part in tensors.items()}
            save_heads(folder, case["depths"], {name.replace("proj", "1"): part for name, part in tensors.items()})
            return
        folder.mkdir(parents=True)
        save_file({re.sub(r"^layer\.", "midlayer.", name): part for name, part in tensors.items()}, folder / FILE)
        about = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(case["vocab_map"])}
        about["eagle_aux_hidden_state_layer_ids"] = case["taps_at"]
        (folder / "config.json").write_text(json.dumps(case["config"] | about | {"num_hidden_layers": 1}))

    return Learner(given, loss, build_optimizer(groups, objective.defaults), objective.defaults.grad_clip, save)


def counted(supervised: Tensor) -> Tensor:
    """Its masks stand at the position that predicts the token."""
    return torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], 1).long()
