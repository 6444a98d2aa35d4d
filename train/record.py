"""The record of a run: its folder, what it shows, what it writes down, its best export. Only rank 0 writes.

    out/  config.yaml  metrics.jsonl  checkpoints/  export/  training.html  curve.png

Knows numbers and files. Does not know how a step is computed.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch.distributed.tensor import DTensor

from paceline.data.conversations import Dataset, Example, coloured, supervision
from paceline.decode.pages import training_page
from paceline.decode.progress import progress
from paceline.models.drafter import Drafter
from paceline.models.errors import Refusal
from paceline.models.export import save_export
from paceline.models.stored import alone
from paceline.train import checkpoint
from paceline.train.trunk import Trunk
from paceline.train.yardstick import Measurement

BEFORE = {"trunk": {"kind": "frozen"}}  # what runs of before there was a choice did
# What may differ between a run and its resumption without making it another run. Where hidden states come from changes
# no bit, unless they were packed otherwise, and then that is said.
FREE = {
    "out",
    "resume",
    "data.features",
    "data.features_in",
    "tracker.name",
    "tracker.mode",
    "train.save_every",
    "train.keep",
    "train.log_every",
}

# What stands behind an option and is looked at again when a run goes on -> what is said where it is another.
_OTHER = {
    "data.path": "these are not the conversations",
    "target.path": "this is not the target",
}

_NOT_ITS_OWN = (
    "data=self are answers of SmolLM2-135M-Instruct: a drafter for another target learns most from that target's own "
    "(scripts/synthesize.py, then data=jsonl data.path=FOLDER)"
)


class Record:
    """Everything a run leaves behind. `coverage`: share of the supervised tokens that the draft vocabulary holds."""

    def __init__(self, cfg: Any, accelerator: Accelerator):
        self.cfg = cfg
        self.main = accelerator.is_main_process
        self.world = accelerator.num_processes
        self.console = Console(quiet=not self.main, soft_wrap=True)
        self.coverage: float | None = None
        self.best = -math.inf
        self.best_step = 0
        self.tokens = 0
        self.seconds = 0.0  # of training: steps, without decoding
        self.ended = False  # whether the last step has been taken
        self.begun_with: dict[str, str] = {}  # option of _OTHER -> a digest of what stands behind it
        self.skipped = self.empty = 0  # optimiser steps whose gradients were not finite, or that had nothing to learn
        told: list[Any] = [None]
        if self.main:
            try:
                told = [self._opened()]
            except OSError as error:
                told = [Refusal(f"out: cannot be written ({error}); give another out")]
        broadcast_object_list(told)
        if isinstance(told[0], Refusal):
            told[0].common = True
            raise told[0]
        self.out = Path(told[0])
        self.checkpoints = self.out / "checkpoints"
        self._tracker: Any = None
        self._tokenizer: Any = None
        self._train: Sequence[Example] = ()
        self._consecutive = 0  # skipped steps, up to now
        self._pending: list[dict[str, Any]] = []  # steps since the last line of metrics.jsonl

    # -- the folder

    def _opened(self) -> str | Refusal:
        """Make the folder of the run, or say why not: one process decides, the others are told."""
        cfg = self.cfg
        if cfg.out is None:
            if cfg.resume is True:
                return Refusal("resume=true goes on with the run in out: give out=FOLDER")
            stem = Path("outputs") / f"{cfg.method.name}-{datetime.now():%Y%m%d-%H%M%S}"
            for trial in count():
                out = stem if not trial else stem.with_name(f"{stem.name}-{trial}")
                with suppress(FileExistsError):  # a run of the same second
                    out.mkdir(parents=True)
                    return str(out.absolute())
        out = Path(cfg.out)
        if (out / "config.yaml").exists():
            if not cfg.resume:
                return Refusal(f"out={out} holds a run already: resume=true goes on with it, or give another out")
            different = _first_difference(BEFORE | yaml.safe_load((out / "config.yaml").read_text()), cfg.plain())
            if different:
                refused = f"{different}: start afresh in another out, the run in out={out} is not like that"
                return Refusal(refused + self._way_on(out))
        elif there := [name for name in ("export", "checkpoints") if (out / name).exists()]:
            return Refusal(f"out={out} holds {there[0]}, which would be replaced, and no run; give another out")
        out.mkdir(parents=True, exist_ok=True)
        try:
            with alone(out):  # asked before the target loads; it is kept for oneself once something is written
                return str(out.absolute())
        except Refusal as refusal:
            return refusal

    def _way_on(self, out: Path) -> str:
        """What is typed to train on, under other options, from a checkpoint of the run in `out`; empty without one."""
        given = self.cfg.resume
        place = Path(given) if isinstance(given, str) else checkpoint.newest(out / "checkpoints")
        if place is None:
            return ""
        free = next(f for f in (out.with_name(f"{out.name}-{number}") for number in count(2)) if not f.exists())
        return f"; or train on from its weights, if they fit that: resume={place} out={free}"

    def resume_from(self) -> Path | None:
        """The checkpoint to go on from; None to start afresh (said, where a resumption was asked for)."""
        if isinstance(self.cfg.resume, str):
            return Path(self.cfg.resume)
        if not self.cfg.resume:
            return None
        place = checkpoint.newest(self.checkpoints)
        if place is None:
            self.console.print(f"resume=true: no checkpoint in {self.checkpoints}, starting afresh")
        return place

    def _own(self, place: Path) -> bool:
        """Whether a checkpoint is one of this folder's, and not another run's."""
        return place.resolve().parent == self.checkpoints.resolve()

    def state(self) -> dict[str, Any]:
        """What `restore` needs, in plain types."""
        return {
            "world": self.world,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "empty": self.empty,
            "ended": self.ended,
            "pending": self._pending,
            "best": None if self.best == -math.inf else self.best,
            "best_step": self.best_step,
            "coverage": self.coverage,
            "begun_with": self.begun_with,
        }

    def restore(self, state: dict[str, Any], place: Path) -> None:
        """Raises Refusal where the run's data or target are others by now, though all options are the same."""
        before = state.get("begun_with", {}) if self._own(place) else {}  # the first checkpoints did not say
        for option, wrong in _OTHER.items():
            if before.get(option, self.begun_with.get(option)) != self.begun_with.get(option):
                raise Refusal(f"{option}: {wrong} that the run in out={self.out} was begun with; nearest: another out")
        self.tokens, self.skipped, self.empty = state["tokens"], state["skipped"], state["empty"]
        self._pending, self.coverage = state["pending"], state.get("coverage")  # the first checkpoints had none
        # not in the checkpoint: its bytes do not depend on clocks. The first lines had none
        known = [line.get("seconds", 0.0) for line in self._lines() if line["step"] <= state["step"]]
        self.seconds = max(known, default=0.0)
        self.ended = state.get("ended", False) and self._own(place)  # that another run had its last says nothing here
        if state["best"] is not None and self._own(place) and (self.out / "export").exists():
            self.best, self.best_step = state["best"], state["best_step"]
        self.console.print(f"resumed from {place}: step {state['step']}, {self.tokens} tokens seen")

    # -- what is shown and written down

    def show_data(self, data: Dataset, tokenizer: Any) -> None:
        """How much is supervised, what was left out, and one example with its mask in colour."""
        show, self._train, self._tokenizer = self.console.print, data.train, tokenizer
        documents = f"{len(data.train)} documents to train on, {len(data.held_out)} held out"
        show(f"[bold]data[/]: {documents}; {supervision(data.train)}")
        for report in (data.skipped, data.unsupervised, data.cut):
            if report:
                show(f"  {report}", highlight=False)
        if self.cfg.data.source == "self" and self.cfg.target.name == "hf":
            show(f"[yellow]{_NOT_ITS_OWN}[/]", highlight=False)
        show("one example, what the drafter learns to predict is marked:", style="dim")
        show(coloured(data.train[0], tokenizer))

    def show_features(self, line: str) -> None:
        """Where the target's states come from, and what that costs."""
        self.console.print(f"[bold]features[/]: {line}", highlight=False)

    def alone(self) -> AbstractContextManager[None]:
        """As long as nobody else may write into the folder. Raises Refusal where another run does."""
        return alone(self.out) if self.main else nullcontext()

    @contextmanager
    def running(self, begun: int, total: int, drafter: Drafter, trunk: Trunk, data: Dataset) -> Iterator[None]:
        """Around all steps: what is shown and tracked meanwhile is closed however they end."""
        self.total, self._terms = total, trunk.terms
        self._clock, self._seen = time.monotonic(), (self.tokens, self.seconds)
        if self.main:
            _write_whole(self.out / "config.yaml", self.cfg.yaml())
            known = [line for line in self._lines() if line["step"] <= begun]  # what came after will come again
            _write_whole(self.out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in known))
            if later := checkpoint.forget(self.checkpoints, begun):  # so will they, and are not to be taken for new
                self.console.print(f"deleted, since the run goes on from step {begun}: {', '.join(later)}")
            if self.cfg.tracker.name == "wandb":
                self._tracker = _wandb(self.cfg, self.out)
        self._announce(begun, drafter, trunk)
        most = self.cfg.train.minutes and 60 * self.cfg.train.minutes - self.seconds
        failed = True
        try:
            with progress("step", total, begun, self.console, most) as self._bar:
                yield
            failed = False
        finally:
            if self._tracker is not None:
                self._tracker.finish(exit_code=int(failed))
        if self.main:
            self._page()
            draw(self.out, self._lines())
            found = f"best mean acceptance length {self.best:.3f} at step {self.best_step}"
            self.console.print(
                f"done: {found if self.best > -math.inf else 'no draft was judged'}; "
                f"export in {self.out / 'export'}, curves in {self.out / 'training.html'}",
                highlight=False,
            )

    def _announce(self, begun: int, drafter: Drafter, trunk: Trunk) -> None:
        size = sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
        own = sum(p.numel() for group in trunk.groups(drafter)[1:] for p in group["params"])
        beside = f" and {own / 1e6:.2f} M of the target's trunk ({self.cfg.trunk.kind})" if own else ""
        covered = ""
        if self.coverage is not None and drafter.vocab_map is not None:
            covered = f", draft vocabulary {len(drafter.vocab_map)} ({self.coverage:.1%} of supervised tokens)"
        if any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
            beside += f", sharded over {self.world} processes,"
        self.console.print(
            f"[bold]{drafter.options.name}[/]: {size:.1f} M parameters{beside} trained for "
            f"{trunk.original.source}{covered}; "
            f"{self.total - begun} steps of {self.cfg.train.batch_tokens} tokens into {self.out}"
        )

    def step(self, number: int, news: dict[str, Any], rate: float, last: bool) -> None:
        """Take note of an optimiser step: sums and counts, divided when a line is written. The `last` one gets a line.

        Raises Refusal after five steps in a row whose gradients were not finite.
        """
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now
        self.tokens, self.ended = self.tokens + news["tokens"], last
        self.skipped += news["skipped"]
        self.empty += news["empty"]
        self._consecutive = self._consecutive + 1 if news["skipped"] else 0
        if news["skipped"]:
            self.console.print(f"step {number}: left out, {self._fault(news['examples'])}", highlight=False)
        if self._consecutive >= 5:
            raise Refusal(
                f"train.lr={self.cfg.train.lr}: the gradients of five steps in a row were not finite (step {number}: "
                f"{self._fault(news['examples'])})",
                common=True,
            )
        if news["skipped"]:  # its loss is no number: it counts as nothing learnt
            nothing = [0] * len(news["loss"])
            news = news | {"loss": nothing, "learnt": nothing, "grad_norm": None}
        self._pending.append(news)
        if number % self.cfg.train.log_every and not last and number != 1:
            self._bar.advance()
            return
        tokens, seconds = self._seen
        speed = (self.tokens - tokens) / max(self.seconds - seconds, 1e-9)
        self._seen = (self.tokens, self.seconds)
        loss = _ratios(self._pending, "loss", "learnt")
        depths = len(news["right"])
        line = {
            "step": number,
            "loss": loss[:depths],
            **{f"trunk_{name}": own for name, own in zip(self._terms, loss[depths:], strict=True)},
            "accuracy": _ratios(self._pending, "right", "asked"),
            "lr": rate,
            "grad_norm": news["grad_norm"],
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "empty": self.empty,
        }
        self._pending = []
        self._write(line)
        note = f"loss {_short(line['loss'], 2)}  accuracy {_short(line['accuracy'], 3)}  {speed:.0f} tokens/s"
        self._bar.advance(note)
        if number == 1 or last:
            self._bar.say()

    def _fault(self, examples: list[int]) -> str:
        """Which examples gave a step gradients that are not finite, and how the first of them begins."""
        if not examples:
            return "its gradients are not finite"
        begins = self._tokenizer.decode(self._train[examples[0]].ids[:24]) if self._tokenizer else ""
        more = f" and {len(examples) - 8} more" if len(examples) > 8 else ""
        return f"not finite at examples {', '.join(map(str, examples[:8]))}{more}; the first begins {begins!r}"

    def measured(self, number: int, found: Measurement, drafter: Drafter, trunk: Trunk, data: Dataset) -> None:
        """Take note of what prompts were decoded to; the best drafter so far becomes the export."""
        length = found.acceptance.mean_acceptance_length
        # where no round was played, which says nothing, the latest is exported
        better = self.best == -math.inf if length is None else length > self.best
        told: dict[str, Any] = {"step": number, "tokens": self.tokens, "decoded": found.decoded}
        told |= {} if length is None else {"mean_acceptance_length": length}
        told |= {"held_out_accuracy": found.accuracy, "held_out_text_accuracy": found.text_accuracy}
        drift = {} if found.drift is None else {f"trunk_{name}": value for name, value in found.drift.as_dict().items()}
        self._write(told | drift)
        if length is None:
            said = f"[yellow]no draft was judged: the answers to {found.decoded} end with their first token[/]"
            said += " - the latest, exported" * better
        else:
            said = (
                f"mean acceptance length [bold]{length:.3f}[/] on {found.decoded} "
                f"(accuracy {_short(found.accuracy, 3)}){' - best so far, exported' if better else ''}"
            )
        self.console.print(f"step {number}: {said}", highlight=False)
        self._page()
        if better:
            if length is not None:
                self.best, self.best_step = length, number
            with checkpoint.writing(self.out / "export"):
                self._export(number, found, drafter, trunk, data)
        self._clock = time.monotonic()  # decoding is no training time

    def _export(self, number: int, found: Measurement, drafter: Drafter, trunk: Trunk, data: Dataset) -> None:
        cfg, learnt = self.cfg, trunk.learnt(self.cfg.export.dtype)
        save_export(
            drafter,
            self.out / "export",
            cfg.export.dtype,
            {
                "name": cfg.target.name,
                "path": cfg.target.path,
                "quantize": cfg.target.quantize,
                "trust_remote_code": cfg.target.trust_remote_code,
                "fingerprint": trunk.original.fingerprint,
                "template_sha256": data.provenance["template_sha256"],
            },
            trunk=None if learnt is None else (trunk.original, learnt),
            tree={"paths": found.paths, "nodes": cfg.decode.nodes},
            vocabulary_coverage=self.coverage,
            provenance={
                "step": number,
                "tokens": self.tokens,
                "decoded": found.decoded,
                "parameters": sum(p.numel() for group in trunk.groups(drafter) for p in group["params"]),
                "data": data.provenance,
                "train": cfg.train.plain(),
                "trunk": cfg.trunk.plain(),
                "seed": cfg.seed,
            },
            acceptance=found.acceptance.as_dict(),
            drift=None if found.drift is None else found.drift.as_dict(),
        )

    def _write(self, line: dict[str, Any]) -> None:
        if not self.main:
            return
        place = self.out / "metrics.jsonl"
        with checkpoint.writing(place), place.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tracker is not None:
            flat = {
                f"{k}/{i}" if isinstance(v, list) else k: x
                for k, v in line.items()
                for i, x in enumerate(v if isinstance(v, list) else [v])
            }
            numbers = {k: v for k, v in flat.items() if k != "step" and not isinstance(v, str)}
            self._tracker.log(numbers, step=line["step"])

    def _page(self) -> None:
        """The run so far as a page."""
        if self.main:
            page = training_page(self.cfg.plain(), self.cfg.yaml(), self._lines())
            _write_whole(self.out / "training.html", page)

    def _lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far, without the half of a line that a killed run may have left at its end."""
        file = self.out / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def draw(out: Path, lines: list[dict[str, Any]]) -> Path | None:
    """curve.png: what training.html shows, over tokens. None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    steps = [line for line in lines if "loss" in line]
    decoded = [line for line in lines if "mean_acceptance_length" in line]
    figure = Figure(figsize=(18, 3.6), layout="constrained")
    loss, accuracy, length, rate, speed = figure.subplots(1, 5)
    tokens = [line["tokens"] for line in steps]
    for k in range(len(steps[0]["loss"]) if steps else 0):
        loss.plot(tokens, [line["loss"][k] for line in steps], label=f"depth {k + 1}")
        accuracy.plot(tokens, [line["accuracy"][k] for line in steps], label=f"depth {k + 1}")
    length.plot([d["tokens"] for d in decoded], [d["mean_acceptance_length"] for d in decoded], "o-", color="black")
    rate.plot(tokens, [line["lr"] for line in steps])
    speed.plot(tokens, [line["tokens_per_second"] for line in steps])
    for axes, title in (
        (loss, "loss (nats a token)"),
        (accuracy, "top-1 accuracy on training text"),
        (length, "mean acceptance length, decoded"),
        (rate, "learning rate"),
        (speed, "tokens a second"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens read")
        axes.grid(alpha=0.3)
    if steps:
        loss.legend(fontsize=8)
    path = out / "curve.png"
    figure.savefig(path, dpi=120)
    return path


def _wandb(cfg: Any, out: Path) -> Any:
    """A wandb run in the run's folder; the same run again after a resumption."""
    import wandb

    file = out / "wandb-run-id"
    run = wandb.init(
        project=cfg.tracker.project,
        mode=cfg.tracker.mode,
        dir=out,
        config=cfg.plain(),
        id=file.read_text() if file.exists() else None,
        resume="allow" if file.exists() and cfg.tracker.mode == "online" else None,
        settings=wandb.Settings(silent=cfg.tracker.mode == "offline"),
    )
    run.define_metric("*", step_metric="tokens")
    file.write_text(run.id)
    return run


def _first_difference(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> str | None:
    for key in now:
        name = prefix + key
        if name in FREE:
            continue
        if isinstance(now[key], dict) and isinstance(before.get(key), dict):
            found = _first_difference(before[key], now[key], name + ".")
            if found:
                return found
        elif before.get(key) != now[key]:
            return f"{name}={now[key]} (it was {before.get(key)})"
    return None


def _ratios(rows: list[dict[str, Any]], part: str, whole: str) -> list[float | None]:
    """Sums over counts, per depth; None where nothing was counted."""
    parts, wholes = ([sum(depth) for depth in zip(*(row[name] for row in rows), strict=True)] for name in (part, whole))
    return [p / w if w else None for p, w in zip(parts, wholes, strict=True)]


def _write_whole(path: Path, text: str) -> None:
    """Replace a file by another in one move: a killed run leaves the old or the new."""
    work = path.with_name(f".{path.name}")
    with checkpoint.writing(path):
        work.write_text(text)
        os.replace(work, path)


def _short(values: Any, digits: int) -> str:
    return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)
