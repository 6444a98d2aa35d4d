"""What a drafter is worth, in the decoder: acceptance, speed against plain decoding, and whether the output is exact.

    python scripts/evaluate.py drafter=outputs/demo/export eval.prompts=demo

Owns the measurement, report.json, its table and its page. Does not know how drafts are made or judged.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.data.prompts import Prompt
    from paceline.decode import AcceptanceReport, Generation
    from paceline.scripts.decoding import Runtime

NEAR_TIE = 2e-2  # of the largest logit: what rounding in 16 bits can turn round
RESAMPLES = 1000
STALL = 3  # times the usual time of a round, over a whole answer, and half a second of it: what no text makes of it
SPEED = {
    "tokens_per_second": "new tokens / wall-clock seconds with the drafter, reading the prompt included",
    "plain_tokens_per_second": "the same loop and prompts without a drafter (with plain=FILE: plain_prompts of them)",
    "hf_generate_tokens_per_second": "transformers' own generate, greedy, prompt by prompt (of hf_prompts of them)",
    "speedup": "tokens_per_second / plain_tokens_per_second, on the same prompts",
    "speedup_predicted": "mean_acceptance_length * target_pass_ms / (verify_pass_ms + draft_ms), from the times below",
    "speedup_vs_hf_generate": "tokens_per_second / hf_generate_tokens_per_second, on the same prompts",
    "target_pass_ms": "one target pass of plain decoding: one token a prompt (median over prompts)",
    "verify_pass_ms": "one target pass over a whole draft (median over prompts)",
    "draft_ms": "drafting for one such pass (median over prompts)",
    "outside_share": "of the time of all rounds, what was spent neither in the target's passes nor in drafting",
}


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import prompt_ids
    from paceline.data.prompts import prompts
    from paceline.decode import drift
    from paceline.decode.pages import report_page
    from paceline.decode.progress import progress
    from paceline.scripts.decoding import runtime, setting, write_json, write_whole
    from paceline.scripts.watch import LONGEST, traces

    asked = prompts(cfg.eval.prompts, cfg.eval.limit)
    ready = runtime(cfg, cfg.eval.batch)
    ids = [prompt_ids(ready.tokenizer, prompt.messages) for prompt in asked]
    _fit(cfg, ready, asked, ids)
    ways = _ways(cfg, ready)
    known = _known(cfg, ready, ids, ways[PLAIN]) if cfg.plain_file else None
    if known is not None and cfg.plain_prompts is None:
        del ways[PLAIN]
    some = {GENERATE: cfg.hf_prompts, PLAIN: cfg.plain_prompts}
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log has room
    console.print(f"{len(ids)} prompts, at most {cfg.eval.max_new_tokens} new tokens each: {', '.join(ways)}")
    with progress("prompts", len(ids)) as bar:
        batches = []
        for batch in measured(ways, ids, cfg.eval.max_new_tokens, cfg.eval.batch, some, known):
            batches.append(batch)
            rates = [f"{_rate(batches, way):.1f} tokens/s {way}" for way in (DRAFTED, PLAIN) if way in ways]
            bar.advance(", ".join(rates), len(batch.rows))
    target = ready.decoder.target
    answers = [(ids[row], answer) for batch in batches for row, answer in zip(batch.rows, batch.alone, strict=True)]
    moved = None if target is ready.original else drift(ready.original, target, answers).as_dict()
    report = {
        "drafter": ready.drafter,
        "target": ready.target,
        "setting": setting(cfg, ready)
        | {
            "batch": cfg.eval.batch,
            "prompts": cfg.eval.prompts,
            "num_prompts": len(ids),
            "max_new_tokens": cfg.eval.max_new_tokens,
            "plain": cfg.plain_file,
            "plain_prompts": cfg.plain_prompts,
        },
        **figures(batches, asked, [len(one) for one in ids], cfg.seed),
        "exactness": exactness(cfg, ready, asked, ids, batches),
        "drift": moved,
        "trace": None,
    }
    if cfg.traces:
        chosen = [i * len(ids) // cfg.traces for i in range(min(cfg.traces, len(ids)))]
        alone = {row: plain for batch in batches for row, plain in zip(batch.rows, batch.alone, strict=True)}
        watched = {row: (asked[row], ids[row], alone[row]) for row in chosen}
        report["trace"] = traces(ready, watched, min(LONGEST, cfg.eval.max_new_tokens))
    file = Path(cfg.out) / "report.json"
    write_json(file, report)
    verdict = [
        ("bad" if "red" in style else "good" if "green" in style else "", line) for style, line in _verdict(report)
    ]
    write_whole(file.with_suffix(".html"), report_page(report, _facts(report), verdict, _meanings()))
    show(console, report)
    console.print(f"all figures, prompt by prompt: {file}", highlight=False, soft_wrap=True)
    console.print(
        f"the same to look at, with rounds to step through: {file.with_suffix('.html')}",
        highlight=False,
        soft_wrap=True,
    )
    if faults(report):
        raise SystemExit(1)


def _fit(cfg: Any, ready: Runtime, asked: Sequence[Prompt], ids: list[list[int]]) -> None:
    """Refuse, before anything is measured, a prompt that is too long for the target's window or the draft model's."""
    target, drafter, shape = ready.decoder.target, ready.decoder.drafter, ready.decoder.shape
    longest = max(range(len(ids)), key=lambda row: len(ids[row]))
    needed = len(ids[longest]) + cfg.eval.max_new_tokens + shape.nodes
    own = None if drafter is None else drafter.window
    for whose, window, room in (("target", target.window, needed), ("draft model", own, needed + shape.unfolded)):
        if window is not None and room > window:
            raise Refusal(
                f"eval.prompts: prompt {asked[longest].id} with its answer and a draft needs {room} tokens, "
                f"this {whose}'s window is {window}: leave it out, or lower eval.max_new_tokens"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Measuring

DRAFTED, PLAIN, GENERATE = "drafted", "plain", "transformers' generate"
Way = Callable[[list[int], list[list[int]], int], "Generation"]  # (rows, their prompts' ids, most new tokens)
WARM_UP = 8  # tokens


@dataclass
class Batch:
    """Prompts that were decoded together, in every way: what came out and the seconds on the wall clock.

    alone: the plain tokens of each prompt decoded by itself, which drafted output is compared with.
    """

    rows: list[int]
    out: dict[str, Generation]
    seconds: dict[str, float]
    alone: list[list[int]]

    def tokens(self, way: str) -> int:
        return sum(map(len, self.out[way].tokens))


def _ways(cfg: Any, ready: Runtime) -> dict[str, Way]:
    import torch

    from paceline.decode import Generation

    target = ready.decoder.target

    def by(decoder: Any) -> Way:
        # noise is keyed by the prompt's number: sampled text does not depend on who else is in the batch
        return lambda rows, ids, limit: decoder.generate(ids, limit, sampler=ready.sampler, eos=ready.stops, rows=rows)

    def generate(rows: list[int], ids: list[list[int]], limit: int) -> Generation:
        new = target.hf_generate(torch.tensor(ids, device=target.device), limit, ready.stops)
        return Generation([new.tolist()], [])

    ways = {DRAFTED: by(ready.decoder), PLAIN: by(ready.plain)}
    # transformers samples with other noise and pads batches: only greedy, prompt by prompt, is it the same work
    alike = ready.sampler.greedy and not ready.sampler.looks_back and cfg.eval.batch == 1
    if cfg.hf_baseline and cfg.plain_file is None and alike:
        ways[GENERATE] = generate
    return ways


def measured(
    ways: dict[str, Way],
    ids: list[list[int]],
    limit: int,
    size: int,
    some: Mapping[str, int | None] = MappingProxyType({}),
    known: list[list[int]] | None = None,
    plain: str = PLAIN,
) -> Iterator[Batch]:
    """Decode batches of `size` prompts in every way in turn; who begins rotates, so that noise hits all alike.

    some: of ways that decode only some of the prompts, evenly spread: how many; None for all.
    known: the plain tokens of each prompt by itself, where they need not be computed; else `plain` is the way to them.
    """
    chosen = {way: {i * len(ids) // count for i in range(count)} for way, count in some.items() if count is not None}
    for way in ways.values():  # the first pass of anything is slow
        way([0], ids[:1], min(limit, WARM_UP))
    for number, first in enumerate(range(0, len(ids), size)):
        rows = list(range(first, min(first + size, len(ids))))
        batch = Batch(rows, {}, {}, [])
        names = [name for name in ways if name not in chosen or chosen[name].intersection(rows)]
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            start = time.perf_counter()
            batch.out[name] = ways[name](rows, [ids[row] for row in rows], limit)  # lists: a GPU has been waited for
            batch.seconds[name] = time.perf_counter() - start
        if known is not None:
            batch.alone = [known[row] for row in rows]
        elif size == 1:
            batch.alone = batch.out[plain].tokens
        else:
            batch.alone = [ways[plain]([row], [ids[row]], limit).tokens[0] for row in rows]
        yield batch


# ---------------------------------------------------------------------------------------------------------------------
# The target's own outputs, computed once for many drafters


def _known(cfg: Any, ready: Runtime, ids: list[list[int]], plain: Way) -> list[list[int]]:
    """The target's own tokens for each prompt by itself: read from cfg.plain_file, or decoded and written there.

    Raises Refusal where the file was made under other settings.
    """
    from paceline.decode.progress import progress
    from paceline.scripts.decoding import write_json

    file, made = Path(cfg.plain_file), _made(cfg, ready, ids)
    if file.exists():
        return _read(file, made)
    tokens: list[list[int]] = []
    with progress(PLAIN, len(ids)) as bar:
        for batch in measured({PLAIN: plain}, ids, cfg.eval.max_new_tokens, 1):
            tokens += batch.alone
            bar.advance()
    write_json(file, {"made": made, "tokens": tokens})
    return tokens


def _made(cfg: Any, ready: Runtime, ids: list[list[int]]) -> dict[str, Any]:
    """What the target's own outputs depend on, in plain types, under names that a refusal can show."""
    return {
        "target fingerprint": ready.target["fingerprint"],
        "target.quantize": ready.target["quantize"],
        "dtype": cfg.dtype,
        "eval.prompts": Path(cfg.eval.prompts).name,
        "number of prompts": len(ids),
        "sha256 of the prompts' ids": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "eval.max_new_tokens": cfg.eval.max_new_tokens,
        "stop ids": sorted(ready.stops),
        **{f"decode.{name}": value for name, value in asdict(ready.sampler).items()},
        "decode.exact": ready.exact,
    }


