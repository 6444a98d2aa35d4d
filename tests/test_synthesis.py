"""Conversations in the target's own words: what is asked of an engine, what is kept, and what is thrown away.

The engine is a function here: it answers whatever it is asked, in the order it likes.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import checkpoint_of_target, windowed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from paceline.conf.entry import load
from paceline.data.conversations import BadData, Record, asked, load_tokenizer
from paceline.data.conversations import load as load_data
from paceline.data.near import Known, repetition
from paceline.data.shards import Shards
from paceline.data.synthesis import (
    BEGINNINGS,
    Ask,
    Engine,
    Filters,
    Mix,
    Sampling,
    Start,
    Synthesis,
    Written,
    beginnings,
    from_nothing,
    from_records,
    opening,
)
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.stored import alone
from paceline.scripts.synthesize import local, run

MIX = Mix([1.0], 1.0, [16])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(folder("tiny"))


def engine(say: Callable[[Ask], Written], asks: list[Ask] | None = None, together: int = 3) -> Engine:
    """Up to `together` turns at a time, the last one first."""

    def write(more: Callable[[], Ask | None]) -> Iterator[tuple[Ask, Written]]:
        held: list[Ask] = []
        while True:
            while len(held) < together and (ask := more()) is not None:
                held.append(ask)
                if asks is not None:
                    asks.append(ask)
            if not held:
                return
            last = held.pop()
            yield last, say(last)

    return write


def talk(ask: Ask) -> Written:
    """A user's turn that no other chat has, or an answer that says what it answers."""
    if ask.begin is not None:
        return Written(f" number {ask.chat} of {len(ask.messages)} please", True)
    return Written(f"You said: {ask.messages[-1]['content']}", True)


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


def test_from_nothing_each_turn_is_asked_for_as_serving_would_send_it(tokenizer: Any) -> None:
    """Two turns a conversation: user's turns after the template's opening of one, answers after its prompt."""
    asks: list[Ask] = []
    made = Synthesis(tokenizer, from_nothing(["Tell me", "List"], 2), MIX, MIX, count=2, filters=Filters(near=None))
    records = {chat: record for chat, record, _ in made.run(engine(talk, asks))}
    said = "Tell me number 0 of 0 please"
    first = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": f"You said: {said}"},
        {"role": "user", "content": "number 0 of 2 please"},
        {"role": "assistant", "content": "You said: number 0 of 2 please"},
    ]
    assert records["0"] is not None
    assert records["0"]["messages"] == first
    assert records["1"] is not None
    assert records["1"]["messages"][0]["content"] == "List number 1 of 0 please"
    ours = [tokenizer.decode(ask.ids) for ask in asks if ask.chat == "0"]
    assert ours == [
        opening(tokenizer) + "Tell me",
        tokenizer.apply_chat_template(first[:1], tokenize=False, add_generation_prompt=True),
        opening(tokenizer, first[:2]),
        tokenizer.apply_chat_template(first[:3], tokenize=False, add_generation_prompt=True),
    ]
    assert len({ask.key for ask in asks}) == len(asks)


def test_given_user_turns_are_kept_and_every_answer_is_new(tokenizer: Any) -> None:
    old = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "an old answer"},
            {"role": "user", "content": "And you?"},
            {"role": "assistant", "content": "another"},
        ]
    }
    given = [asked(old)[0], asked({"prompt": "What is two and two?"})[0]]
    made = Synthesis(tokenizer, from_records(given, None), MIX, MIX)
    records = {chat: record for chat, record, _ in made.run(engine(talk))}
    assert records["0"] is not None
    assert [message["content"] for message in records["0"]["messages"]] == [
        "Be brief.",
        "Hi",
        "You said: Hi",
        "And you?",
        "You said: And you?",
    ]
    assert records["1"] is not None
    assert len(records["1"]["messages"]) == 2
    longer = Synthesis(tokenizer, from_records(given[1:], 2), MIX, MIX)
    ((_, record, _),) = longer.run(engine(talk))
    assert record is not None
    assert record["messages"][2]["content"] == "number 0 of 2 please", "turns beyond the given ones are the target's"


