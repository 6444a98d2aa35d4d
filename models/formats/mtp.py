"""MTP modules that released checkpoints carry beside their model's layers: config.json and safetensors, or shards.

Reads modules whose block is an ordinary decoder layer. Knows names and conventions; what a module does with its tensors
is models/mtp_sequential.py's.

    DeepSeek's names (GLM-4.5's too)   model.layers.{L + k}.*: enorm, hnorm, eh_proj [embedding, state],
                                       shared_head.norm and a layer; embed_tokens and shared_head.head are copies
    MiMo's names                       model.mtp_layers.{k}.*: token_layernorm, hidden_layernorm,
                                       input_proj [state, embedding], final_layernorm and a layer

Both are read by vLLM from the output of the final norm (MiMo's: from its input) and hand on what their layer gives,
before the norm; the embedding at position 0 counts as 0. Others do otherwise: `method.taps`, `method.hand_on`,
`method.zero_first` and `method.position_offset` say so where they are set.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.models.drafter import Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.export import load_tensors
from paceline.models.formats.common import config_of, layer_of, without_copy
from paceline.models.mtp_sequential import SequentialOptions
from paceline.models.target import Target

DEEPSEEK = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
MIMO = re.compile(r"(?:model\.)?mtp_layers\.(\d+)\.(.+)")
OF_MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
# what marks a block that is no ordinary decoder layer
FOREIGN = {
    r"self_attn\.(kv_a|kv_b|q_a|q_b)_": "latent attention (MLA)",
    r"mlp\.(experts|shared_experts|gate)\.": "a mixture of experts",
}


def recognised(folder: str | Path) -> bool:
    """Whether this may be such a checkpoint: a config, safetensors with modules, and no export of paceline's own."""
    folder = Path(folder)
    if not (folder / "config.json").is_file() or (folder / "drafter.json").exists():
        return False
    try:
        names = _files(folder)
    except (OSError, ValueError, SafetensorError):
        return False
    return any(MIMO.fullmatch(name) or name.endswith(".eh_proj.weight") for name in names)


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The float32 drafter made of a checkpoint's modules, for `target`. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; blocks of another kind; modules for a
            target of another width or with other tables.
    """
    folder, where = Path(folder), f"{option}={folder}"
    config = config_of(folder, where)
    try:
        files = _files(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise Refusal(f"{where}: its tensors cannot be listed ({str(error).splitlines()[0]})") from error
    first, mimo = _first_layer(config, where), any(MIMO.fullmatch(name) for name in files)
    modules: dict[int, dict[str, str]] = {}  # number of the module -> its names -> those of the file
    for name in files:
        found = (MIMO if mimo else DEEPSEEK).fullmatch(name)
        if found and (mimo or int(found[1]) >= first):
            number = int(found[1]) - (0 if mimo else first)
            modules.setdefault(number, {})[_renamed(found[2]) if mimo else found[2]] = name
    if sorted(modules) != list(range(len(modules))):
        missing = min(set(range(max(modules))) - modules.keys())
        raise Refusal(f"{where}: module {missing} is missing, it has {', '.join(map(str, sorted(modules)))}")
    if not modules:
        raise Refusal(f"{where}: no MTP module there: no layer from {first} (num_hidden_layers) on")
    for name in (name for names in modules.values() for name in names.values()):
        for mark, kind in FOREIGN.items():
            if re.search(mark, name):
                raise Refusal(f"{where}: {name} is part of {kind}; only ordinary decoder layers are read")
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for number, names in sorted(modules.items()):
        parts = _tensors(folder, files, names, where)
        without_copy(parts, "embed_tokens.weight", target.model.get_input_embeddings().weight, where)
        without_copy(parts, "shared_head.head.weight", target.head.weight, where)
        if mimo and "eh_proj.weight" in parts:
            parts["eh_proj.weight"] = torch.cat(parts["eh_proj.weight"].chunk(2, 1)[::-1], 1)
        tensors |= {f"layers.{target.layers + number}.{name}": tensor for name, tensor in parts.items()}
    options = SequentialOptions(
        name="mtp_sequential",
        modules=len(modules),
        taps=(target.layers if mimo else -1,),
        hand_on="raw",
        position_offset=0,
        zero_first=True,
        layer=layer_of(config, parts, target, where, "no decoder layer"),
    )
    drafter = build(options, Shape.of(target))
    load_tensors(drafter, tensors, where)
    drafter.borrow(target)
    return drafter


def _first_layer(config: dict[str, Any], where: str) -> int:
    layers = config.get("num_hidden_layers")
    if type(layers) is not int:
        raise Refusal(f"{where}: config.json has no num_hidden_layers, from which on layers are MTP modules")
    return layers


def _renamed(name: str) -> str:
    head, _, kind = name.rpartition(".")
    return f"{OF_MIMO.get(head, head)}.{kind}"


def _files(folder: Path) -> dict[str, str]:
    """Names of all tensors -> the file that holds them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            found |= dict.fromkeys(stored.keys(), file.name)
    return found


def _tensors(folder: Path, files: dict[str, str], names: dict[str, str], where: str) -> dict[str, Tensor]:
    """names: ours -> the file's. Only these are read, whatever else the files hold."""
    found: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names.values()}):
        try:
            with safe_open(folder / file, "pt") as stored:
                for ours, theirs in names.items():
                    if files[theirs] == file:
                        found[ours] = stored.get_tensor(theirs)
        except (OSError, SafetensorError) as error:
            raise Refusal(f"{where}: {file} cannot be read ({str(error).splitlines()[0]})") from error
    return found
