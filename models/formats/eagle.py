"""EAGLE and EAGLE-3 checkpoints as the official code, vLLM and SGLang know them: config.json and one file of tensors.

Reads and writes. Knows names and conventions of that layout, and what each of the three leaves out; what the drafter
does with its tensors is models/eagle.py's.

    EAGLE-3    midlayer.* (or layers.0.*), fc [H, 3H], norm, lm_head, d2t (offsets), t2d
    EAGLE-1    layers.0.*, fc [H, 2H], the target's own head
    both       embed_tokens.weight, a copy of the target's

EAGLE-3 is written once for all three. In EAGLE-1, fc.bias is as trained for the official code, must not be there for
vLLM, and must be there for SGLang: zeros, where there is none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafter import Drafter, Shape, build
from paceline.models.eagle import EagleOptions, default_taps
from paceline.models.errors import Refusal
from paceline.models.formats.common import (
    USUAL_THETA,
    Checkpoint,
    base_config,
    biases,
    draft_tokens,
    embedding,
    layer_manifest,
    layer_of,
    opened,
    tensors_of,
    vllm,
    without_copy,
)
from paceline.models.stored import Spec, check, dtype_of, load_tensors
from paceline.models.target import Target

METHOD, FORMATS, ONTO_TARGET = "eagle", ("eagle", "vllm", "sglang"), False
FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
OF_SGLANG = "LlamaForCausalLMEagle"  # its EAGLE-1
TAPS = "eagle_aux_hidden_state_layer_ids"


def recognised(folder: str | Path) -> bool:
    """Whether this may be such a checkpoint: a config and tensors, and no export of paceline's own."""
    folder = Path(folder)
    here = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return "config.json" in here and "drafter.json" not in here and any(name in here for name in FILES)


def load(folder: str | Path, target: Target, option: str = "drafter") -> Drafter:
    """The drafter of such a checkpoint, for `target`, in the dtype it is stored in. option: what named the folder.

    Raises:
        Refusal: what is missing, left over, misshapen or damaged, by name; a drafter for a target of another width.
    """
    where = f"{option}={folder}"
    found = opened(Path(folder), FILES, where)
    found.tensors = {name.removeprefix("model."): tensor for name, tensor in found.tensors.items()}
    without_copy(found.tensors, "embed_tokens.weight", embedding(target), where)
    drafter = understood(found, Shape.of(target), where)
    drafter.borrow(target)
    return drafter


# ---------------------------------------------------------------- in


def understood(found: Checkpoint, shape: Shape, where: str) -> Drafter:
    """The drafter that a checkpoint describes, whose tables of the target are left out already. Raises Refusal."""
    config, tensors = found.config, dict(found.tensors)
    wide = _is_wide(config, tensors)
    if not wide:
        tensors.pop("lm_head.weight", None)  # the target's, which is asked itself
    before = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    layer = layer_of(config, {name.removeprefix(before) for name in tensors}, shape.hidden, where)
    _check_flags(config, where)
    vocab = _draft_vocabulary(config, tensors, shape, where) if wide else shape.vocab
    taps = _taps(config, tensors, shape, where) if wide else (-1,)
    # the manifest, in the file's own names
    inner = layer_manifest(layer, shape.hidden, shape.hidden * (1 + wide))
    if wide:
        inner |= {f"{norm}.weight": Spec((shape.hidden,)) for norm in ("input_layernorm", "hidden_norm")}
    manifest = {before + name: spec for name, spec in inner.items()}
    manifest["fc.weight"] = Spec((shape.hidden, shape.hidden * (len(taps) if wide else 2)))
    if "fc.bias" in tensors:
        manifest["fc.bias"] = Spec((shape.hidden,))
    if wide:
        manifest |= {"norm.weight": Spec((shape.hidden,)), "lm_head.weight": Spec((vocab, shape.hidden))}
    if vocab < shape.vocab:
        manifest["d2t"] = Spec((vocab,), (torch.int64, torch.int32))
        if "t2d" in tensors:  # vLLM and SGLang do without
            manifest["t2d"] = Spec((shape.vocab,), (torch.bool, torch.uint8, torch.int64))
    elif wide:
        for name, size in (("d2t", vocab), ("t2d", shape.vocab)):  # official code has them, as zeros or ones
            if name in tensors:
                manifest[name] = Spec((size,), (torch.int64, torch.int32, torch.bool, torch.uint8))
    check(tensors, manifest, where)
    vocab_map = _vocabulary(tensors, shape, where) if vocab < shape.vocab else None
    if vocab_map is None and tensors.pop("d2t", torch.zeros(1)).any():
        raise Refusal(f"{where}: d2t moves ids, but lm_head.weight has all {vocab} of them")
    if vocab_map is None:
        tensors.pop("t2d", None)
    if OF_SGLANG in _architectures(config) and "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]  # it is there because SGLang would draw one at random
    options = EagleOptions(
        name="eagle",
        join="attention" if wide else "fc",
        output="own" if wide else "shared",
        draft_vocab=None if vocab_map is None else len(vocab_map),
        taps=taps,
        fc_bias="fc.bias" in tensors,
        layer=layer,
    )
    ours = "midlayer." if wide else "layers.0."
    tensors = {ours + name.removeprefix(before) if name.startswith(before) else name: t for name, t in tensors.items()}
    drafter = build(options, shape, vocab_map).to(dtype_of(tensors.values()))
    load_tensors(drafter, tensors, where)
    return drafter.eval()