@pytest.mark.parametrize(
    "raw, turns",
    [
        ({"prompt": "Why?"}, ["Why?"]),
        ({"prompt": None, "text": "Why?"}, None),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, ["Add\n\n1 2"]),
        ({"question": "Why?", "answer": "So."}, ["Why?"]),
        ({"turns": ["One", "Two"], "category": "math"}, ["One", "Two"]),
        ({"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}, ["A"]),
        ({"messages": [{"role": "user", "content": "A"}]}, ["A"]),
        ({"prompt": [{"role": "user", "content": "A"}], "completion": [{"role": "assistant", "content": "B"}]}, ["A"]),
        ({"messages": [{"role": "assistant", "content": "A"}]}, None),
        ({"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}, None),
        ({"prompt": " "}, None),
        ({"messages": [{"role": "user", "content": "A"}], "tools": [{"name": "f"}]}, None),
    ],
)
def test_prompts_of_any_form_are_read(raw: dict[str, Any], turns: list[str] | None) -> None:
    record, reason = asked(raw)
    if turns is None and raw.get("text"):
        turns = [raw["text"]]
    if turns is None:
        assert reason
    else:
        assert (reason, [m["content"] for m in record.messages if m["role"] == "user"]) == ("", turns)


def test_what_is_thrown_away_is_counted_with_its_reason(tokenizer: Any) -> None:
    special = tokenizer.all_special_tokens[0]
    users = {
        "0": Written("a question that does not end", False),
        "1": Written("why", True),
        "2": Written(f"what does {special} mean?", True),
        "4": Written("  WHAT is a drafter, please?", True),
        "5": Written("What is a drafter, please??", True),
        "10": Written("what does \ud83d mean?", True),
    }
    answers = {
        "6": Written("  ", True),
        "7": Written(f"it is {special}", True),
        "8": Written("so it goes on and on, and " * 9, True),
        "9": Written("", False, "refused by the server (400)"),
        "11": Written("it is \ud83d", True),
    }

    def say(ask: Ask) -> Written:
        if ask.begin is not None:
            return users.get(ask.chat, Written(f"{'abcdefghijklm'[int(ask.chat)] * 9} is what?", True))
        return answers.get(ask.chat, Written("an answer", True))

    users["3"] = Written("What is a drafter, please?", True)
    made = Synthesis(tokenizer, from_nothing([""], 1), MIX, MIX, count=2, filters=Filters(near=0.8))
    ended = list(made.run(engine(say, together=1)))
    assert [chat for chat, record, _ in ended if record] == ["3", "12"]
    assert dict(made.dropped) == {
        "user's turn too long": 1,
        "user's turn too short": 1,
        "user's turn with half a character": 1,
        "user's turn with special tokens": 1,
        "user's turn written before": 1,
        "user's turn nearly written before": 1,
        "answer empty": 1,
        "answer with half a character": 1,
        "answer with special tokens": 1,
        "answer repeats itself": 1,
        "refused by the server (400)": 1,
    }


def test_user_turns_are_written_ahead_but_no_answer_in_vain(tokenizer: Any) -> None:
    """Every other user's turn is of no use. So more are asked than are wanted, and just as many answered."""
    asks: list[Ask] = []

    def say(ask: Ask) -> Written:
        return talk(ask) if int(ask.chat) % 2 else Written("and so on", False)

    made = Synthesis(tokenizer, from_nothing([""], 1), MIX, MIX, count=20, filters=Filters(near=None))
    ended = list(made.run(engine(say, asks, together=8)))
    assert made.written == sum(record is not None for _, record, _ in ended) == 20
    assert sum(ask.begin is None for ask in asks) == 20
    assert 40 <= sum(ask.begin is not None for ask in asks) < 60


def test_a_conversation_ends_before_a_turn_that_is_of_no_use(tokenizer: Any) -> None:
    """The second answer is empty; in the other conversation the first one is cut, and nobody goes on from there."""

    def say(ask: Ask) -> Written:
        if ask.begin is not None:
            return talk(ask)
        return Written("" if len(ask.messages) == 3 else "a first answer", ask.chat == "0")

    made = Synthesis(tokenizer, from_nothing([""], 2), MIX, MIX, count=2)
    records = {chat: record for chat, record, _ in made.run(engine(say))}
    assert [len(record["messages"]) for record in records.values() if record] == [2, 2]
    assert {chat: record["finished"] for chat, record in records.items() if record} == {"0": True, "1": False}
    assert dict(made.shortened) == {"answer empty": 1}


def test_too_long_conversations_are_dropped_before_they_are_written(tokenizer: Any) -> None:
    starts = iter([Start("0", [], ["x" * 500]), Start("1", [], ["a short one"])])
    made = Synthesis(tokenizer, starts, MIX, MIX, longest=300)
    ended = {chat: reason for chat, _, reason in made.run(engine(talk))}
    assert ended == {"0": "longer than max_length", "1": None}


def test_a_target_that_asks_nothing_usable_ends_the_run(tokenizer: Any) -> None:
    made = Synthesis(tokenizer, from_nothing([""], 1), MIX, MIX, count=1)
    with pytest.raises(BadData, match=r"no usable user's turn in 640 tries \(user's turn too long 639"):
        list(made.run(engine(lambda ask: Written("and so on", False))))


def test_each_conversation_takes_one_temperature_and_length_of_the_mix() -> None:
    mix = Mix([0.0, 0.7], 0.9, [64, 256, 512])
    of = {str(chat): mix.of(str(chat), 0) for chat in range(600)}
    for temperature in (0.0, 0.7):
        for longest in (64, 256, 512):
            share = sum(s == (temperature, 0.9, longest) for s in of.values())
            assert 70 < share < 130
    assert of == {chat: mix.of(chat, 0) for chat in of}


def test_turns_nearly_alike_are_found_and_unlike_ones_are_not() -> None:
    known = Known(0.8)
    base = "Explain how a drafter proposes tokens that the target verifies in one pass number"
    assert known.fault(f"{base} one") is None
    assert known.fault(f"{base} two") == "user's turn nearly written before"
    assert known.fault(f"  {base.upper()}  ONE") == "user's turn written before"
    assert all(known.fault(f"{i}. {'abcdefghij'[i] * 40}") is None for i in range(10))
    assert Known(None).fault(f"{base} one") is None


def test_repetition_is_the_share_that_is_said_again() -> None:
    assert repetition("Each of these words stands here once, and no other text is like it.") == 0
    assert repetition("round and round and " * 20) > 0.9
    assert repetition("short") == 0


def test_shards_say_how_they_were_made_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    shards = Shards(tmp_path, 2, {"seed": 1})
    assert list(shards.read()) == []
    for number in range(5):
        shards.add({"id": str(number)})
    shards.close()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [f"conversations-0000{i}.jsonl" for i in range(3)]
    assert all(json.loads((tmp_path / n).read_text().splitlines()[0])["provenance"] == {"seed": 1} for n in names)
    with (tmp_path / names[-1]).open("a") as torn:
        torn.write('{"id": "5", "mess')
    again = Shards(tmp_path, 2, {"seed": 1})
    assert [record["id"] for record in again.read()] == list("01234")
    again.add({"id": "5"})
    again.add({"id": "6"})
    again.close()
    assert [record["id"] for record in Shards(tmp_path, 2, {}).read()] == list("0123456")


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().split("\n") if line]


SMALL = ["target=tiny", "batch=8", "prompt.max_tokens=120", "prompt.temperature=2", "answer.max_tokens=8"]


def test_what_the_target_wrote_is_kept_space_by_space() -> None:
    words = WordLevel({"a": 0, ".": 1, "<end>": 2, "?": 3}, unk_token="?")
    tidy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), clean_up_tokenization_spaces=True)
    assert tidy.decode([0, 1]) == "a."
    job = SimpleNamespace(eos=[2], write=lambda more: ((SimpleNamespace(key=more().key), [0, 1, 2]) for _ in range(1)))
    ask = Ask("0", [], None, [0], Sampling(1.0, 1.0, 8), 5)
    assert list(local(job, tidy)(lambda: ask)) == [(ask, Written("a .", True))]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "conversations-00000.jsonl").symlink_to("/dev/full")
    with pytest.raises(BadData, match=r"^out: \S*-00000\.jsonl cannot be written \(.*No space.*\); with room"):
        Shards(tmp_path, 2, {}).add({"id": "0"})


