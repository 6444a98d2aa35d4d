"""nvidia-modelopt: EAGLE-3 from stored hidden states (`eagle_offline`), and Medusa heads, in bfloat16."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import modelopt.torch.speculative as speculative
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
    model = LlamaForCausalLM(LlamaConfig(**case["config"] | {"num_hidden_layers": 0})).to(torch.bfloat16)
    model.get_input_embeddings().weight.data.copy_(case["head"])  # tied, as the target's
    model.requires_grad_(False)
    inputs = {"input_ids": case["ids"], "attention_mask": case["real"].long()}
    if case["method"] == "medusa":
        options = {"medusa_num_heads": case["depths"], "medusa_num_layers": 1}
        speculative.convert(model, [("medusa", options)])
        model.model = Given(case["last"])
        inputs["labels"] = case["ids"].masked_fill(~case["supervised"], -100)
        model.medusa_heads.requires_grad_(True)
    else:
        layer = {name: case["config"][name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        layer |= {"intermediate_size": case["config"]["intermediate_size"], "draft_vocab_size": len(case["vocab_map"])}
        layer |= {"has_lm_head": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in case["taps_at"]]}
        options = {"eagle_offline": True, "eagle_ttt_steps": case["depths"], "eagle_architecture_config": layer}
        options |= {"eagle_use_torch_compile": False, "eagle_decoder_type": "llama"}
        speculative.convert(model, [("eagle", options)])
        eagle = model.eagle_module
        eagle.d2t.copy_(case["vocab_map"] - torch.arange(len(case["vocab_map"])))
        eagle.lm_head.weight.data.copy_(case["head"][case["vocab_map"]])
        inputs["loss_mask"] = case["supervised"]
        inputs["base_model_outputs"] = {"base_model_hidden_states": case["last"], "aux_hidden_states": case["taps"]}
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # transformers' Trainer, which its examples train with, takes this one
    optimizer = torch.optim.AdamW(learning, lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Given(nn.Module):
    """In the place of the target's layers: the states they would compute."""

    def __init__(self, last: Tensor):
        super().__init__()
        self.last = last

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.last, past_key_values=None, hidden_states=None, attentions=None)
