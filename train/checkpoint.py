"""Checkpoints: everything an exact resume needs, in folders that appear whole or not at all. safetensors and JSON only.

    checkpoints/step-000500/   drafter.safetensors (float32), optimizer.safetensors, rng.safetensors (every rank), state.json

Knows modules, optimisers and numbers. Does not know what a step is.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.models.errors import Refusal
from paceline.models.export import load_tensors


def save(
    folder: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: Sequence[Tensor],
    state: dict[str, Any],
) -> Path:
    """Write `folder/step-NNNNNN`.

    Args:
        rng: torch's generator state of each rank. state: plain numbers and strings: best so far, tokens seen, world size ...
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:06d}"
    work = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        names = {parameter: name for name, parameter in module.named_parameters()}
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
        save_file({f"rank{rank}": generator for rank, generator in enumerate(rng)}, work / "rng.safetensors")
        (work / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        for file in work.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        work.chmod(0o755)
        shutil.rmtree(place, ignore_errors=True)
        work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in `folder`."""
    return (
        max(folder.glob("step-*/state.json"), default=folder, key=lambda file: file.parent.name).parent
        if _any(folder)
        else None
    )


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints."""
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def read_state(place: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises Refusal where there is none."""
    try:
        return json.loads((place / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise Refusal(f"resume={place}: no checkpoint there ({error})") from error


def load(place: Path, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """Put a checkpoint back into module, optimiser and torch's generator; returns its state. Raises Refusal: what is damaged."""
    state = read_state(place)
    where = f"resume={place}"
    try:
        tensors = load_file(place / "drafter.safetensors")
        moments = load_file(place / "optimizer.safetensors")
        rng = load_file(place / "rng.safetensors")
    except Exception as error:  # safetensors raises kinds of its own
        raise Refusal(f"{where}: cannot be read ({error})") from error
    load_tensors(module, tensors, where)
    parameters = dict(module.named_parameters())
    for key, value in moments.items():
        name, _, kind = key.partition("|")
        if name not in parameters:
            raise Refusal(f"{where}: the optimiser knows {name}, this drafter does not")
        # the step count of a fused AdamW lives where the parameter lives
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device)
    if f"rank{rank}" not in rng:
        raise Refusal(f"{where}: saved by {len(rng)} processes, resumed by more")
    torch.set_rng_state(rng[f"rank{rank}"])
    return state


def _any(folder: Path) -> bool:
    return any(folder.glob("step-*/state.json"))
