"""docs/extending.md works as written: its file and its yaml, outside the package, are trained, exported and decoded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["train.steps=30", "train.batch_tokens=512", "train.lr=3e-3", "data.limit=40", "data.cache=null"]
TINY += ["eval.held_out_prompts=2", "eval.max_new_tokens=8", "method.width=32", "decode.tree=chain"]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page tells to write, in a folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    page = (ROOT / "docs" / "extending.md").read_text()
    files = re.findall(r"`(mine/\S+)`:\n\n```\w+\n(.*?)```\n", page, re.DOTALL)
    assert [name for name, _ in files] == ["mine/recurrent.py", "mine/method/recurrent.yaml"]
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def ran(folder: Path, script: str, *words: str, known: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_METHODS": "mine/recurrent.py" if known else ""}
    command = [sys.executable, str(ROOT / script), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_drafter_from_outside_is_trained_exported_and_decoded(mine: Path) -> None:
    words = ["--config-dir", "mine", "method=recurrent", "target=tiny", "dtype=float32", "out=run", *TINY]
    done = ran(mine, "train/medusa.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (mine / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses[0]) == 3 and sum(losses[-1]) < sum(losses[0])
    about = json.loads((mine / "run" / "export" / "drafter.json").read_text())
    assert about["method"]["name"] == "recurrent" and about["method"]["width"] == 32
    small = ["drafter=run/export", "dtype=float32", "decode.tree=chain", "eval.limit=3", "eval.max_new_tokens=12"]
    done = ran(mine, "scripts/evaluate.py", *small, "hf_baseline=false")
    assert done.returncode == 0, done.stderr
    report = json.loads((mine / "run" / "report.json").read_text())
    assert report["exactness"]["identical"] == 3 and report["acceptance"]["num_draft_tokens"] > 0
    assert (
        report["setting"]["depth"] == 4 and "The drafter proposes tokens" in (mine / "run" / "report.html").read_text()
    )


def test_what_is_wrong_with_it_is_said_in_a_line(mine: Path) -> None:
    wrong = (["method=recurrent", "method.widht=3"], "method.widht: no such option; nearest: method.width")
    for words, line in (wrong, (["method=recurent"], "nearest: recurrent")):
        done = ran(mine, "train/medusa.py", "--config-dir", "mine", "target=tiny", *words)
        assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = ran(mine, "train/medusa.py", "--config-dir", "mine", "method=recurrent", "target=tiny", known=False)
    assert done.returncode == 2 and "no such method 'recurrent'" in done.stderr