def _read(file: Path, made: dict[str, Any]) -> list[list[int]]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        theirs, tokens = dict(held["made"]), [list(row) for row in held["tokens"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refusal(f"plain: {file} holds no outputs of a target ({error!r}); name another file") from None
    for name, ours in made.items():
        if theirs.get(name) != ours:
            raise Refusal(f"plain: {file} was made with {name}={theirs.get(name)}, not {ours}; name another file")
    if len(tokens) != made["number of prompts"]:
        raise Refusal(f"plain: {file} holds {len(tokens)} outputs of {made['number of prompts']}; name another file")
    return tokens


# ---------------------------------------------------------------------------------------------------------------------
# Figures: sums over prompts, divided once


def figures(batches: list[Batch], asked: Sequence[Prompt], lengths: list[int], seed: int) -> dict[str, Any]:
    """`acceptance`, `speed`, `time`, `by_category`, `by_context`, `intervals`, `prompts`, `stalled` of report.json.

    lengths: tokens of each prompt.
    """
    reports = [report for batch in batches for report in batch.out[DRAFTED].reports]
    categories = dict.fromkeys(prompt.category for prompt in asked)
    both = [batch for batch in batches if PLAIN in batch.seconds]
    return {
        "acceptance": _sum(reports).as_dict(),
        "speed": _speed(batches, _sum(reports).mean_acceptance_length),
        "time": {"drafted": _time(batches, DRAFTED), "plain": _time(both, PLAIN) if both else None},
        "by_category": {
            category: _category(batches, reports, [i for i, p in enumerate(asked) if p.category == category])
            for category in categories
        },
        "by_context": _by_context(batches, lengths),
        "intervals": {
            "confidence": 0.95,
            "resamples": RESAMPLES,
            "seed": seed,
            "mean_acceptance_length": interval([[r.emitted for r in reports]], [[r.rounds for r in reports]], seed),
            "speedup": interval(
                [[b.tokens(DRAFTED) for b in both], [b.seconds[PLAIN] for b in both]],
                [[b.tokens(PLAIN) for b in both], [b.seconds[DRAFTED] for b in both]],
                seed,
            ),
        },
        "prompts": [
            {
                "id": asked[row].id,
                "category": asked[row].category,
                "batch": number,
                "tokens": len(batch.out[DRAFTED].tokens[place]),
                "rounds": reports[row].rounds,
                "accepted": reports[row].num_accepted_tokens,
                "seconds": batch.seconds[DRAFTED],
                "plain_seconds": batch.seconds.get(PLAIN),
                "hf_generate_seconds": batch.seconds.get(GENERATE),
            }
            for number, batch in enumerate(batches)
            for place, row in enumerate(batch.rows)
        ],
        "stalled": stalled(batches, asked),
    }


def stalled(batches: list[Batch], asked: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Answers whose rounds took STALL times the median answer's, the prompt's pass apart: the machine was elsewhere.

    Their time stays in every figure; who reads one should know.
    """
    found = []
    for way in (DRAFTED, PLAIN):
        decoded = [batch for batch in batches if way in batch.seconds and batch.out[way].passes]
        rounds = [batch.seconds[way] - batch.out[way].seconds.get("prefill", 0.0) for batch in decoded]
        each = [seconds / batch.out[way].passes for seconds, batch in zip(rounds, decoded, strict=True)]
        usual = statistics.median(each) if each else 0.0
        found += [
            {"prompt": asked[batch.rows[0]].id, "way": way, "times": one / usual}
            for batch, seconds, one in zip(decoded, rounds, each, strict=True)
            if one > STALL * usual and seconds - usual * batch.out[way].passes > 0.5
        ]
    return found


def _sum(reports: Iterable[AcceptanceReport]) -> AcceptanceReport:
    first, *others = reports
    return sum(others, first)


def _rate(batches: Iterable[Batch], way: str) -> float | None:
    """Tokens a second; None where nothing was decoded so."""
    timed = [batch for batch in batches if way in batch.seconds]
    return sum(batch.tokens(way) for batch in timed) / sum(batch.seconds[way] for batch in timed) if timed else None


def _times(batches: Iterable[Batch], way: str) -> float | None:
    """How many times as fast as `way` drafted decoding is, on what was decoded both ways."""
    both = [batch for batch in batches if way in batch.seconds]
    drafted, other = _rate(both, DRAFTED), _rate(both, way)
    return drafted / other if drafted is not None and other else None


def _speed(batches: list[Batch], length: float | None) -> dict[str, float | None]:
    def milliseconds(way: str, phase: str) -> float | None:
        outs = [batch.out[way] for batch in batches if way in batch.out]
        passes = [out.seconds[phase] / out.passes for out in outs if out.passes]
        return 1e3 * statistics.median(passes) if passes else None

    plain, verify, draft = (
        milliseconds(way, phase) for way, phase in ((PLAIN, "target"), (DRAFTED, "target"), (DRAFTED, "draft"))
    )
    predicted = None
    if length is not None and plain is not None and verify is not None and draft is not None:
        predicted = length * plain / (verify + draft)
    spent = _time(batches, DRAFTED)
    rounds = spent["draft"] + spent["target"] + spent["rest"]
    return {
        "tokens_per_second": _rate(batches, DRAFTED),
        "plain_tokens_per_second": _rate(batches, PLAIN),
        "hf_generate_tokens_per_second": _rate(batches, GENERATE),
        "speedup": _times(batches, PLAIN),
        "speedup_predicted": predicted,
        "speedup_vs_hf_generate": _times(batches, GENERATE),
        "target_pass_ms": plain,
        "verify_pass_ms": verify,
        "draft_ms": draft,
        "outside_share": spent["rest"] / rounds if rounds else None,
    }


def _time(batches: list[Batch], way: str) -> dict[str, float]:
    """Seconds on the wall clock by what they were spent on; see report.html."""
    spent = dict.fromkeys(("prompt", "draft", "target"), 0.0)
    for batch in batches:
        for name, phase in (("prompt", "prefill"), ("draft", "draft"), ("target", "target")):
            spent[name] += batch.out[way].seconds.get(phase, 0.0)
    return spent | {"rest": sum(batch.seconds[way] for batch in batches) - sum(spent.values())}


def _by_context(batches: list[Batch], lengths: list[int]) -> list[dict[str, Any]]:
    """Rounds sorted by how much text they go on from, in ranges that double."""
    rounds: Counter[int] = Counter()
    emitted: Counter[int] = Counter()
    for batch in batches:
        for row, gained in zip(batch.rows, batch.out[DRAFTED].gained, strict=True):
            context = lengths[row] + 1  # the prompt's pass gave a token
            for tokens in gained:
                doubled = context.bit_length()
                rounds[doubled] += 1
                emitted[doubled] += tokens
                context += tokens
    return [
        {
            "from": 1 << doubled - 1,
            "to": (1 << doubled) - 1,
            "rounds": rounds[doubled],
            "mean_acceptance_length": emitted[doubled] / rounds[doubled],
        }
        for doubled in sorted(rounds)
    ]


def _category(batches: list[Batch], reports: list[AcceptanceReport], rows: list[int]) -> dict[str, Any]:
    """Seconds belong to a batch: where it holds several prompts, a category has no speed of its own."""
    whole = _sum(reports[row] for row in rows)
    alone = [batch for batch in batches if len(batch.rows) == 1 and batch.rows[0] in rows]
    timed = len(alone) == len(rows)
    return {
        "prompts": len(rows),
        "mean_acceptance_length": whole.mean_acceptance_length,
        "draft_acceptance_rate": whole.draft_acceptance_rate,
        "tokens_per_second": _rate(alone, DRAFTED) if timed else None,
        "speedup": _times(alone, PLAIN) if timed else None,
    }


def interval(over: list[list[float]], under: list[list[float]], seed: int) -> list[float] | None:
    """95% percentile bootstrap of (product of the sums of `over`) / (that of `under`); every list has one entry a unit.

    Source: Efron 1979. None where there are fewer than two units, or nothing to divide by.
    """
    import numpy as np

    units = len(over[0])
    if units < 2 or not all(map(sum, under)):
        return None
    drawn = np.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    top, bottom = (np.prod([np.array(column)[drawn].sum(1) for column in columns], axis=0) for columns in (over, under))
    some = bottom > 0
    return np.quantile(top[some] / bottom[some], [0.025, 0.975]).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Exactness


def exactness(
    cfg: Any, ready: Runtime, asked: Sequence[Prompt], ids: list[list[int]], batches: list[Batch]
) -> dict[str, Any]:
    """Drafted against plain output, token for token; `reason` says why there is nothing to compare."""
    if not ready.sampler.greedy and cfg.decode.verify != "walk":
        promise = "has the same distribution, not the same tokens" if cfg.decode.verify == "reject" else "is lossy"
        reason = f"sampled output under decode.verify={cfg.decode.verify} {promise}"
        return {"compared": 0, "identical": None, "first_differences": [], "reason": reason}
    pairs = [
        (row, plain, drafted)
        for batch in batches
        for row, plain, drafted in zip(batch.rows, batch.alone, batch.out[DRAFTED].tokens, strict=True)
    ]
    differences = [
        {"prompt": asked[row].id} | _first_difference(ready, ids[row], plain, drafted)
        for row, plain, drafted in pairs
        if plain != drafted
    ]
    return {
        "compared": len(pairs),
        "identical": len(pairs) - len(differences),
        "first_differences": differences,
        "reason": None,
    }


def _first_difference(ready: Runtime, ids: list[int], plain: list[int], drafted: list[int]) -> dict[str, Any]:
    """Where two outputs part, and how sure the target was there: its logits after the prompt and the common tokens.

    near_tie: both tokens' logits lie within NEAR_TIE (of the largest logit) of the best, or within twice of what
    rounding alone moved a logit by here (`rounding`: the same text, read token by token and at once), so that it may
    choose either. None for sampled tokens, which noise chooses too.
    """
    import torch

    position, (first, second) = next(
        (i, pair) for i, pair in enumerate(zip_longest(plain, drafted)) if pair[0] != pair[1]
    )
    target = ready.decoder.target
    with torch.no_grad():
        _, last = target(torch.tensor([ids + plain[:position]], device=target.device))
        logits = target.head(last[0, -1])[: target.vocab].float()
        if ready.sampler.looks_back:
            logits = ready.sampler.adjusted(logits[None, None], [(ids, plain[:position])], ready.stops)[0, 0]
    best, runner_up = logits.topk(2).values.tolist()
    scale = float(logits.abs().max())
    chosen = [float(logits[token]) for token in (first, second) if token is not None]
    gap = best - min(chosen)
    near = len(chosen) == 2 and gap < NEAR_TIE * scale
    rounding = None
    if not near and len(chosen) == 2 and last.dtype != torch.float32:
        rounding = _rounding(target, ids, plain[:position], logits)
        near = gap < 2 * rounding
    return {
        "position": position,
        "top2_gap": best - runner_up,
        "logit_scale": scale,
        "plain_token": first,
        "drafted_token": second,
        "rounding": rounding,
        "near_tie": near if ready.sampler.greedy else None,
    }


def _rounding(target: Any, ids: list[int], tokens: list[int], at_once: Any) -> float:
    """Greatest change of a logit when the tokens after the prompt are read one by one, as plain decoding reads them."""
    import torch

    with torch.no_grad():
        cache = target.new_cache(1, len(ids) + len(tokens) + 1)
        for words in (ids, *([token] for token in tokens)):
            _, last = target(torch.tensor([words], device=target.device), cache=cache)
            count = torch.tensor([len(words)], device=target.device)
            target.keep(cache, torch.empty(1, 0, dtype=torch.long, device=target.device), count)
        return float((target.head(last[0, -1])[: target.vocab].float() - at_once).abs().max())


def faults(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The differences that rounding does not excuse: all where bits are promised, else those that are no near-tie."""
    differences = report["exactness"]["first_differences"]
    return [d for d in differences if report["setting"]["exact"] or d["near_tie"] is False]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def show(console: Console, report: dict[str, Any]) -> None:
    """What the report says: each figure under its name in report.json, with its meaning."""
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    from paceline.decode.pages import number

    console.print(Rule())
    facts = Table.grid(padding=(0, 2))
    for name, fact in _facts(report).items():
        facts.add_row(Text(name, style="bold"), Text(fact))
    console.print(facts)
    table = _table("", "", "95% interval")
    for section, meanings in _meanings().items():
        if report[section] is None:
            continue
        table.add_row(Text(section, style="bold"))
        for name, meaning in meanings.items():
            spread = report["intervals"].get(name)
            table.add_row(
                Text.assemble(name, "\n", (meaning, "dim")),
                number(name, report[section][name]),
                "" if spread is None else "{:.2f} to {:.2f}".format(*spread),
            )
        table.add_section()
    console.print(table)
    columns = ("mean_acceptance_length", "tokens_per_second", "speedup")
    table = _table("by category", "prompts", *columns)
    for category, values in report["by_category"].items():
        table.add_row(Text(category), str(values["prompts"]), *(number(name, values[name]) for name in columns))
    console.print(table)
    for style, line in _verdict(report):
        console.print(Text(line, style=style))


def _table(first: str, *numbers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(first, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _meanings() -> dict[str, dict[str, str]]:
    """Of each figure, by section of the report."""
    from paceline.decode import DEFINITIONS, DRIFT

    return {"acceptance": DEFINITIONS, "speed": SPEED, "drift": DRIFT}


def _facts(report: dict[str, Any]) -> dict[str, str]:
    from paceline.decode.pages import called, judged

    drafter, target, how, speed = (report[name] for name in ("drafter", "target", "setting", "speed"))
    trained = f", {drafter['parameters'] / 1e6:.1f} million parameters, {drafter['path']}" if drafter["path"] else ""
    trained_too = "" if target["trunk"] == "frozen" else f" as it was trained with the drafter ({target['trunk']})"
    kind = how["tree"] if how["tree"] == "chain" else f"{how['tree']} tree"
    draft = f"{kind} of depth {{depth}}, {{nodes}} nodes a pass, drafts={{drafts}}, verify={{verify}}"
    choice = (
        "temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}" if how["temperature"] else "greedy"
    )
    looks_back = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_new_tokens": 0}
    choice = ", ".join([choice, *(f"{name} {how[name]}" for name, off in looks_back.items() if how[name] != off)])
    times, length = speed["speedup"], report["acceptance"]["mean_acceptance_length"]
    results = []
    if times is not None:
        spread = report["intervals"]["speedup"]
        between = "" if spread is None else " ({:.2f} to {:.2f})".format(*spread)
        results.append(f"{times:.2f}{between} times the speed without a drafter: {judged(spread)}")
    if length is not None:
        results.append(f"{length:.2f} tokens per pass of the target instead of 1")
    return {
        "drafter": drafter["name"] + trained,
        "target": f"{called(target)}{trained_too}, {how['dtype']}, on {how['device']}: {how['machine']}",
        "decoding": f"{draft}; {choice}; {{num_prompts}} prompts ({{prompts}}), batch {{batch}}".format(**how),
        "result": "; ".join(results),
    }


def _verdict(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines on the machine and on exactness, with their style."""
    exact, how = report["exactness"], report["setting"]
    for stall in report["stalled"]:
        slow = f"{stall['way']} rounds of prompt {stall['prompt']} took {stall['times']:.1f} times what is usual here"
        yield "yellow", f"{slow}: the machine did something else; trust speedup_predicted, or measure again"
    if how["lossy"]:
        yield "bold yellow", "LOSSY: verify=typical also accepts drafts that the target would not have chosen."
    if exact["reason"]:
        yield "", f"exactness: not compared, {exact['reason']}"
        return
    wrong = faults(report)
    excused = [difference for difference in exact["first_differences"] if difference not in wrong]
    yield (
        "bold" if exact["first_differences"] else "bold green",
        f"exactness: {exact['identical']} of {exact['compared']} answers are, token for token, the target's own",
    )
    if excused:
        gap, scale = (max(difference[name] for difference in excused) for name in ("top2_gap", "logit_scale"))
        tie = f" at a near-tie (top-2 logit gap at most {gap:.2g}, logits up to {scale:.0f})"
        where = f"{'' if how['temperature'] else tie} where rounding in {how['dtype']} decides"
        yield "", f"{len(excused)} part from it{where}; dtype=float32 rounds finer"
    if wrong:
        yield "bold red", f"NOT THE TARGET'S OUTPUT: {len(wrong)} answers differ, and not by rounding. They part at"
    for fault in wrong[:10]:
        tokens = f"drafted {fault['drafted_token']}, plain {fault['plain_token']}"
        logits = f"top-2 logit gap {fault['top2_gap']:.3g} of {fault['logit_scale']:.3g}"
        yield "red", f"  prompt {fault['prompt']}, new token {fault['position']}: {tokens}, {logits}"


main = entry("evaluate", run)

if __name__ == "__main__":
    main()
