"""Records on disk as they are made: shards of JSON lines that a killed run leaves whole but for the last line.

    folder/conversations-00000.jsonl, conversations-00001.jsonl, ...

The first record of each shard says under `provenance` how it was made. Knows no template and no model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.data.records import BadData


class Shards:
    """Records of a folder, `size` a shard. What an earlier run left is read once, before anything is added."""

    def __init__(self, folder: Path, size: int, provenance: dict[str, Any]):
        self._folder, self._size, self._provenance = folder, size, provenance
        self._count = 0
        self._sink: Any = None

    def read(self) -> Iterator[dict[str, Any]]:
        """The records there are; half a line at the end of the last shard is cut off."""
        while (file := self._file()).exists():
            before = self._count
            for record in whole_lines(file):
                self._count += 1
                yield record
            if self._count == before or self._count % self._size:
                return  # the shard that is written on

    def add(self, record: dict[str, Any]) -> None:
        """Write a record, so that it outlives this process. Raises BadData where there is no room for it."""
        first = self._count % self._size == 0
        if first or self._sink is None:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sink = self._file().open("a", encoding="utf-8")
        line = record | {"provenance": self._provenance} if first else record
        try:
            self._sink.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._sink.flush()
        except OSError as error:
            raise BadData(
                f"out: {self._file()} cannot be written ({error}); with room there the same command goes on"
            ) from error
        self._count += 1

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _file(self) -> Path:
        return self._folder / f"conversations-{self._count // self._size:05}.jsonl"


def whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines. A last line without its end is cut off the file."""
    whole = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield json.loads(line)
    if whole < file.stat().st_size:
        with file.open("r+b") as torn:
            torn.truncate(whole)
