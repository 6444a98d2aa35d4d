"""Which tree pays here, for a drafter and this machine: measured, foretold, proved by decoding, kept in the export.

    python scripts/tune.py drafter=outputs/eagle/export

Then decode.tree=tuned decodes with it. Owns which trees are tried, tune.json and tune.png. Does not know how costs are
measured (decode/cost.py) or trees judged (decode/pays.py).
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.decode.pays import Candidate, Prospect
    from paceline.scripts.decoding import Runtime

FORETOLD, MEASURED = "foretold", "measured"
TOGETHER = 8  # rows that the target writes the played texts in
PER_KIND = 2  # trees of each kind that are proved, the most promising ones
FULL = 3  # prompts for each row of a batch that is kept full, at least: the fewer, the longer it is seen to run empty


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import prompt_ids
    from paceline.data.prompts import prompts
    from paceline.decode.cost import measure
    from paceline.decode.pays import play, prospects
    from paceline.models.export import amend, describe
    from paceline.scripts.decoding import made_by, runtime, tuned_as, write_json

    ready, console = runtime(cfg), Console()
    if not console.is_terminal:
        console.width = 120  # a log has room
    target, drafter = ready.decoder.target, ready.decoder.drafter
    if drafter is None:
        raise Refusal("decode.nodes: 1 leaves no room for drafts, and it is trees that are tuned; nearest: 16")
    paths = (describe(cfg.drafter).get("tree") or {}).get("paths", ())
    ids = [prompt_ids(ready.tokenizer, prompt.messages) for prompt in prompts(cfg.eval.prompts, cfg.eval.limit)]
    played, proved = ids[::2], ids[1::2] or ids  # the bundled categories take turns: both see all of them
    texts = _answered(cfg, ready, played)
    if all(len(answer) < 3 for _, answer in texts):
        raise Refusal(
            f"eval.max_new_tokens: of {len(texts)} answers of at most {cfg.eval.max_new_tokens} tokens none has three, "
            "which a draft takes to be judged; give more tokens, or other eval.prompts"
        )
    console.print("costs of a round: " + ", ".join(f"batch {rows}" for rows in cfg.batches), highlight=False)
    cost = measure(target, drafter, cfg.batches, made_by(target, cfg.dtype, ready.exact))
    console.print(f"the drafter over the target's answers to {len(played)} prompts", highlight=False)
    record = play(target, drafter, texts, paths)
    choices: dict[str, Any] = {}
    batches: dict[str, dict[str, Any]] = {}
    for rows in cfg.batches:
        found = prospects(record, cost, rows, paths)
        usual = _finalists(found)
        tried = list(dict.fromkeys([*usual, *_cells(found)])) if cfg.grid else usual
        console.print(f"batch {rows}: {len(tried)} of {len(found)} trees are decoded with", highlight=False)
        rates = _proved(cfg, ready, [one.candidate for one in tried], rows, proved, paths)
        best = max(tried, key=lambda one: rates[one.candidate]["tokens_per_second"])
        choices[str(rows)] = _choice(best, rates)
        batches[str(rows)] = {
            FORETOLD: [one.as_dict() for one in found],
            MEASURED: [one.as_dict() | {MEASURED: rates[one.candidate]} for one in tried],
        }
        _show(console, rows, batches[str(rows)][MEASURED], choices[str(rows)])
        if cfg.grid:
            batches[str(rows)]["without the grid"] = held = _held_to_the_grid(usual, rates)
            console.print(
                f"batch {rows}: without the grid, tuning takes {_name(held)}: {held['share']:.3f} of the best tree's "
                f"tokens/s, whose own repeats lie between {held['least']:.3f} and {held['most']:.3f} of their median",
                highlight=False,
            )
    about = {"cost": cost.as_dict(), "choices": choices}
    amend(cfg.drafter, **{tuned_as(cfg.decode): about})
    file = Path(cfg.out) / "tune.json"
    write_json(file, {"drafter": ready.drafter, "target": ready.target, **about, "batches": batches})
    draw(file.with_suffix(".png"), batches, choices)
    console.print(f"kept in {cfg.drafter} for decode.tree=tuned; every figure: {file}", highlight=False, soft_wrap=True)


def _answered(cfg: Any, ready: Runtime, ids: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """(prompt, the target's answer) of each."""
    from paceline.decode.progress import progress

    texts = []
    with progress("the target's answers", len(ids)) as bar:
        for first in range(0, len(ids), TOGETHER):
            some = ids[first : first + TOGETHER]
            rows = range(first, first + len(some))
            out = ready.plain.generate(some, cfg.eval.max_new_tokens, sampler=ready.sampler, eos=ready.stops, rows=rows)
            texts += list(zip(some, out.tokens, strict=True))
            bar.advance(by=len(some))
    return texts


def _finalists(found: list[Prospect]) -> list[Prospect]:
    """Plain decoding and the most promising of each kind; `found` stands best first."""
    kinds: dict[str, list[Prospect]] = {}
    for one in found:
        kinds.setdefault(one.candidate.tree, []).append(one)
    return [one for kind in kinds.values() for one in kind[:PER_KIND]]


def _cells(found: list[Prospect]) -> list[Prospect]:
    """Of each kind, number of nodes and depth, the most promising."""
    cells: dict[tuple[str, int, int], Prospect] = {}
    for one in found:
        cells.setdefault((one.candidate.tree, one.candidate.nodes, one.candidate.depth), one)
    return list(cells.values())


def _proved(
    cfg: Any, ready: Runtime, candidates: list[Candidate], rows: int, ids: list[list[int]], paths: Any
) -> dict[Candidate, dict[str, Any]]:
    """Decode with each in turn, `repeats` times: tokens_per_second (median, and of each time), acceptance length.

    Batches are kept full: a prompt takes the place of each text that is finished, as where many ask.
    """
    from paceline.decode import Decoder
    from paceline.decode.progress import progress
    from paceline.scripts.evaluate import Way, measured

    def way(candidate: Candidate) -> Way:
        drafter = None if candidate.tree == "plain" else ready.decoder.drafter
        decoder = Decoder(ready.decoder.target, drafter, candidate.shape(paths), ready.decoder.verify)
        return lambda keys, some, limit: decoder.generate(
            some, limit, sampler=ready.sampler, eos=ready.stops, rows=keys, together=rows
        )

    size = 1
    if rows > 1:
        ids = ids * -(-FULL * rows // len(ids))
        size = len(ids)
    ways = {str(candidate): way(candidate) for candidate in candidates}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with progress("texts, with every tree", cfg.repeats * len(ids)) as bar:
        for turn in range(cfg.repeats):
            names = list(ways)
            first = turn % len(names)
            turned = {name: ways[name] for name in names[first:] + names[:first]}
            batches = []
            for batch in measured(turned, ids, cfg.eval.max_new_tokens, size, known=[[] for _ in ids]):
                batches.append(batch)
                bar.advance(by=size)
            for name, rate in rates.items():
                rate.append(sum(b.tokens(name) for b in batches) / sum(b.seconds[name] for b in batches))
    lengths = {
        name: sum(b.out[name].report.emitted for b in batches) / max(sum(b.out[name].report.rounds for b in batches), 1)
        for name in ways
    }
    return {
        candidate: {
            "tokens_per_second": statistics.median(rates[name]),
            "each_time": rates[name],
            "mean_acceptance_length": lengths[name],
        }
        for candidate, name in zip(candidates, ways, strict=True)
    }


def _held_to_the_grid(usual: list[Prospect], rates: dict[Candidate, dict[str, Any]]) -> dict[str, Any]:
    """What tuning without the grid takes, by decoding once with each, and its share of the best tree's median rate."""
    from dataclasses import asdict

    taken = max((one.candidate for one in usual), key=lambda one: rates[one]["each_time"][0])
    best = max(rates.values(), key=lambda one: one["tokens_per_second"])
    median = best["tokens_per_second"]
    spread = [one / median for one in best["each_time"]]
    share = rates[taken]["tokens_per_second"] / median
    return asdict(taken) | {"share": share, "least": min(spread), "most": max(spread)}


def _choice(best: Prospect, rates: dict[Candidate, dict[str, Any]]) -> dict[str, Any]:
    """What drafter.json keeps for one size of batch: the `decode` options, and what they gave here."""
    from dataclasses import asdict

    from paceline.decode.pays import PLAIN

    here, plain = rates[best.candidate], rates[PLAIN]["tokens_per_second"]
    return asdict(best.candidate) | {
        "tokens_per_second": here["tokens_per_second"],
        "plain_tokens_per_second": plain,
        "speedup": here["tokens_per_second"] / plain,
        "mean_acceptance_length": here["mean_acceptance_length"],
    }


def _name(candidate: dict[str, Any]) -> str:
    """`dynamic 32 nodes, depth 6, node_cost 0.02, depth_cost 0.2`."""
    if candidate["tree"] == "plain":
        return "no drafts"
    costs = [f"{name} {candidate[name]:.3g}" for name in ("node_cost", "depth_cost") if candidate[name]]
    return ", ".join([f"{candidate['tree']} {candidate['nodes']} nodes", f"depth {candidate['depth']}", *costs])


def _show(console: Console, rows: int, tried: list[dict[str, Any]], choice: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="acceptance: tokens a pass of the target")
    table.add_column(f"batch {rows}", no_wrap=True)
    for name in ("tokens/s, foretold", "measured", "acceptance, foretold", "measured"):
        table.add_column(name, justify="right")
    for one in sorted(tried, key=lambda one: -one[MEASURED]["tokens_per_second"]):
        here = one[MEASURED]
        rates = f"{one['tokens_per_second']:.1f}", f"{here['tokens_per_second']:.1f}"
        lengths = f"{one['mean_acceptance_length']:.2f}", f"{here['mean_acceptance_length']:.2f}"
        table.add_row(_name(one), *rates, *lengths)
    console.print(table)
    console.print(f"batch {rows}: {_name(choice)}: {choice['speedup']:.2f} times plain decoding", style="bold")


def draw(path: Path, batches: dict[str, Any], choices: dict[str, Any]) -> None:
    """tune.png: tokens a second against nodes, foretold (lines) and measured (points); speed-up against batch size.

    Nothing without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(5.2 * (len(batches) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(batches) + 1, squeeze=False)[0]
    for axes, (rows, batch) in zip(panels, batches.items(), strict=True):
        for number, kind in enumerate(("chain", "static", "dynamic")):
            best: dict[int, float] = {}
            for one in batch[FORETOLD]:
                if one["tree"] == kind:
                    best[one["nodes"]] = max(best.get(one["nodes"], 0.0), one["tokens_per_second"])
            if best:
                axes.plot(*zip(*sorted(best.items()), strict=True), color=f"C{number}", label=f"{kind}, foretold")
            points = [(o["nodes"], o[MEASURED]["tokens_per_second"]) for o in batch[MEASURED] if o["tree"] == kind]
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=f"C{number}", label=f"{kind}, measured")
        axes.axhline(
            choices[rows]["plain_tokens_per_second"], color="black", linewidth=0.8, label="no drafts, measured"
        )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("nodes of a pass at most, the root included (chain: draft tokens + 1)")
        axes.set_ylabel("tokens a second")
        axes.set_title(f"batch {rows}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    last.plot([int(rows) for rows in choices], [choice["speedup"] for choice in choices.values()], "o-")
    last.axhline(1.0, color="black", linewidth=0.8)
    last.set_xscale("log", base=2)
    last.set_xlabel("batch size")
    last.set_title("times as fast as plain decoding, with the tree that pays there", fontsize=10)
    last.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


main = entry("tune", run)

if __name__ == "__main__":
    main()
