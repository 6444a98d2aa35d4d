"""A drafter trained by this trainer and by others', on the same tokens in the same order; whose is the best?

    python scripts/side_by_side.py
    python scripts/side_by_side.py "trainers=[paceline,economize]" tokens=20000 out=outputs/trial
    python scripts/side_by_side.py kind=medusa depths=2 "trainers=[paceline,economize]" out=outputs/heads

The target's hidden states are computed once. Every trainer takes its own steps on them, in a process of its own
(scripts/trainers.py), at the same learning rates; its drafter is converted, and decoded with by scripts/evaluate.py.
What has ended is not done again. Writes side_by_side.json and side_by_side.md into `out`. Knows no trainer.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry, quoted
from paceline.models.errors import Refusal
from paceline.scripts.compare import Cell, as_options, performed, spread
from paceline.scripts.jobs import Forecast, Job
from paceline.scripts.trainers import PEERS, Texts, Trainer

if TYPE_CHECKING:
    from rich.console import Console

OURS = "paceline"


@dataclass
class Run:
    """A training with one seed. trained: what it left (trained.json); report: of its decoding; notes: what it lacks."""

    trainer: str
    rate: float
    seed: int
    folder: Path
    trained: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.trainer}, rate {self.rate:g}, seed {self.seed}"


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.scripts.decoding import write_json, write_whole

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a log has room
    out = Path(cfg.out)
    able = [name for name in cfg.trainers if name not in PEERS or cfg.kind in PEERS[name][1]]
    if unable := [name for name in cfg.trainers if name not in able]:
        raise Refusal(f"trainers: {', '.join(unable)} cannot train {cfg.kind}; nearest: {able or [OURS]}")
    runs = [
        Run(trainer, rate, seed, out / f"{trainer}-{rate:g}-seed{seed}")
        for trainer in cfg.trainers
        for rate in cfg.rates
        for seed in range(cfg.seeds if trainer == OURS else 1)
    ]
    given = prepared(cfg)
    kinds = [kind for run in runs for kind in (run.trainer, "converting", "decoding")]
    forecast = Forecast(kinds, dict.fromkeys(cfg.trainers, 60 * cfg.minutes))
    for one in runs:
        train(cfg, one, given, forecast, console)
        if one.trained:
            decode(cfg, one, forecast, console)
        else:
            forecast.skip("converting")
            forecast.skip("decoding")
    rows = table(cfg, runs)
    said = {"verdict": verdict(rows), "rows": rows, "settings": cfg.plain(), "command": shlex.join(sys.argv)}
    write_json(out / "side_by_side.json", said)
    write_whole(out / "side_by_side.md", markdown(rows))
    show(console, rows)
    console.print(f"in {out}: side_by_side.json, side_by_side.md", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# What all of them read


@dataclass(frozen=True)
class Given:
    """What every training begins with (`case`), and the tokens and the file of every step."""

    case: Path
    tokens: list[int]

    def batch(self, step: int) -> Path:
        return self.case.with_name(f"{step:05}.pt")


def prepared(cfg: Any) -> Given:
    """Computed, unless it was. Raises Refusal where the folder holds trainings that were given something else."""
    import torch

    from paceline.data.conversations import draft_vocabulary
    from paceline.decode.progress import progress
    from paceline.scripts.decoding import write_json

    folder = Path(cfg.out) / "given"
    file = folder / "given.json"
    names = ("target", "kind", "tokens", "batch_tokens", "depths", "draft_vocab", "warmup")
    asked = {name: cfg.plain()[name] for name in names}
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        for name in names:
            if before["asked"][name] != asked[name]:
                raise Refusal(
                    f"{name}: what lies in {cfg.out} was trained with {before['asked'][name]}; nearest: that, or "
                    "another out"
                )
        return Given(folder / "case.pt", before["tokens"])
    folder.mkdir(parents=True, exist_ok=True)
    texts = Texts(cfg.target)
    vocab_map, coverage = None, 1.0
    if cfg.kind == "eagle3":
        if cfg.draft_vocab >= texts.target.vocab:
            raise Refusal(f"draft_vocab: {cfg.draft_vocab}, but the target has {texts.target.vocab} ids; nearest: 64")
        vocab_map, coverage = draft_vocabulary(texts.data, cfg.draft_vocab, keep=texts.stops)
    torch.save(texts.case(cfg.kind, cfg.depths, vocab_map) | {"masters": True}, folder / "case.pt")
    given = Given(folder / "case.pt", [])
    with progress("hidden states", cfg.tokens) as bar:
        for number, examples in enumerate(texts.steps(cfg.tokens, cfg.batch_tokens)):
            torch.save(texts.ragged(examples), given.batch(number))
            given.tokens.append(sum(map(len, examples)))
            bar.advance(by=given.tokens[-1])
    write_json(file, {"asked": asked, "coverage": coverage, "tokens": given.tokens})
    return given


# ---------------------------------------------------------------------------------------------------------------------
# The work


def train(cfg: Any, one: Run, given: Given, forecast: Forecast, console: Console) -> None:
    """Let the trainer read all it is given, or as much as it can in its time; what it leaves is `one.trained`."""
    file = one.folder / "trained.json"
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["tokens"] == sum(given.tokens) or before["minutes"] == cfg.minutes:
            one.trained = before
            forecast.skip(one.trainer)
            console.print(f"{one.name}: there already", highlight=False)
    if not one.trained:
        console.print(f"[bold]{one.name}[/] ({forecast})", highlight=False)
        begun = time.monotonic()
        fault = _train(cfg, one, given)
        forecast.done(one.trainer, time.monotonic() - begun)
        if fault is not None:
            one.notes.append(fault)
            console.print(f"{one.name}: {fault}", style="bold red", highlight=False, markup=False, soft_wrap=True)
            return
    if one.trained["tokens"] < sum(given.tokens):
        one.notes.append(
            f"{one.trained['minutes']:g} minutes were enough for {one.trained['tokens']:,} of "
            f"{sum(given.tokens):,} tokens, and its rate had not fallen to 0"
        )


def _train(cfg: Any, one: Run, given: Given) -> str | None:
    """None, or in one line why it failed."""
    import torch

    from paceline.decode.progress import progress
    from paceline.scripts.decoding import write_json

    shutil.rmtree(one.folder, ignore_errors=True)
    one.folder.mkdir(parents=True)
    limit, seconds, read, losses = time.monotonic() + 60 * cfg.minutes, 0.0, 0, []
    with tempfile.TemporaryDirectory() as work:
        case = Path(work) / "case.pt"
        torch.save(torch.load(given.case, weights_only=True) | {"seed": one.seed}, case)
        log = one.folder / "log.txt"
        with Trainer(one.trainer, case, log, Path(cfg.venvs)) as trainer, progress(one.name, sum(given.tokens)) as bar:
            for number, tokens in enumerate(given.tokens):
                said = trainer.step(given.batch(number), rate(cfg, one.rate, number, len(given.tokens)))
                if said is None:
                    break
                if not math.isfinite(said["loss"]):
                    return f"loss {said['loss']} at step {number + 1}"
                seconds, read = seconds + said["seconds"], read + tokens
                losses.append(said["loss"])
                bar.advance(f"loss {said['loss']:.3f}, {read / seconds:.0f} tokens/s", tokens)
                if time.monotonic() > limit:
                    break
            trainer.save(one.folder / "drafter")
        if trainer.failed is not None:
            return trainer.failed
    one.trained = {"tokens": read, "seconds": seconds, "minutes": cfg.minutes, "losses": losses}
    write_json(one.folder / "trained.json", one.trained)
    return None


def rate(cfg: Any, peak: float, step: int, steps: int) -> float:
    """Of step 0, 1, ...: up to the peak in a line, and in a line down to 0 after the last."""
    warmup = max(1, round(cfg.warmup * steps))
    return peak * min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def decode(cfg: Any, one: Run, forecast: Forecast, console: Console) -> None:
    """Convert its drafter and decode with it, unless that was done; `one.report` is what came of it."""
    from paceline.scripts.evaluate import faults

    export = one.folder / "export"
    converting = Job(
        f"{one.name}: converting",
        "converting",
        "paceline.scripts.convert",
        ["format=native", *as_options("target", cfg.target.name, cfg.target)],
        [f"from={quoted(str(one.folder / 'drafter'))}", f"to={quoted(str(export))}"],
        one.folder / "converting",
    )
    asked = [f"eval.{name}={quoted(value)}" for name, value in cfg.eval.plain().items()]
    asked += [f"dtype={cfg.dtype}", "decode.tree=chain", f"decode.depth={cfg.depths}", "hf_baseline=false", "traces=0"]
    plain = Path(cfg.out) / f"plain-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]}.json"
    decoding = Job(
        f"{one.name}: decoding",
        "decoding",
        "paceline.scripts.evaluate",
        asked,
        [
            f"drafter={quoted(str(export))}",
            f"plain={quoted(str(plain))}",
            f"out={quoted(str(one.folder / 'decoding'))}",
        ],
        one.folder / "decoding",
        result=one.folder / "decoding" / "report.json",
    )
    for job in (converting, decoding):
        if fault := performed(job, forecast, console):
            one.notes.append(f"{job.kind} failed, {fault}")
            return
    one.report = json.loads((decoding.folder / "report.json").read_text(encoding="utf-8"))
    if wrong := faults(one.report):
        one.notes.append(f"{len(wrong)} answers are NOT the target's, and not by rounding")


# ---------------------------------------------------------------------------------------------------------------------
# The table


def table(cfg: Any, runs: list[Run]) -> list[dict[str, Any]]:
    """A row for each trainer and rate, in plain types. best: the longest of its trainer."""
    rows = []
    for trainer in cfg.trainers:
        own = [_row(cfg, [run for run in runs if (run.trainer, run.rate) == (trainer, rate)]) for rate in cfg.rates]
        best = max(own, key=lambda row: row["length"] or 0.0)
        rows += [row | {"best": row is best and row["length"] is not None} for row in own]
    return rows


def _row(cfg: Any, runs: list[Run]) -> dict[str, Any]:
    """length: tokens a pass, the mean over the seeds. low, high: its 95% interval over the prompts, of one seed; of
    several the least and the most."""
    name = "mean_acceptance_length"
    reports = [run.report for run in runs if run.report]
    cell = (
        spread([(report["acceptance"][name], report["intervals"][name]) for report in reports]) if reports else Cell()
    )
    trained = [run.trained for run in runs if run.trained]
    tokens, seconds = (sum(one[part] for one in trained) for part in ("tokens", "seconds"))
    several = len(runs) > 1
    return {
        "trainer": runs[0].trainer,
        "rate": runs[0].rate,
        "seeds": len(reports),
        "tokens": round(tokens / len(trained)) if trained else None,
        "seconds": round(seconds / len(trained), 3) if trained else None,
        "length": cell.value,
        "low": cell.low,
        "high": cell.high,
        "shown": cell.text,
        "lengths": [report["acceptance"][name] for report in reports],
        "loss": [statistics.mean(one["losses"][-len(one["losses"]) // 10 :]) for one in trained],
        "notes": [f"seed {run.seed}: {text}" if several else text for run in runs for text in run.notes],
    }


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Of each other trainer: whether ours, at its best rate, is at least the lower end of its interval at its own."""
    best = {row["trainer"]: row for row in rows if row["best"]}
    ours = best.pop(OURS, None)
    if ours is None:
        return []
    return [
        f"{OURS} {ours['length']:.2f} is {'at least' if ours['length'] >= theirs['low'] else 'BELOW'} "
        f"{theirs['low']:.2f}, the lower end of {name}'s {theirs['length']:.2f}"
        for name, theirs in best.items()
        if theirs["low"] is not None
    ]


