"""Takes training steps as it is told: `python -P steps.py ADAPTER.py CASE.pt`, with the packages the adapter imports.

An adapter has `build(case)`: from the tensors of the case (`Texts.case` in scripts/trainers.py), a Learner. Writes a
line of JSON when it is ready; then answers every line of JSON that it reads with another:

    {"batch": FILE, "rate": RATE or null}   an optimiser step on the batch in the file (`Texts.batch`), at this learning
                                            rate, null for the package's own -> seconds, by the clock and of all
                                            processors, the loss, and the most memory so far, in bytes
    {"save": FOLDER}                        the drafter as it is by now

Knows torch, learners and /proc; no package.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    adapter, case = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print belongs into the log
    sys.path.append(str(Path(adapter).parent))  # learner.py; last, so that no file there hides a package
    spec = importlib.util.spec_from_file_location("adapter", adapter)
    assert spec is not None and spec.loader is not None
    module = sys.modules["adapter"] = importlib.util.module_from_spec(spec)  # torch.compile looks it up
    spec.loader.exec_module(module)
    about = torch.load(case, weights_only=True)
    idle = memory("VmRSS:")
    forget_the_peak()
    torch.manual_seed(about["seed"])
    learner = module.build(about)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=told, flush=True)

    say(ready=module.__doc__.splitlines()[0])
    file, given = None, None
    for line in sys.stdin:
        asked = json.loads(line)
        if "save" in asked:
            learner.save(Path(asked["save"]))
            say(saved=asked["save"])
            continue
        if asked["batch"] != file:
            file = asked["batch"]
            given = learner.given(torch.load(file, weights_only=True))
        if asked["rate"] is not None:
            for group in learner.optimizer.param_groups:
                group["lr"] = asked["rate"]
        begun, worked = time.perf_counter(), time.process_time()
        loss = learner.step(given)
        took = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - worked}
        say(**took, loss=float(loss), idle=idle, peak=memory("VmHWM:"))


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
