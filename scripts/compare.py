"""Train or load drafters for one target, decode with each, and lay them side by side: one table, one picture.

    python scripts/compare.py target=smollm2
    python scripts/compare.py comparison=eagle_starts out=outputs/starts

Starts the training entries and scripts/evaluate.py as processes, one after another, and reads what they leave behind:
metrics.jsonl, an export, report.json. What has ended is not done again. Writes compare.json, compare.md (the table) and
compare.png. Knows no method and no model: a drafter is a name, an entry and options.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry, load, quoted
from paceline.models.errors import Refusal
from paceline.scripts.jobs import Forecast, Job, ended, note, perform

if TYPE_CHECKING:
    from rich.console import Console


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.scripts.decoding import write_json, write_whole

    runs = planned(cfg)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a log has room
    perform_all(cfg, runs, console)
    rows, conditions = ranked(cfg, runs), stated(cfg, runs)
    said = {
        "title": cfg.title,
        "conditions": conditions,
        "verdict": verdict(cfg, rows),
        "meaning": meaning(cfg),
        "rows": [asdict(row) for row in rows],
        "settings": cfg.plain(),
        "command": shlex.join(sys.argv),
    }
    out = Path(cfg.out)
    write_json(out / "compare.json", said)
    write_whole(out / "compare.md", markdown(cfg, rows, conditions))
    picture = draw(out, cfg, rows)
    show(console, cfg, rows, conditions)
    files = ["compare.json", "compare.md", *([picture.name] if picture else [])]
    console.print(f"in {out}: {', '.join(files)}", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# The plan: whatever is wrong is refused here


@dataclass
class Run:
    """A drafter with one seed: what makes it, and afterwards what it left.

    export: its folder, or the word for what needs none. training: None where it is only loaded.
    budget, minutes: tokens that its training is to read, and its limit. notes: what it lacks, and why.
    """

    name: str
    seed: int
    folder: Path
    export: str
    training: Job | None
    evaluate: list[str]
    budget: int | None = None
    minutes: float | None = None
    notes: list[str] = field(default_factory=list)
    reports: dict[float, dict[str, Any]] = field(default_factory=dict)

    @property
    def place(self) -> Path | None:
        return Path(self.export) if os.path.isabs(self.export) else None

    def about(self) -> dict[str, Any]:
        """drafter.json of the export, as far as there is one."""
        file = self.place and self.place / "drafter.json"
        return json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Lines that the training of an export RUN/export left, without the half of one that it may be writing."""
        file = self.place and self.place.name == "export" and self.place.parent / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file and file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def planned(cfg: Any) -> list[Run]:
    """Every run of every drafter. Raises Refusal or BadData for what would fail only after the first hour."""
    from paceline.data.prompts import prompts

    prompts(cfg.eval.prompts, cfg.eval.limit)
    runs: list[Run] = []
    digest = cache(_digest)  # of data that many runs have in common
    for seed in range(cfg.seeds):
        for name, row in cfg.drafters.items():
            if (cfg.only is None or name in cfg.only) and (row.entry is not None or seed == 0):
                try:
                    made = _planned(cfg, name, row, seed, digest)
                except Refusal as refusal:
                    raise Refusal(f"drafters.{name}: {refusal}") from None
                if made.folder in [other.folder for other in runs]:
                    raise Refusal(f"drafters.{name}: another one is kept in {made.folder}; give it another name")
                runs.append(made)
    return runs


