"""Processes that are run once: what each was asked, whether it ended, why it failed, how long the others will take.

Knows commands, folders and clocks. Does not know what the processes do.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """python -m MODULE ASKED PLACES, with all it prints in FOLDER/log.txt.

    what: it is, for people. kind: jobs of a kind take about as long as each other.
    asked: options by which an ended job is known again. about: what else it depends on, as a text that says which.
    places: options that only say where things lie.
    result: a file that an ended process leaves, whatever its exit code; None: exit code 0 says that it ended.
    """

    what: str
    kind: str
    module: str
    asked: list[str]
    places: list[str]
    folder: Path
    about: str = ""
    result: Path | None = None
    processes: int = 1

    def as_noted(self, ended: bool) -> dict[str, Any]:
        return {"asked": self.asked, "about": self.about, "ended": ended}


def note(job: Job) -> dict[str, Any]:
    """What the folder says of the job that was begun there last; empty where none was."""
    file = job.folder / "job.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def ended(job: Job) -> bool:
    return note(job) == job.as_noted(True) and (job.result is None or job.result.exists())


def perform(job: Job) -> str | None:
    """Run a job to its end. None, or in one line why it failed."""
    from paceline.scripts.decoding import write_json

    write_json(job.folder / "job.json", job.as_noted(False))
    if job.result is not None:
        job.result.unlink(missing_ok=True)
    command, environment = [sys.executable, "-m"], dict(os.environ)
    if job.processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes), "-m"]
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.processes)))
    log = job.folder / "log.txt"
    with log.open("ab") as file:
        before = file.tell()
        child = subprocess.Popen(
            [*command, job.module, *job.asked, *job.places],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if code and (job.result is None or not job.result.exists()):
        with log.open("rb") as file:
            file.seek(before)
            lines = file.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()] or ["it said nothing"]
        reason = next((line for line in reversed(said) if line.startswith("paceline: ")), None)
        if reason is None:  # behind it torchrun draws lines of its own
            raised = (line for line in reversed(said) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line))
            reason = next((line for line in raised if "ChildFailedError" not in line), said[-1])
        return f"exit code {code}: {reason.removeprefix('paceline: ')} (all of it: {log})"
    write_json(job.folder / "job.json", job.as_noted(True))
    return None


def _end_with_parent() -> None:
    """In the child: however the parent ends, killed too, SIGTERM follows. Nothing goes on writing where it left off."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Forecast:
    """How long the jobs that are left will take, from those of their kind that were done."""

    def __init__(self, kinds: list[str], most: dict[str, float]):
        """kinds: of all jobs that are left. most: seconds that one of a kind can take, where that is known."""
        self.left, self.most, self._total = Counter(kinds), most, len(kinds)
        self._took: dict[str, list[float]] = defaultdict(list)
        self._begun = time.monotonic()

    def done(self, kind: str, seconds: float) -> None:
        self.left[kind] -= 1
        self._took[kind].append(seconds)

    def skip(self, kind: str) -> None:
        self.left[kind] -= 1

    def __str__(self) -> str:
        left, unknown = 0.0, False
        for kind, count in self.left.items():
            known = statistics.mean(self._took[kind]) if self._took[kind] else self.most.get(kind)
            left += count * (known or 0.0)
            unknown |= count > 0 and known is None
        spent = (time.monotonic() - self._begun) / 60
        done = f"{self._total - self.left.total()} of {self._total} done"
        return f"{done}, {spent:.0f} min spent, {'more than' if unknown else 'about'} {left / 60:.0f} min left"
