"""Medusa heads as the official code and vLLM (up to 0.32) know them. Reads and writes.

    official   medusa_lm_head.pt (or .safetensors)   {head}.{block}.linear.{weight,bias}, {head}.{blocks}.weight
               without the matrices, all heads use the target's
    vLLM       model.safetensors                     blocks.{head}.layers.{block}.{weight,bias}, lm_heads.{head}.weight,
                                                     token_map (ids) where they know only some

How many heads and blocks there are is counted in the tensors: released config.json files do not say it, or not truly.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.models.drafter import MOST, Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.formats.common import SAFE, Checkpoint, base_config, opened, tensors_of, vllm
from paceline.models.medusa import MedusaOptions
from paceline.models.stored import Spec, check, dtype_of, load_tensors, read_json
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "medusa", ("medusa", "vllm"), False
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", SAFE)
HEADS = 5  # that the code on GitHub makes, whatever config.json says; that on PyPI makes as many as that says
OFFICIAL = re.compile(r"(?:medusa_heads?\.)?(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")
OF_VLLM = re.compile(r"(?:blocks\.(\d{1,3})\.layers\.(\d{1,3})|lm_heads\.(\d{1,3}))\.(?:weight|bias)")


def recognised(folder: str | Path) -> bool:
    """Whether there is an official file of heads, or a config.json that says so."""
    folder = Path(folder)
    if not (folder / "config.json").is_file() or (folder / "drafter.json").exists():
        return False
    try:
        said = read_json(folder / "config.json", "").get("model_type") == "medusa"
    except Refusal:
        said = False
    return said or any((folder / name).is_file() for name in FILES[:2])


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The heads of such a checkpoint, for `target`, in the dtype they are stored in. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; heads for a target of another width.
    """
    where = f"{option}={folder}"
    drafter = understood(opened(Path(folder), FILES, where), Shape.of(target), where)
    drafter.borrow(target)
    return drafter


def understood(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    """The heads of a checkpoint. Raises Refusal."""
    tensors = found.tensors
    for name, size in (("hidden_size", shape.hidden), ("vocab_size", shape.vocab)):
        if (said := found.config.get(name)) not in (None, size):
            raise Refusal(f"{where}: config.json: {name} is {str(said)[:40]}, the target's is {size}")
    official = [match for name in tensors if (match := OFFICIAL.fullmatch(name))]
    of_vllm = [match for name in tensors if (match := OF_VLLM.fullmatch(name))]
    if bool(official) == bool(of_vllm):
        raise Refusal(
            f"{where}: neither the official names of Medusa heads nor vLLM's" + (", but both" * bool(official))
        )
    if official:
        heads = 1 + max(int(match[1]) for match in official)
        blocks = 1 + max((int(match[2]) for match in official if match[3] != "weight"), default=0)
        own = any(match[3] == "weight" for match in official)
    else:
        heads = 1 + max(int(match[1] or match[3]) for match in of_vllm)
        blocks = 1 + max((int(match[2]) for match in of_vllm if match[2]), default=0)
        own = any(match[3] for match in of_vllm)
    if max(heads, blocks) > MOST:
        raise Refusal(f"{where}: {heads} heads of {blocks} blocks; at most {MOST} are read")
    ids = tensors.get("token_map")
    if ids is not None and (ids.ndim != 1 or not 1 <= len(ids) <= shape.vocab):
        raise Refusal(f"{where}: tensor token_map has shape {list(ids.shape)}, the target has {shape.vocab} ids")
    # the manifest: name in the file -> ours
    hidden, width = shape.hidden, shape.vocab if ids is None else len(ids)
    before = next((name[: match.start(1)] for name in tensors if (match := OFFICIAL.fullmatch(name))), "")
    manifest: dict[str, Spec] = {} if ids is None else {"token_map": Spec((width,), (torch.int64, torch.int32))}
    ours: dict[str, str] = {"token_map": "token_map"}
    for head in range(heads):
        for block in range(blocks):
            for kind, rows in (("weight", (hidden, hidden)), ("bias", (hidden,))):
                mine = f"blocks.{head}.layers.{block}.{kind}"
                name = f"{before}{head}.{block}.linear.{kind}" if official else mine
                manifest[name], ours[name] = Spec(rows), mine
        if own:
            name = f"{before}{head}.{blocks}.weight" if official else f"lm_heads.{head}.weight"
            manifest[name], ours[name] = Spec((width, hidden)), f"lm_heads.{head}.weight"
    check(tensors, manifest, where)
    options = MedusaOptions(
        name="medusa",
        heads=heads,
        blocks=blocks,
        output="own" if own else "shared",
        draft_vocab=None if ids is None else width,
    )
    try:
        drafter = build(options, shape, ids)
    except ValueError as error:  # of checked_map
        raise Refusal(f"{where}: tensor token_map: {error}") from error
    drafter.to(dtype_of(tensors.values()))
    mapped = {ours[name]: tensor for name, tensor in tensors.items()}
    if ids is not None:
        mapped["token_map"] = ids.long()
    load_tensors(drafter, mapped, where)
    return drafter.eval()


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a file, or the code that reads it, has no place for."""
    options = drafter.options
    if list(drafter.taps) != [-1]:
        yield f"method.taps={list(drafter.taps)}: heads read the output of the final norm, [-1]"
    if format == "vllm":
        if options.output == "shared":
            yield "lm_heads.0.weight would be missing; train with method.output=own"
        return
    if options.draft_vocab is not None:
        yield "token_map, a draft vocabulary, has no place there; train with method.draft_vocab=null"
    if options.blocks != 1:
        yield f"method.blocks={options.blocks}: the official code applies one block again; nearest: 1"


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    if format == "vllm":
        return "vLLM up to 0.32", vllm(target, drafter, model="FOLDER", method="medusa")
    github = "" if drafter.max_depth == HEADS else f"; not that on GitHub, which makes {HEADS} heads, some random"
    return f"The official Medusa code (`MedusaModel.from_pretrained(FOLDER)`{github})", ""


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """Such a checkpoint, for the official code or for vLLM. target: where it is, which the official code opens."""
    options = drafter.options
    if format == "vllm":
        return Checkpoint(base_config(drafter), tensors_of(drafter))
    config = {
        "base_model_name_or_path": target.get("path") or target.get("folder") or target.get("name"),
        "medusa_num_heads": options.heads,
        "medusa_num_layers": options.blocks,
        "hidden_size": drafter.shape.hidden,
        "vocab_size": drafter.shape.vocab,
        # no model_type: the official code takes a folder for heads because transformers does not know it
    }
    return Checkpoint(config, {_official(name): t for name, t in tensors_of(drafter).items()}, FILES[1])


def _official(name: str) -> str:
    kind, head, *rest = name.split(".")
    return f"{head}.1.weight" if kind == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"
