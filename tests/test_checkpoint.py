"""Kill a run anywhere and resume it: the same bytes. A checkpoint appears whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import checkpoint_of_target, config, contents, metrics, options, steps
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Example
from paceline.models.errors import Refusal
from paceline.models.stored import alone
from paceline.train import checkpoint, loop
from paceline.train.loop import fit

TEN = ("train.steps=10", "train.save_every=5", "train.keep=9", "eval.every=4", "train.log_every=3", "train.warmup=0.2")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """The run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    fit(config(folder, target_folder, *TEN))
    return folder / "run"


def same_end(run: Path, whole: Path) -> None:
    """Checkpoints, export and metrics are those of the uninterrupted run, bit for bit."""
    assert contents(run / "export") == contents(whole / "export")
    assert contents(run / "checkpoints" / "step-000010") == contents(whole / "checkpoints" / "step-000010")
    assert metrics(run) == metrics(whole)


class Killed(Exception):
    pass


def killed(monkeypatch: pytest.MonkeyPatch, step: int, cfg: Any) -> None:
    """Run until step `step` begins."""
    update, calls = loop._update, 0

    def dying(*args: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == step:
            raise Killed
        return update(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop, "_update", dying)
        fit(cfg)


# ---------------------------------------------------------------- whole runs


def test_a_run_that_broke_off_ends_as_if_it_had_not(
    tmp_path: Path,
    target_folder: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    killed(monkeypatch, 9, config(tmp_path, target_folder, *TEN))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000005"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # what a kill in the middle of a line leaves
    fit(config(tmp_path, target_folder, *TEN, "resume=true"))
    assert "resumed from" in capsys.readouterr().out
    same_end(run, whole)

    # a finished run that is resumed has nothing to do, and ends well
    pages = ("curve.png", "training.html", "config.yaml")  # resume=true stands in them
    before = {name: data for name, data in contents(run).items() if name not in pages}
    fit(config(tmp_path, target_folder, *TEN, "resume=true"))
    assert "done: best mean acceptance length" in capsys.readouterr().out
    assert before.items() <= contents(run).items()


SIGKILL = """
import os, signal, sys
from paceline.conf.entry import load
from paceline.train import checkpoint
from paceline.train.loop import fit

save, calls = checkpoint.save_file, 0

def dying(tensors, file):
    global calls
    calls += 1
    if calls == 5:  # three files a checkpoint: the second of the second
        file.write_bytes(b"half a fi")
        os.kill(os.getpid(), signal.SIGKILL)
    save(tensors, file)

checkpoint.save_file = dying
fit(load("medusa", *sys.argv[1:]))
"""


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_older_one_whole(
    tmp_path: Path, target_folder: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    died = subprocess.run(
        [sys.executable, "-c", SIGKILL, *options(tmp_path, target_folder, *TEN)], capture_output=True, timeout=120
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(left) == 2 and left[0].startswith(".unfinished-") and left[1] == "step-000005"
    fit(config(tmp_path, target_folder, *TEN, "resume=true"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000005", "step-000010"]
    same_end(run, whole)


def test_a_checkpoint_named_by_its_path_goes_on_elsewhere(tmp_path: Path, target_folder: Path, whole: Path) -> None:
    place = whole / "checkpoints" / "step-000005"
    fit(config(tmp_path, target_folder, *TEN, f"resume={place}"))
    there, here = (contents(run / "checkpoints" / "step-000010") for run in (whole, tmp_path / "run"))
    assert here["drafter.safetensors"] == there["drafter.safetensors"]
    assert here["optimizer.safetensors"] == there["optimizer.safetensors"]
    assert (tmp_path / "run" / "export" / "drafter.json").exists()  # a new folder has no best of its own yet
    assert [line["step"] for line in metrics(tmp_path / "run")] == [6, 8, 9, 10, 10]
    with pytest.raises(Refusal, match=f"no checkpoint there .nearest: {whole / 'checkpoints' / 'step-000010'}"):
        fit(config(tmp_path, target_folder, *TEN, f"resume={whole}", f"out={tmp_path}/third"))


def test_a_folder_is_one_run_s_alone_while_it_trains(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cfg = tmp_path / "run", config(tmp_path, target_folder, "resume=true")
    run.mkdir()
    with alone(run), pytest.raises(Refusal, match=f"out={run}: another process is writing there; give another out"):
        fit(cfg)
    assert not any(run.iterdir())
    update = loop._update

    def meanwhile(*args: Any) -> dict[str, Any]:
        with pytest.raises(Refusal, match="another process is writing there"), alone(run):
            pass
        return update(*args)

    monkeypatch.setattr(loop, "_update", meanwhile)
    fit(cfg)
    with alone(run):
        assert [line["step"] for line in steps(run)] == [1, 2, 3]


def test_what_another_run_found_best_is_not_this_ones(
    tmp_path: Path, target_folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other" / "step-000005"
    shutil.copytree(whole, run)
    shutil.copytree(whole / "checkpoints" / "step-000005", other)
    state = json.loads((other / "state.json").read_text())
    (other / "state.json").write_text(json.dumps(state | {"best": 99.0}))
    fit(config(tmp_path, target_folder, *TEN, f"resume={other}"))
    assert "best mean acceptance length 99" not in capsys.readouterr().out


def test_a_run_of_float16_goes_on_from_one_that_needed_no_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda *_: ({"step": 5}, {}))
    scaler = SimpleNamespace(load_state_dict=lambda _: pytest.fail("there is none to load"))
    accelerator = SimpleNamespace(process_index=0, num_processes=1, device="cpu", scaler=scaler)
    record: Any = SimpleNamespace(restore=lambda *_: None, ended=False)
    assert loop._resumed(Path("there"), record, None, accelerator, 10) == (5, {})  # type: ignore[arg-type]


def test_what_lies_in_a_folder_without_a_run_is_not_replaced(tmp_path: Path, target_folder: Path) -> None:
    for name in ("export", "checkpoints"):
        kept = tmp_path / name / "run" / name / "mine.txt"
        kept.parent.mkdir(parents=True)
        kept.touch()
        with pytest.raises(Refusal, match=f"holds {name}, which would be replaced, and no run; give another out"):
            fit(config(tmp_path / name, target_folder))
        assert kept.exists()


def test_a_finished_run_is_trained_on_elsewhere(tmp_path: Path, target_folder: Path, whole: Path) -> None:
    """That it had its last step says nothing of a run that has more of them."""
    last = f"resume={whole}/checkpoints/step-000010"
    with pytest.raises(Refusal, match="it has taken 10 steps, and this run is to end after 10; nearest: more of train"):
        fit(config(tmp_path, target_folder, *TEN, last))
    fit(config(tmp_path, target_folder, *TEN, "train.steps=12", "train.log_every=1", last))
    assert [line["step"] for line in steps(tmp_path / "run")] == [11, 12]
    assert (tmp_path / "run" / "export" / "drafter.json").exists()


def test_a_run_that_goes_back_to_an_earlier_checkpoint_forgets_the_later_ones(
    tmp_path: Path, target_folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    back = (*TEN, "train.save_every=1", f"resume={run}/checkpoints/step-000005")
    killed(monkeypatch, 2, config(tmp_path, target_folder, *back))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000005", "step-000006"]
    fit(config(tmp_path, target_folder, *TEN, "resume=true"))
    same_end(run, whole)


def test_a_checkpoint_of_before_the_coverage_was_kept_goes_on(tmp_path: Path, target_folder: Path, whole: Path) -> None:
    place = Path(shutil.copytree(whole / "checkpoints" / "step-000005", tmp_path / "step-000005"))
    state = json.loads((place / "state.json").read_text())
    del state["coverage"]
    (place / "state.json").write_text(json.dumps(state))
    fit(config(tmp_path, target_folder, *TEN, f"resume={place}"))
    assert json.loads((tmp_path / "run" / "export" / "drafter.json").read_text())["vocabulary_coverage"] is None
    there, here = (contents(run / "checkpoints" / "step-000010") for run in (whole, tmp_path / "run"))
    assert here["drafter.safetensors"] == there["drafter.safetensors"]


def test_a_run_does_not_go_on_with_other_data_or_another_target_behind_the_same_path(tmp_path: Path) -> None:
    target = checkpoint_of_target(tmp_path / "target")
    more = ("train.steps=2", "train.save_every=1")
    fit(config(tmp_path, target, *more))
    run, model = tmp_path / "run", target / "model.safetensors"
    shutil.rmtree(run / "checkpoints" / "step-000002")
    before, weights, text = contents(run), model.read_bytes(), (target / "data.jsonl").read_text()

    (target / "data.jsonl").write_text(text.replace("cat", "cow"))
    with pytest.raises(Refusal, match=r"data.path: these are not the conversations that the run in out=.* begun with"):
        fit(config(tmp_path, target, *more, "resume=true"))
    (target / "data.jsonl").write_text(text)
    save_file({name: -tensor for name, tensor in load_file(model).items()}, model, {"format": "pt"})
    with pytest.raises(Refusal, match=r"target.path: this is not the target that the run in out=.* begun with"):
        fit(config(tmp_path, target, *more, "resume=true"))
    assert contents(run) == before

    model.write_bytes(weights)
    place = run / "checkpoints" / "step-000001" / "state.json"
    state = json.loads(place.read_text())
    del state["begun_with"]  # as before it was kept
    place.write_text(json.dumps(state))
    (target / "data.jsonl").write_text(text.replace("cat", "cow"))
    fit(config(tmp_path, target, *more, "resume=true"))
    assert metrics(run)[-1]["step"] == 2


def test_with_nothing_to_resume_a_run_starts_afresh_and_says_so(
    tmp_path: Path,
    target_folder: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed(monkeypatch, 5, config(tmp_path, target_folder, *TEN))
    assert metrics(tmp_path / "run")
    fit(config(tmp_path, target_folder, *TEN, "resume=true"))
    assert "starting afresh" in capsys.readouterr().out
    same_end(tmp_path / "run", whole)


def test_a_run_is_neither_overwritten_nor_resumed_as_another(target_folder: Path, whole: Path) -> None:
    before = contents(whole)
    with pytest.raises(Refusal, match="holds a run already: resume=true goes on with it") as refusal:
        fit(config(whole.parent, target_folder, *TEN))
    assert refusal.value.common  # to all processes: one says it
    for changed, was in (("method.heads=3", 4), ("train.lr=0.1", 0.01), ("seed=1", 0), ("dtype=bfloat16", "float32")):
        with pytest.raises(Refusal, match=rf"{changed} \(it was {was}\): start afresh") as refusal:
            fit(config(whole.parent, target_folder, *TEN, "resume=true", changed))
        assert str(refusal.value).endswith(f": resume={whole}/checkpoints/step-000010 out={whole}-2")
    with pytest.raises(Refusal, match="give out=FOLDER"):
        fit(config(whole.parent, target_folder, *TEN, "resume=true", "out=null"))
    assert contents(whole) == before


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path: Path, target_folder: Path) -> None:
    with pytest.raises(Refusal, match=r"method\.taps"):
        fit(config(tmp_path, target_folder, "method.taps=[7]"))
    fit(config(tmp_path, target_folder, "train.steps=1"))


# ---------------------------------------------------------------- data order


def ids(parts: list[Batch]) -> list[int]:
    """Documents of these micro-batches; document i is filled with i."""
    return [int(i) for part in parts for i in part.ids[part.document >= 0].unique_consecutive()]


@pytest.mark.parametrize("world", [1, 2])
def test_the_order_of_the_data_is_the_same_whenever_a_run_resumes(world: int) -> None:
    examples = [Example(torch.full((10,), i), torch.ones(10, dtype=torch.bool)) for i in range(40)]
    for rank in range(world):
        loader = Loader(examples, 50, accumulate=2, world=world, rank=rank)
        order = [(number, ids(parts)) for number, parts in loop._steps(loader, 0, 20)]
        assert [number for number, _ in order] == list(range(1, 21))  # eight steps an epoch: the third breaks off
        if world == 1:
            both = [sorted(i for _, some in order[first : first + 8] for i in some) for first in (0, 8)]
            assert both == [list(range(40))] * 2 and order[0][1] != order[8][1]
        for begun in range(21):
            assert [(number, ids(parts)) for number, parts in loop._steps(loader, begun, 20)] == order[begun:]


# ---------------------------------------------------------------- the files


def trained(steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        module(torch.ones(3)).sum().backward()
        optimizer.step()
    return module, optimizer


CPU, GPU = torch.device("cpu"), torch.device("cuda")
RNG = [checkpoint.generators(CPU)]


def test_a_checkpoint_brings_back_weights_moments_and_generator(tmp_path: Path) -> None:
    module, optimizer = trained(3)
    torch.manual_seed(7)
    place = checkpoint.save(
        tmp_path, 3, *checkpoint.held(module, optimizer), [checkpoint.generators(CPU)], {"best": 1.5}
    )
    drawn = torch.rand(4)
    other, fresh = trained(0)
    state, moments = checkpoint.load(place, other, rank=0, world=1, device=CPU)
    assert state == {"step": 3, "best": 1.5}
    checkpoint.give(moments, other, fresh)
    assert torch.rand(4).equal(drawn)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert ours.equal(theirs)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert optimizer.state[ours][kind].equal(fresh.state[theirs][kind])


def test_the_generator_of_a_gpu_is_brought_back_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator()  # stands for that of a GPU
    stand_in = SimpleNamespace(
        get_rng_state=lambda device: dice.get_state(), set_rng_state=lambda state, device: dice.set_state(state)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: stand_in)
    module, optimizer = trained()

    def drawn_after(place: Path, device: torch.device, rank: int = 0) -> torch.Tensor:
        checkpoint.load(place, trained(0)[0], rank, 2, device)
        return torch.rand(4, generator=dice)

    ranks, drawn = [], []
    for seed in (7, 8):
        dice.manual_seed(seed)
        ranks.append(checkpoint.generators(GPU))
        drawn.append(torch.rand(4, generator=dice))
    place = checkpoint.save(tmp_path, 1, *checkpoint.held(module, optimizer), ranks, {})
    for rank in (0, 1):
        assert drawn_after(place, GPU, rank).equal(drawn[rank])
    # what was written without one, or has to go on without one, leaves a generator alone
    old = checkpoint.save(
        tmp_path / "old", 1, *checkpoint.held(module, optimizer), [checkpoint.generators(CPU) for _ in ranks], {}
    )
    for written, device in ((old, GPU), (place, CPU)):
        dice.manual_seed(9)
        untouched = torch.rand(4, generator=dice)
        dice.manual_seed(9)
        assert drawn_after(written, device).equal(untouched)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = trained()
    checkpoint.save(tmp_path, 1, *checkpoint.held(module, optimizer), RNG, {})
    before = contents(tmp_path)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    for step in (1, 2):
        with pytest.raises(Refusal, match=r"out: .*step-00000. cannot be written \(no space left\); what was written"):
            checkpoint.save(tmp_path, step, *checkpoint.held(module, optimizer), RNG, {})
    assert contents(tmp_path) == before


def test_the_newest_are_kept_by_number_and_leftovers_go(tmp_path: Path) -> None:
    module, optimizer = trained()
    for step in (5, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, *checkpoint.held(module, optimizer), RNG, {})
    (tmp_path / ".unfinished-abc").mkdir()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step-1000000"
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    module, optimizer = trained()

    def refused(words: str, into: nn.Module = module, world: int = 1) -> None:
        with pytest.raises(Refusal, match=words):
            checkpoint.load(place, into, 0, world, CPU)

    place = checkpoint.save(tmp_path, 1, *checkpoint.held(module, optimizer), RNG, {})
    refused("saved by 1 processes, cannot go on with 2", world=2)
    refused("tensor weight has shape", nn.Linear(4, 2))
    refused("tensor bias belongs to no part", nn.Linear(3, 2, bias=False))
    refused("tensor more.weight is missing", nn.ModuleDict({"more": nn.Linear(3, 2)}))
    del optimizer.state[module.bias]
    place = checkpoint.save(tmp_path, 1, *checkpoint.held(module, optimizer), RNG, {})
    refused("optimiser's tensors are not this drafter's, see bias")
    (place / "rng.safetensors").write_bytes(b"half")
    refused("cannot be read")
    (place / "state.json").write_text(json.dumps({"step": 1})[:-3])
    refused("no checkpoint there")
