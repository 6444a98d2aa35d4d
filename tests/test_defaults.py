"""Every method as one first meets it: the options as they come, in bfloat16, compiled passes where there are any.

Most tests are in float32, where right values can be told from rounding; what breaks with packed weights breaks here.
"""

import json
from pathlib import Path

import pytest

from paceline.conf.entry import load
from paceline.scripts import evaluate
from paceline.train.loop import fit

# What is typed, and the program of train/ it is typed for.
TYPED = {
    "medusa": "medusa",
    "medusa method=hydra_heads": "medusa",
    "medusa method=medusa2": "medusa",
    "medusa trunk=full": "medusa",
    "eagle method=eagle": "eagle",
    "eagle method=hass": "eagle",
    "eagle method=eagle3": "eagle",
    "mtp": "mtp",
    "mtp method=mtp_sequential": "mtp",
    "mtp target=tiny_pretrain": "mtp",
    "draft": "draft",
}
FEW = ["data.limit=60", "train.steps=3", "eval.held_out_prompts=2", "eval.max_new_tokens=8"]


@pytest.mark.parametrize("typed", TYPED)
def test_it_trains_exports_and_decodes_to_the_targets_own_text(typed: str, tmp_path: Path) -> None:
    words = typed.split()[1:]
    target = [] if any(word.startswith("target=") for word in words) else ["target=tiny"]
    fit(load(TYPED[typed], *target, *words, *FEW, f"out={tmp_path / 'run'}"))
    short = ["eval.limit=2", "eval.max_new_tokens=12", "hf_baseline=false", "traces=0"]
    evaluate.run(load("evaluate", f"drafter={tmp_path / 'run' / 'export'}", *short, f"out={tmp_path}"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["setting"]["dtype"] == "bfloat16" and report["exactness"]["compared"] == 2
    # where bits are not promised, evaluate itself has looked at each difference, and exits with 1 for a fault
    assert report["exactness"]["identical"] == 2 or not report["setting"]["exact"]
