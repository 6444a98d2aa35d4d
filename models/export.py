"""Exports: a trained drafter as a folder that describes itself, read back strictly. The native format.

    config.json          what serving engines look for in this method's files
    model.safetensors    every trained tensor and the draft vocabulary; nothing borrowed from the target
    README.md            the model card
    drafter.json         method and options, taps, slot convention, target fingerprint, tree, provenance, acceptance;
                         `tuned`, once scripts/tune.py has been there
    trunk/               where the target was trained with it: what changed (models/trunk.py)

Knows the folder and its checks. Does not know how a drafter was trained or what its tree is good for.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from paceline.models.card import card
from paceline.models.drafter import Drafter, Shape, build, methods, options
from paceline.models.errors import Refusal
from paceline.models.formats.common import base_config
from paceline.models.layers import checked_map
from paceline.models.packed import pack_weights
from paceline.models.quick import quicken
from paceline.models.stored import check, load_tensors, manifest_of, read_json, read_tensors, save_tensors, whole
from paceline.models.target import DTYPES, Target
from paceline.models.trunk import FOLDER, Learnt, fingerprint, read

VERSION = 1
SLOTS = "depth k at position t reads the token at t+1+k and predicts the token at t+2+k"


def save_export(
    drafter: Drafter,
    folder: str | Path,
    dtype: str,
    target: dict[str, Any],
    trunk: tuple[Target, Learnt] | None = None,
    **about: Any,
) -> Path:
    """Write an export; the folder appears whole or not at all, and replaces an older one.

    Args:
        dtype: of the floating-point tensors.
        target: {"name", "path", "fingerprint"}, how it is loaded, and what else identifies it.
        trunk: where the target was trained too: as it was before, and what it has learnt.
        about: further entries of drafter.json: `tree`, `provenance`, `acceptance`.
    """
    folder = Path(folder)
    tensors = {
        name: tensor.detach().to("cpu", DTYPES[dtype] if tensor.is_floating_point() else None).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with whole(folder) as work:
        if trunk is not None:
            original, learnt = trunk
            learnt.save(work / FOLDER, original)
            about["trunk"] = {"kind": learnt.kind, "fingerprint": fingerprint(work / FOLDER, target["fingerprint"])}
        description = {
            "paceline": VERSION,
            "method": drafter.options.model_dump(mode="json", exclude={"init_from"}),
            "shape": asdict(drafter.shape),
            "slots": SLOTS,
            "taps": list(drafter.taps),
            "dtype": dtype,
            "target": target,
            **about,
        }
        save_tensors(tensors, work / "model.safetensors")
        for name, content in (("config.json", base_config(drafter, dtype)), ("drafter.json", description)):
            (work / name).write_text(json.dumps(content, indent=2) + "\n")
        (work / "README.md").write_text(card(drafter, description))
    return folder


def amend(folder: str | Path, **about: Any) -> None:
    """Set entries of drafter.json, such as `tuned`; the file changes whole or not at all."""
    file = Path(folder) / "drafter.json"
    unfinished = file.with_name(f".{file.name}-{os.getpid()}")
    unfinished.write_text(json.dumps(read_json(file, f"drafter={folder}") | about, indent=2) + "\n")
    unfinished.replace(file)


def describe(folder: str | Path, option: str = "drafter") -> dict[str, Any]:
    """drafter.json of an export, checked as far as that is possible without a target. option: what named the folder.

    Raises:
        Refusal: no export there, of another version, or with options this version does not know.
    """
    folder = Path(folder)
    where, file = f"{option}={folder}", folder / "drafter.json"
    if not file.is_file():
        below = [str(child.parent) for child in sorted(folder.glob("**/drafter.json"))[:1]]
        hint = f"; nearest: {below[0]}" if below else ""
        raise Refusal(f"{where}: no export there (it has no drafter.json){hint}")
    try:
        about = read_json(file, where)
        version, name = about["paceline"], about["method"]["name"]
        sizes = asdict(Shape(**about["shape"]))
        if any(type(size) is not int or size < 1 for size in sizes.values()):
            raise TypeError(f"shape {sizes}")
        _ = about["target"]["fingerprint"], DTYPES[about["dtype"]]
        if (trunk := about.get("trunk")) is not None:
            _ = trunk["fingerprint"], {"lora": 0, "full": 1}[trunk["kind"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{where}: drafter.json is damaged ({type(error).__name__}: {error})") from error
    if version != VERSION:
        raise Refusal(f"{where}: written in format {version}, this paceline reads {VERSION}")
    if name not in methods():
        raise Refusal(f"{where}: method {name!r} is not known here; one of {', '.join(methods())}")
    try:
        options(name).model_validate(about["method"]).check_settled()
    except ValidationError as error:
        first = error.errors()[0]
        reason = first.get("ctx", {}).get("error")
        if isinstance(reason, Refusal):  # it names the option itself
            raise Refusal(f"{where}: {reason}") from error
        raise Refusal(f"{where}: {'.'.join(map(str, ('method', *first['loc'])))}: {first['msg']}") from error
    except Refusal as refusal:
        raise Refusal(f"{where}: {refusal}") from None
    return about


def load_export(
    folder: str | Path, target: Target, dtype: str | None = None, option: str = "drafter"
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of an export, ready to draft for `target`, and its drafter.json.

    Args:
        target: the one it was trained for; where that was trained too, what `load_trunk` makes of it.
        dtype: of the loaded drafter; None: as exported. option: what named the folder.

    Raises:
        Refusal: a missing, extra, misshapen or unreadable tensor by name; a drafter trained for another target.
    """
    about, where = describe(folder, option), f"{option}={folder}"
    trunk = about.get("trunk")
    if trunk is None:
        _same_target(where, about["target"]["fingerprint"], target)
    elif target.fingerprint != trunk["fingerprint"]:
        raise Refusal(f"{where} was trained together with its target: it drafts for what load_trunk returns, only")
    if about["shape"] != (shape := asdict(Shape.of(target))):
        raise Refusal(f"{where}: drafter.json: shape is {about['shape']}, that of target={target.source} is {shape}")
    drafter = _stored(about, Path(folder), where)
    drafter.to(target.device, DTYPES[dtype or about["dtype"]]).eval().requires_grad_(False)
    drafter.borrow(target)
    pack_weights(drafter)
    quicken(drafter)
    return drafter, about


