"""Pages for people: a report, a watched answer, a training run. HTML that needs nothing else; html/ has the templates.

Knows the plain types of report.json, watch.json and metrics.jsonl. Does not know models, tokenizers or measurement.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paceline.decode.charts import chart, short

# How a drafter goes about it, and what drafts the token at depth {}; of one from outside it is said in general.
METHODS = {
    "medusa": ("Heads on the target's last hidden state guess a place further each, blind to each other.", "head {}"),
    "hydra_heads": (
        "Heads on the target's last hidden state guess one after the other, and read what was drafted before them.",
        "head {}",
    ),
    "eagle": (
        "One decoder layer reads the target's hidden states, and then its own guess at the target's next state.",
        "layer, pass {}",
    ),
    "mtp": (
        "A decoder layer for each depth reads the trunk's output; the target's own head reads what it makes of it.",
        "depth {}",
    ),
    "mtp_sequential": (
        "A module for each depth reads what the one before handed on, and the token drafted last.",
        "module, depth {}",
    ),
    "draft": (
        "A small language model writes on by itself; it reads tokens only, none of the target's states.",
        "draft model, {}",
    ),
    "ngram": (
        "What followed the last occurrence of the text's own ending is proposed again; nothing is trained.",
        "copied, {}",
    ),
    "none": ("Nothing is drafted: every pass of the target gives one token.", "{}"),
}
UNKNOWN = "-"  # a figure there is not


def number(name: str, value: Any) -> str:
    """A figure as it is shown, by the end of its name: rates in per cent, the unknown as a dash."""
    if isinstance(value, list):
        return " ".join(number(name, part) for part in value)
    if value is None:
        return UNKNOWN
    if name.endswith("_rate"):
        return f"{value:.0%}"
    return f"{value:.{1 if name.endswith(('_ms', '_second')) else 4 if name.endswith('_kl') else 2}f}"


def judged(speedup: list[float] | None) -> str:
    """In words, what the interval of a speed-up says."""
    if speedup is None:
        return "too few prompts to tell"
    low, high = speedup
    return "faster" if low > 1 else "slower" if high < 1 else "no faster and no slower that could be told"


def called(target: dict[str, Any]) -> str:
    """What people call a target by: the name of one that comes along, of any other its folder or hub id."""
    return target["path"] if target["name"] == "hf" else target["name"]


def method(about: dict[str, Any]) -> dict[str, Any]:
    """What the viewer draws of a drafter. about: `trace.drafter` of report.json."""
    name, _, lookup = about["name"].partition(" and ")
    idea, part = METHODS.get(name, ("The drafter proposes tokens.", "depth {}"))
    if lookup:
        idea += " Beside it, what followed an earlier repetition is drafted."
    return {"idea": idea, "part": part, "trunk": about["reads_target"], "chained": about["reads_tokens"]}


def report_page(
    report: dict[str, Any], facts: dict[str, str], verdict: list[tuple[str, str]], meanings: dict[str, dict[str, str]]
) -> str:
    """report.json as a page.

    Args:
        facts: what was measured, in words, by name. verdict: lines on exactness, each `good`, `bad` or `` before it.
        meanings: of each figure, by section of the report.
    """
    accepted = [report["acceptance"]["num_drafts"], *report["acceptance"]["num_accepted_tokens_per_pos"], 0]
    trace = report["trace"]
    return _template("report.html.jinja").render(
        report=report,
        facts=facts,
        verdict=verdict,
        meanings=meanings,
        histogram=[more - fewer for more, fewer in pairwise(accepted)],
        trace=trace if trace and trace["prompts"] else None,
        method=method(trace["drafter"]) if trace else None,
    )


def watch_page(about: dict[str, Any], summary: str) -> str:
    """watch.json as a page, with one line on what there is to see."""
    trace = about["trace"]
    return _template("watch.html.jinja").render(
        about=about, summary=summary, trace=trace, method=method(trace["drafter"])
    )


def training_page(config: dict[str, Any], yaml: str, lines: list[dict[str, Any]]) -> str:
    """metrics.jsonl as a page. config: the run's options, also as the text `yaml`."""
    steps = [line for line in lines if "loss" in line]
    decoded = [line for line in lines if "mean_acceptance_length" in line]
    best = max(decoded, key=lambda line: line["mean_acceptance_length"], default=None)
    prompts = best and best.get("decoded", "held-out prompts")  # the first runs did not say how many
    last = steps[-1] if steps else None
    depths = len(steps[0]["loss"]) if steps else 0

    def by_depth(name: str) -> dict[str, list[tuple[float, float]]]:
        return {
            f"{k + 1}": [(line["tokens"], line[name][k]) for line in steps if line[name][k] is not None]
            for k in range(depths)
        }

    def one(name: str, of: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
        return {"": [(line["tokens"], line[name]) for line in of if line[name] is not None]}

    charts = [
        chart("Loss by depth (nats a token)", by_depth("loss")),
        chart("Top-1 accuracy by depth, training text", by_depth("accuracy")),
        chart("Mean acceptance length, decoded", one("mean_acceptance_length", decoded), dots=True),
        chart("Learning rate", one("lr", steps)),
        chart("Tokens a second", one("tokens_per_second", steps)),
    ]
    headline = [
        {
            "title": "best mean acceptance length",
            "value": UNKNOWN if best is None else f"{best['mean_acceptance_length']:.2f}",
            "meaning": "Nothing decoded yet." if best is None else f"At step {best['step']}, on {prompts}.",
        },
        {
            "title": "tokens read",
            "value": UNKNOWN if last is None else short(last["tokens"]),
            "meaning": "No step yet." if last is None else f"In {last['step']} steps.",
        },
        {
            "title": "loss at depth 1",
            "value": UNKNOWN if last is None else number("", last["loss"][0]),
            "meaning": "Nats a token, over the last steps.",
        },
    ]
    return _template("training.html.jinja").render(
        config=config,
        yaml=yaml,
        summary="method {}, target {}, data {}".format(
            config["method"]["name"], called(config["target"]), config["data"]["source"]
        ),
        headline=headline,
        charts=[drawn for drawn in charts if drawn is not None],
        decoded=decoded,
        prompts=prompts,
    )


@cache
def _environment() -> Environment:
    folder = Path(__file__).with_name("html")
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"figure": number, "judged": judged, "called": called}
    made.filters["plainly"] = plainly
    return made


def plainly(value: Any) -> str:
    """A setting in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plainly(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(map(plainly, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None else str(value)


def _template(name: str) -> Any:
    return _environment().get_template(name)
