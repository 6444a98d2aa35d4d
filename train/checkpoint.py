"""Checkpoints: everything an exact resume needs, in folders that appear whole or not at all. safetensors and JSON only.

    checkpoints/step-000500/   drafter.safetensors     float32
                               optimizer.safetensors   both moments and the step count of every parameter
                               rng.safetensors         torch's generators, of every rank: the CPU's, and its GPU's
                               state.json              step, and what the record of the run counts

Knows modules, optimisers and numbers. Does not know what a step is.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.models.errors import Refusal
from paceline.models.export import load_tensors

HIDDEN = ".unfinished-"  # how the name of a folder begins that is being written or deleted


def generators(device: torch.device) -> dict[str, Tensor]:
    """States of the generators that training on `device` draws from, by kind of device: `cpu`, and that of a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def whole(tensor: Tensor) -> Tensor:
    """What is sharded over processes, of which all have to ask, gathered; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `save` writes, whole and on the CPU: weights by name, moments by name|kind. All processes take part."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    moments = {
        f"{names[parameter]}|{key}": whole(value).detach().cpu().contiguous()
        for parameter, kinds in optimizer.state.items()
        for key, value in kinds.items()
    }
    weights = {name: whole(tensor).detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    return weights, moments


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    rng: Sequence[Mapping[str, Tensor]],
    state: dict[str, Any],
) -> Path:
    """Write `folder/step-NNNNNN`.

    Args:
        weights, moments: `held`. rng: the `generators` of each rank. state: plain types: best so far, tokens seen,
            world size ...

    Raises Refusal where that is not possible; what was written before stays.
    """
    place = folder / f"step-{step:06d}"
    with writing(place):
        _write(place, step, weights, moments, rng, state)
    return place


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Say in one line what cannot be written, most likely since the disk is full. Raises Refusal."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Refusal(f"out: {place} cannot be written ({error}); what was written before stays") from error


def _write(
    place: Path,
    step: int,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    rng: Sequence[Mapping[str, Tensor]],
    state: dict[str, Any],
) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=place.parent))
    try:
        save_file(dict(weights), work / "drafter.safetensors")
        save_file(dict(moments), work / "optimizer.safetensors")
        drawn = {_slot(rank, kind): drawn for rank, states in enumerate(rng) for kind, drawn in states.items()}
        save_file(drawn, work / "rng.safetensors")
        (work / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        for file in work.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        work.chmod(0o755)
        _discard(place)
        work.rename(place)
        _settled(place.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _settled(folder: Path) -> None:
    """Have the names in a folder on the disk, as its files are: a rename that a power cut undoes was none."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in `folder`, None where there is none."""
    return max(_all(folder), key=_step, default=None)


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, and nothing that a killed run was about to write or to delete."""
    for old in sorted(_all(folder), key=_step)[:-keep]:
        _discard(old)
    for left in folder.glob(f"{HIDDEN}*"):
        shutil.rmtree(left)


def forget(folder: Path, after: int) -> list[str]:
    """Delete the checkpoints of more than `after` steps; returns their names."""
    later = sorted((place for place in _all(folder) if _step(place) > after), key=_step)
    for place in later:
        _discard(place)
    return [place.name for place in later]


def _all(folder: Path) -> list[Path]:
    return [place for place in folder.glob("step-*") if _step(place) >= 0]


def _step(place: Path) -> int:
    number = place.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _discard(place: Path) -> None:
    """Delete a checkpoint, which must not be seen half deleted."""
    if place.exists():
        doomed = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=place.parent))
        place.rename(doomed / place.name)
        shutil.rmtree(doomed)


def load(
    place: Path, module: nn.Module, rank: int, world: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put a checkpoint back into a module and the `generators` of `device`; returns its state, and moments for `give`.

    A GPU's generator stays as it is where the checkpoint was written on another kind of device, or before it was kept.

    Raises Refusal: what is missing or damaged.
    """
    where = f"resume={place}"
    try:
        state = json.loads((place / "state.json").read_text())
    except (OSError, ValueError) as error:
        near = newest(place) or newest(place / "checkpoints")
        hint = f"nearest: {near}" if near else type(error).__name__
        raise Refusal(f"{where}: no checkpoint there ({hint})") from error
    try:
        tensors = load_file(place / "drafter.safetensors")
        moments = load_file(place / "optimizer.safetensors")
        rng = load_file(place / "rng.safetensors")
    except Exception as error:  # safetensors raises kinds of its own
        raise Refusal(f"{where}: cannot be read ({error})") from error
    saved = sum("|" not in name for name in rng)
    if saved < world:
        raise Refusal(f"{where}: saved by {saved} processes, cannot go on with {world}")
    load_tensors(module, tensors, where)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    known = {key.partition("|")[0] for key in moments}
    if known and known != trained.keys():  # none: no step has been taken
        raise Refusal(f"{where}: the optimiser's tensors are not this drafter's, see {min(known ^ trained.keys())}")
    torch.set_rng_state(rng[_slot(rank, "cpu")])
    if (drawn := rng.get(_slot(rank, device.type))) is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(drawn, device)
    return state, moments


def give(moments: Mapping[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put moments back, each where its parameter lies, and sharded as that is."""
    parameters = dict(module.named_parameters())
    for key, value in moments.items():
        name, _, kind = key.partition("|")
        parameter = parameters[name]
        value = value.to(parameter.device)  # the step count of a fused AdamW lives where the parameter lives
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        optimizer.state[parameter][kind] = value


def _slot(rank: int, kind: str) -> str:
    """The name of a generator's state; the CPU's is the rank's alone, as before others were kept."""
    return f"rank{rank}" if kind == "cpu" else f"rank{rank}|{kind}"
