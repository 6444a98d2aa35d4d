"""nvidia-modelopt: EAGLE-3, both directions. It has no reader for what it exports: its module gets the tensors by the
names its exporter gives them, strictly. What its training forward, on its own target, has of `lm_head` is recorded.

In training the norm of the embedding, `input_layernorm`, is applied to the features as well, before their own: by the
layer of transformers, and again by the hook in front of its attention. Nobody who serves what it exports does that.
"""

from pathlib import Path
from typing import Any

import modelopt.torch.speculative as speculative
import torch
from asked import config_of, main, recorded, shaken
from modelopt.torch.export.plugins.hf_spec_export import EagleExporter
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class OnlyForEmbeddings(nn.Module):
    """A norm that lets the first of two pass: the layer calls it for the features, then the hook for the embedding."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.passed = norm, False

    def forward(self, x: Tensor) -> Tensor:
        self.passed = not self.passed
        return x if self.passed else self.norm(x)


def made(asked: Any, sizes: dict[str, Any], layers: list[int], vocabulary: int) -> Any:
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    theta = sizes["rope_theta"]
    about = {name: sizes[name] for name in names} | {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": "default", "rope_theta": theta},
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        "has_lm_head": True,
        "use_last_layernorm": True,
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    base = AutoModelForCausalLM.from_pretrained(asked.target, dtype=torch.float32)
    how = {"eagle_architecture_config": about, "eagle_ttt_steps": asked.depths, "eagle_use_torch_compile": False}
    how["eagle_export_rope_scaling"] = {}  # unless said, it exports another rope (yarn) than it was trained with
    return speculative.convert(base, [("eagle", how)])


def read(asked: Any) -> Any:
    about = config_of(asked)
    layers = about["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    model = made(asked, about, layers, about["draft_vocab_size"])
    tensors = load_file(Path(asked.drafter) / "model.safetensors")
    tensors.pop("t2d", None)
    names = {name: name.replace("midlayer.", "layers.0.") for name in tensors}
    model.eagle_module.load_state_dict({names[name]: tensor.clone() for name, tensor in tensors.items()})
    return logits(model, asked, layers)


def logits(model: Any, asked: Any, layers: list[int]) -> Any:
    found, layer = recorded(model.eagle_module.lm_head), model.eagle_module.layers[0]
    if asked.served:
        layer.input_layernorm = OnlyForEmbeddings(layer.input_layernorm)
    model.train()
    model(input_ids=asked.ids[None])
    # step k rolls its states k places on, so that row t + k has the chain of t
    return [rows[depth:] for depth, rows in enumerate(found)], [layer + 1 for layer in layers]


def write(asked: Any) -> Any:
    layers, ids = [tap - 1 for tap in asked.taps], torch.tensor(asked.vocabulary)
    model = made(asked, asked.sizes, layers, len(ids))
    shaken(model.eagle_module)
    model.eagle_module.d2t.copy_(ids - torch.arange(len(ids)))
    EagleExporter(model).export(asked.drafter, dtype=torch.float32)
    return logits(model, asked, layers)


main("nvidia-modelopt", read, write)
