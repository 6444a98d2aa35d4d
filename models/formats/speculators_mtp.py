"""MTP checkpoints of the library `speculators`: one module, a layer of Qwen3's, under mtp_layers.0.*. Reads and writes.

    token_layernorm, hidden_layernorm, input_proj [embedding, state], final_layernorm, and the layer's own names

Its trainer reads the trunk's last state before the final norm and hands on what `final_layernorm` gives. (Engines that
get the module stitched into a target read behind the norm: `method.taps=[-1]` where a checkpoint was tuned for them.)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.models.drafter import Drafter, Shape
from paceline.models.errors import Refusal
from paceline.models.formats import mtp, speculators
from paceline.models.formats.common import (
    SAFE,
    Checkpoint,
    base_config,
    biases,
    embedding,
    opened,
    tensors_of,
    without_copy,
)
from paceline.models.formats.speculators import KIND, LAYER
from paceline.models.stored import read_json
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "mtp_sequential", ("speculators",), False
BEFORE = "mtp_layers.0."


def recognised(folder: str | Path) -> bool:
    """Whether config.json says so."""
    return speculators.recognised(folder) and read_json(Path(folder) / "config.json", "").get(KIND) == "mtp"


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The drafter of such a checkpoint, for `target`, in the dtype it is stored in. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; a module for a target with other tables.
    """
    where = f"{option}={folder}"
    found = opened(Path(folder), (SAFE,), where)
    without_copy(found.tensors, "embed_tokens.weight", embedding(target), where)
    without_copy(found.tensors, "lm_head.weight", target.head.weight, where)
    drafter = understood(found, Shape.of(target), where)
    drafter.borrow(target)
    return drafter


def understood(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    """The drafter that a checkpoint describes, whose tables of the target are left out already. Raises Refusal."""
    config = found.config.get(LAYER)
    if not isinstance(config, dict):
        raise Refusal(f"{where}: config.json has no {LAYER}")
    if config.get("num_hidden_layers") != shape.layers:
        said = str(config.get("num_hidden_layers"))[:40]
        raise Refusal(f"{where}: config.json: it reads the state behind layer {said}, the target has {shape.layers}")
    return mtp.alone(found.tensors, lambda name: BEFORE + mtp.to_mimo(name), config, shape, where, (shape.layers,))


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a file has no place for."""
    wanted = {"taps": (drafter.shape.layers,), "hand_on": "normed", "position_offset": 0, "zero_first": False}
    yield from mtp.other_conventions(drafter, wanted | {"modules": 1})
    if biases(drafter.options.layer) != ["self_attn.q_norm.weight"]:
        yield "method.layer: its layers are Qwen3's, with norms on the heads of q and k and no biases"


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    return "speculators (`SpeculatorModel.from_pretrained(FOLDER)`)", ""


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """Such a checkpoint. target: where it is, which speculators opens."""
    flat, layer, rope = base_config(drafter), drafter.options.layer, dict(drafter.options.layer.rope or {})
    apart = {name: rope.pop(name) for name in ("max_position_embeddings", "partial_rotary_factor") if name in rope}
    config = {
        KIND: "mtp",
        "architectures": ["MTPDraftModel"],
        "torch_dtype": flat["torch_dtype"],
        "num_nextn_predict_layers": 1,
        LAYER: {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": flat["hidden_size"],
            "vocab_size": flat["vocab_size"],
            "num_hidden_layers": drafter.shape.layers,  # the state behind so many is read
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "intermediate_size": layer.intermediate,
            "hidden_act": layer.activation,
            "rms_norm_eps": layer.eps,
            "rope_parameters": rope,
            **apart,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
        "speculators_config": speculators.proposals("mtp", drafter, target),
    }
    before = f"layers.{drafter.shape.layers}."
    tensors = {BEFORE + mtp.to_mimo(name.removeprefix(before)): t for name, t in tensors_of(drafter).items()}
    return Checkpoint(config, tensors)
