"""nvidia-modelopt: EAGLE-3 from stored hidden states (`eagle_offline`), and Medusa heads, in bfloat16, or in float32
under autocast where `case["masters"]` asks for float32 weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modelopt.torch.speculative as speculative
import torch
from learner import Learner, save_heads
from modelopt.torch.export.plugins.hf_spec_export import EagleExporter
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Given = Callable[[dict[str, Tensor]], dict[str, Any]]


def build(case: dict[str, Any]) -> Learner:
    dtype = torch.float32 if case["masters"] else torch.bfloat16
    model = LlamaForCausalLM(LlamaConfig(**case["config"] | {"num_hidden_layers": 0})).to(dtype)
    model.get_input_embeddings().weight.data.copy_(case["head"])  # tied, as the target's
    model.requires_grad_(False)
    given, save = (medusa if case["method"] == "medusa" else eagle3)(model, case)
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # transformers' Trainer, which its examples train with, takes this one
    optimizer = torch.optim.AdamW(learning, lr=1e-4, fused=True)

    def loss(given: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case["masters"]):
            return model(**given).loss

    return Learner(given, loss, optimizer, save=save)


def medusa(model: Any, case: dict[str, Any]) -> tuple[Given, Callable[[Path], object]]:
    speculative.convert(model, [("medusa", {"medusa_num_heads": case["depths"], "medusa_num_layers": 1})])
    model.model = Trunk()
    model.medusa_heads.requires_grad_(True)

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        model.model.last = batch["last"]
        labels = batch["ids"].masked_fill(~batch["supervised"], -100)
        return {"input_ids": batch["ids"], "attention_mask": batch["real"].long(), "labels": labels}

    def save(folder: Path) -> None:
        save_heads(folder, case["depths"], model.medusa_heads.state_dict())

    return given, save


def eagle3(model: Any, case: dict[str, Any]) -> tuple[Given, Callable[[Path], object]]:
    names = (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "rope_theta",
    )
    layer = {name: case["config"][name] for name in names} | {"draft_vocab_size": len(case["vocab_map"])}
    layer["rope_scaling"] = {"rope_type": "default", "rope_theta": case["config"]["rope_theta"]}
    layer |= {"has_lm_head": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in case["taps_at"]]}
    options = {"eagle_offline": True, "eagle_ttt_steps": case["depths"], "eagle_architecture_config": layer}
    options |= {"eagle_use_torch_compile": False, "eagle_decoder_type": "llama"}
    options["eagle_export_rope_scaling"] = {}  # unless said, it exports another rope (yarn) than it was trained with
    speculative.convert(model, [("eagle", options)])
    eagle = model.eagle_module
    eagle.d2t.copy_(case["vocab_map"] - torch.arange(len(case["vocab_map"])))
    eagle.lm_head.weight.data.copy_(case["head"][case["vocab_map"]])

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        model._cached_attn_blk_masks.clear()  # of rows of another length
        states = {"base_model_hidden_states": batch["last"], "aux_hidden_states": batch["taps"]}
        rows = {"input_ids": batch["ids"], "attention_mask": batch["real"].long(), "loss_mask": batch["supervised"]}
        return rows | {"base_model_outputs": states}

    return given, EagleExporter(model).export


class Trunk(nn.Module):
    """In the place of the target's layers: the states they would compute."""

    last: Tensor

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.last, past_key_values=None, hidden_states=None, attentions=None)
