"""SpecForge: EAGLE-3, both directions. Its trainer's loop needs a GPU; what that calls in its model is called here."""

import os
import sys
import types
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch
from asked import main, shaken
from transformers import LlamaConfig, PreTrainedModel  # noqa: F401, before the stand-in below is there

for name in ("triton", "triton.language"):  # imported for its losses, which need a GPU
    sys.modules.setdefault(name, types.ModuleType(name))
sys.modules["triton"].jit = lambda function: function  # type: ignore[attr-defined]
sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
sys.modules["triton.language"].constexpr = int  # type: ignore[attr-defined]

from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from specforge.training.model_loading import warm_start_draft_model  # noqa: E402


def read(asked: Any) -> Any:
    config = LlamaConfig.from_pretrained(asked.drafter)
    model = LlamaForCausalLMEagle3(config).float()
    warm_start_draft_model(model, asked.drafter, draft_config=config, strategy="eagle3", allow_missing_embedding=True)
    model.load_embedding(asked.target)
    return logits(model, asked)


def logits(model: Any, asked: Any) -> Any:
    # the nested key names the layers whose output is read
    taps = [layer + 1 for layer in model.config.eagle_config["eagle_aux_hidden_state_layer_ids"]]
    length = len(asked.ids)
    hidden = model.project_hidden_states(torch.cat([asked.states[tap] for tap in taps], -1)[None])
    places = torch.arange(length)[None]
    seen = model.prepare_decoder_attention_mask(torch.ones_like(places).bool(), hidden, 1, length, 0)
    cache: list[list[torch.Tensor]] = [[], []]
    found = []
    for depth in range(asked.depths):
        embedded = model.embed_input_ids(asked.ids.roll(-1 - depth)[None])
        hidden = model.backbone(embedded, hidden, cache, seen, places, use_cache=True)
        found.append(model.compute_logits(hidden)[0])
    return found, taps


def write(asked: Any) -> Any:
    config = LlamaConfig(num_hidden_layers=1, draft_vocab_size=len(asked.vocabulary), **asked.sizes)
    config.architectures, config.pretraining_tp = ["LlamaForCausalLMEagle3"], 1
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in asked.taps]}
    model = LlamaForCausalLMEagle3(config)
    shaken(model)
    ids = torch.tensor(asked.vocabulary)
    model.d2t.copy_(ids - torch.arange(len(ids)))
    model.t2d.zero_()[ids] = True
    model.load_embedding(asked.target)
    # its trainer saves all but the embedding
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "embed" not in name}
    model.save_pretrained(asked.drafter, state_dict=tensors)
    return logits(model, asked)


main("specforge", read, write)
