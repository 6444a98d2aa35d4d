"""Owns rows of training text, and how they lie on disk: flat arrays in shards, read where they lie.

Knows no tokenizer, no template and no record.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD = 1 << 20  # tokens a shard: 5 MB, what is held in memory until it is written


@dataclass(frozen=True)
class Example:
    """One row of training text: token ids and which of them the target would have had to write itself."""

    ids: Tensor  # int64 [T]
    supervised: Tensor  # bool [T]

    def __len__(self) -> int:
        return len(self.ids)


class Rows(Sequence[Example]):
    """The rows of some shards. Memory-mapped: what is not looked at takes no memory, and the system may drop the rest.

    owner: whatever must live as long as the files, for example a temporary folder.
    """

    def __init__(self, files: Sequence[Path], owner: object = None):
        self._owner = owner
        self._shards = [load_file(file) for file in files]
        # shards of 3 and 2 rows -> [0 3 5]: row i lies in the last shard that begins at or before i
        self._begin = [0, *accumulate(len(shard["start"]) - 1 for shard in self._shards)]

    def __len__(self) -> int:
        return self._begin[-1]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        which = bisect_right(self._begin, index) - 1
        shard, row = self._shards[which], index - self._begin[which]
        here = slice(*shard["start"][row : row + 2].tolist())
        return Example(shard["ids"][here].long(), shard["supervised"][here])

    def lengths(self) -> list[int]:
        """Tokens of every row, without reading the rows."""
        return [length for shard in self._shards for length in shard["start"].diff().tolist()]

    def highest(self) -> int:
        """The highest id of all rows, of which there is one at least."""
        return max(int(shard["ids"].max()) for shard in self._shards)


class Writer:
    """Writes rows into the shards STEM-00000.safetensors, STEM-00001.safetensors, ... of a folder.

    ids int32 [N], supervised bool [N], start int64 [rows + 1]: row r is [start[r], start[r + 1]) of the others.
    """

    def __init__(self, folder: Path, stem: str):
        self.files: list[Path] = []
        self._folder, self._stem = folder, stem
        self._rows: list[Example] = []
        self._tokens = 0

    def add(self, row: Example) -> None:
        self._rows.append(row)
        self._tokens += len(row)
        if self._tokens >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what is still held. Called once after the last row."""
        if not self._rows:
            return
        start = [0, *accumulate(map(len, self._rows))]
        self.files.append(self._folder / f"{self._stem}-{len(self.files):05}.safetensors")
        save_file(
            {
                "ids": torch.cat([row.ids for row in self._rows]).int(),
                "supervised": torch.cat([row.supervised for row in self._rows]),
                "start": torch.tensor(start),
            },
            self.files[-1],
        )
        self._rows, self._tokens = [], 0


def lengths(rows: Sequence[Example]) -> list[int]:
    """Tokens of every row."""
    return rows.lengths() if isinstance(rows, Rows) else [len(row) for row in rows]


def highest(rows: Sequence[Example]) -> int:
    """The highest id of all rows; -1 for none."""
    if not len(rows):
        return -1
    return rows.highest() if isinstance(rows, Rows) else max(int(row.ids.max()) for row in rows)


# A kept entry: a folder of shards and about.json, which says what they are and holds their checksums.


@contextmanager
def making(entry: Path) -> Iterator[Path]:
    """An empty folder beside `entry` to make it in. Whoever else wants it waits, and should look whether it is there.

    What killed processes left of this entry and of others goes away. Raises OSError.
    """
    work = entry.with_name(f".{entry.name}")
    held = None
    while held is None:  # it may become the entry, or be cleared away, while it is waited for
        work.mkdir(parents=True, exist_ok=True)
        held = _held(work, fcntl.LOCK_EX)
    try:
        _empty(work)
        for left in entry.parent.glob("." + 24 * "[0-9a-f]"):
            _clear(left)
        yield work
    finally:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), work.stat()):  # it has not become the entry
                _empty(work)
                work.rmdir()
        os.close(held)


def _held(folder: Path, how: int) -> int | None:
    """A descriptor that locks a folder; None where it is not there (any more), or, with LOCK_NB, another has it."""
    try:
        held = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(held, how)
        if os.path.samestat(os.fstat(held), folder.stat()):
            return held
    os.close(held)
    return None


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _clear(folder: Path) -> None:
    """Delete a folder that an entry was made in, unless somebody is at it."""
    if (held := _held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
        _empty(folder)
        folder.rmdir()
        os.close(held)


def keep(folder: Path, entry: Path, about: dict[str, Any]) -> None:
    """Move finished shards to `entry` in one step, with what there is to say `about` them. A spoiled entry makes way.

    Raises OSError where that is not possible.
    """
    body = json.dumps(about)
    written = {"files": _checksums(folder), "sha256": hashlib.sha256(body.encode()).hexdigest(), "about": body}
    (folder / "about.json").write_text(json.dumps(written))
    if entry.exists() and kept(entry) is None:
        shutil.rmtree(entry)
    try:
        os.rename(folder, entry)
    except OSError:  # another process was there first: its rows are the same
        if kept(entry) is None:
            raise


def kept(entry: Path) -> dict[str, Any] | None:
    """What was said about the shards in `entry`, if every byte there is as it was written; None where it is not."""
    try:
        written = json.loads((entry / "about.json").read_text())
        whole = hashlib.sha256(written["about"].encode()).hexdigest() == written["sha256"]
        return json.loads(written["about"]) if whole and written["files"] == _checksums(entry) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, or torn


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            found[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found
