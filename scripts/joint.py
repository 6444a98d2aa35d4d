"""Train a trunk and its depths together, and depths on a trunk that was trained alone; compare what they foresee.

    python scripts/joint.py out=outputs/joint

Starts the training entries as processes, one after another, and reads what they leave behind. Writes joint.json and
joint.md (a table). Knows no method and no model.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry, load, quoted
from paceline.models.errors import Refusal

MEANING = (
    "top-1 accuracy on the text of held-out conversations, by depth: how often the likeliest draft token is the text's"
)


def run(cfg: Any) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from paceline.scripts.decoding import write_json

    out, console = Path(cfg.out), Console()
    load(cfg.entry, *cfg.common, *cfg.together)  # what is refused is refused before the first half an hour
    load(cfg.entry, *cfg.common, *cfg.alone)
    found: dict[str, list[list[float]]] = {"together": [], "after": []}
    for seed in range(cfg.seeds):
        for name in ("together", "alone", "after"):
            place = out / f"{name}-seed{seed}"
            options = [*cfg.common, *getattr(cfg, name), f"seed={seed}", f"out={quoted(str(place))}", "resume=true"]
            if name == "after":
                trunk = out / f"alone-seed{seed}" / "export" / "trunk"
                options.append(f"target.path={quoted(str(trunk))}")
            console.print(f"[bold]seed {seed}, {name}[/]: {cfg.entry} {' '.join(options)}", highlight=False)
            done = subprocess.run([sys.executable, "-m", f"paceline.train.{cfg.entry}", *options])
            if done.returncode:
                raise Refusal(f"train/{cfg.entry}.py {' '.join(options)} failed with exit code {done.returncode}")
            if name in found:
                found[name].append(foreseen(place / "metrics.jsonl"))
    write_json(out / "joint.json", {"meaning": MEANING, "accuracy": found, "ratio": ratios(found)})
    table = markdown(found)
    (out / "joint.md").write_text(table)
    console.print(Markdown(table))
    console.print(f"{out / 'joint.json'}", highlight=False, soft_wrap=True)


def foreseen(metrics: Path) -> list[float]:
    """Accuracy by depth of the last time that a run was measured."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["held_out_text_accuracy"] for line in lines if "held_out_text_accuracy" in line][-1]


def ratios(found: dict[str, list[list[float]]]) -> list[float]:
    """By depth, the mean over seeds of accuracy trained together, over that of depths trained after."""
    together, after = ([statistics.mean(depth) for depth in zip(*found[name], strict=True)] for name in found)
    return [ours / theirs for ours, theirs in zip(together, after, strict=True)]


def markdown(found: dict[str, list[list[float]]]) -> str:
    """A row a depth: mean (least to most) of both, and their ratio."""
    lines = [f"{MEANING}; {len(found['together'])} seeds.", ""]
    lines += ["| depth | trained together | on a trunk trained alone | ratio |", "|---|---|---|---|"]
    for depth, ratio in enumerate(ratios(found)):
        cells = []
        for runs in found.values():
            values = [run[depth] for run in runs]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {depth + 1} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


main = entry("joint", run)

if __name__ == "__main__":
    main()
