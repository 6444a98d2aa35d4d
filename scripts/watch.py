"""Watch a drafter at work: what each round drafted, what the target kept of it, and the passes that saves.

    python scripts/watch.py drafter=outputs/demo/export prompt="Why is the sky blue?"

Owns traces: rounds in full, with the text of every token, as report.json and watch.json hold them. Shows each round as
a line; the page lets one step through them. Does not know how drafts are made or judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry

if TYPE_CHECKING:
    from rich.text import Text

    from paceline.data.prompts import Prompt
    from paceline.scripts.decoding import Runtime

LONGEST = 96  # new tokens of a prompt in a report
NODES = 64  # of a round: all that a page can show


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import prompt_ids
    from paceline.data.prompts import Prompt
    from paceline.decode.pages import watch_page
    from paceline.scripts.decoding import runtime, setting, write_json, write_whole

    ready = runtime(cfg)
    messages = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
    asked = Prompt("prompt", "all", [*messages, {"role": "user", "content": cfg.prompt}])
    ids = prompt_ids(ready.tokenizer, asked.messages)
    (plain,) = ready.plain.generate([ids], cfg.max_new_tokens, sampler=ready.sampler, eos=ready.stops).tokens
    trace = traces(ready, {0: (asked, ids, plain)}, cfg.max_new_tokens)
    about = {"drafter": ready.drafter, "target": ready.target, "setting": setting(cfg, ready), "trace": trace}
    (one,) = trace["prompts"]
    console = Console(highlight=False, soft_wrap=True)
    for number, round_ in enumerate(one["rounds"], 1):
        console.print(line(number, round_, trace["words"]))
    passes, tokens, alone = len(one["rounds"]), len(one["tokens"]), len(one["plain"])
    same = "the same tokens" if one["tokens"] == one["plain"] else "other tokens: see docs/metrics.md on exactness"
    summary = (
        f"{tokens} tokens in {passes} passes of the target after the prompt's own; "
        f"plain decoding takes {alone - 1} for its {alone} ({same})"
    )
    console.print(f"\n{summary}")
    out = Path(cfg.out)
    write_json(out / "watch.json", about)
    write_whole(out / "watch.html", watch_page(about, summary[0].upper() + summary[1:] + "."))
    console.print(f"step through it: {out / 'watch.html'}")


def traces(
    ready: Runtime, asked: Mapping[int, tuple[Prompt, list[int], list[int]]], longest: int = LONGEST
) -> dict[str, Any]:
    """The answers to some prompts, round by round, in plain types: `trace` of report.json.

    Args:
        asked: key of each prompt's noise -> the prompt, its ids, and the target's own answer to it.
        longest: new tokens of each that are traced.
    """
    prompts = []
    for row, (prompt, ids, plain) in asked.items():
        made = ready.decoder.generate([ids], longest, sampler=ready.sampler, eos=ready.stops, rows=[row], traced=True)
        (tokens,), (rounds,) = made.tokens, made.trace
        prompts.append(
            {
                "id": prompt.id,
                "category": prompt.category,
                "prompt": prompt.messages[-1]["content"],
                "start": tokens[0],
                "rounds": [one.likeliest(NODES).as_dict() for one in rounds],
                "tokens": tokens,
                "pieces": pieces(ready, tokens),
                "plain": plain[:longest],
                "plain_pieces": pieces(ready, plain[:longest]),
            }
        )
    drafter = ready.decoder.drafter
    return {
        "drafter": {
            "name": ready.drafter["name"],
            "reads_target": drafter is not None and bool(drafter.taps),
            "reads_tokens": drafter is not None and drafter.reads_tokens,
        },
        "words": words(ready.tokenizer, {token for one in prompts for token in _tokens(one)}),
        "prompts": prompts,
    }


def _tokens(prompt: dict[str, Any]) -> Iterable[int]:
    yield from prompt["tokens"]
    yield from prompt["plain"]
    for one in prompt["rounds"]:
        yield from one["tokens"]
        yield from one["new"]


def words(tokenizer: Any, tokens: Iterable[int]) -> dict[str, str]:
    """The text of each token by itself, as it stands behind other text: special ones by name, half characters as �."""
    before = tokenizer.encode("a", add_special_tokens=False)
    known = tokenizer.decode(before)
    return {str(token): tokenizer.decode([*before, token])[len(known) :] for token in sorted(tokens)}


def pieces(ready: Runtime, tokens: list[int]) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to the one that completes it."""
    from paceline.scripts.generate import Words

    spoken = Words(ready.tokenizer, ready.stops)
    texts = ["".join(text for text, _ in spoken.add(token, False)) for token in tokens]
    texts[-1] += "".join(text for text, _ in spoken.end())
    return texts


def line(number: int, one: dict[str, Any], words: dict[str, str]) -> Text:
    """A round in a line: how many were drafted, which were kept, what the target added."""
    from rich.text import Text

    from paceline.scripts.generate import ACCEPTED, HARMLESS

    def word(token: int) -> str:
        return words[str(token)].replace("\n", "↵").translate(HARMLESS)

    drafted = len(one["tokens"]) - 1 + one["left_out"]
    text = Text(f"{number:>4}  {drafted:>3} drafted, {len(one['path']) - 1} kept  ", style="dim")
    text.append(word(one["tokens"][0]), style="dim")
    for place, token in enumerate(one["new"]):
        text.append("|", style="dim").append(word(token), style=ACCEPTED if place < len(one["path"]) - 1 else "not dim")
    return text


main = entry("watch", run, text=("prompt", "system"))

if __name__ == "__main__":
    main()