def _planned(cfg: Any, name: str, row: Any, seed: int, digest: Callable[[Path], str]) -> Run:
    from paceline.models.drafter import check_depth
    from paceline.models.export import describe
    from paceline.scripts.decoding import target_of

    folder = Path(cfg.out) / re.sub(r"\W+", "-", name)
    decodings = [load("evaluate", "drafter=none", *_asked(cfg, row.evaluate, t)) for t in cfg.temperatures]
    if row.entry is None:
        about = describe(row.export, "export") if os.path.isabs(row.export) else {}
        for decoding in decodings:
            target_of(decoding.model_copy(update={"drafter": row.export}), about)
        return Run(name, seed, folder, row.export, None, row.evaluate)
    folder = folder.with_name(f"{folder.name}-seed{seed}")
    asked = [*as_options("target", cfg.target.name, cfg.target), *as_options("data", cfg.data.source, cfg.data)]
    if cfg.tokens is not None:
        asked += ["train.steps=null", f"train.tokens={cfg.tokens}"]
    asked += [f"train.minutes={quoted(cfg.minutes)}", *cfg.options, *row.options, f"seed={seed}"]
    places = [f"out={quoted(str(folder))}", "resume=true"]
    training = load(row.entry, *asked)
    for decoding in decodings:
        check_depth(decoding.decode.depth, training.method.depth_limit())
    module = f"paceline.train.{row.entry}"
    read = (training.data.path, *(part.path for part in training.data.parts))
    data = " ".join(digest(Path(path)) for path in read if path and os.path.isabs(path))
    processes = row.processes or cfg.processes
    job = Job(f"{folder.name}: training", "training", module, asked, places, folder, data, processes=processes)
    before = note(job) if (folder / "config.yaml").exists() else {}  # it began
    if (words := before.get("asked", asked)) != asked:
        was = " ".join(word for word in words if word not in asked) or "with fewer options"
        raise Refusal(f"what lies in {folder} was trained otherwise ({was}): give another out")
    if before.get("about", "") not in ("", data):  # the first notes did not say
        raise Refusal(f"data.path: what lies in {folder} was trained on what stood there before: give another out")
    length = training.train
    return Run(name, seed, folder, str(folder / "export"), job, row.evaluate, length.tokens, length.minutes)


def as_options(group: str, choice: str, section: Any) -> list[str]:
    """A section as options of another program: the file of its group, then every value."""
    return [f"{group}={choice}", *(f"{group}.{name}={quoted(value)}" for name, value in section.plain().items())]


def _asked(cfg: Any, own: list[str], temperature: float) -> list[str]:
    """Options of scripts/evaluate.py, save the drafter and where things lie."""
    return [
        *as_options("target", cfg.target.name, cfg.target),
        *(f"eval.{name}={quoted(value)}" for name, value in cfg.eval.plain().items()),
        "hf_baseline=false",
        *cfg.evaluate,
        *own,
        f"decode.temperature={temperature}",
    ]


def _decoding(cfg: Any, run: Run, temperature: float) -> Job:
    """The job of decoding with a drafter that there is by now."""
    from paceline.decode import Sampler

    asked, places = _asked(cfg, run.evaluate, temperature), [f"drafter={quoted(run.export)}"]
    of = load("evaluate", "drafter=none", *asked)
    prompts = _digest(Path(of.eval.prompts))
    if cfg.plain_prompts is not None:
        # the target's own outputs are computed once for all who have a target and a sampler in common
        sampler = asdict(Sampler.of(of.decode))
        common = [of.target.plain(), run.about().get("trunk"), of.dtype, of.eval.plain(), prompts, sampler]
        name = hashlib.sha256(json.dumps(common).encode()).hexdigest()[:12]
        asked.append(f"plain_prompts={cfg.plain_prompts}")
        places.append(f"plain={quoted(str(Path(cfg.out) / 'plain' / f'{name}.json'))}")
    folder = run.folder / f"T{temperature:g}"
    places.append(f"out={quoted(str(folder))}")
    return Job(
        f"{run.folder.name}: decoding at {_at(temperature)}",
        "decoding",
        "paceline.scripts.evaluate",
        asked,
        places,
        folder,
        about=f"{_digest(Path(run.export))} {prompts}",
        result=folder / "report.json",
    )


def _digest(place: Path) -> str:
    """Of a file, or of all there is in a folder: what lies there now may be another than before. Words have none."""
    whole = hashlib.sha256()
    inside = [place, *sorted(place.rglob("*"))] if place.is_absolute() else []
    for file in [path for path in inside if path.is_file()]:
        with file.open("rb") as stored:
            whole.update(hashlib.file_digest(stored, "sha256").digest())
    return whole.hexdigest()


