"""Owns what a target says of training text and where it is kept: nowhere, in memory, or in shards that lie on disk.

    FOLDER/  index.json                  about: whose states these are; shards: the checksum of each
             states-00000.safetensors    example int64 [R], start int64 [R + 1], last [N, H], hidden [N, F]

Example example[r] has the rows [start[r], start[r + 1]) of the others, in the dtype that they were computed in. Where
the taps are none or the output of the final norm alone, `last` says all, and there is no `hidden`.

Knows batches, tensors and files. Knows no model: `say` is a callable it is handed.

    Legend: B rows of a batch, T sequence, R examples of a shard, N their tokens, H hidden, F = len(taps) * H.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.records import BadData
from paceline.data.rows import Example

SHARD = 1 << 28  # bytes a shard: what is held in memory until it is written, and what a kill costs
HIDDEN = ".unfinished-"  # how a file is named while it is written

# What the states depend on: entry of `about` -> how a refusal calls it. In this order: who reads other data most likely
# has another template.
MATTERS = {
    "target": "target",
    "quantize": "target.quantize",
    "dtype": "dtype",
    "taps": "method.taps",
    "template_sha256": "chat template",
    "tokens_sha256": "data",
}


class Store(Protocol):
    """States of examples, each a tuple of tensors with a row a token."""

    def __contains__(self, example: object) -> bool: ...
    def read(self, examples: Sequence[int]) -> list[Tensor]:
        """The rows of these examples, one after the other. Raises KeyError for one that is not there."""
        ...

    def add(self, examples: Sequence[int], sizes: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keep the rows of these examples, which stand one after the other."""
        ...


class Features:
    """The target's hidden states for micro-batches, each computed once where there is a `store` to keep them."""

    def __init__(self, say: Callable[[Batch], tuple[Tensor, Tensor]], taps: Sequence[int], store: Store | None = None):
        """say: a batch -> hidden [B, T, F], the taps side by side, and last [B, T, H], the output of the final norm."""
        self._say, self._taps, self.store = say, tuple(taps), store

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """hidden [B, T, F] and last [B, T, H]; what is kept has zeros where there is padding."""
        if self.store is None or not batch.members:
            return self._say(batch)
        real = batch.document >= 0
        documents, sizes = batch.document[real].cpu().unique_consecutive(return_counts=True)
        examples = [batch.members[d] for d in documents.tolist()]
        if all(example in self.store for example in examples):
            kept = [_spread(rows, real) for rows in self.store.read(examples)]
            return kept[0][..., :0] if not self._taps else kept[-1], kept[0]
        hidden, last = self._say(batch)
        self.store.add(examples, sizes.tolist(), [part[real] for part in ((last, hidden) if self.both else (last,))])
        return hidden, last

    @property
    def both(self) -> bool:
        """Whether `hidden` is more than `last`."""
        return self._taps not in ((), (-1,))

    def apart(self, batch: Batch) -> float:
        """How far what is kept is from what the target says now: norm of the difference over the norm, 0 to the bit."""
        real = batch.document >= 0
        pairs = zip(self.of(batch), self._say(batch), strict=True)
        return max((_distance(ours[real], theirs[real]) for ours, theirs in pairs if ours.shape[-1]), default=0.0)


def _spread(rows: Tensor, real: Tensor) -> Tensor:
    """[N, W] rows at the places of `real` [B, T], zeros elsewhere -> [B, T, W]."""
    whole = torch.zeros(*real.shape, rows.shape[-1], dtype=rows.dtype, device=real.device)
    whole[real] = rows.to(real.device, non_blocking=True)
    return whole


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12))


def bytes_a_token(taps: Sequence[int], hidden: int, itemsize: int) -> int:
    """What a token's states take, of a target `hidden` wide whose numbers have `itemsize` bytes."""
    return (1 + (len(taps) if tuple(taps) not in ((), (-1,)) else 0)) * hidden * itemsize


def description(
    target: str,
    quantize: str,
    dtype: str,
    taps: Sequence[int],
    template_sha256: str,
    examples: Sequence[Example],
    packing: dict[str, int],
) -> dict[str, Any]:
    """Whose states they are: what `Shards` is told, and writes into its index. target: its fingerprint."""
    return {
        "target": target,
        "quantize": quantize,
        "dtype": dtype,
        "taps": list(taps),
        "template_sha256": template_sha256,
        "tokens_sha256": tokens_sha256(examples),
        "packing": packing,
    }


