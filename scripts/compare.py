"""Train variants of a drafter, each with several seeds, and lay their decoded acceptance lengths side by side.

    python scripts/compare.py comparison=eagle_starts out=outputs/starts

Starts the training entries as processes, one after another, and reads what they leave behind. Writes compare.json,
compare.md (a table) and compare.png (acceptance length over training tokens). Knows no method and no model.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry, load
from paceline.models.errors import Refusal

MEANING = "mean acceptance length, decoded on held-out prompts: tokens per pass of the target"


def run(cfg: Any) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from paceline.scripts.decoding import write_json

    out = Path(cfg.out)
    jobs = {
        (name, seed): [*cfg.common, *options, f"seed={seed}", f"out={out / _folder(name)}-seed{seed}", "resume=true"]
        for seed in range(cfg.seeds)
        for name, options in cfg.variants.items()
    }
    for options in jobs.values():
        load(cfg.entry, *options)  # what is refused is refused before the first hour
    console = Console()
    points: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in cfg.variants}
    for number, ((name, _), options) in enumerate(jobs.items(), start=1):
        console.print(f"[bold]{number} of {len(jobs)}[/] {cfg.entry} {' '.join(options)}", highlight=False)
        done = subprocess.run([sys.executable, "-m", f"paceline.train.{cfg.entry}", *options])
        if done.returncode:
            raise Refusal(f"train/{cfg.entry}.py {' '.join(options)} failed with exit code {done.returncode}")
        where = next(word for word in options if word.startswith("out=")).removeprefix("out=")
        points[name].append(decoded(Path(where) / "metrics.jsonl"))
    write_json(
        out / "compare.json", {"title": cfg.title, "meaning": MEANING, "jobs": list(jobs.values()), "points": points}
    )
    table = markdown(cfg.title, points)
    (out / "compare.md").write_text(table)
    picture = draw(out, cfg.title, points)
    console.print(Markdown(table))
    console.print(f"{out / 'compare.json'}{f', {picture}' if picture else ''}", highlight=False, soft_wrap=True)


def _folder(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def decoded(metrics: Path) -> list[tuple[int, float]]:
    """(training tokens, decoded acceptance length) each time a run decoded."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["tokens"], line["mean_acceptance_length"]) for line in lines if "mean_acceptance_length" in line]


def markdown(title: str, points: dict[str, list[list[tuple[int, float]]]]) -> str:
    """A row a variant: tokens, and over its seeds the last acceptance length: mean, least and most."""
    rows = []
    for name, runs in points.items():
        last = [run[-1][1] for run in runs]
        rows.append((statistics.mean(last), name, runs[0][-1][0], last))
    lines = [f"**{title}**", "", f"{MEANING}; {len(rows[0][3])} seeds.", ""]
    lines += ["| variant | training tokens | mean | least | most |", "|---|---|---|---|---|"]
    for mean, name, tokens, last in sorted(rows, reverse=True):
        lines.append(f"| {name} | {tokens:,} | {mean:.3f} | {min(last):.3f} | {max(last):.3f} |")
    return "\n".join(lines) + "\n"


def draw(out: Path, title: str, points: dict[str, list[list[tuple[int, float]]]]) -> Path | None:
    """compare.png: a colour a variant, a thin line a seed, a thick one their mean. None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, runs) in enumerate(points.items()):
        colour = f"C{number}"
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=colour, linewidth=0.7, alpha=0.6)
        shared = list(zip(*runs, strict=False))
        tokens = [statistics.mean(tokens for tokens, _ in at) for at in shared]
        lengths = [statistics.mean(length for _, length in at) for at in shared]
        axes.plot(tokens, lengths, color=colour, linewidth=2.2, label=name)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("mean acceptance length, decoded")
    axes.grid(alpha=0.3)
    axes.legend()
    path = out / "compare.png"
    figure.savefig(path, dpi=120)
    return path


main = entry("compare", run)

if __name__ == "__main__":
    main()