def _is_wide(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Whether it is EAGLE-3: by any of the tensors that only that has, so that one is missed where it is missing."""
    marks = ("norm.weight", "d2t", "t2d", "midlayer.", "hidden_norm.weight")
    named = any("Eagle3" in str(name) for name in _architectures(config))
    return named or any(n.startswith(marks) or n.endswith("hidden_norm.weight") for n in tensors)


def _architectures(config: dict[str, Any]) -> list[Any]:
    said = config.get("architectures")
    return said if isinstance(said, list) else []


def _check_flags(config: dict[str, Any], where: str) -> None:
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if config.get(flag):
            raise Refusal(f"{where}: {flag} is set in config.json, which this drafter does not do")
    if config.get("num_hidden_layers", 1) != 1:
        raise Refusal(f"{where}: config.json: num_hidden_layers is {config['num_hidden_layers']}, this drafter has 1")


def _draft_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor], shape: Shape, where: str) -> int:
    """Rows of the output matrix, as config.json has them, or where that does not say, the matrix itself."""
    said = config.get("draft_vocab_size")
    head = tensors.get("lm_head.weight")
    rows = said if said is not None else len(head) if head is not None and head.ndim else shape.vocab
    if type(rows) is not int or not 1 <= rows <= shape.vocab:
        raise Refusal(f"{where}: a draft vocabulary of {str(rows)[:40]} ids, the target has {shape.vocab}")
    return rows


def _vocabulary(tensors: dict[str, Tensor], shape: Shape, where: str) -> Tensor:
    """Target ids of the draft ids, and d2t and t2d as ours. d2t holds offsets; ids themselves are told apart."""
    given, known = tensors["d2t"].long(), tensors.get("t2d")
    ids = given + torch.arange(len(given))
    if known is not None:
        marked = known.bool().nonzero()[:, 0]
        if not torch.equal(marked, ids):
            kind = "d2t holds ids, engines add each one's place to it" if torch.equal(marked, given) else ""
            fault = kind or "d2t and t2d do not name the same ids"
            raise Refusal(f"{where}: {fault} (of the target's {shape.vocab})")
    elif len(given) > 1 and bool((given[1:] > given[:-1]).all()):
        # offsets stay the same from one kept id to its neighbour, and a file without neighbours is not to be expected
        raise Refusal(f"{where}: d2t holds ids, engines add each one's place to it (it rises with every place)")
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab:
        raise Refusal(f"{where}: d2t points beyond the target's {shape.vocab} ids")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise Refusal(f"{where}: d2t does not lead to ascending ids")
    tensors["d2t"] = given
    tensors["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, ids, True)
    return ids


def _taps(config: dict[str, Any], tensors: dict[str, Tensor], shape: Shape, where: str) -> tuple[int, ...]:
    """The hidden states read: vLLM's key counts layers passed, as we do; the nested one, SGLang's, one less."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise Refusal(f"{where}: config.json: eagle_config is refused, it must be an object")
    if nested.get("use_aux_hidden_state") is False:
        raise Refusal(f"{where}: config.json: use_aux_hidden_state is false, a drafter of one state without fc.weight")
    after, last = (_ids(place, add, shape, where) for place, add in ((config, 0), (nested, 1)))
    if after is not None and last is not None and after != last:
        raise Refusal(
            f"{where}: config.json: {TAPS} {list(after)} at the top counts layers passed, that in eagle_config names "
            f"the last of them, {[k - 1 for k in last]}: it should be one less each"
        )
    after = last if after is None else after
    if after is not None:
        return after
    fc = tensors.get("fc.weight")
    if fc is not None and tuple(fc.shape) != (shape.hidden, 3 * shape.hidden):
        raise Refusal(f"{where}: tensor fc.weight has shape {list(fc.shape)}, expected three hidden states' width")
    return default_taps(shape.layers)


def _ids(place: dict[str, Any], add: int, shape: Shape, where: str) -> tuple[int, ...] | None:
    ids = place.get(TAPS)
    if ids is None:
        return None
    whole = isinstance(ids, list) and all(type(k) is int and -1 <= k + add <= shape.layers for k in ids)
    if not whole or not 1 <= len(ids) == len(set(ids)):
        raise Refusal(f"{where}: config.json: {TAPS} {str(ids)[:60]} are no layers of a target of {shape.layers}")
    return tuple(k + add for k in ids)


# ---------------------------------------------------------------- out


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with the drafter in FOLDER; empty where it is Python code."""
    wide, tokens = drafter.options.join == "attention", draft_tokens(drafter)
    if format == "eagle":
        return "The official EAGLE code (`EaModel.from_pretrained(ea_model_path=FOLDER)`)", ""
    if format == "sglang":
        return "SGLang", (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'EAGLE3' if wide else 'EAGLE'} --speculative-draft-model-path FOLDER "
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    return "vLLM", vllm(target, drafter, model="FOLDER", method="eagle3" if wide else "eagle")


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """Such a checkpoint, for one of FORMATS, of a drafter without faults."""
    config, tensors = base_config(drafter), tensors_of(drafter)
    if drafter.options.join == "attention" and len(drafter.taps) != 3:
        config["num_aux_hidden_states"] = len(drafter.taps)
    if drafter.options.join == "fc" and format == "sglang":
        config |= {"architectures": [OF_SGLANG], "bias": False}  # there, `bias` would give attention some
        tensors.setdefault("fc.bias", torch.zeros(drafter.shape.hidden, dtype=drafter.dtype))
    return Checkpoint(config, tensors)


def faults(drafter: Drafter, format: str) -> Iterator[str]:
    """What such a file, or the code that reads it, has no place for. format: one of FORMATS, or speculators."""
    options, shape, layer = drafter.options, drafter.shape, drafter.options.layer
    taps, rope = list(drafter.taps), drafter.options.layer.rope or {}
    kind = rope.get("rope_type", "default")
    for name in biases(layer):
        yield f"{name} has no place there; train with method.layer.{_option(name)}=false"
    if options.join == "fc":
        if options.output == "own":
            yield "lm_head.weight has no place in EAGLE-1, whose head is the target's; train with method.output=shared"
        if options.draft_vocab is not None:
            yield "d2t, a draft vocabulary, has no place in EAGLE-1; train with method.draft_vocab=null"
        if taps != [-1]:
            yield f"method.taps={taps}: EAGLE-1 reads the output of the final norm, [-1]"
        if options.fc_bias and format == "vllm":
            yield "fc.bias has no place there; train with method.fc_bias=false"
    else:
        usual = [2, shape.layers // 2, shape.layers - 3]
        if options.output == "shared":
            yield "lm_head.weight would be missing; train with method.output=own"
        if options.fc_bias:
            yield "fc.bias has no place there; train with method.fc_bias=false"
        if len(taps) != 3 and (format != "vllm" or len(taps) < 2):
            yield f"method.taps={taps}: fc.weight reads three hidden states there"
        if taps != sorted(taps) or not 1 <= min(taps) <= max(taps) < shape.layers:
            yield f"method.taps={taps}: engines read inputs of layers 1 to {shape.layers - 1}, in their order"
        if format == "eagle" and taps != usual:
            yield f"method.taps={taps}: the official code reads {usual}, whatever config.json says"
    if format in ("vllm", "sglang") and layer.activation != "silu":
        yield f"method.layer.activation={layer.activation}: that layer computes silu"
    if format == "eagle":
        if layer.heads * layer.head_dim != shape.hidden:
            yield f"method.layer.head_dim={layer.head_dim}: the official code makes heads of width / heads"
        if kind not in ("default", "linear") or rope.get("partial_rotary_factor", 1.0) != 1.0:
            yield f"method.layer.rope: {kind} is not turned there; it has default and linear"
        elif kind == "linear" and rope.get("rope_theta") != USUAL_THETA:
            yield f"method.layer.rope: with linear scaling the official code has rope_theta={USUAL_THETA:.0f}"


def _option(name: str) -> str:
    """The option of a layer that gives it this tensor."""
    if name.endswith("_norm.weight"):
        return "qk_norm"
    return {"q": "qkv_bias", "o": "out_bias"}.get(name.split(".")[1][0], "mlp_bias")
