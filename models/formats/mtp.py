"""MTP modules that lie in a checkpoint beside their model's layers: config.json and safetensors, or shards.

Reads modules whose block is an ordinary decoder layer, and writes them into a copy of their target's checkpoint. Knows
names and conventions; what a module does with its tensors is models/mtp_sequential.py's.

    DeepSeek's names (GLM-4.5's too)   model.layers.{L + k}.*: enorm, hnorm, eh_proj [embedding, state],
                                       shared_head.norm and a layer; embed_tokens and shared_head.head are copies
    MiMo's names                       model.mtp_layers.{k}.*: token_layernorm, hidden_layernorm,
                                       input_proj [state, embedding], final_layernorm and a layer
    Qwen's names                       mtp.*: pre_fc_norm_embedding, pre_fc_norm_hidden, fc [embedding, state], norm,
                                       and a layer under layers.0

The first two are read by vLLM from the output of the final norm (MiMo's: from its input) and hand on what their layer
gives, before the norm; the embedding at position 0 counts as 0. transformers, whose config.json has `num_mtp_layers`,
reads DeepSeek's names, hands on what its norm gives, and makes no difference at position 0. So it is with Qwen's, which
are read only, one module of them, and where its attention has no gate. Others do otherwise: `method.taps`,
`method.hand_on`, `method.zero_first` and `method.position_offset` say so where they are set.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafter import MOST, Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.formats.common import (
    Checkpoint,
    biases,
    embedding,
    layer_manifest,
    layer_of,
    tensors_of,
    without_copy,
)
from paceline.models.layers import LayerOptions
from paceline.models.mtp_sequential import SequentialOptions
from paceline.models.stored import Spec, check, dtype_of, load_tensors, read_json, read_tensors, tensor_files
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "mtp_sequential", ("mtp_stitched", "mimo"), True
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers")
DEEPSEEK = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.(.+)")
MIMO = re.compile(r"(?:model\.)?mtp_layers\.(\d{1,6})\.(.+)")
OF_MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
TO_MIMO = {ours: theirs for theirs, ours in OF_MIMO.items()}
QWEN = "mtp."
TO_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
# what marks a block that is no ordinary decoder layer
FOREIGN = {
    r"self_attn\.(kv_a|kv_b|q_a|q_b)_": "latent attention (MLA)",
    r"mlp\.(experts|shared_experts?|gate)\.": "a mixture of experts",
}


def recognised(folder: str | Path) -> bool:
    """Whether this may be such a checkpoint: a config, safetensors with modules, and no export of paceline's own."""
    folder = Path(folder)
    if not (folder / "config.json").is_file() or (folder / "drafter.json").exists():
        return False
    try:
        said = read_json(folder / "config.json", "")
        if any(name in said for name in COUNTS):
            return True
        names = tensor_files(folder, "")
    except Refusal:
        return False
    return _is_qwen(names) or any(MIMO.fullmatch(name) or name.endswith(".eh_proj.weight") for name in names)


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The drafter made of a checkpoint's modules, for `target`, in the dtype they have. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; blocks of another kind; modules for a
            target of another width or with other tables.
    """
    folder, where = Path(folder), f"{option}={folder}"
    config, files = read_json(folder / "config.json", where), tensor_files(folder, where)
    if _is_qwen(files):
        wanted = [name for name in files if name.startswith(QWEN)]
    else:
        wanted = [name for number in _modules(list(files), config, where).values() for name in number.values()]
    found = Checkpoint(config, {})
    for file in sorted({files[name] for name in wanted}):
        found.tensors |= read_tensors(folder / file, where, [name for name in wanted if files[name] == file])
    for name in wanted:
        for copy, table in (
            ("embed_tokens.weight", embedding(target)),
            ("shared_head.head.weight", target.head.weight),
        ):
            if name.endswith(f".{copy}"):
                without_copy(found.tensors, name, table, where)
    drafter = understood(found, Shape.of(target), where)
    drafter.borrow(target)
    return drafter


def understood(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    """The drafter made of the modules in a checkpoint; whatever else it holds is the target's. Raises Refusal."""
    config = found.config
    if _is_qwen(found.tensors):
        return _of_qwen(found, shape, where)
    modules = _modules(list(found.tensors), config, where)
    mimo, stitched = _is_mimo(found.tensors), "num_mtp_layers" in config
    first = 0 if mimo else _first_layer(config, where)
    layer = layer_of(config, {name for names in modules.values() for name in names}, shape.hidden, where)
    inner = module_manifest(layer, shape.hidden)
    manifest, ours = {}, {}
    tensors = {name: found.tensors[name] for names in modules.values() for name in names.values()}
    for number, names in modules.items():
        some = next(iter(names.values()))
        before = some[: some.index(f".{first + number}.")]
        for name, spec in inner.items():
            theirs = f"{before}.{first + number}.{to_mimo(name) if mimo else name}"
            manifest[theirs], ours[theirs] = spec, f"layers.{shape.layers + number}.{name}"
    check(tensors, manifest, where)
    mapped = {ours[name]: tensor for name, tensor in tensors.items()}
    if mimo:
        mapped = {name: _swapped(t) if name.endswith(".eh_proj.weight") else t for name, t in mapped.items()}
    options = SequentialOptions(
        name=METHOD,
        modules=len(modules),
        taps=(shape.layers if mimo else -1,),
        hand_on="normed" if stitched else "raw",
        position_offset=0,
        zero_first=not stitched,
        layer=layer,
    )
    drafter = build(options, shape).to(dtype_of(mapped.values()))
    load_tensors(drafter, mapped, where)
    return drafter.eval()


