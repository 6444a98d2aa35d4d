"""scripts/side_by_side.py: all trainers read the same, what has ended is kept, and the table says what was measured."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.models.errors import Refusal
from paceline.scripts import side_by_side, trainers
from paceline.scripts.side_by_side import Run

SMALL = ["target=tiny", "rates=[1e-2]", "seeds=1", "tokens=1000", "draft_vocab=64", "dtype=float32"]
SMALL += ["eval.limit=2", "eval.max_new_tokens=8"]


def run(out: Path, *words: str) -> dict[str, Any]:
    side_by_side.run(load("side_by_side", *SMALL, f"out={out}", f"venvs={out}/venvs", *words))
    return json.loads((out / "side_by_side.json").read_text())


def python_of(recipe: Any, root: Path) -> Path:
    if recipe.name == "speculators":
        raise Refusal("peers: speculators: pip install speculators failed (no such version)")
    return Path(sys.executable)


THREE = "trainers=[paceline,economize,speculators]"


@pytest.fixture(scope="module", autouse=True)
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Under the name of economize trains this trainer; speculators cannot be installed."""
    adapters = tmp_path_factory.mktemp("adapters")
    for name in ("steps.py", "learner.py", "step_paceline.py"):
        shutil.copy(trainers.ADAPTERS / name, adapters)
    (adapters / "step_economize.py").write_text('"""A peer."""\nfrom step_paceline import build\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers, "ADAPTERS", adapters)
        patch.setattr(trainers, "python_of", python_of)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end."""
    out = tmp_path_factory.mktemp("sides")
    run(out, THREE)
    return out


def test_the_same_trainer_under_another_name_makes_the_same_drafter(done: Path) -> None:
    ours, theirs = (done / f"{name}-0.01-seed0" for name in ("paceline", "economize"))
    tensors = [(folder / "drafter" / "model.safetensors").read_bytes() for folder in (ours, theirs)]
    assert tensors[0] == tensors[1]
    trained = json.loads((ours / "trained.json").read_text())
    given = json.loads((done / "given" / "given.json").read_text())
    assert trained["tokens"] == sum(given["tokens"]) >= 1000 > sum(given["tokens"][:-1])
    assert len(trained["losses"]) == len(given["tokens"])


def test_the_table_is_of_what_was_decoded(done: Path) -> None:
    found = json.loads((done / "side_by_side.json").read_text())
    for row, name in zip(found["rows"][:2], ("paceline", "economize"), strict=True):
        report = json.loads((done / f"{name}-0.01-seed0" / "decoding" / "report.json").read_text())
        assert row["length"] == report["acceptance"]["mean_acceptance_length"]
        assert [row["low"], row["high"]] == report["intervals"]["mean_acceptance_length"]
        assert (report["setting"]["tree"], report["setting"]["depth"]) == ("chain", 4)
        assert row["best"] and row["notes"] == []
    assert len(found["verdict"]) == 1 and "at least" in found["verdict"][0]
    assert found["verdict"][0] in (done / "side_by_side.md").read_text()


def test_who_cannot_be_installed_has_a_row_that_says_so(done: Path) -> None:
    row = json.loads((done / "side_by_side.json").read_text())["rows"][2]
    assert row["trainer"] == "speculators" and row["length"] is None and not row["best"]
    assert row["notes"] == ["peers: speculators: pip install speculators failed (no such version)"]
    assert row["notes"][0] in (done / "side_by_side.md").read_text()


def test_what_has_ended_is_not_done_again(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, before = [], (done / "side_by_side.json").read_text()
    monkeypatch.setattr(side_by_side, "_train", lambda cfg, one, given: begun.append(one.name) or "not now")
    again = run(done, THREE)
    assert begun == ["speculators, rate 0.01, seed 0"]  # it failed
    assert again["rows"][:2] == json.loads(before)["rows"][:2]
    (done / "side_by_side.json").write_text(before)


def test_what_was_given_something_else_is_refused(done: Path) -> None:
    with pytest.raises(Refusal, match=r"tokens: .* trained with 1000; nearest: that, or another out"):
        run(done, "tokens=2000")


def test_a_training_that_has_no_time_left_says_how_far_it_came(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "decode", lambda *asked: None)
    shutil.copytree(done / "given", tmp_path / "given")
    found = run(tmp_path, "trainers=[paceline]", "minutes=0.00001")
    (row,), (first, *_) = found["rows"], json.loads((tmp_path / "given" / "given.json").read_text())["tokens"]
    assert row["tokens"] == first and "1e-05 minutes were enough for" in row["notes"][0]


def test_a_vocabulary_as_large_as_the_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="draft_vocab: 8192, but the target has"):
        run(tmp_path, "draft_vocab=8192")


def test_medusa_heads_too_and_only_by_those_who_train_them(tmp_path: Path) -> None:
    with pytest.raises(
        Refusal, match=r"trainers: speculators cannot train medusa; nearest: \['paceline', 'economize'\]"
    ):
        run(tmp_path, THREE, "kind=medusa")
    found = run(tmp_path, "trainers=[paceline,economize]", "kind=medusa", "depths=2", "tokens=300")
    ours, theirs = found["rows"]
    assert ours["notes"] == theirs["notes"] == [] and ours["length"] == theirs["length"] >= 1
    about = json.loads((tmp_path / "paceline-0.01-seed0" / "export" / "drafter.json").read_text())
    assert (about["method"]["name"], about["method"]["heads"]) == ("medusa", 2)


def test_rates_rise_and_fall_in_a_line() -> None:
    cfg = load("side_by_side", *SMALL, "warmup=0.4")
    assert [side_by_side.rate(cfg, 1.0, step, 5) for step in range(5)] == [0.5, 1.0, 0.75, 0.5, 0.25]


def test_the_better_rate_counts_and_seeds_are_averaged() -> None:
    cfg = load("side_by_side", *SMALL, "trainers=[paceline,economize]", "rates=[1e-3,2e-3]", "seeds=2")

    def trained(trainer: str, rate: float, seed: int, length: float) -> Run:
        report = {
            "acceptance": {"mean_acceptance_length": length},
            "intervals": {"mean_acceptance_length": [length - 0.1, length + 0.1]},
        }
        return Run(trainer, rate, seed, Path(), {"tokens": 10, "seconds": 2.0, "losses": [1.0]}, report)

    lengths = {("paceline", 1e-3): [1.5, 1.7], ("paceline", 2e-3): [1.4, 1.5]}
    lengths |= {("economize", 1e-3): [1.2], ("economize", 2e-3): [1.8]}
    runs = [trained(*key, seed, value) for key, values in lengths.items() for seed, value in enumerate(values)]
    rows = side_by_side.table(cfg, runs)
    assert [row["best"] for row in rows] == [True, False, False, True]
    assert rows[0]["length"] == pytest.approx(1.6) and [rows[0]["low"], rows[0]["high"]] == [1.5, 1.7]
    assert side_by_side.verdict(rows) == ["paceline 1.60 is BELOW 1.70, the lower end of economize's 1.80"]
    assert "| **paceline** | **0.001** | **2** | **10** | **2** | **5** | **1.60 (1.50 to 1.70)** |" in (
        side_by_side.markdown(rows)
    )
