"""Two processes are one run: one folder, the steps and, to rounding, the gradients and weights of one process."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env
from runs import (
    ROOT,
    checkpoint_of_target,
    config,
    contents,
    corpus,
    finished,
    metrics,
    options,
    ranks,
    steps,
)
from safetensors.torch import load_file
from torch import Tensor

from paceline.data.batch import Loader
from paceline.data.conversations import load_tokenizer
from paceline.decode import Decoder, chain
from paceline.models.export import load_export
from paceline.models.target import Target
from paceline.train import loop
from paceline.train.loop import fit

# Every step's checkpoint is kept, so that gradients can be read from the first moments, and clipping is off.
TWENTY = (
    "train.steps=20",
    "train.save_every=1",
    "train.keep=20",
    "train.clip=1e9",
    "train.lr=1e-3",
    "train.schedule=linear",
    "data.held_out=0.0",
    "train.batch_tokens=130",
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint_of_target(tmp_path_factory.mktemp("target"))
    corpus(folder / "data.jsonl", 7, seed=1)
    return folder


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """train/medusa.py on two processes, as a user starts it; a hang is a failure."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(ROOT / "train" / "medusa.py"),
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env=alone | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[tuple[int, int], Path]:
    """(processes, accumulate) -> folder of the run. The two runs of two processes are one --multirun."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for accumulate in (1, 2):
        found[1, accumulate] = folder / f"one-{accumulate}"
        found[2, accumulate] = folder / f"two-{accumulate}"
        fit(config(folder, target_folder, *TWENTY, f"train.accumulate={accumulate}", f"out={found[1, accumulate]}"))
    out = "out=" + str(folder / "two-${train.accumulate}")
    launched(folder, "-m", *options(folder, target_folder, *TWENTY, "train.accumulate=1,2", out))
    return found


def checkpoint(run: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and gradients of a step; a gradient is the first step's first moment over 1 - beta1."""
    place = run / "checkpoints" / f"step-{step:06d}"
    moments = load_file(place / "optimizer.safetensors")
    gradients = {key.split("|")[0]: m / (1 - 0.9) for key, m in moments.items() if key.endswith("|exp_avg")}
    weights = load_file(place / "drafter.safetensors")
    return {name: w for name, w in weights.items() if w.is_floating_point()}, gradients


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.parametrize("processes, accumulate", [(1, 2), (2, 1), (2, 2)])
def test_gradients_and_weights_are_those_of_one_process_at_the_same_global_batch(
    runs: dict[tuple[int, int], Path], processes: int, accumulate: int, record_property: Callable[[str, object], None]
) -> None:
    whole, shared = runs[1, 1], runs[processes, accumulate]
    gradients = apart(checkpoint(shared, 1)[1], checkpoint(whole, 1)[1])
    weights = apart(checkpoint(shared, 20)[0], checkpoint(whole, 20)[0])
    record_property("gradients", gradients)
    record_property("weights", weights)
    print(f"{processes} processes, accumulate {accumulate}: gradients {gradients:.1e}, weights {weights:.1e} apart")
    assert 0 < gradients < 1e-5 and weights < 1e-4


