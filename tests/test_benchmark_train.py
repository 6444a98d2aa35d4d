"""scripts/benchmark.py train: every framework is given the same, a row says what was measured or why nothing was."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.conf.entry import load
from paceline.models.errors import Refusal
from paceline.scripts import trainers
from paceline.scripts.benchmark import run
from paceline.scripts.benchmark_train import DRAFTERS, LAYOUTS, draftable, useful_flops
from paceline.scripts.trainers import ADAPTERS, PEERS, RECIPES, Texts

SMALL = ["target=tiny", "part=train", "steps=1", "compile=false"]


def rows(out: Path, *words: str) -> list[dict[str, Any]]:
    run(load("benchmark", *SMALL, f"out={out}", f"venvs={out}/venvs", *words))
    return json.loads((out / "benchmark.json").read_text())["rows"]


def test_our_own_step_has_a_row_for_every_workload(tmp_path: Path) -> None:
    measured = rows(tmp_path, "frameworks=[paceline]")
    assert [(row["framework"], row["method"], row["layout"]) for row in measured] == [
        ("paceline", "eagle3", "dense"),
        ("paceline", "eagle3", "ragged"),
        ("paceline", "medusa", "dense"),
        ("paceline", "mtp", "dense"),
    ]
    for row in measured:
        assert row["part"] == "train" and row["tokens_per_second"] > 0 and row["gflops"] > 0
        assert row["peak_rss_gb"] >= 0 and row["seconds"] > 0


def test_who_cannot_be_installed_or_falls_over_says_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python_of(recipe: Any, root: Path) -> Path:
        if recipe.name == "speculators":
            raise Refusal("peers: speculators: pip install speculators failed (no such version)")
        return Path(sys.executable)  # where economize is not installed

    monkeypatch.setattr(trainers, "python_of", python_of)
    words = "workloads=[eagle3-dense]", "frameworks=[speculators,paceline,economize]"
    found = {row["framework"]: row for row in rows(tmp_path, *words)}
    assert found["paceline"]["tokens_per_second"] > 0
    assert found["speculators"]["failed"].endswith("(no such version)")
    assert "No module named 'economize'" in found["economize"]["failed"]


def test_every_framework_has_an_adapter_for_what_it_trains() -> None:
    for adapter, methods in PEERS.values():
        assert (ADAPTERS / f"step_{adapter}.py").exists() and adapter in RECIPES
        assert set(methods) <= DRAFTERS.keys()


@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_a_batch_is_2048_tokens_that_can_all_be_drafted(layout: str) -> None:
    texts = Texts(load("benchmark", "target=tiny").target)
    batch, case = LAYOUTS[layout](texts), texts.case("eagle3", 1, None)
    tokens = batch["ids"][batch["real"]]
    # a byte is a token of the tiny target, and no eight conversations in a row are so short
    assert 0 <= len(tokens) - 2048 < (1 if layout == "dense" else 1000)
    assert torch.isin(tokens, draftable(batch["ids"], len(batch["ids"].unique()), 320)).all()
    assert (batch["supervised"] <= batch["real"]).all()
    assert bool(batch["supervised"].all()) == (layout == "dense")
    hidden = case["config"]["hidden_size"]
    assert [batch[name].shape[-1] for name in ("taps", "trunk", "last")] == [3 * hidden, hidden, hidden]


def test_useful_work_is_counted_by_hand_for_a_single_head() -> None:
    config = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1
    )
    real = torch.tensor([[True] * 5, [True] * 4 + [False]])
    supervised = real.clone()
    supervised[0, 3] = False
    case = {"method": "medusa", "depths": 1, "config": config | {"vocab_size": 10}, "vocab_map": None}
    # x[2] and x[4] of the first, x[2] and x[3] of the second: a block of 1 x 1 and a head of 1 x 10
    assert useful_flops(case, {"real": real, "supervised": supervised}) == 2 * 3 * 4 * (1 + 10)


def test_useful_work_is_counted_by_hand_for_chains_of_three() -> None:
    config = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1
    )
    real = torch.tensor([[True] * 5 + [False] * 2])
    case = {"method": "eagle3", "depths": 3, "config": config | {"vocab_size": 10}, "vocab_map": None}
    supervised = real & (torch.arange(7) == 4)
    # all five rows at depth 0, for t = 0 and 1 at depth 1, for t = 0 at depth 2; each sees t + 1 + k
    layer, scores = 8 * (2 * 3 + 1 + 3), 15 + (2 + 3) + 3
    head = 3 * 10
    assert (
        useful_flops(case, {"real": real, "supervised": supervised})
        == 2 * 3 * (layer + 2 * scores + 5 * 3 + head) + 2 * 10  # and the teacher's logits
    )


def test_no_worker_hides_a_package_behind_its_own_name() -> None:
    """They lie in a folder that holds no module of a package's name, and Python is told not to look there."""
    asked = [sys.executable, "-P", str(ADAPTERS / "steps.py"), "none.py", "none.pt"]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert "none.py" in done.stderr and done.returncode == 1