COLUMNS = ("trainer", "learning rate", "seeds", "tokens", "seconds", "tokens/s", "length")


def _cells(row: dict[str, Any]) -> list[str]:
    spent = ["-", "-", "-"]
    if row["tokens"] is not None:
        spent = [f"{row['tokens']:,}", f"{row['seconds']:,.0f}", f"{row['tokens'] / row['seconds']:,.0f}"]
    return [row["trainer"], f"{row['rate']:g}", str(row["seeds"]), *spent, row["shown"]]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [f"**{cell}**" if row["best"] else cell for cell in _cells(row)]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {row['trainer']}, {row['rate']:g}: {text}" for row in rows for text in row["notes"]]
    return "\n".join([*lines, "", *notes, *(f"- {line}." for line in verdict(rows))]) + "\n"


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    shown = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        shown.add_row(*_cells(row), style="bold" if row["best"] else None)
    console.print(shown)
    for row in rows:
        for text in row["notes"]:
            said = f"{row['trainer']}, {row['rate']:g}: {text}"
            console.print(said, style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(
        "length: tokens per pass of the target (95% interval over the prompts; of several seeds the least and"
    )
    console.print("the most). Bold: the better rate of each.")
    for line in verdict(rows):
        console.print(line, style="bold", highlight=False)


main = entry("side_by_side", run)

if __name__ == "__main__":
    main()
