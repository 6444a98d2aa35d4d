"""Takes training steps as it is told: `python -P steps.py ADAPTER.py CASE.pt`, with the packages the adapter imports.

An adapter has `build(case)`: from the tensors of the case (`Texts.case` in scripts/benchmark_train.py), a function that
takes one optimiser step as its package takes it and returns the loss. Writes a line of JSON when it is ready; then, for
every line it reads, takes a step and writes how many seconds that took, by the clock and of all processors, the loss,
and the most memory so far, in bytes. Knows torch, adapters and /proc; no package.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch


def main() -> None:
    adapter, case = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print belongs into the log
    spec = importlib.util.spec_from_file_location("adapter", adapter)
    assert spec is not None and spec.loader is not None
    module = sys.modules["adapter"] = importlib.util.module_from_spec(spec)  # torch.compile looks it up
    spec.loader.exec_module(module)
    given = torch.load(case, weights_only=True)
    idle = memory("VmRSS:")
    forget_the_peak()
    torch.manual_seed(0)
    step = module.build(given)
    print(
        json.dumps({"ready": module.__doc__.splitlines()[0], "about": getattr(module, "ABOUT", "")}),
        file=told,
        flush=True,
    )
    for _ in sys.stdin:
        begun, worked = time.perf_counter(), time.process_time()
        loss = step()
        seconds = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - worked}
        most = {"idle": idle, "peak": memory("VmHWM:")}
        print(json.dumps({**seconds, "loss": float(loss), **most}), file=told, flush=True)


def memory(name: str) -> int:
    """Bytes, of a line of /proc/self/status; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def forget_the_peak() -> None:
    """The most memory is counted from here on: imports and the reading of files may have taken more."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


if __name__ == "__main__":
    main()