def _of_qwen(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    tensors = {name: tensor for name, tensor in found.tensors.items() if name.startswith(QWEN)}
    _check_ordinary(tensors, where)
    rows, heads = tensors.get(f"{QWEN}layers.0.self_attn.q_proj.weight"), found.config.get("num_attention_heads")
    size = found.config.get("head_dim")
    if rows is not None and type(heads) is int and type(size) is int and len(rows) == 2 * heads * size:
        raise Refusal(f"{where}: attention has a gate (q_proj has two rows for each it needs); that is not read")
    return alone(tensors, _to_qwen, found.config, shape, where, taps=(-1,))


def _to_qwen(name: str) -> str:
    head, _, kind = name.rpartition(".")
    return f"{QWEN}{TO_QWEN[head]}.{kind}" if head in TO_QWEN else f"{QWEN}layers.0.{name}"


def alone(
    tensors: dict[str, Tensor],
    theirs: Callable[[str], str],
    config: dict[str, Any],
    shape: Shape,
    where: str,
    taps: tuple[int, ...],
) -> Drafter:
    """The drafter of a file with one module, which hands on what its last norm gives. Raises Refusal.

    theirs: our name of a tensor -> the file's. config: of its layer. taps: what it reads.
    """
    names = {name.split("layers.0.")[-1] for name in tensors}
    layer = layer_of(config, names, shape.hidden, where)
    manifest = module_manifest(layer, shape.hidden)
    check(tensors, {theirs(name): spec for name, spec in manifest.items()}, where)
    options = SequentialOptions(
        name=METHOD, modules=1, taps=taps, hand_on="normed", position_offset=0, zero_first=False, layer=layer
    )
    drafter = build(options, shape).to(dtype_of(tensors.values()))
    load_tensors(drafter, {f"layers.{shape.layers}.{name}": tensors[theirs(name)] for name in manifest}, where)
    return drafter.eval()


def module_manifest(layer: LayerOptions, hidden: int) -> dict[str, Spec]:
    """Of one module, under our names."""
    norms = ("input_layernorm", "enorm", "hnorm", "shared_head.norm")
    found = layer_manifest(layer, hidden, hidden) | {f"{norm}.weight": Spec((hidden,)) for norm in norms}
    return found | {"eh_proj.weight": Spec((hidden, 2 * hidden))}


def _modules(names: list[str], config: dict[str, Any], where: str) -> dict[int, dict[str, str]]:
    """Number of each module, ascending -> its tensors by our names -> by the file's. Raises Refusal."""
    mimo = _is_mimo(names)
    first = 0 if mimo else _first_layer(config, where)
    modules: dict[int, dict[str, str]] = {}
    for name in names:
        found = (MIMO if mimo else DEEPSEEK).fullmatch(name)
        if found is not None and (number := int(found[1]) - first) >= 0:
            modules.setdefault(number, {})[from_mimo(found[2])] = name
            _check_ordinary([name], where)
    if not modules:
        raise Refusal(f"{where}: no MTP module there: no layer from {first} (num_hidden_layers) on")
    if set(modules) != set(range(len(modules))):
        missing = min(set(range(len(modules))) - set(modules))
        raise Refusal(f"{where}: module {missing} is missing, it has {', '.join(map(str, sorted(modules)))}")
    if len(modules) > MOST:
        raise Refusal(f"{where}: {len(modules)} modules; at most {MOST} are read")
    return dict(sorted(modules.items()))


def _check_ordinary(names: Iterable[str], where: str) -> None:
    for name in names:
        for mark, kind in FOREIGN.items():
            if re.search(mark, name):
                raise Refusal(f"{where}: {name} is part of {kind}; only ordinary decoder layers are read")


def _is_qwen(names: Iterable[str]) -> bool:
    return any(name.startswith(QWEN) for name in names)


def _is_mimo(names: Any) -> bool:
    return any(MIMO.fullmatch(name) for name in names)


def _first_layer(config: dict[str, Any], where: str) -> int:
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise Refusal(f"{where}: config.json has no num_hidden_layers, from which on layers are MTP modules")
    return layers


def from_mimo(name: str) -> str:
    head, _, kind = name.rpartition(".")
    return f"{OF_MIMO.get(head, head)}.{kind}"


def to_mimo(name: str) -> str:
    head, _, kind = name.rpartition(".")
    return f"{TO_MIMO.get(head, head)}.{kind}"


def _swapped(weight: Tensor) -> Tensor:
    """[state, embedding] for [embedding, state], and back."""
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


# ---------------------------------------------------------------- out


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a checkpoint, or the code that reads it, has no place for.

    mtp_stitched is read by transformers (`use_mtp`), mimo by vLLM's class for MiMo, which has one module.
    """
    options = drafter.options
    wanted: dict[str, Any] = {"taps": (-1,), "hand_on": "normed", "position_offset": 0, "zero_first": False}
    if format == "mimo":
        wanted = {"taps": (drafter.shape.layers,), "hand_on": "raw", "position_offset": 0, "zero_first": True}
        wanted["modules"] = 1
    yield from other_conventions(drafter, wanted)
    if format == "mimo" and biases(options.layer) != ["self_attn.q_proj.bias"]:
        yield "method.layer: MiMo's layers are Qwen2's, with biases of q, k and v and no others"


def other_conventions(drafter: Drafter, wanted: dict[str, Any]) -> Iterator[str]:
    """What of a drafter its reader does otherwise. wanted: that reader's options."""
    options = drafter.options
    if options.draft_vocab is not None:
        yield "token_map, a draft vocabulary, has no place there; train with method.draft_vocab=null"
    for name, value in wanted.items():
        if getattr(options, name) != value:
            asked = json.dumps(value)
            yield f"method.{name}={json.dumps(getattr(options, name))}: its reader has {asked}; train with that"


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    if format == "mimo":
        how = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
        return "vLLM, as MiMo", f"vllm serve FOLDER --speculative-config '{how}'"
    return "transformers (`model.generate(..., use_mtp=True)`, of the stitched folder)", ""


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """The modules on top of their target's checkpoint, `target["folder"]`. Refusal: that is not there, or another."""
    options, shape, mimo = drafter.options, drafter.shape, format == "mimo"
    folder = target.get("folder")
    if folder is None or not (Path(folder) / "config.json").is_file():
        raise Refusal(f"format={format}: the target's checkpoint is needed; give target=hf target.path=FOLDER")
    config = read_json(Path(folder) / "config.json", f"target.path={folder}")
    where = f"format={format}: target.path={folder}"
    files = tensor_files(Path(folder), where)
    if not files:
        raise Refusal(f"{where}: holds no safetensors to go with")
    names = {name.removeprefix("model.layers.0.") for name in files}
    theirs = layer_of(config, names, shape.hidden, where)
    for name, own in options.layer:
        if getattr(theirs, name) != own:
            raise Refusal(
                f"{where}: method.layer.{name}={own}: a module is a layer of its target's kind, "
                f"which has {getattr(theirs, name)}"
            )
    if mimo and config.get("model_type") != "qwen2":
        raise Refusal(f"{where}: is a {str(config.get('model_type'))[:40]}; MiMo's layers are qwen2's")
    tensors = {}
    for name, tensor in tensors_of(drafter).items():
        _, number, rest = name.split(".", 2)
        if mimo:
            rest, number = to_mimo(rest), str(int(number) - shape.layers)
            tensor = _swapped(tensor).contiguous() if rest == "input_proj.weight" else tensor
        tensors[f"model.{'mtp_layers' if mimo else 'layers'}.{number}.{rest}"] = tensor
    if mimo:
        changes: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        changes["num_nextn_predict_layers"] = 1
    else:
        changes = {"num_mtp_layers": options.modules}
    return Checkpoint(config | changes, tensors, "mtp.safetensors", Path(folder))
