"""Measure the project's own parts on this machine, into out/benchmark.json.

    python scripts/benchmark.py data
    python scripts/benchmark.py decode
    python scripts/benchmark.py exact
    python scripts/benchmark.py passes
    python scripts/benchmark.py synthesize
    python scripts/benchmark.py train

A part is a function that yields rows, dicts with `part`, `name` and figures; PARTS names them. Rows of a part that is
measured again take the place of the old ones. A row with `so_far` is of a run that has not ended: kept, should the
run be stopped, and not printed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry
from paceline.scripts.benchmark_decode import decode, exact
from paceline.scripts.benchmark_passes import passes
from paceline.scripts.benchmark_synthesize import synthesize
from paceline.scripts.benchmark_train import train

Row = dict[str, Any]


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.scripts.decoding import write_json

    file = Path(cfg.out) / "benchmark.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    for row in PARTS[cfg.part](cfg):
        if "so_far" not in row:
            Console(soft_wrap=True).print(row)
        rows = [old for old in rows if (old["part"], old["name"]) != (row["part"], row["name"])] + [row]
        write_json(file, {"rows": rows})


def data(cfg: Any) -> Iterator[Row]:
    """The way from a file of conversations to packed batches: a tenth of them, then all.

    Processor seconds are counted, not the clock's, so that the figure is that of one core, whatever else runs here.
    `memory_mb` is the most memory of its own that the process had meanwhile, beyond what it began with: nearly equal
    in both rows, if memory does not grow with the data.
    """
    from paceline.data.batch import Loader
    from paceline.data.conversations import SELF, json_lines, load, load_tokenizer
    from paceline.models.embedded import folder

    tokenizer = load_tokenizer(folder(cfg.target.name, cfg.target.path), cfg.target.trust_remote_code)
    bundled = [record["messages"] for _, record in json_lines(SELF)]
    for count in (cfg.conversations // 10, cfg.conversations):
        with tempfile.TemporaryDirectory() as work:
            file = Path(work) / "conversations.jsonl"
            with file.open("w") as sink:  # no two alike, and one, two or three turns long
                for number, messages in zip(range(count), cycle(bundled), strict=False):
                    further = bundled[(number * 7 + 1) % len(bundled)] * (number % 3)
                    first = {"role": "user", "content": f"{number}. {messages[0]['content']}"}
                    sink.write(json.dumps({"messages": [first, messages[1], *further]}) + "\n")
            before = time.process_time()
            with Memory() as memory:
                read = load(tokenizer, "jsonl", str(file), max_length=2048, held_out=0, cache=Path(work) / "cache")
                encoded = time.process_time()
                tokens = slots = 0
                for (batch,) in Loader(read.train, cfg.batch_tokens).batches(0):
                    tokens, slots = tokens + batch.tokens, slots + batch.ids.numel()
                packed = time.process_time()
            yield {
                "part": "data",
                "name": f"{count} conversations",
                "tokens": tokens,
                "tokens_per_second": round(tokens / (packed - before)),
                "encoded_per_second": round(tokens / (encoded - before)),
                "packed_per_second": round(tokens / (packed - encoded)),
                "filled": round(tokens / slots, 4),
                "memory_mb": round(memory.most / 2**20),
            }


class Memory:
    """The most anonymous memory seen while it is entered, beyond what there was at first (bytes; 0 where not Linux)."""

    def __enter__(self) -> Memory:
        self._first, self.most = self._now(), 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, self._now() - self._first)

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


PARTS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "data": data,
    "decode": decode,
    "exact": exact,
    "passes": passes,
    "synthesize": synthesize,
    "train": train,
}

_main = entry("benchmark", run)


def main() -> None:
    """`benchmark.py data` is `benchmark.py part=data`."""
    if len(sys.argv) > 1 and sys.argv[1] in PARTS:
        sys.argv[1] = f"part={sys.argv[1]}"
    _main()


if __name__ == "__main__":
    main()
