"""Conversations from nothing: how user's turns begin, and what is thrown away. The target is a function here."""

import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.conf.entry import load
from paceline.data.conversations import BadData, load_tokenizer
from paceline.data.synthesis import BEGINNINGS, Written, beginnings, conversations, opening
from paceline.models.target import folder
from paceline.scripts.synthesize import run


def test_bundled_beginnings_are_many_distinct_and_of_every_kind() -> None:
    lines = beginnings("varied")
    assert len(lines) == len(set(lines)) == len(BEGINNINGS.read_text().splitlines()) > 100
    for word in ("Python", "Translate", "Summarize", "Passage:", "Solve", "story", "email", "names"):
        assert any(word in line for line in lines), word
    assert "Read the passage and answer the question.\n\nPassage: The" in lines, "a written \\n is a line break"


def test_beginnings_come_from_a_file_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "begin.txt"
    file.write_text("Tell me\n\nList\\nall\n")
    assert beginnings(str(file)) == ["Tell me", "List\nall"]
    assert beginnings("free") == [""]
    file.write_text("\n")
    with pytest.raises(BadData, match="no lines; nearest: varied"):
        beginnings(str(file))


def test_each_turn_begins_as_told_in_turn_and_the_beginning_is_part_of_it() -> None:
    tokenizer = load_tokenizer(folder("tiny"))
    start = opening(tokenizer)
    asked: list[str] = []

    def ask(prompts: list[str]) -> list[Written]:
        asked.extend(prompts)
        return [Written(f" number {len(asked)}-{i} please", i != 1) for i in range(len(prompts))]

    def answer(prompts: list[str]) -> list[Written]:
        return [Written("yes", True) for _ in prompts]

    dropped: Counter[str] = Counter()
    records = list(conversations(tokenizer, ask, answer, 4, 2, dropped=dropped, begin=("Tell me", "List")))
    assert asked[:4] == [start + "Tell me", start + "List"] * 2
    questions = [record["messages"][0]["content"] for record in records]
    assert questions == [f"Tell me number {n}-0 please" for n in (2, 4, 6, 8)]
    assert dropped == {"user's turn too long": 4}


def test_the_script_writes_what_it_was_begun_with_and_goes_on_only_so(tmp_path: Path) -> None:
    out = tmp_path / "self"
    small = ["target=tiny", "batch=16", "prompt.max_tokens=120", "prompt.temperature=2", "answer.max_tokens=8"]
    run(load("synthesize", *small, "count=2", f"out={out}"))
    records = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    assert all(record["messages"][0]["content"].startswith(tuple(beginnings("varied"))) for record in records)
    assert json.loads((out / "provenance.json").read_text())["begin"] == "varied"
    with pytest.raises(Exception, match="begun with begin=varied, not free"):
        run(load("synthesize", *small, "count=4", "begin=free", f"out={out}"))
