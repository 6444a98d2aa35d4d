"""Variants side by side: every run is made once, and the table and picture are of what they decoded."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.models.errors import Refusal
from paceline.scripts import compare

RECIPE = """
# @package _global_
title: starts
entry: eagle
common: [target=tiny, train.steps=4, train.log_every=2, eval.every=2, eval.held_out_prompts=2, eval.max_new_tokens=8,
         data.limit=40]
variants:
  "random, 1": [method.start=random]
  target: [method.start=target]
"""


def config(folder: Path, *options: str) -> Any:
    (folder / "comparison").mkdir(exist_ok=True)
    (folder / "comparison" / "mine.yaml").write_text(RECIPE)
    return load("compare", f"hydra.searchpath=['file://{folder}']", "comparison=mine", f"out={folder}/runs", *options)


def test_the_table_says_what_the_runs_decoded_and_no_run_is_made_twice(tmp_path: Path) -> None:
    compare.run(config(tmp_path, "seeds=1"))
    found = json.loads((tmp_path / "runs" / "compare.json").read_text())
    for name, folder in (("random, 1", "random-1-seed0"), ("target", "target-seed0")):
        lines = [json.loads(line) for line in (tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()]
        decoded = [line for line in lines if "mean_acceptance_length" in line]
        assert found["points"][name] == [[[line["tokens"], line["mean_acceptance_length"]] for line in decoded]]
        assert len(decoded) == 2 and decoded[0]["tokens"] < decoded[1]["tokens"]
        assert f"| {name} | {decoded[1]['tokens']:,} |" in (tmp_path / "runs" / "compare.md").read_text()
    assert (tmp_path / "runs" / "compare.png").stat().st_size > 0
    before = (tmp_path / "runs" / "target-seed0" / "checkpoints" / "step-000004" / "state.json").stat().st_mtime_ns
    compare.run(config(tmp_path, "seeds=1"))
    assert json.loads((tmp_path / "runs" / "compare.json").read_text())["points"] == found["points"]
    after = (tmp_path / "runs" / "target-seed0" / "checkpoints" / "step-000004" / "state.json").stat().st_mtime_ns
    assert after == before


def test_a_wrong_option_of_any_variant_is_refused_before_the_first_run(tmp_path: Path) -> None:
    cfg = config(tmp_path, "variants.target=['method.strat=random']")
    with pytest.raises(Refusal, match=r"method.strat: no such option; nearest: method.start"):
        compare.run(cfg)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(Refusal, match="entry: no such entry 'eagel'; nearest: eagle"):
        config(tmp_path, "entry=eagel")
