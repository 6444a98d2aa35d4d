"""scripts/tune.py: what it finds is kept in the export, and decoded with when decode.tree=tuned asks for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.export import amend, describe, load_export, save_export
from paceline.models.target import Target
from paceline.scripts import evaluate, tune

PATHS = [[0], [1], [0, 0], [2], [0, 1], [1, 0]]
SMALL = ["eval.limit=4", "eval.max_new_tokens=12", "dtype=float32"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(folder("tiny"), "float32", vocab=259)


@pytest.fixture
def export(tmp_path: Path, target: Target) -> Path:
    drafter = build(options("medusa")(name="medusa", heads=2), Shape.of(target))
    drafter.start(target)
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint, "vocab": target.vocab}
    return save_export(drafter, tmp_path / "run" / "export", "float32", about, tree={"paths": PATHS})


def test_what_pays_is_found_kept_and_decoded_with(export: Path, target: Target, capsys: Any) -> None:
    tune.run(load("tune", f"drafter={export}", *SMALL, "batches=[1,3]"))
    assert "times plain decoding" in capsys.readouterr().out
    tuned = describe(export)["tuned"]
    load_export(export, target)  # still one
    assert set(tuned["choices"]) == {"1", "3"} and tuned["cost"]["made"]["dtype"] == "float32"
    said = json.loads((export.parent / "tune.json").read_text())
    for rows, choice in tuned["choices"].items():
        tried = said["batches"][rows]["measured"]
        rates = [one["measured"]["tokens_per_second"] for one in tried]
        assert {one["tree"] for one in tried} == {"plain", "chain", "static", "dynamic"}
        assert choice["tokens_per_second"] == max(rates) and choice["speedup"] >= 1, "no drafts are a choice too"
    assert (export.parent / "tune.png").stat().st_size > 10_000
    evaluate.run(load("evaluate", f"drafter={export}", *SMALL, "decode.tree=tuned", "eval.batch=3"))
    how = json.loads((export.parent / "report.json").read_text())["setting"]
    choice = tuned["choices"]["3"]
    assert (how["nodes"], how["depth"]) == (1 if choice["tree"] == "plain" else how["nodes"], choice["depth"])
    assert "elsewhere" not in capsys.readouterr().err


def test_the_grid_says_what_tuning_without_it_is_worth(export: Path, capsys: Any) -> None:
    small = ["eval.limit=2", "eval.max_new_tokens=6", "dtype=float32"]
    tune.run(load("tune", f"drafter={export}", *small, "batches=[1,2]", "grid=true", "repeats=2"))
    said = capsys.readouterr().out
    for rows, batch in json.loads((export.parent / "tune.json").read_text())["batches"].items():
        options = ("tree", "nodes", "depth", "node_cost", "depth_cost")
        tried = {tuple(one[name] for name in options): one["measured"] for one in batch["measured"]}
        # two heads: chains of 1 and 2, trees no deeper than that
        cells = {("plain", 1, 0), ("chain", 2, 1), ("chain", 3, 2)}
        cells |= {(kind, nodes, 2) for kind in ("static", "dynamic") for nodes in (4, 8, 12, 16, 24, 32, 48, 64)}
        assert {key[:3] for key in tried} == cells
        assert all(len(one["each_time"]) == 2 for one in tried.values())
        held = batch["without the grid"]
        best = max(one["tokens_per_second"] for one in tried.values())
        mine = tried[tuple(held[name] for name in options)]["tokens_per_second"]
        assert held["share"] == mine / best and held["least"] <= 1 <= held["most"]
        assert f"batch {rows}: without the grid, tuning takes" in said


def test_the_nearest_batch_decides_and_another_machine_is_named(export: Path, capsys: Any) -> None:
    from paceline.scripts.decoding import runtime

    chain = {"tree": "chain", "nodes": 3, "depth": 2, "width": 1, "node_cost": 0.0, "depth_cost": 0.0}
    none = chain | {"tree": "plain", "nodes": 1, "depth": 0}
    dynamic = chain | {"tree": "dynamic", "nodes": 5, "width": 4, "node_cost": 0.125, "depth_cost": 0.25}
    amend(export, tuned={"cost": {"made": {"threads": 99}}, "choices": {"1": dynamic, "4": chain, "16": none}})
    cfg = load("evaluate", f"drafter={export}", *SMALL, "decode.tree=tuned")
    shapes = {rows: runtime(cfg, rows).decoder for rows in (1, 3, 40)}
    assert (shapes[1].shape.nodes, shapes[1].shape.node_cost, shapes[1].shape.depth_cost) == (5, 0.125, 0.25)
    assert shapes[3].shape.paths == ((0,), (0, 0))
    assert shapes[40].drafter is None, "a drafter that does not pay is left out"
    assert "tuned elsewhere" in capsys.readouterr().err


def test_what_nothing_can_be_judged_by_is_refused_before_costs_are_measured(export: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.decode.cost.measure", lambda *_: pytest.fail("costs were measured"))
    with pytest.raises(Refusal, match=r"eval\.max_new_tokens: of 2 answers of at most 2 tokens none has three"):
        tune.run(load("tune", f"drafter={export}", *SMALL, "eval.max_new_tokens=2"))
    with pytest.raises(Refusal, match=r"decode\.nodes: 1 leaves no room for drafts"):
        tune.run(load("tune", f"drafter={export}", *SMALL, "decode.nodes=1"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "decode.tree=tuned"], "has not been tuned (python scripts/tune.py drafter="),
        (["tune", "decode.tree=tuned"], "nearest: static"),
        (["tune", "batches=[]"], "batches"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_a_model_loads(
    export: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", [words[0], f"drafter={export}", *words[1:]])
    with pytest.raises(SystemExit) as exit_:
        {"evaluate": evaluate, "tune": tune}[words[0]].main()
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.count("\n") == 1 and said in err, err
