"""The bundled prompts are many-sided, original and complete in themselves; users' files are read or named."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.data.conversations import BadData
from paceline.data.prompts import prompts

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
CATEGORIES = {
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "retrieval_qa", "maths_word"),
}


def test_bench_holds_eight_prompts_of_each_of_twelve_categories() -> None:
    bench = prompts("bench")
    assert Counter(p.category for p in bench) == dict.fromkeys(CATEGORIES, 8)
    assert len({p.id for p in bench}) == len({p.messages[0]["content"] for p in bench}) == 96
    assert all(len(p.messages) == 1 and p.messages[0]["role"] == "user" for p in bench)
    assert {p.category for p in prompts("bench", limit=12)} == CATEGORIES


def test_demo_is_the_first_two_of_each_category() -> None:
    bench = prompts("bench")
    expected = [p for c in CATEGORIES for p in [p for p in bench if p.category == c][:2]]
    assert sorted(p.id for p in prompts("demo")) == sorted(p.id for p in expected)
    assert len(prompts("demo")) == 24


@pytest.mark.parametrize("category", ["extraction", "summarization", "retrieval_qa"])
def test_prompts_about_a_text_bring_the_text(category: str) -> None:
    for prompt in prompts("bench"):
        if prompt.category == category:
            passage = max(prompt.messages[0]["content"].split("\n\n"), key=len)
            assert 60 <= len(passage.split()) <= 150, prompt.id


def phrases(text: str, words: int = 7) -> set[tuple[str, ...]]:
    tokens = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return {tuple(tokens[i : i + words]) for i in range(len(tokens) - words + 1)}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public prompt sets are not here")
def test_bench_shares_no_phrase_with_public_prompt_sets() -> None:
    ours = {phrase: p.id for p in prompts("bench") for text in (p.messages[0]["content"], *p.later)
            for phrase in phrases(text)}  # fmt: skip
    common: dict[str, list[str]] = {}
    for file in sorted([*SHARED.glob("*/*.jsonl"), *SHARED.glob("*/*.jsonl.gz")]):
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text("utf-8")
        for line in text.splitlines():
            theirs = phrases(json.dumps(json.loads(line), ensure_ascii=False).replace("\\n", " "))
            for phrase in theirs & ours.keys():
                common.setdefault(ours[phrase], []).append(f"{file.name}: {' '.join(phrase)}")
    assert not common


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "asked.jsonl"
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return file


def test_every_known_form_of_prompt_is_read(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    file = write(
        tmp_path,
        {"prompt": "a"},
        {"question": "b", "id": "x"},
        {"instruction": "c"},
        {"instruction": "c", "input": "d"},
        {"turns": ["e", "f"], "question_id": 81, "category": "writing"},
        {"messages": [system, {"role": "user", "content": "g"}, {"role": "assistant", "content": "reply"}]},
    )
    read = prompts(file)
    assert [p.messages[-1]["content"] for p in read] == ["a", "b", "c", "c\n\nd", "e", "g"]
    assert [p.id for p in read] == ["1", "x", "3", "4", "81", "6"]
    assert [p.category for p in read] == ["all"] * 4 + ["writing", "all"]
    assert read[4].later == ("f",)
    assert read[5].messages == [system, {"role": "user", "content": "g"}]
    assert prompts(file, limit=2) == read[:2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid JSON"),
        ("[]", "no JSON object"),
        ({"text": "a"}, "neither prompt"),
        ({"prompt": ""}, "empty or no text"),
        ({"turns": []}, "empty or no text"),
        ({"instruction": "a", "input": 3}, "empty or no text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": None}]}, "known role and text"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    with pytest.raises(BadData, match=rf"^eval\.prompts: .*asked\.jsonl:2: .*{reason}") as refusal:
        prompts(write(tmp_path, {"prompt": "a"}, line))
    assert "\n" not in str(refusal.value)


def test_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "a"})
    with pytest.raises(BadData, match=r"no file /.*asked\.json; nearest: /.*asked\.jsonl$"):
        prompts(file.with_suffix(".json"))
    with pytest.raises(BadData, match=r"no file /.*/bensch; nearest: bench$"):
        prompts("bensch")
    with pytest.raises(BadData, match="no prompt in"):
        prompts(write(tmp_path))
