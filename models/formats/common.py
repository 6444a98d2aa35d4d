"""What several formats share: config.json, a decoder layer described by it, copies of the target's tables."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.errors import Refusal
from paceline.models.layers import LayerOptions
from paceline.models.target import Target

USUAL_THETA = 10_000.0  # what official code computes with where config.json has none


def config_of(folder: Path, where: str) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Refusal(f"{where}: config.json cannot be read ({error})") from error


def layer_of(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str, otherwise: str
) -> LayerOptions:
    """What a decoder layer with these tensors, under Llama's names, is made of. otherwise: what it is not, if not."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        layer = {
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": len(tensors["self_attn.q_proj.weight"]) // heads,
            "intermediate": config["intermediate_size"],
            "activation": config.get("hidden_act", "silu"),
            "eps": config.get("rms_norm_eps", 1e-6),
            "rope": {"rope_type": "default", "rope_theta": config.get("rope_theta") or USUAL_THETA}
            | {key: config[key] for key in ("partial_rotary_factor",) if config.get(key)}
            | _scaling(config.get("rope_scaling"))
            | (config.get("rope_parameters") or {}),
            "qk_norm": "self_attn.q_norm.weight" in tensors,
            "qkv_bias": "self_attn.q_proj.bias" in tensors,
            "out_bias": "self_attn.o_proj.bias" in tensors,
            "mlp_bias": "mlp.down_proj.bias" in tensors,
        }
    except KeyError as error:
        raise Refusal(f"{where}: {otherwise}, it has no {error}") from error
    if hidden != target.hidden:
        raise Refusal(f"{where}: made for a target of width {hidden}, this one has {target.hidden}")
    return LayerOptions.model_construct(**layer).checked()


def _scaling(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Before transformers 5 the kind was called `type`, too."""
    if not scaling:
        return {}
    return {"rope_type": scaling.get("rope_type") or scaling.get("type")} | {
        key: value for key, value in scaling.items() if key not in ("type", "rope_type")
    }


def without_copy(tensors: dict[str, Tensor], name: str, own: Tensor, where: str) -> None:
    """A table is borrowed from the target: a copy of it is left out, another one could not be."""
    theirs = tensors.pop(name, None)
    if theirs is not None and (theirs.shape != own.shape or not torch.allclose(theirs.to(own), own, atol=1e-2)):
        raise Refusal(f"{where}: {name} {list(theirs.shape)} is not the target's: a drafter for another one")
