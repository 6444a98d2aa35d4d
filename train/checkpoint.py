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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.models.errors import Refusal
from paceline.models.export import load_tensors

HIDDEN = ".unfinished-"  # how the name of a folder begins that is being written or deleted


def generators(device: torch.device) -> dict[str, Tensor]:
    """States of the generators that training on `device` draws from, by kind of device: `cpu`, and that of a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def save(
    folder: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: Sequence[Mapping[str, Tensor]],
    state: dict[str, Any],
) -> Path:
    """Write `folder/step-NNNNNN`.

    Args:
        rng: the `generators` of each rank. state: plain types: best so far, tokens seen, world size ...
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:06d}"
    work = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=folder))
    try:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        moments = {
            f"{names[parameter]}|{key}": value.detach().cpu().contiguous()
            for parameter, held in optimizer.state.items()
            for key, value in held.items()
        }
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()},
            work / "drafter.safetensors",
        )
        save_file(moments, work / "optimizer.safetensors")
        drawn = {_slot(rank, kind): held for rank, states in enumerate(rng) for kind, held in states.items()}
        save_file(drawn, work / "rng.safetensors")
        (work / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        for file in work.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        work.chmod(0o755)
        _discard(place)
        work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in `folder`, None where there is none."""
    return max(_all(folder), key=_step, default=None)


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, and nothing that a killed run was about to write or to delete."""
    for old in sorted(_all(folder), key=_step)[:-keep]:
        _discard(old)
    for left in folder.glob(f"{HIDDEN}*"):
        shutil.rmtree(left)


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
    place: Path, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, device: torch.device
) -> dict[str, Any]:
    """Put a checkpoint back into module, optimiser and the `generators` of `device`; returns its state.

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
    for key, value in moments.items():
        name, _, kind = key.partition("|")
        # the step count of a fused AdamW lives where the parameter lives
        optimizer.state[trained[name]][kind] = value.to(trained[name].device)
    torch.set_rng_state(rng[_slot(rank, "cpu")])
    if (held := rng.get(_slot(rank, device.type))) is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(held, device)
    return state


def _slot(rank: int, kind: str) -> str:
    """The name of a generator's state; the CPU's is the rank's alone, as before others were kept."""
    return f"rank{rank}" if kind == "cpu" else f"rank{rank}|{kind}"