def _at(temperature: float) -> str:
    return f"T={temperature:g}"


# ---------------------------------------------------------------------------------------------------------------------
# The work


def perform_all(cfg: Any, runs: list[Run], console: Console) -> None:
    """Train and decode what has not been; what fails is noted in its run, and the others go on."""
    kinds = ["training" for run in runs if run.training] + ["decoding"] * len(runs) * len(cfg.temperatures)
    forecast = Forecast(kinds, {"training": 60 * cfg.minutes} if cfg.minutes else {})
    for run in runs:
        if run.training is not None:
            if fault := performed(run.training, forecast, console, partial(_read, run)):
                run.notes.append(f"training failed, {fault}")
                for _ in cfg.temperatures:
                    forecast.skip("decoding")
                continue
            read = run.metrics()[-1]["tokens"]
            if run.budget is not None and read < run.budget:
                run.notes.append(f"{run.minutes:g} minutes were enough for {read:,} of {run.budget:,} tokens")
        for temperature in cfg.temperatures:
            job = _decoding(cfg, run, temperature)
            if fault := performed(job, forecast, console):
                run.notes.append(f"decoding at {_at(temperature)} failed, {fault}")
            else:
                run.reports[temperature] = json.loads((job.folder / "report.json").read_text(encoding="utf-8"))
                run.notes += _remarks(temperature, run.reports[temperature])


