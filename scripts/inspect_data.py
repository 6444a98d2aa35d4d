"""Look at data before a drafter is trained on it: counts, lengths, masks, and what a draft vocabulary would cover.

    python scripts/inspect_data.py data=jsonl data.path=chats.jsonl target=smollm2

Shows a table and a few examples with their masks; writes inspect.json, inspect.png and inspect.html, a page that needs
nothing else. Reads a target's tokenizer only, never its weights.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry

if TYPE_CHECKING:
    from paceline.data.conversations import Dataset, Example, Skipped

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # draft vocabularies
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
SHOWN = 3  # examples in the terminal


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import coloured, known_ids, load, load_tokenizer
    from paceline.decode.progress import progress
    from paceline.models.embedded import folder
    from paceline.scripts.decoding import write_json

    tokenizer = load_tokenizer(folder(cfg.target.name, cfg.target.path), cfg.target.trust_remote_code)
    with progress("conversations", cfg.data.limit) as bar:
        data = load(tokenizer, **cfg.data.keywords(), watch=bar.over)
    about, sizes = measured(data, known_ids(tokenizer))
    out, console = Path(cfg.out), Console(soft_wrap=True, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "inspect.json", about)
    picture = draw(about, *sizes)
    if picture:
        (out / "inspect.png").write_bytes(picture)
    # evenly spread, the first and the last among them
    count = min(cfg.examples, len(data.train))
    chosen = [i * (len(data.train) - 1) // max(count - 1, 1) for i in range(count)]
    (out / "inspect.html").write_text(page(about, data, chosen, tokenizer, cfg.width, picture), encoding="utf-8")

    for name, value in about["counts"].items():
        console.print(f"{name:>24}  {value}")
    for report in (data.skipped, data.unsupervised, data.cut):
        if report:
            console.print(str(report), style="yellow")
    points = ", ".join(f"{point['ids']} ids {point['covered']:.1%}" for point in about["coverage"])
    console.print(f"{'draft vocabulary covers':>24}  {points}")
    for row in chosen[:SHOWN]:
        console.print(f"\nrow {row}", style="bold")
        console.print(coloured(cut(data.train[row], cfg.width), tokenizer))
    console.print(f"\n{out / 'inspect.html'}, inspect.json{', inspect.png' if picture else ''}")


def measured(data: Dataset, vocab: int) -> tuple[dict[str, Any], tuple[list[int], list[int]]]:
    """What there is to say in numbers, in plain types; and tokens and supervised tokens of every row."""
    from paceline.data.conversations import frequencies

    tokens, supervised = [], []
    for row in data.train:
        tokens.append(len(row))
        supervised.append(int(row.supervised.sum()))
    often = frequencies(data.train, vocab).sort(descending=True).values.cumsum(0)
    sizes = [size for size in SIZES if size < vocab] + [vocab]
    about = {
        "where": data.skipped.where,
        "counts": {
            "records": data.provenance["conversations"],
            "records held out": data.provenance["held_out"],
            "records left out": len(data.skipped),
            "turns not supervised": len(data.unsupervised),
            "rows to train on": len(tokens),
            "tokens": sum(tokens),
            "supervised tokens": sum(supervised),
            "supervised tokens cut": data.provenance["supervised_tokens_cut"],
            "ids that are supervised": int((frequencies(data.train) > 0).sum()),
        },
        "skipped": reasons(data.skipped),
        "unsupervised": reasons(data.unsupervised),
        "quantiles": {"share": QUANTILES, "tokens": quantiles(tokens), "supervised": quantiles(supervised)},
        "coverage": [{"ids": size, "covered": int(often[size - 1]) / max(sum(supervised), 1)} for size in sizes],
        "provenance": data.provenance,
    }
    return about, (tokens, supervised)


def reasons(report: Skipped) -> dict[str, Any]:
    return {reason: {"count": len(places), "first": places[:20]} for reason, places in report.reasons.items()}


def quantiles(values: list[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]


def cut(example: Example, width: int) -> Example:
    from paceline.data.conversations import Example

    return Example(example.ids[:width], example.supervised[:width])


def draw(about: dict[str, Any], tokens: list[int], supervised: list[int]) -> bytes | None:
    """A PNG of three panels. None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.hist(tokens, bins=40)
    middle.hist([part / whole for part, whole in zip(supervised, tokens, strict=True)], bins=40, range=(0, 1))
    right.plot([p["ids"] for p in about["coverage"]], [p["covered"] for p in about["coverage"]], marker="o")
    right.set_xscale("log", base=2)
    for axes, title, label in (
        (left, "length of rows", "tokens"),
        (middle, "supervised share of rows", "supervised / all tokens"),
        (right, "supervised tokens that a draft vocabulary covers", "ids"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def page(
    about: dict[str, Any], data: Dataset, chosen: list[int], tokenizer: Any, width: int, picture: bytes | None
) -> str:
    """The HTML page: text is escaped, the picture lies inside."""
    from jinja2 import Environment

    from paceline.data.conversations import runs

    examples = []
    for row in chosen:
        whole = data.train[row]
        shown = cut(whole, width)
        examples.append(
            {
                "row": row,
                "tokens": len(whole),
                "supervised": int(whole.supervised.sum()),
                "cut": len(shown) < len(whole),
                "pieces": [(tokenizer.decode(shown.ids[a:b]), bool(shown.supervised[a])) for a, b in runs(shown)],
            }
        )
    template = Path(__file__).with_name("inspect_data.html.jinja").read_text(encoding="utf-8")
    inside = base64.b64encode(picture).decode() if picture else ""
    return Environment(autoescape=True).from_string(template).render(about=about, examples=examples, picture=inside)


main = entry("inspect_data", run)

if __name__ == "__main__":
    main()