def tokens_sha256(examples: Sequence[Example]) -> str:
    """A hash of all token ids, example by example."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little") + example.ids.int().numpy().tobytes())
    return digest.hexdigest()


class Memory:
    """States in memory."""

    def __init__(self) -> None:
        self.bytes = 0
        self.blocks: list[tuple[Sequence[int], Sequence[int], Sequence[Tensor]]] = []
        self._where: dict[int, tuple[Sequence[Tensor], slice]] = {}

    def __contains__(self, example: object) -> bool:
        return example in self._where

    def read(self, examples: Sequence[int]) -> list[Tensor]:
        pieces = [[part[here] for part in states] for states, here in map(self._where.__getitem__, examples)]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def add(self, examples: Sequence[int], sizes: Sequence[int], states: Sequence[Tensor]) -> None:
        states = [part.cpu() for part in states]
        self.bytes += sum(part.nbytes for part in states)
        self.blocks.append((examples, sizes, states))
        self._learn(examples, [0, *accumulate(sizes)], states)

    def _learn(self, examples: Sequence[int], start: Sequence[int], states: Sequence[Tensor]) -> None:
        for row, example in enumerate(examples):
            self._where[example] = states, slice(start[row], start[row + 1])


class Shards(Memory):
    """States in a folder of shards, read where they lie; what is added is written once it fills a shard.

    Any number of processes may read and write at once. A shard is there whole or not at all, and in the index or it
    does not count.
    """

    def __init__(self, folder: Path, about: dict[str, Any], begin: bool = False):
        """Raises BadData, naming what differs, for states that are not as `about` says, or none at all.

        about: the entries of MATTERS, and `packing`. begin: what is not there yet will be written.
        """
        super().__init__()
        self.folder, self.about = folder, about
        self.awaited: set[int] = set()
        if begin:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with self._locked() as index:
                    if not index["shards"]:  # whoever began it has written nothing
                        index["about"] = about
            except OSError as error:
                raise self._failed(error) from error
        self.found = self._index()["about"]
        if not self.found:
            raise BadData(
                f"data.features_in: there are no states in {folder}: write them with scripts/cache_features.py, given "
                f"the same options; nearest: data.features=hybrid, which writes them in the first epoch"
            )
        for key, name in MATTERS.items():
            if self.found.get(key) != about[key]:
                raise BadData(
                    f"data.features_in: the states in {folder} are of another {name} ({self.found.get(key)}, not "
                    f"{about[key]}); nearest: another folder"
                )

    @property
    def same_packing(self) -> bool:
        """Whether what is read together was computed together: then states are what the target says, to the bit."""
        return self.found["packing"] == self.about["packing"]

    def spoiled(self, rank: int = 0, world: int = 1) -> list[str]:
        """Names of this process's share of the shards that are not there, or not as they were written."""
        shards = sorted(self._index()["shards"].items())[rank::world]
        return [name for name, checksum in shards if _checksum(self.folder / name) != checksum]

    def forget(self, names: Sequence[str]) -> None:
        """Delete shards, and what killed processes were about to write."""
        with self._locked() as index:
            for name in names:
                index["shards"].pop(name, None)
                (self.folder / name).unlink(missing_ok=True)
            for left in self.folder.glob(f"{HIDDEN}*"):
                with left.open("rb") as file, suppress(BlockingIOError):  # its writer still holds it
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()

    def open(self, mine: Iterable[int], without: Sequence[str] = ()) -> set[int]:
        """Map all shards of the index but those `without`; returns which of this process's examples are not there.

        As soon as they are, what is held of them is written, if it fills no shard. Raises BadData.
        """
        for name in self._index()["shards"]:
            if name not in without:
                self._map(name)
        self.awaited = set(mine) - self._where.keys()
        return set(self.awaited)

    def add(self, examples: Sequence[int], sizes: Sequence[int], states: Sequence[Tensor]) -> None:
        if not self.same_packing:
            raise BadData(
                f"data.features_in: the states in {self.folder} were begun with {self.found['packing']}, and cannot go "
                f"on with {self.about['packing']}; nearest: another folder"
            )
        super().add(examples, sizes, states)
        self.awaited.difference_update(examples)
        if self.bytes >= SHARD or not self.awaited:
            self.flush()

    def flush(self) -> None:
        """Write what is still held. Raises BadData where that is not possible; what was written before stays."""
        if not self.blocks:
            return
        examples, sizes, states = zip(*self.blocks, strict=True)
        names = ("last", "hidden")
        tensors = {name: torch.cat(parts) for name, parts in zip(names, zip(*states, strict=True), strict=False)}
        tensors["example"] = torch.tensor([example for some in examples for example in some])
        tensors["start"] = torch.tensor([0, *accumulate(size for some in sizes for size in some)])
        try:
            with self._locked():
                work = tempfile.NamedTemporaryFile(prefix=HIDDEN, dir=self.folder, delete=False)  # noqa: SIM115
                fcntl.flock(work, fcntl.LOCK_EX)
            with work:
                try:
                    save_file(tensors, work.name)
                    os.fchmod(work.fileno(), 0o644)
                    os.fsync(work.fileno())
                    checksum = _checksum(Path(work.name))
                    with self._locked() as index:
                        name = f"states-{1 + max((int(n[7:-12]) for n in index['shards']), default=-1):05}.safetensors"
                        os.replace(work.name, self.folder / name)
                        index["shards"][name] = checksum
                finally:
                    Path(work.name).unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        self.blocks, self.bytes = [], 0
        self._map(name)

    def _map(self, name: str) -> None:
        try:
            shard = load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise BadData(
                f"data.features_in: {self.folder / name} cannot be read ({error}); scripts/cache_features.py makes it "
                "anew"
            ) from error
        states = [shard[part] for part in ("last", "hidden") if part in shard]
        self._learn(shard["example"].tolist(), shard["start"].tolist(), states)

    def _index(self) -> dict[str, Any]:
        file = self.folder / "index.json"
        if not file.exists():
            return {"about": {}, "shards": {}}
        try:
            index = json.loads(file.read_text())
            _ = index["about"]["packing"], index["shards"].items()
            return index
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadData(
                f"data.features_in: {file} is damaged ({type(error).__name__}); nearest: another folder"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """The index, to be changed by one process at a time; it is replaced in one move."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self._index()
            before = json.dumps(index)
            yield index
            if json.dumps(index) != before:
                work = self.folder / ".index.json"
                with work.open("w") as file:
                    json.dump(index, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                work.replace(self.folder / "index.json")

    def _failed(self, error: Exception) -> BadData:
        return BadData(f"data.features_in: {self.folder} cannot be written ({error}); what was written before stays")


def _checksum(file: Path) -> str | None:
    """sha256 of a file; None where it cannot be read."""
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None