def test_every_run_takes_the_same_steps_of_the_same_data_at_the_same_rates(
    runs: dict[tuple[int, int], Path],
) -> None:
    expected = steps(runs[1, 1])
    assert [line["step"] for line in expected] == list(range(1, 21))
    rates = [line["lr"] for line in expected]
    assert rates == pytest.approx([1e-3 * (20 - i) / 20 for i in range(20)])
    for run in runs.values():
        lines = steps(run)
        assert [line["lr"] for line in lines] == rates
        assert [line["tokens"] for line in lines] == [line["tokens"] for line in expected]
        for ours, theirs in zip(lines, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_two_processes_leave_one_folder_and_take_equally_many_steps_of_uneven_data(
    runs: dict[tuple[int, int], Path], target_folder: Path
) -> None:
    folder = runs[2, 1].parent
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("two")) == ["two-1", "two-2"]
    assert len(list(folder.rglob("config.yaml"))) == 4  # of four runs
    for accumulate in (1, 2):
        run = runs[2, accumulate]
        assert yaml.safe_load((run / "config.yaml").read_text())["train"]["accumulate"] == accumulate
        assert [line["step"] for line in metrics(run)] == [*range(1, 21), 20]  # each line once
        for step in range(1, 21):  # both processes were there when each step was saved
            assert len(load_file(run / "checkpoints" / f"step-{step:06d}" / "rng.safetensors")) == 2
            state = json.loads((run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
            assert state["world"] == 2
    # there were steps of a single document, in which the second process had nothing to do
    data = loop.load(load_tokenizer(target_folder), **config(folder, target_folder, *TWENTY).data.keywords())
    shares = [part.tokens for (part,) in Loader(data.train, 130, world=2, rank=1).batches(epoch=0)]
    assert 0 in shares and any(shares)


def tracked(folder: Path) -> tuple[str, dict[str, Any], list[int]]:
    """What a folder of an offline run says: the run's id, its config, the steps it has figures of.

    The file is a log in LevelDB's form behind a header of seven bytes: blocks of 32 kB, records that may be split.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    name, config, seen = "", {}, []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "run":
                name = record.run.run_id
                config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                seen.append(record.history.step.num)
    return name, config, seen


def test_two_processes_without_a_folder_agree_on_one_and_on_one_tracked_run_which_a_resumption_goes_on_with(
    tmp_path: Path, target_folder: Path
) -> None:
    more = ("train.steps=3", "train.save_every=1", "tracker=wandb", "dtype=bfloat16", "data.held_out=0.0")
    done = launched(tmp_path, *options(tmp_path, target_folder, *more, "out=null"))
    (run,) = (tmp_path / "outputs").iterdir()
    assert run.name.startswith("medusa-")
    assert done.stdout.count("supervised tokens:") == 1 and done.stdout.count("done:") == 1
    assert torch.isfinite(torch.tensor(steps(run)[-1]["loss"])).all()
    (first,) = run.glob("wandb/offline-run-*")
    name, config, seen = tracked(first)
    plain = yaml.safe_load((run / "config.yaml").read_text())
    assert {key: config[key] for key in plain} == plain
    assert seen == [1, 2, 3]

    shutil.rmtree(run / "checkpoints" / "step-000003")  # as if it had been stopped in the third step
    launched(tmp_path, *options(tmp_path, target_folder, *more, f"out={run}", "resume=true"))
    _, second = sorted(run.glob("wandb/offline-run-*"))
    again, config, seen = tracked(second)
    assert again == name and seen == [3] and config["train"] == plain["train"]
    assert [line["step"] for line in steps(run)] == [1, 2, 3]


# ---------------------------------------------------------------- sharded


def launch_environment(file: str) -> dict[str, str]:
    """What `accelerate launch --config_file conf/accelerate/FILE` tells the processes it starts."""
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(ROOT / "conf" / "accelerate" / file), "train/eagle.py"])
    env = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def test_sharded_training_is_that_of_one_process_and_resumes_to_the_bit(
    tmp_path: Path, target_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    five = (*TWENTY, "train.steps=5", "train.batch_tokens=400", "train.accumulate=2", "method.taps=[0,1,2]")

    def run(name: str, world: int, *more: str, env: dict[str, str] | None = None) -> Path:
        words = options(tmp_path, target_folder, *five, f"out={tmp_path}/{name}", *more)
        assert finished(ranks(world, "eagle", words, env)) == [0] * world
        return tmp_path / name

    env = launch_environment("fsdp2.yaml")
    assert env["ACCELERATE_USE_FSDP"] == "true" and env["FSDP_VERSION"] == "2"
    one = run("one", 1)
    capfd.readouterr()
    sharded = run("sharded", 2, env=env)
    assert "sharded over 2 processes" in capfd.readouterr().out
    assert json.loads((sharded / "export" / "drafter.json").read_text())["method"]["unroll"] == 4
    gradients = apart(checkpoint(sharded, 1)[1], checkpoint(one, 1)[1])
    weights = apart(checkpoint(sharded, 5)[0], checkpoint(one, 5)[0])
    print(f"sharded: gradients {gradients:.1e}, weights {weights:.1e} apart")
    assert 0 < gradients < 1e-5 and weights < 1e-4

    target = Target.load(str(target_folder), "float32", vocab=259)
    drafter, _ = load_export(sharded / "export", target)
    exported, last = drafter.state_dict(), checkpoint(sharded, 5)[0]
    assert all(exported[name].equal(weights) for name, weights in last.items())
    assert len(Decoder(target, drafter, chain(3)).generate([list(range(40, 60))], 8).tokens[0]) == 8

    resumed = run("resumed", 2, f"resume={sharded}/checkpoints/step-000003", env=env)
    for name in ("step-000004", "step-000005"):
        assert (
            contents(resumed / "checkpoints" / name)["drafter.safetensors"]
            == (contents(sharded / "checkpoints" / name)["drafter.safetensors"])
        )
    end, there = (contents(run / "checkpoints" / "step-000005") for run in (resumed, sharded))
    for file in ("optimizer.safetensors", "rng.safetensors"):
        assert end[file] == there[file]
