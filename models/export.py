"""Exports: a trained drafter as a folder that describes itself, read back strictly. The native format.

    config.json          what serving engines look for in this method's files
    model.safetensors    every trained tensor and the draft vocabulary; nothing borrowed from the target
    drafter.json         method and options, taps, slot convention, target fingerprint, tree, provenance, acceptance
    trunk/               where the target was trained with it: what changed (models/trunk.py)

Knows the folder and its checks. Does not know how a drafter was trained or what its tree is good for.
"""

import ctypes
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.models.drafter import Drafter, Shape, build, methods, options
from paceline.models.errors import Refusal
from paceline.models.layers import checked_map
from paceline.models.packed import pack_weights
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
    work = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(work, ignore_errors=True)  # what a killed writer left
    work.mkdir(parents=True)
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
    config = {
        "hidden_size": drafter.shape.hidden,
        "vocab_size": drafter.shape.vocab,
        "torch_dtype": dtype,
        **drafter.engine_config(),
    }
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (work / "drafter.json").write_text(json.dumps(description, indent=2) + "\n")
    if folder.exists():
        _exchange(work, folder)
        shutil.rmtree(work)
    else:
        work.rename(folder)
    return folder


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that at no moment there is none under either name.

    Where the system cannot (only Linux is asked), it takes two: a kill between them leaves the old one aside, whole.
    """
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap is None or swap(here, os.fsencode(new), here, os.fsencode(old), exchange) != 0:
        aside = old.with_name(f".{old.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        old.rename(aside)
        new.rename(old)
        aside.rename(new)


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
        about = json.loads(file.read_text())
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
    opts = options(about["method"]["name"]).model_validate(about["method"])
    file = Path(folder) / "model.safetensors"
    try:
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{where}: model.safetensors cannot be read ({error})") from error
    stand_in = torch.arange(opts.draft_vocab) if opts.draft_vocab else None
    drafter = build(opts, Shape(**about["shape"]), stand_in)
    load_tensors(drafter, tensors, where)
    try:
        if drafter.vocab_map is not None:
            checked_map(drafter.vocab_map, drafter.shape.vocab)
        drafter.check_vocabulary()
    except ValueError as error:
        raise Refusal(f"{where}: {error}") from error
    drafter.to(target.device, DTYPES[dtype or about["dtype"]]).eval().requires_grad_(False)
    drafter.borrow(target)
    pack_weights(drafter)
    return drafter, about


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


def load_tensors(drafter: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Fill a module from named tensors, strict in both directions and in shapes. Refusal names the first fault."""
    wanted = drafter.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise Refusal(f"{where}: tensor {name} is missing")
        if tensors[name].shape != tensor.shape:
            raise Refusal(
                f"{where}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(tensor.shape)}"
            )
    extra = sorted(set(tensors) - set(wanted))
    if extra:
        raise Refusal(f"{where}: tensor {extra[0]} belongs to no part of this drafter")
    drafter.load_state_dict(tensors)


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
