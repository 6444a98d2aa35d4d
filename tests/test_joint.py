"""Joint training against depths trained after: the runs build on each other, and the table is of what they foresee."""

import json
from pathlib import Path

import pytest

from paceline.conf.entry import load, quoted
from paceline.models.errors import Refusal
from paceline.scripts import joint

SMALL = "dtype=float32 train.steps=2 train.batch_tokens=300 data.limit=40 data.held_out=0.3 eval.max_new_tokens=4"


def said(name: str, words: str) -> str:
    """An option that is a list of options."""
    return f"{name}={words.split()}"


def test_the_depths_trained_after_stand_on_the_trunk_that_was_trained_alone(tmp_path: Path) -> None:
    out = tmp_path / "runs, ö"
    together = said("together", "target=tiny_pretrain method.heads=2")
    alone = said("alone", "target=tiny_pretrain method.heads=1 trunk.depth_weight=0.0")
    after = said("after", "target=hf method.heads=2")
    joint.run(load("joint", "seeds=1", f"out={quoted(str(out))}", said("common", SMALL), together, alone, after))
    found = json.loads((out / "joint.json").read_text())
    about = json.loads((out / "after-seed0" / "export" / "drafter.json").read_text())
    assert about["target"]["path"] == str(out / "alone-seed0" / "export" / "trunk") and "trunk" not in about
    for name in ("together", "after"):
        lines = [json.loads(line) for line in (out / f"{name}-seed0" / "metrics.jsonl").read_text().splitlines()]
        assert found["accuracy"][name] == [lines[-1]["held_out_text_accuracy"]]


def test_the_ratio_is_of_the_means_over_seeds() -> None:
    found = {"together": [[0.2, 0.3], [0.4, 0.5]], "after": [[0.3, 0.1], [0.3, 0.3]]}
    assert joint.ratios(found) == pytest.approx([1.0, 2.0])
    table = joint.markdown(found)
    assert "| 1 | 0.300 (0.200 to 0.400) | 0.300 (0.300 to 0.300) | 1.00 |" in table and "2 seeds" in table


def test_what_is_wrong_is_refused_before_the_first_run(tmp_path: Path) -> None:
    for name in ("together", "alone"):
        with pytest.raises(Refusal, match=r"method\.head: no such option; nearest: method\.heads"):
            joint.run(load("joint", f"out={tmp_path}/runs", said(name, "target=tiny_pretrain method.head=1")))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(Refusal, match="entry: no such entry 'mpt'; nearest: mtp"):
        load("joint", "entry=mpt")
