"""EAGLE and EAGLE-3 checkpoints as the official code, vLLM and SGLang know them: config.json and one file of tensors.

Reads. Knows names and conventions of that layout; what the drafter does with them is models/eagle.py's.

    EAGLE-3    midlayer.* (or layers.0.*), fc [H, 3H], norm, lm_head, d2t (offsets), t2d
    EAGLE-1    layers.0.*, fc [H, 2H], the target's own head
    both       embed_tokens.weight, a copy of the target's
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.models.drafter import Drafter, Shape, build
from paceline.models.eagle import EagleOptions, default_taps
from paceline.models.errors import Refusal
from paceline.models.export import load_tensors
from paceline.models.formats.common import config_of, layer_of, without_copy
from paceline.models.target import Target

FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")


def recognised(folder: str | Path) -> bool:
    """Whether this may be such a checkpoint: a config and tensors, and no export of paceline's own."""
    folder = Path(folder)
    here = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return "config.json" in here and "drafter.json" not in here and any(name in here for name in FILES)


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The float32 drafter of such a checkpoint, for `target`. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; a drafter for a target of another width.
    """
    folder, where = Path(folder), f"{option}={folder}"
    config = config_of(folder, where)
    tensors = {name.removeprefix("model."): tensor for name, tensor in _tensors(folder, where).items()}
    wide = any(name.endswith("hidden_norm.weight") for name in tensors)
    without_copy(tensors, "embed_tokens.weight", target.model.get_input_embeddings().weight, where)
    vocab_map = _vocabulary(tensors, target, where)
    options = _options(config, tensors, target, wide, vocab_map, where)
    ours, theirs = ("midlayer.", "layers.0.") if wide else ("layers.0.", "midlayer.")
    tensors = {ours + name.removeprefix(theirs) if name.startswith(theirs) else name: t for name, t in tensors.items()}
    if not wide:
        tensors.pop("lm_head.weight", None)  # the target's, which is asked itself
    drafter = build(options, Shape.of(target), vocab_map)
    load_tensors(drafter, tensors, where)
    drafter.borrow(target)
    return drafter


def _tensors(folder: Path, where: str) -> dict[str, Tensor]:
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise Refusal(f"{where}: none of {', '.join(FILES)} is there")
    try:
        if file.suffix == ".bin":
            return torch.load(file, map_location="cpu", weights_only=True)
        return load_file(file)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise Refusal(f"{where}: {file.name} cannot be read ({str(error).splitlines()[0]})") from error


def _vocabulary(tensors: dict[str, Tensor], target: Target, where: str) -> Tensor | None:
    offsets, known = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    vocab = target.config.vocab_size
    if known is None:
        known = torch.zeros(vocab, dtype=torch.bool)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise Refusal(f"{where}: d2t points beyond the target's {vocab} ids")
        known[ids] = True
        tensors["t2d"] = known
    if len(known) != vocab or not torch.equal(known.nonzero()[:, 0], ids):
        raise Refusal(f"{where}: d2t and t2d do not name the same ids of the target's {vocab}")
    tensors["t2d"], tensors["d2t"] = known.bool(), offsets.long()
    return ids


def _options(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, wide: bool, vocab_map: Tensor | None, where: str
) -> EagleOptions:
    names = {name.removeprefix("midlayer.").removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    layer = layer_of(config, names, target, where, "neither EAGLE nor EAGLE-3")
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if config.get(flag):
            raise Refusal(f"{where}: {flag} is set in config.json, which this drafter does not do")
    return EagleOptions(
        name="eagle",
        join="attention" if wide else "fc",
        output="own" if wide else "shared",
        draft_vocab=None if vocab_map is None else len(vocab_map),
        taps=_taps(config, target) if wide else (-1,),
        fc_bias="fc.bias" in names,
        layer=layer,
    )


def _taps(config: dict[str, Any], target: Target) -> tuple[int, ...]:
    """The hidden states read: vLLM's key counts layers passed, as we do; the nested one, SGLang's, one less."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ids = None if nested is None else [k + 1 for k in nested]
    return default_taps(target.layers) if ids is None else tuple(ids)
