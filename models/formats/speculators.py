"""EAGLE-3 checkpoints of the library `speculators`: the tensors of models/formats/eagle.py under layers.0.*.

config.json holds the decoder layer's configuration inside, and says what target they draft for. Reads and writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.models.drafter import Drafter, Shape
from paceline.models.errors import Refusal
from paceline.models.formats import eagle
from paceline.models.formats.common import (
    SAFE,
    Checkpoint,
    base_config,
    embedding,
    opened,
    tensors_of,
    vllm,
    without_copy,
)
from paceline.models.stored import read_json
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "eagle", ("speculators",), False
KIND, LAYER, AUX = "speculators_model_type", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def recognised(folder: str | Path) -> bool:
    """Whether config.json says so."""
    file = Path(folder) / "config.json"
    if not file.is_file() or (Path(folder) / "drafter.json").exists():
        return False
    try:
        return KIND in read_json(file, "")
    except Refusal:
        return False


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The drafter of such a checkpoint, for `target`, in the dtype it is stored in. option: what named the folder.

    Raises:
        Refusal: as models/formats/eagle.py; another kind of drafter than EAGLE-3.
    """
    where = f"{option}={folder}"
    found = opened(Path(folder), (SAFE,), where)
    without_copy(found.tensors, "embed_tokens.weight", embedding(target), where)
    drafter = understood(found, Shape.of(target), where)
    drafter.borrow(target)
    return drafter


def understood(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    """As models/formats/eagle.py's."""
    config = found.config
    if config.get(KIND) != "eagle3":
        raise Refusal(f"{where}: config.json: {KIND} is {str(config.get(KIND))[:40]}; only eagle3 is read")
    layer = config.get(LAYER)
    if not isinstance(layer, dict):
        raise Refusal(f"{where}: config.json has no {LAYER}")
    flat = layer | {name: config.get(name) for name in ("draft_vocab_size", AUX, *FLAGS)}
    flat["architectures"] = ["LlamaForCausalLMEagle3"]
    return eagle.understood(Checkpoint(flat, found.tensors), shape, where)


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a file has no place for."""
    if drafter.options.join != "attention":
        yield "holds EAGLE-3 only (method.join=attention); nearest: format=eagle"
    yield from eagle.faults(drafter, format)


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    return "vLLM, of speculators' format", vllm(target, drafter, model="FOLDER", method="eagle3")


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """Such a checkpoint. target: where it is, which speculators opens."""
    flat = base_config(drafter)
    layer = {name: value for name, value in flat.items() if name not in ("eagle_config", "draft_vocab_size", AUX)}
    layer = {name: value for name, value in layer.items() if name not in FLAGS} | {
        "architectures": ["LlamaForCausalLM"]
    }
    config = {
        KIND: "eagle3",
        "architectures": ["Eagle3Speculator"],
        "torch_dtype": flat["torch_dtype"],
        "draft_vocab_size": flat["draft_vocab_size"],
        AUX: flat[AUX],  # layers passed
        **dict.fromkeys(FLAGS, False),  # vLLM takes the first for true where it is not said
        LAYER: layer,
        "speculators_config": proposals("eagle3", drafter, target),
    }
    tensors = {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: tensor
        for name, tensor in tensors_of(drafter).items()
    }
    return Checkpoint(config, tensors)


def proposals(algorithm: str, drafter: Drafter, target: dict[str, Any]) -> dict[str, Any]:
    """What every checkpoint of this library says of how it drafts, and for whom."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.unroll}],
        "verifier": {
            "name_or_path": target.get("path") or target.get("folder") or target.get("name"),  # opened by it
            "architectures": target.get("architectures") or [],
        },
    }