def read_export(folder: str | Path, option: str = "drafter") -> tuple[Drafter, dict[str, Any]]:
    """The drafter of an export as it is stored, without its target, and its drafter.json. Refusal: as `load_export`."""
    about = describe(folder, option)
    return _stored(about, Path(folder), f"{option}={folder}").eval(), about


def _stored(about: dict[str, Any], folder: Path, where: str) -> Drafter:
    """Sizes are held against the file before anything is built of them: drafter.json is not to be trusted either."""
    opts, shape = options(about["method"]["name"]).model_validate(about["method"]), Shape(**about["shape"])
    dtype = DTYPES[about["dtype"]]
    tensors = read_tensors(folder / "model.safetensors", where)
    most = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
    if opts.draft_vocab is not None and opts.draft_vocab > most:
        raise Refusal(f"{where}: method.draft_vocab: {opts.draft_vocab}, but no tensor has as many rows")
    stand_in = None if opts.draft_vocab is None else torch.arange(opts.draft_vocab)
    try:
        with torch.device("meta"):
            sketch = build(opts, shape, stand_in)
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise Refusal(f"{where}: drafter.json describes no drafter ({str(error).splitlines()[0]})") from error
    check(tensors, manifest_of(sketch, dtype), where)
    drafter = build(opts, shape, stand_in).to(dtype)
    load_tensors(drafter, tensors, where, dtype)
    try:
        if drafter.vocab_map is not None:
            checked_map(drafter.vocab_map, drafter.shape.vocab)
        drafter.check_vocabulary()
    except ValueError as error:
        raise Refusal(f"{where}: {error}") from error
    return drafter


def load_trunk(folder: str | Path, target: Target, trust_remote_code: bool = False, option: str = "drafter") -> Target:
    """The target that the drafter of an export drafts for: `target`, or what training with the drafter made of it.

    `target` stays as it is. An adapter is merged, so that a pass costs what it cost before.

    Raises:
        Refusal: a drafter trained for another target; a trunk that cannot be read.
    """
    about, where = describe(folder, option), f"{option}={folder}"
    _same_target(where, about["target"]["fingerprint"], target)
    if (known := about.get("trunk")) is None:
        return target
    place = Path(folder) / FOLDER
    found = fingerprint(place, about["target"]["fingerprint"])
    if found != known["fingerprint"]:
        raise Refusal(f"{where}: its trunk is damaged or another's, {found} and not {known['fingerprint']}")
    trunk = read(place, known["kind"], target, trust_remote_code)
    trunk.known_as = found
    return trunk


def _same_target(where: str, theirs: str, target: Target) -> None:
    ours = target.fingerprint
    tables, _, layers = theirs.partition("-")
    my_tables, _, my_layers = ours.partition("-")
    comparable = "quantised" not in (layers, my_layers)
    if tables != my_tables or (comparable and layers != my_layers):
        raise Refusal(
            f"{where} was trained for a target with fingerprint {theirs}, "
            f"target={target.source} has {ours}: give the target it was trained for, or train a new drafter"
        )
