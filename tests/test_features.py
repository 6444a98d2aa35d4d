"""Hidden states that are kept are those that would be computed, to the bit, and another's are refused by name."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import checkpoint_of_target, config, contents, metrics, options
from torch import Tensor

from paceline.conf.entry import load
from paceline.data import features as kept
from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Example, load_tokenizer
from paceline.data.conversations import load as load_data
from paceline.data.features import Features, Memory, Shards, description
from paceline.data.records import BadData
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.target import Target
from paceline.scripts.cache_features import run as cache
from paceline.train import features as chosen
from paceline.train.loop import fit

TWO_EPOCHS = ("train.steps=null", "train.epochs=2", "dtype=bfloat16")
WORDS: dict[str, tuple[str, ...]] = {
    "medusa": ("method.heads=2",),
    "eagle": ("method=eagle3", "method.unroll=2", "method.taps=[0,1,2]"),
}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SHARD", 40_000)


def examples(count: int = 7, seed: int = 0) -> list[Example]:
    noise = torch.Generator().manual_seed(seed)
    sizes = (5, 9, 17, 30, 31, 33, 40)[:count]
    return [Example(torch.randint(0, 256, (n,), generator=noise), torch.ones(n, dtype=torch.bool)) for n in sizes]


def same_run(one: Path, other: Path) -> None:
    """Weights, moments and generators of the last checkpoint, the export and the metrics, bit for bit."""
    assert contents(one / "export") == contents(other / "export")
    assert contents(one / "checkpoints") == contents(other / "checkpoints")
    assert metrics(one) == metrics(other)


def written(tmp_path: Path, target_folder: Path, method: str, *more: str) -> Path:
    """States that scripts/cache_features.py makes."""
    words = options(tmp_path, target_folder, *TWO_EPOCHS, *WORDS[method], *more)
    if method != "eagle":
        words.append(f"method={method}")
    cache(load("cache_features", *words, f"data.features_in={tmp_path}/states"))
    return tmp_path / "states"


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("method", WORDS)
def test_training_is_the_same_to_the_bit_wherever_the_states_come_from(
    tmp_path: Path, target_folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = written(tmp_path, target_folder, method)
    assert len(list(states.glob("states-*.safetensors"))) > (3 if method == "eagle" else 1)
    before = contents(states)
    places = {"online": states, "memory": states, "cached": states, "hybrid": tmp_path / "filled"}
    for kind, place in places.items():
        more = (*TWO_EPOCHS, *WORDS[method], f"data.features={kind}", f"data.features_in={place}")
        fit(config(tmp_path / kind, target_folder, *more, program=method))
        assert f"features: {kind}, " in capsys.readouterr().out
    for kind in ("memory", "cached", "hybrid"):
        same_run(tmp_path / kind / "run", tmp_path / "online" / "run")
    assert contents(states) == before
    # what the first epoch wrote is what the script writes, and is read by the next run
    (tmp_path / "online" / "run").rename(tmp_path / "first")
    more = (*TWO_EPOCHS, *WORDS[method], "data.features=cached", f"data.features_in={tmp_path}/filled")
    fit(config(tmp_path / "online", target_folder, *more, program=method))
    assert "computed again: the same bits" in capsys.readouterr().out
    same_run(tmp_path / "online" / "run", tmp_path / "first")


def test_no_pass_of_the_target_is_made_for_what_is_kept(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, target_folder, "eagle")
    passes: list[int] = []
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, ids, *a, **k: passes.append(1) or forward(self, ids, *a, **k))

    def made(kind: str) -> int:
        passes.clear()
        more = (*TWO_EPOCHS, *WORDS["eagle"], f"data.features={kind}", f"data.features_in={tmp_path}/states")
        fit(config(tmp_path / kind, target_folder, *more, program="eagle"))
        return len(passes)

    online, memory, cached = map(made, ("online", "memory", "cached"))
    steps = len(metrics(tmp_path / "online" / "run")) - 1
    assert (online - memory, online - cached) == (steps // 2, steps - 1)  # but one, to compare with


def test_states_that_were_packed_otherwise_are_read_and_said_to_be(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = written(tmp_path, target_folder, "medusa")
    more = (*TWO_EPOCHS, *WORDS["medusa"], f"data.features_in={states}", "train.batch_tokens=200", "seed=3")
    fit(config(tmp_path, target_folder, *more, "data.features=cached"))
    assert "apart, since they were packed otherwise" in capsys.readouterr().out
    (states / sorted(path.name for path in states.glob("states-*"))[0]).unlink()
    with pytest.raises(BadData, match=r"begun with \{'batch_tokens': 300, .*cannot go on with \{'batch_tokens': 200"):
        fit(config(tmp_path / "more", target_folder, *more, "data.features=hybrid"))


@pytest.mark.parametrize("taps", [(), (-1,), (0, 2)])
def test_states_are_the_computed_ones_in_any_epoch_and_order(taps: tuple[int, ...], tmp_path: Path) -> None:
    target = Target.load(folder("tiny"), "bfloat16", vocab=259)
    loader = Loader(examples(), batch_tokens=64, accumulate=2, seed=1)

    def say(batch: Batch) -> tuple[Tensor, Tensor]:
        return target(batch.ids, taps, documents=batch.document, positions=batch.positions)

    about = description("x", "none", "bfloat16", taps, "t", loader.examples, loader.packing)
    shards = Shards(tmp_path / "states", about, begin=True)
    shards.open(range(7))
    stores = (Memory(), shards)
    for epoch in (3, 0, 1):
        for part in (part for parts in loader.batches(epoch) for part in parts):
            real = part.document >= 0
            for store in stores:
                for then, now in zip(Features(say, taps, store).of(part), say(part), strict=True):
                    assert then.shape == now.shape and then.dtype == now.dtype
                    assert torch.equal(then[real], now[real])
    again = Shards(tmp_path / "states", about)
    assert again.open(range(7)) == set() and not again.spoiled()
    swapped = loader.packed([6, 1])  # packed as they never were
    kept_states = Features(say, taps, again).of(swapped)
    for then, now in zip(kept_states, say(swapped), strict=True):
        torch.testing.assert_close(then[swapped.document >= 0], now[swapped.document >= 0], atol=0.05, rtol=0.05)


# ---------------------------------------------------------------- what is refused


def flipped(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", [9, -1, "tokens"])
def test_a_flipped_byte_is_refused_by_the_shards_name_and_mended_by_the_script(
    tmp_path: Path, target_folder: Path, place: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = written(tmp_path, target_folder, "medusa")
    before = contents(states)
    (file, *_) = sorted(states.glob("states-*.safetensors"))
    flipped(file, file.stat().st_size // 2 if isinstance(place, str) else place)
    cfg = config(
        tmp_path, target_folder, *TWO_EPOCHS, *WORDS["medusa"], "data.features=cached", f"data.features_in={states}"
    )
    with pytest.raises(Refusal, match=rf"data.features_in: {file} is not as it was written: scripts/cache_features"):
        fit(cfg)
    file.unlink()
    with pytest.raises(Refusal, match=f"{file} is not as it was written"):
        fit(cfg)
    written(tmp_path, target_folder, "medusa")
    assert f"not as they were written: {file.name}" in capsys.readouterr().out
    fit(cfg)
    assert len(contents(states)) == len(before)


def test_no_process_of_several_takes_a_spoiled_shard_for_one(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = written(tmp_path, target_folder, "medusa")
    (first, second, *_) = sorted(states.glob("states-*.safetensors"))
    flipped(first, -1)
    second.write_bytes(second.read_bytes()[:100])
    about = json.loads((states / "index.json").read_text())["about"]
    with pytest.raises(BadData, match=rf"data.features_in: {second} cannot be read \(.*; scripts/cache_features.py"):
        Shards(states, about).open([])
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):  # the first deletes what is spoiled, perhaps later than the other looks
        monkeypatch.setenv("RANK", rank)
        written(tmp_path, target_folder, "medusa")
    mended = Shards(states, about)
    cfg = config(tmp_path, target_folder)
    count = len(load_data(load_tokenizer(target_folder), **cfg.data.keywords()).train)
    assert mended.open(range(count)) == set() and not mended.spoiled()


CHANGED = {
    "target": "are of another target",
    "taps": r"are of another method.taps \(\[-1\], not \[1\]\)",
    "dtype": r"are of another dtype \(bfloat16, not float32\)",
    "template": "are of another chat template",
    "data": "are of another data",
}


@pytest.mark.parametrize("what", CHANGED)
def test_states_of_another_target_taps_template_dtype_or_data_are_refused_by_name(
    tmp_path: Path, target_folder: Path, what: str
) -> None:
    states = written(tmp_path, target_folder, "medusa")
    theirs, more = target_folder, list[str]()
    if what in ("target", "template"):
        theirs = Path(shutil.copytree(target_folder, tmp_path / "other"))
    if what == "target":
        from safetensors.torch import load_file, save_file

        weights = load_file(theirs / "model.safetensors")
        weights["model.layers.0.self_attn.q_proj.weight"].neg_()
        save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})
    if what == "template":
        template = theirs / "chat_template.jinja"
        template.write_text(template.read_text() + "{# another #}")
    if what == "taps":
        more.append("method.taps=[1]")
    if what == "dtype":
        more.append("dtype=float32")
    if what == "data":
        more.append("data.limit=9")
    for kind in ("cached", "hybrid"):
        words = (*TWO_EPOCHS, *WORDS["medusa"], f"data.features={kind}", f"data.features_in={states}", *more)
        with pytest.raises(BadData, match=rf"data.features_in: the states in {states} {CHANGED[what]}"):
            fit(config(tmp_path / kind, theirs, *words))


def test_what_is_not_there_or_not_whole_or_not_the_targets_is_refused(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*TWO_EPOCHS, *WORDS["medusa"], "data.features=cached", f"data.features_in={tmp_path}/states")
    with pytest.raises(BadData, match=r"there are no states in .*/states: write them with scripts/cache_features.py"):
        fit(config(tmp_path, target_folder, *words))
    states = written(tmp_path, target_folder, "medusa")
    index = json.loads((states / "index.json").read_text())
    last = max(index["shards"])
    whole = (states / "index.json").read_text()
    del index["shards"][last]
    (states / "index.json").write_text(json.dumps(index))
    with pytest.raises(Refusal, match=r"lacks the states of \d+ of \d+ examples: scripts/cache_features.py goes on"):
        fit(config(tmp_path, target_folder, *words))
    (states / "index.json").write_text(whole[:-9])
    with pytest.raises(BadData, match=r"index.json is damaged"):
        fit(config(tmp_path, target_folder, *words))
    (states / "index.json").write_text(whole)
    forward = Target.forward

    def otherwise(self: Target, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        hidden, last = forward(self, *args, **named)
        return hidden, last if named.get("documents") is None else last.flip(-1)

    monkeypatch.setattr(Target, "forward", otherwise)
    with pytest.raises(Refusal, match=r"are \d+\.\d\d from what the target says \(relative\)"):
        fit(config(tmp_path, target_folder, *words))


# ---------------------------------------------------------------- killed, and without room


def begun(place: Path, count: int = 7) -> tuple[Shards, dict[str, Any]]:
    about = description("x", "none", "float32", (0,), "t", examples(), {"batch_tokens": 1, "parts": 1, "seed": 0})
    shards = Shards(place, about, begin=True)
    shards.open(range(count))
    return shards, about


def rows(size: int, value: float) -> list[Tensor]:
    return [torch.full((size, 4), value), torch.full((size, 8), -value)]


def test_what_a_killed_writer_leaves_is_not_read_and_goes_away(tmp_path: Path) -> None:
    shards, about = begun(tmp_path)
    shards.add([3], [30], rows(30, 3.0))
    shards.flush()
    alive, killed = (tmp_path / f"{kept.HIDDEN}{name}" for name in ("alive", "killed"))
    killed.write_bytes(b"half a shard")
    orphan = tmp_path / "states-00001.safetensors"  # written, but not in the index
    orphan.write_bytes(b"another")
    with alive.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shards.forget([])
        assert alive.exists() and not killed.exists()
    again = Shards(tmp_path, about, begin=True)
    assert again.open(range(7)) == {0, 1, 2, 4, 5, 6} and 3 in again
    again.add([0, 2], [5, 17], rows(22, 2.0))
    again.flush()
    assert sorted(path.name for path in tmp_path.glob("states-*")) == ["states-00000.safetensors", orphan.name]
    third = Shards(tmp_path, about)
    third.open([])
    last, hidden = third.read([2, 3])
    assert last.tolist() == [[2.0] * 4] * 17 + [[3.0] * 4] * 30 and hidden.shape == (47, 8)


def test_two_writers_take_turns_and_lose_nothing(tmp_path: Path) -> None:
    (one, about), (other, _) = begun(tmp_path), begun(tmp_path)
    for number in range(3):
        one.add([number], [2], rows(2, number))
        one.flush()
        other.add([number + 3], [2], rows(2, number + 3))
        other.flush()
    both = Shards(tmp_path, about)
    assert both.open(range(6)) == set() and not both.spoiled()
    assert [float(both.read([number])[0][0, 0]) for number in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_is_one_line_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, _ = begun(tmp_path)
    shards.add([3], [30], rows(30, 3.0))
    shards.flush()
    before = contents(tmp_path)
    shards.add([0], [5], rows(5, 1.0))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept, "save_file", full)
    with pytest.raises(
        BadData, match=r"cannot be written \(.*No space left on device\); what was written before stays"
    ):
        shards.flush()
    assert contents(tmp_path) == before


def test_room_is_asked_for_before_anything_is_computed(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "available", lambda: 10.0)
    with pytest.raises(Refusal, match=r"memory takes 0.\d MB, 0.0 MB are free; nearest: hybrid"):
        fit(config(tmp_path, target_folder, "data.features=memory"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(Refusal, match=r"needs 0.\d MB more, 0.0 MB are free; nearest: data.features=online"):
        fit(config(tmp_path, target_folder, "data.features=hybrid", f"data.features_in={tmp_path}/states"))
    with pytest.raises(Refusal, match="has not that much room"):
        written(tmp_path, target_folder, "medusa")


def test_reading_takes_no_memory_for_what_is_not_looked_at(tmp_path: Path) -> None:
    shards, about = begun(tmp_path)
    shards.add([3], [1 << 16], rows(1 << 16, 3.0))

    def resident() -> int:
        return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon:")))

    again = Shards(tmp_path, about)
    before = resident()
    again.open([])
    assert resident() - before < 512  # kB, of 3 MB
    assert float(again.read([3])[1].sum()) == -3.0 * 8 * (1 << 16)