def performed(job: Job, forecast: Forecast, console: Console, news: Callable[[], str] = str) -> str | None:
    """Do a job, unless it has been. None, or why it failed."""
    from paceline.decode.progress import status

    if ended(job):
        forecast.skip(job.kind)
        console.print(f"{job.what}: there already", highlight=False)
        return None
    console.print(f"[bold]{job.what}[/] ({forecast})", highlight=False)
    begun = time.monotonic()

    def said() -> str:
        parts = (job.what, news(), f"{(time.monotonic() - begun) / 60:.1f} min", f"all: {forecast}")
        return ", ".join(part for part in parts if part)

    with status(said, console):
        fault = perform(job)
    forecast.done(job.kind, time.monotonic() - begun)
    if fault:
        console.print(f"{job.what} failed, {fault}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    return fault


def _read(run: Run) -> str:
    lines = run.metrics()
    if not lines:
        return ""
    return f"{lines[-1]['tokens']:,}{f' of {run.budget:,}' if run.budget else ''} tokens"


def _remarks(temperature: float, report: dict[str, Any]) -> list[str]:
    """What a report says that no figure of the table does."""
    from paceline.scripts.evaluate import faults

    found, at = [], _at(temperature)
    if wrong := faults(report):
        found.append(f"{at}: {len(wrong)} answers are NOT the target's, and not by rounding")
    if report["setting"]["lossy"]:
        found.append(f"{at}: LOSSY, verify=typical also accepts what the target would not have chosen")
    if (drift := report["drift"]) and drift["tokens"]:
        found.append(
            f"{at}: the target was trained too; from what it was, KL {drift['mean_kl']:.4f} nats a token, "
            f"{drift['greedy_agreement_rate']:.1%} of its tokens the same"
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Figures: what processes left, a row a drafter


@dataclass
class Cell:
    """A figure as it is shown; its value and interval, as far as it has them. None for what is not there."""

    text: str = "-"
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass
class Row:
    """cells: by column. curves: of each seed, by name, the points (training tokens, value). trusted: may win."""

    name: str
    cells: dict[str, Cell]
    notes: list[str]
    curves: dict[str, list[list[tuple[int, float]]]]
    reports: list[str]
    trusted: bool


TREE, LENGTH, SPEED, SAME, HELD_OUT = "draft", "length", "speed-up", "identical", "held-out length"
FIRST = "accuracy of the first draft token, training text"


def meaning(cfg: Any) -> dict[str, str]:
    """The columns in their order, and what each says."""
    from paceline.decode import DEFINITIONS
    from paceline.scripts import evaluate

    many = f"mean of {cfg.seeds} seeds, their least to most"
    spread = "95% interval over the prompts" if cfg.seeds == 1 else many
    decoded = {
        LENGTH: f"{DEFINITIONS['mean_acceptance_length']} ({spread})",
        SPEED: f"{evaluate.SPEED['speedup']}, timed in turn ({spread})",
        SAME: "answers that are, token for token, those of the target alone; in 16 bits some part at near-ties",
    }
    columns = {
        "trainable parameters": "numbers that training may change, those of a trunk that is trained too included",
        "training tokens": "tokens read, prompts included, over all epochs",
        "tokens/s": "training tokens / seconds of training",
        "minutes": "of training: all its steps, without loading and decoding",
    }
    if cfg.temperatures:
        columns[TREE] = "its tree, most nodes of a pass (the root included), most draft tokens in a row"
    for temperature in cfg.temperatures:
        columns |= {f"{name}, {_at(temperature)}": text for name, text in decoded.items()}
    if not cfg.temperatures:
        columns[HELD_OUT] = f"{decoded[LENGTH]}, decoded at the end of training on held-out prompts, or bundled ones"
    return columns


def ranking(cfg: Any) -> list[str]:
    """Columns in which a drafter can win; the first orders the table."""
    return [f"{SPEED}, {_at(temperature)}" for temperature in cfg.temperatures] or [HELD_OUT]


def ranked(cfg: Any, runs: list[Run]) -> list[Row]:
    """The rows of the table, best first; what has no figure there comes last."""
    rows = [_row(cfg, [run for run in runs if run.name == name]) for name in dict.fromkeys(run.name for run in runs)]
    first = ranking(cfg)[0]
    return sorted(rows, key=lambda row: -(row.cells[first].value or 0.0))


def _row(cfg: Any, runs: list[Run]) -> Row:
    """A drafter over its seeds."""
    from paceline.scripts.evaluate import faults

    metrics = [run.metrics() for run in runs]
    ends = [lines[-1] for lines in ([line for line in known if "seconds" in line] for known in metrics) if lines]
    tokens, seconds = ([end[name] for end in ends] for name in ("tokens", "seconds"))
    cells = dict.fromkeys(meaning(cfg), Cell())
    cells["trainable parameters"] = _one([_parameters(run) for run in runs], "{:,.0f}")
    cells["training tokens"] = _one([_tokens(run) for run in runs], "{:,.0f}")
    cells["tokens/s"] = _one([sum(tokens) / sum(seconds) if seconds else None], "{:,.0f}")
    cells["minutes"] = _one([s / 60 for s in seconds], "{:.1f}")
    for temperature in cfg.temperatures:
        reports = [run.reports[temperature] for run in runs if temperature in run.reports]
        at, exact = _at(temperature), [report["exactness"] for report in reports]
        for how in [report["setting"] for report in reports][:1]:
            cells[TREE] = Cell("{tree} {nodes}, {depth}".format(**how))
        for name, section, key in ((LENGTH, "acceptance", "mean_acceptance_length"), (SPEED, "speed", "speedup")):
            cells[f"{name}, {at}"] = spread([(report[section][key], report["intervals"][key]) for report in reports])
        same, compared = sum(e["identical"] or 0 for e in exact), sum(e["compared"] for e in exact)
        if compared:
            cells[f"{SAME}, {at}"] = Cell(f"{same} of {compared}", same / compared)
    decoded = [_curve(lines, "mean_acceptance_length", lambda length: length) for lines in metrics]
    learnt = [_curve(lines, "accuracy", lambda depths: depths[0]) for lines in metrics]
    if HELD_OUT in cells:
        cells[HELD_OUT] = spread([(points[-1][1], None) for points in decoded if points])
    many = cfg.seeds > 1
    return Row(
        runs[0].name,
        cells,
        [f"seed {run.seed}: {text}" if many else text for run in runs for text in run.notes],
        {HELD_OUT: [points for points in decoded if points], FIRST: [points for points in learnt if points]},
        [str(run.folder / f"T{temperature:g}" / "report.json") for run in runs for temperature in run.reports],
        not any(faults(report) for run in runs for report in run.reports.values()),
    )


def _curve(lines: list[dict[str, Any]], name: str, of: Callable[[Any], float | None]) -> list[tuple[int, float]]:
    """(training tokens, figure) of each line that has it."""
    found = [(line["tokens"], of(line[name])) for line in lines if line.get(name) is not None]
    return [(tokens, value) for tokens, value in found if value is not None]


def _tokens(run: Run) -> int | None:
    """Training tokens: as the run counted them, else as the export says; none where there is nothing to train."""
    if lines := run.metrics():
        return lines[-1]["tokens"]
    return (run.about().get("provenance") or {}).get("tokens") if run.place else 0


def _parameters(run: Run) -> int | None:
    """What the export says was trained; of a drafter that does not say, all it has."""
    said = (run.about().get("provenance") or {}).get("parameters")
    return said if said is not None else next((r["drafter"]["parameters"] for r in run.reports.values()), None)


def _one(values: list[Any], form: str) -> Cell:
    """The mean of what all seeds have about equally."""
    known = [value for value in values if value is not None]
    return Cell(form.format(statistics.mean(known)), statistics.mean(known)) if known else Cell()


def spread(found: list[tuple[float | None, list[float] | None]]) -> Cell:
    """One seed's figure with its own interval; of several their mean, the least and the most."""
    known = [(value, interval) for value, interval in found if value is not None]
    if not known:
        return Cell()
    values = [value for value, _ in known]
    low, high = (min(values), max(values)) if len(values) > 1 else known[0][1] or (None, None)
    value = statistics.mean(values)
    return Cell(f"{value:.2f}" if low is None else f"{value:.2f} ({low:.2f} to {high:.2f})", value, low, high)


def verdict(cfg: Any, rows: list[Row]) -> str:
    """One sentence: who wins here, and whether chance may have decided."""
    parts = [part for column in ranking(cfg) if (part := _won(cfg, column, rows))]
    return f"{'; '.join(parts)}." if parts else "Nothing was measured that could be compared."


def _won(cfg: Any, column: str, rows: list[Row]) -> str | None:
    able = [row for row in rows if row.cells[column].value is not None and row.trusted]
    if not able:
        return None
    best = max(able, key=lambda row: row.cells[column].value or 0.0)
    won, at = best.cells[column], column.replace(f"{SPEED},", " at")
    least, most = (won.value or 0.0 if end is None else end for end in (won.low, won.high))
    if column == HELD_OUT:
        said = f"{best.name} drafts best, {won.text} tokens per pass of the target"
    elif least > 1:
        said = f"on this machine {best.name} is fastest{at}, {won.text} times as fast as decoding without a drafter"
    elif most < 1:
        said = f"on this machine no drafter gains time{at}, and {best.name} loses least ({won.text})"
    else:
        told = f"no drafter gains time{at} that could be told"
        said = f"on this machine {told}, and {best.name} is nearest to it ({won.text})"
    near = [
        row.name
        for row in able
        if row is not best and won.low is not None and (row.cells[column].high or 0.0) >= won.low
    ]
    return f"{said}, but the interval of {' and '.join(near)} overlaps: chance may have decided" if near else said


# ---------------------------------------------------------------------------------------------------------------------
# The table and the picture


def _lines(cfg: Any, rows: list[Row]) -> list[list[str]]:
    return [[row.name, *(cell.text for cell in row.cells.values())] for row in rows]


def stated(cfg: Any, runs: list[Run]) -> str:
    """What was asked of all, and where it was measured."""
    said = [f"target {cfg.target.path or cfg.target.name}"]
    said.append(f"{cfg.tokens:,} training tokens each" if cfg.tokens else "training as the options of a row say")
    if cfg.minutes:
        said.append(f"{cfg.minutes:g} minutes of training at most")
    for report in [report for run in runs for report in run.reports.values()][:1]:
        how = "{num_prompts} prompts ({prompts}) of at most {max_new_tokens} new tokens, {dtype}, {threads} threads"
        said.append(f"{how}; {{device}}: {{machine}}".format(**report["setting"]))
    return "; ".join(said)


def markdown(cfg: Any, rows: list[Row], conditions: str) -> str:
    columns = meaning(cfg)
    head = ["drafter", *columns]
    table = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *_lines(cfg, rows))]
    notes = [f"- {row.name}: {text}" for row in rows for text in row.notes]
    meanings = [f"- *{column}*: {text}" for column, text in columns.items()]
    parts = [f"**{cfg.title}**", "", f"{conditions}.", "", *table, "", verdict(cfg, rows), ""]
    return "\n".join([*parts, *(["Notes:", "", *notes, ""] if notes else []), *meanings]) + "\n"


