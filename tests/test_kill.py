"""Killed at random points, again and again, a run ends in the bytes of one that nobody touched.

`make kills` kills each run twenty times: KILLS says how often.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import checkpoint_of_target, contents, finished, metrics, options, ranks, steps

KILLS = int(os.environ.get("KILLS", "2"))
TOTAL = 8 + 4 * KILLS
WORDS = (
    f"train.steps={TOTAL}",
    "train.save_every=3",
    "train.accumulate=2",
    "train.log_every=2",
    "train.batch_tokens=200",
    "eval.every=5",
    "method.heads=2",
    "data.features=memory",
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[int, Path]:
    """By number of processes, the runs that nobody touched."""
    folder = tmp_path_factory.mktemp("whole")
    for world in (1, 2):
        words = options(folder, target_folder, *WORDS, f"out={folder}/{world}")
        assert finished(ranks(world, "medusa", words)) == [0] * world
    return {world: folder / str(world) for world in (1, 2)}


def same_end(run: Path, whole: Path) -> None:
    """The last checkpoint, the export and the metrics, bit for bit."""
    last = f"step-{TOTAL:06d}"
    assert contents(run / "checkpoints" / last) == contents(whole / "checkpoints" / last)
    assert contents(run / "export") == contents(whole / "export")
    assert metrics(run) == metrics(whole)
    assert not list((run / "checkpoints").glob(".*"))


def reached(run: Path) -> int:
    """Bytes that say how far a run has got."""
    return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0


def waited(run: Path, processes: list[Any], lines: int, more: float) -> None:
    """Until the run has written so many further lines, and then `more` seconds."""
    for _ in range(lines):
        before = reached(run)
        while reached(run) == before and all(process.is_alive() for process in processes):
            time.sleep(0.002)
    time.sleep(more)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not(
    tmp_path: Path, target_folder: Path, whole: dict[int, Path], world: int
) -> None:
    draw, run = random.Random(f"{world}/{KILLS}"), tmp_path / "run"
    words = options(tmp_path, target_folder, *WORDS, "resume=true")
    ends = []
    for _ in range(KILLS):
        processes = ranks(world, "medusa", words)
        # from before anything is loaded to the middle of a step, an evaluation or a checkpoint
        waited(run, processes, draw.randint(0, 3), draw.random() * draw.choice((0.01, 0.1, 1.0)))
        for process in draw.sample(processes, world):  # one dies first; the other waits for it in vain
            process.kill()
        ends += finished(processes)
    assert ends.count(-signal.SIGKILL) >= KILLS, ends
    assert finished(ranks(world, "medusa", words)) == [0] * world
    same_end(run, whole[world])


def test_a_run_that_is_told_to_end_saves_its_step_and_goes_on_from_there(
    tmp_path: Path, target_folder: Path, whole: dict[int, Path]
) -> None:
    run, words = tmp_path / "run", options(tmp_path, target_folder, *WORDS, "resume=true")
    processes = ranks(2, "medusa", words)
    waited(run, processes, 2, 0.0)
    os.kill(processes[1].pid, signal.SIGTERM)  # one is told, all end at the same step
    assert finished(processes) == [128 + signal.SIGTERM] * 2
    saved = max(path.name for path in (run / "checkpoints").glob("step-*"))
    assert int(saved[5:]) >= steps(run)[-1]["step"] and not (run / "checkpoints" / f"step-{TOTAL:06d}").exists()
    assert finished(ranks(2, "medusa", words)) == [0] * 2
    same_end(run, whole[2])