def test_the_script_goes_on_where_it_stopped_and_only_as_it_was_begun(tmp_path: Path) -> None:
    out = tmp_path / "self"
    run(load("synthesize", *SMALL, "count=1", "held_out=0.4", f"out={out}"))
    run(load("synthesize", *SMALL, "count=3", "held_out=0.4", f"out={out}"))
    records = lines(out) + lines(out / "held_out")
    assert len(records) == 3
    dropped = [json.loads(line)["id"] for line in (out / "made/dropped.jsonl").read_text().splitlines()]
    ids = [record["id"] for record in records] + dropped
    assert len(ids) == len(set(ids))
    assert all(record["messages"][0]["content"].startswith(tuple(beginnings("varied"))) for record in records)
    about = json.loads((out / "made/provenance.json").read_text())
    assert about["begin"] == "varied"
    assert about["target_fingerprint"]
    training = load_data(load_tokenizer(folder("tiny")), "jsonl", str(out), held_out=0.4)
    assert (len(training.train), len(training.held_out)) == (len(lines(out)), 0), "one hash decides in both places"
    (out / "made/provenance.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(Refusal, match=r"holds conversations, and no made/provenance\.json of who wrote them"):
        run(load("synthesize", *SMALL, "count=4", "held_out=0.4", f"out={out}"))
    (tmp_path / "elsewhere.json").rename(out / "made/provenance.json")
    with alone(out), pytest.raises(Refusal, match=f"out={out}: another process is writing there"):
        run(load("synthesize", *SMALL, "count=4", "held_out=0.4", f"out={out}"))
    with pytest.raises(Refusal, match="begun with begin=varied, not free"):
        run(load("synthesize", *SMALL, "count=4", "begin=free", "held_out=0.4", f"out={out}"))


@pytest.mark.parametrize(
    "options, message",
    [
        (["count=null"], "count: null"),
        (["given.path=x.jsonl"], "given.path: not read"),
        (["engine=server"], "server.url: must be given"),
        (["server.url=http://localhost:1/v1"], "server.url: read only by engine=server"),
        (["answer.temperature=[]"], "answer.temperature"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        load("synthesize", *options)


def test_texts_longer_than_the_targets_window_are_refused_before_the_first_is_written(tmp_path: Path) -> None:
    """Else the run would end with the first long prompt, and could not be gone on with under another max_length."""
    target = windowed(tmp_path / "target", checkpoint_of_target(tmp_path / "wide"), 100)
    words = [*SMALL, "target=hf", f"target.path={target}", f"out={tmp_path}/out", "count=1"]
    with pytest.raises(Refusal, match="max_length: 101, but this target's window is 100 tokens; nearest: 100"):
        run(load("synthesize", *words, "max_length=101"))
    assert not any((tmp_path / "out").iterdir())


def test_plain_records_have_nobody_who_asks() -> None:
    assert list(from_records([Record([{"role": "user", "content": "a"}])], None)) == [Start("0", [], ["a"])]
