"""Where a run's hidden states come from: chosen, looked over and priced before the first step.

Knows the option, the target, the loader and who runs beside. How states are kept is data/features.py's.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Dataset
from paceline.data.features import Features, Memory, Shards, bytes_a_token, description
from paceline.data.rows import lengths
from paceline.models.errors import Refusal
from paceline.models.target import Target

FAR = 0.1  # what is kept differs by more from what the target says only if it is another's: bfloat16 rounds to 0.004


def features_of(
    cfg: Any, target: Target, taps: tuple[int, ...], loader: Loader, data: Dataset, tell: Callable[[str], None]
) -> Features:
    """The features that `cfg.data.features` asks for; `tell` is given one line about disk, memory and time.

    All processes take part. Raises Refusal, and BadData, where there is no room, or the states are not these.
    """

    def say(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return target(batch.ids, taps, documents=batch.document, positions=batch.positions)

    kind, mine = cfg.data.features, list(loader.parts())
    features = Features(say, taps)
    tokens = sum(lengths(data.train))
    size = tokens * bytes_a_token(taps, target.hidden, target.dtype.itemsize)
    pace = _seconds_a_token(say, loader, mine, target.device)
    if kind == "online":
        tell(
            f"online, {_time(tokens * pace)} of the target's passes an epoch; kept, its states would take {_size(size)}"
        )
        return features
    if kind == "memory":
        near = size * int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / loader.world
        free = available()
        if near > free:
            raise Refusal(
                f"data.features: memory takes {_size(near)}, {_size(free)} are free; nearest: hybrid, on disk"
            )
        features.store = Memory()
        tell(
            f"memory, {_size(near)} of {_size(free)} that are free; {_time(tokens * pace)} of the target's passes, once"
        )
        return features

    place = Path(cfg.data.features_in)
    about = description(
        target.fingerprint,
        cfg.target.quantize,
        cfg.dtype,
        taps,
        data.provenance["template_sha256"],
        data.train,
        loader.packing,
    )
    shards = features.store = Shards(place, about, begin=kind == "hybrid")
    spoiled = gather_object(shards.spoiled(loader.rank, loader.world))
    if spoiled and kind == "cached":
        raise Refusal(
            f"data.features_in: {place / min(spoiled)} is not as it was written: "
            "scripts/cache_features.py makes it anew",
            common=True,
        )
    if kind == "hybrid" and loader.rank == 0:
        shards.forget(spoiled)
    gather_object([None])  # nobody reads the index before that is done
    missing = gather_object(sorted(shards.open(i for part in mine for i in part)))
    if missing and kind == "cached":
        raise Refusal(
            f"data.features_in: {place} lacks the states of {len(missing)} of {len(data.train)} examples: "
            "scripts/cache_features.py goes on; nearest: data.features=hybrid",
            common=True,
        )
    there = [part for part in mine if all(example in shards for example in part)][:1]
    apart = max(gather_object([features.apart(loader.packed(part).to(target.device)) for part in there]), default=0.0)
    if apart > FAR:
        said = f"data.features_in: the states in {place} are {apart:.2f} from what the target says (relative)"
        raise Refusal(said, common=True)
    sizes = lengths(data.train)
    lacking = sum(sizes[i] for i in missing)
    needed, free = size * lacking / tokens, shutil.disk_usage(place).free
    if needed > free:
        raise Refusal(
            f"data.features_in: {place} needs {_size(needed)} more, {_size(free)} are free; "
            "nearest: data.features=online"
        )
    again = "" if lacking == tokens else f", {_again(apart, shards.same_packing)}"
    time_left = f"; {_time(lacking * pace)} of the target's passes, once" if lacking else ""
    tell(f"{kind}, {_size(size)} in {place}{f' ({_size(free)} free)' if lacking else ''}{again}{time_left}")
    return features


def _again(apart: float, same_packing: bool) -> str:
    if same_packing and not apart:
        return "computed again: the same bits"
    why = "on another machine" if same_packing else "packed otherwise"
    return f"computed again: {apart:.1e} apart, since they were {why}"


def _seconds_a_token(say: Callable[[Batch], Any], loader: Loader, mine: list[list[int]], device: torch.device) -> float:
    """Seconds that the target takes for a token of this process's first micro-batch, over all processes."""
    if not mine:
        return 0.0
    batch = loader.packed(mine[0]).to(device)
    began = time.monotonic()
    say(batch)[1].sum().item()  # waits for a GPU
    return (time.monotonic() - began) / batch.tokens / loader.world


def available() -> float:
    """Bytes of memory that are free; any number where nobody says."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), float("inf"))


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 7200
        else f"{seconds / 60:.0f} min"
        if seconds >= 120
        else f"{seconds:.0f} s"
    )
