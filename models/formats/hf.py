"""Draft models as ordinary checkpoints of transformers: config.json and safetensors, or shards. Reads and writes.

An export with tables of its own is one already. What a model does with its tensors is transformers' business.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.draft_model import DraftOptions, check_same_tokens
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.formats.common import Checkpoint, base_config, tensors_of, vllm
from paceline.models.stored import check, dtype_of, load_tensors, manifest_of, read_json, read_tensors, tensor_files
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "draft", ("hf",), False
TRUNKS = ("model.layers.", "transformer.h.", "gpt_neox.layers.")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DRAFTERS = ("fc.", "midlayer.", "mtp", "hidden_norm", "eh_proj")  # what marks a drafter of another kind


def recognised(folder: str | Path) -> bool:
    """Whether this may be such a checkpoint: a config with a causal LM, its trunk's tensors and no drafter's."""
    folder = Path(folder)
    if not (folder / "config.json").is_file() or (folder / "drafter.json").exists():
        return False
    try:
        said, names = read_json(folder / "config.json", ""), list(tensor_files(folder, ""))
    except Refusal:
        return False
    trunk = any(name.startswith(TRUNKS) for name in names)
    return trunk and "model_type" in said and not any(mark in name for name in names for mark in DRAFTERS)


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The draft model of such a checkpoint, in the dtype it is stored in. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; fewer ids than the target's tokenizer has.
    """
    folder, where = Path(folder), f"{option}={folder}"
    config, files = read_json(folder / "config.json", where), tensor_files(folder, where)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        tensors |= read_tensors(folder / file, where, [name for name in files if files[name] == file])
    drafter = understood(Checkpoint(config, tensors), Shape.of(target), where)
    rows = drafter.rows
    if rows < target.vocab:
        raise Refusal(f"{where}: its embedding has {rows} rows, the target's tokenizer {target.vocab} ids")
    return drafter


def check_tokenizer(folder: str | Path, tokenizer: Any, option: str = "drafter") -> bool:
    """Whether the folder has a tokenizer. Raises Refusal where an id of the target's is another token to it."""
    if not any((Path(folder) / name).is_file() for name in TOKENIZERS):
        return False
    check_same_tokens(str(folder), tokenizer, f"{option}={folder}", "take a model of the target's family")
    return True


def understood(found: Checkpoint, shape: Shape, where: str) -> Any:
    """The draft model that transformers makes of a configuration. Raises Refusal."""
    config = {name: value for name, value in found.config.items() if name not in ("dtype", "torch_dtype")}
    tensors = dict(found.tensors)
    try:
        options = DraftOptions(name=METHOD, tables="own", config=config)
        with torch.device("meta"):
            sketch = build(options, shape)
    except Exception as error:  # transformers raises whatever it stumbles over in a configuration
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise Refusal(f"{where}: config.json describes no model ({reason})") from error
    manifest = manifest_of(sketch)
    for name in set(tensors) - set(manifest):
        if name == "lm_head.weight" and any(
            torch.equal(tensors[name], table) for other, table in tensors.items() if other != name
        ):
            del tensors[name]  # a copy of the embedding, which is its output matrix too
    check(tensors, manifest, where)
    drafter = build(options, shape).to(dtype_of(tensors.values()))
    load_tensors(drafter, tensors, where)
    return drafter.eval()


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a checkpoint has no place for."""
    if drafter.options.tables == "shared":
        yield "embedding and output matrix are the target's, a model needs its own; train with method.tables=own"


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    return "transformers (`assistant_model=`), and vLLM", vllm(target, drafter, model="FOLDER", method="draft_model")


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """Such a checkpoint, of a drafter without faults."""
    return Checkpoint(base_config(drafter), tensors_of(drafter))