def show(console: Console, cfg: Any, rows: list[Row], conditions: str) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table("drafter", title=escape(cfg.title), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in meaning(cfg):
        table.add_column(column, justify="right")
    for line in _lines(cfg, rows):
        table.add_row(*map(escape, line))
    console.print(conditions, highlight=False, markup=False)
    console.print(table)
    for row in rows:
        for text in row.notes:
            console.print(f"{row.name}: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for column, text in meaning(cfg).items():
        console.print(f"{column}: {text}", style="dim", highlight=False, markup=False)
    console.print(f"[bold green]{escape(verdict(cfg, rows))}[/]", highlight=False)


def draw(out: Path, cfg: Any, rows: list[Row]) -> Path | None:
    """compare.png: bars with their intervals, and training curves. None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    kinds = (LENGTH, SPEED) if cfg.temperatures else ()
    curves = [name for name in (HELD_OUT, FIRST) if any(len(points) > 1 for row in rows for points in row.curves[name])]
    panels = len(kinds) + len(curves)
    figure = Figure(figsize=(5.5 * max(panels, 1), 1.8 + 0.45 * max(len(rows), 6)), layout="constrained")
    figure.suptitle(cfg.title, fontsize=11)
    places = list(figure.subplots(1, max(panels, 1), squeeze=False)[0])
    for kind in kinds:
        _bars(places.pop(0), kind, cfg, rows)
    for name in curves:
        axes = places.pop(0)
        for number, row in enumerate(rows):
            _lines_of(axes, row.curves[name], f"C{number}", row.name)
        axes.set_xlabel("training tokens")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path, work = out / "compare.png", out / ".compare.png"
    figure.savefig(work, dpi=120, format="png")
    work.replace(path)
    return path


def _bars(axes: Any, kind: str, cfg: Any, rows: list[Row]) -> None:
    """A group a drafter, a bar a temperature, best on top."""
    thick = 0.8 / len(cfg.temperatures)
    for number, temperature in enumerate(cfg.temperatures):
        cells = [row.cells[f"{kind}, {_at(temperature)}"] for row in rows]
        values = [cell.value or 0.0 for cell in cells]
        reach = [
            [abs(value - (end if end is not None else value)) for value, end in zip(values, ends, strict=True)]
            for ends in ([cell.low for cell in cells], [cell.high for cell in cells])
        ]
        where = [place + number * thick for place in range(len(rows))]
        axes.barh(where, values, thick, xerr=reach, capsize=2, label=_at(temperature))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.4 - thick / 2 for place in range(len(rows))], [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_title("mean acceptance length" if kind == LENGTH else "times as fast as without a drafter", fontsize=10)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8)


def _lines_of(axes: Any, seeds: list[list[tuple[int, float]]], colour: str, name: str) -> None:
    """A thin line a seed, a thick one their mean where there are several."""
    for points in seeds:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.7 if len(seeds) > 1 else 1.5, alpha=0.6)
    shared = list(zip(*seeds, strict=False))
    mean = [tuple(statistics.mean(part) for part in zip(*at, strict=True)) for at in shared]
    if mean:
        axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2.2 if len(seeds) > 1 else 1.5, label=name)


main = entry("compare", run)

if __name__ == "__main__":
    main()
