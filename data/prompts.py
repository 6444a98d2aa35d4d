"""Owns the evaluation prompts: the bundled set (data/bench.jsonl, written for this project) and users' files.

Knows no tokenizer and no template; a prompt is a list of chat messages that ends with the user's turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.conversations import ROLES, BadData, Messages, existing, json_lines

BENCH = Path(__file__).parent / "bench.jsonl"
DEMO_PER_CATEGORY = 2


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, and what the user goes on to say afterwards."""

    id: str
    category: str
    messages: Messages  # ends with a user turn
    later: tuple[str, ...] = ()  # the user's further turns


def prompts(name_or_path: str | Path, limit: int | None = None) -> list[Prompt]:
    """`bench` (all 96 bundled prompts), `demo` (the first two of each category, 24) or a FILE.jsonl; at most `limit`.

    A line of a file has `prompt`, `question`, `instruction` (+ `input`), `turns` or `messages`; `id` and `category`
    are optional. The bundled categories take turns, so a small `limit` still sees all of them. Raises BadData, naming
    file and line.
    """
    bundled = name_or_path in ("bench", "demo")
    path = BENCH if bundled else existing(name_or_path, "eval.prompts", also=("bench", "demo"))
    chosen: list[Prompt] = []
    seen: Counter[str] = Counter()
    for prompt in _read(path):
        seen[prompt.category] += 1
        if name_or_path != "demo" or seen[prompt.category] <= DEMO_PER_CATEGORY:
            chosen.append(prompt)
    if not chosen:
        raise BadData(f"eval.prompts: no prompt in {path}")
    return chosen[:limit]


def _read(path: Path) -> Iterator[Prompt]:
    for number, record in json_lines(path, "eval.prompts"):
        place = f"eval.prompts: {path}:{number}"
        if not isinstance(record, dict):
            raise BadData(f"{place}: {'invalid JSON' if isinstance(record, ValueError) else 'no JSON object'}")
        messages, later = _asked(record, place)
        name = next((record[key] for key in ("id", "question_id", "task_id") if key in record), number)
        yield Prompt(str(name), str(record.get("category", "all")), messages, later)


def _asked(record: dict[str, Any], place: str) -> tuple[Messages, tuple[str, ...]]:
    if "messages" in record:
        return _until_user(record["messages"], place), ()
    if "turns" in record:
        turns = record["turns"]
    elif "instruction" in record:
        parts = [record["instruction"], record.get("input") or ""]
        turns = ["\n\n".join(filter(None, parts))] if all(isinstance(part, str) for part in parts) else None
    elif (key := next((key for key in ("prompt", "question") if key in record), None)) is not None:
        turns = [record[key]]
    else:
        raise BadData(f"{place}: neither prompt, question, instruction, turns nor messages")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise BadData(f"{place}: the prompt is empty or no text")
    return [{"role": "user", "content": turns[0]}], tuple(turns[1:])


def _until_user(messages: Any, place: str) -> Messages:
    """The messages up to the last user turn: a recorded reply after it is what the target is to write itself."""
    kept: Messages = []
    for message in messages if isinstance(messages, list) else []:
        role = ROLES.get(message.get("role", "")) if isinstance(message, dict) else None
        if role is None or not isinstance(message.get("content"), str) or not message["content"].strip():
            raise BadData(f"{place}: a message needs a known role and text")
        kept.append({"role": role, "content": message["content"]})
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    if not kept:
        raise BadData(f"{place}: no user turn")
    return kept
