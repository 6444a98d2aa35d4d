"""Readers: every known form of record, every kind of file, mixtures, and the cache of what was made of them."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from paceline.conf.entry import load as config
from paceline.data.conversations import BadData, Dataset, load, load_tokenizer
from paceline.data.records import Record, Skipped, Source, asked, mixed, parsed, read
from paceline.data.rows import Example, Rows, Writer, kept
from paceline.data.synthesis import beginnings
from paceline.models.errors import Refusal

TINY = Path(__file__).parent.parent / "models" / "tiny"
ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def chat(question: str, answer: str = "b") -> dict[str, str]:
    return {"prompt": question, "response": answer}


def texts(tokenizer: Any, data: Dataset) -> list[str]:
    return [tokenizer.decode(row.ids) for row in data.train]


# Forms


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        ({"messages": [ASK, SAY]}, [ASK, SAY]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [ASK, SAY]),
        ({"conversation": [{"from": "user", "value": "a"}, {"from": "chatgpt", "value": "b"}]}, [ASK, SAY]),
        ({"prompt": "a", "response": "b"}, [ASK, SAY]),
        ({"prompt": "a", "completion": "b"}, [ASK, SAY]),
        ({"prompt": [ASK], "completion": [SAY]}, [ASK, SAY]),
        ({"question": "a", "answer": "b"}, [ASK, SAY]),
        ({"instruction": "a", "input": "", "output": "b"}, [ASK, SAY]),
        ({"instruction": "Sum", "input": "1 2", "output": "b"}, [{"role": "user", "content": "Sum\n\n1 2"}, SAY]),
        ({"instruction": "Sum", "context": "1 2", "response": "b"}, [{"role": "user", "content": "Sum\n\n1 2"}, SAY]),
        ({"system": "s", "prompt": "a", "response": "b"}, [{"role": "system", "content": "s"}, ASK, SAY]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, SAY]}, [ASK, SAY]),
        ({"messages": [ASK, SAY], "conversations": None, "text": None}, [ASK, SAY]),  # a row of a table
        ({"messages": [ASK, SAY | {"reasoning_content": "r", "id": 3}]}, [ASK, SAY | {"reasoning_content": "r"}]),
    ],
)
def test_every_form_of_chat_becomes_the_same_messages(raw: Any, messages: Any) -> None:
    assert parsed(raw) == (Record(messages), "")


def test_plain_text_is_a_record_without_messages() -> None:
    assert parsed({"text": "once"}) == (Record([], text="once"), "")
    assert parsed({"text": " "})[1] == "the text is empty"
    assert parsed({"prompt": "a", "response": "b", "text": "a b"})[0].messages == [ASK, SAY]


def test_tool_calls_keep_their_arguments_as_objects_and_tools_may_be_written_as_text() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [called]}]
    turns += [{"role": "tool", "content": "2", "tool_call_id": "c1"}, {"role": "tool", "content": "3"}, SAY]
    record, reason = parsed({"messages": turns, "tools": '[{"type": "function"}]'})
    assert reason == "" and record.tools == [{"type": "function"}]
    assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}]}
    assert record.messages[2:] == [turns[2], turns[3], SAY]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "no JSON object"),
        ({"chat": []}, "neither messages, .*"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role 'narrator'"),
        ({"messages": ["a"]}, "a message is no object"),
        ({"messages": [{"role": "user", "content": 3}, SAY]}, "content is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAY]}, "content is no text"),
        ({"messages": [ASK, {"role": "tool", "content": "1"}, SAY]}, "a tool message that nobody asked for"),
        ({"messages": [{"role": "tool", "content": "1"}, SAY]}, "starts with a tool message"),
        ({"messages": [ASK, SAY, {"role": "system", "content": "s"}]}, "a system message after the first"),
        ({"messages": [ASK, SAY | {"tool_calls": ["f"]}]}, "a tool call that is none"),
        ({"messages": [ASK, SAY | {"tool_calls": 1}]}, "a tool call that is none"),
        ({"messages": [ASK, SAY | {"tool_calls": [{"name": "f", "arguments": "{"}]}]}, "the arguments .* no JSON"),
        ({"messages": [ASK, SAY], "tools": "["}, "tools are no JSON"),
        ({"messages": [ASK, SAY], "tools": ["f"]}, "tools are no list of objects"),
    ],
)
def test_what_is_no_conversation_is_told_why(raw: Any, reason: str) -> None:
    assert parsed(raw)[0] == Record([])
    assert re.fullmatch(reason, parsed(raw)[1])


# Files


def test_parquet_holds_the_same_records_as_json_lines(tokenizer: Any, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    records = [{"messages": [ASK, SAY]}, {"messages": [{"role": "user", "content": None}]}, {"messages": [ASK, SAY]}]
    write_table(pa.Table.from_pylist(records), tmp_path / "chats.parquet")
    data = load(tokenizer, "parquet", str(tmp_path / "chats.parquet"), held_out=0)
    again = load(tokenizer, "jsonl", str(lines(tmp_path / "chats.jsonl", *records)), held_out=0)
    assert texts(tokenizer, data) == texts(tokenizer, again) and len(data.train) == 2
    assert data.skipped.reasons == again.skipped.reasons == {"content is null": [2]}
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadData, match=r"^data\.path: cannot read .*torn\.parquet[^\n]*$"):
        load(tokenizer, "parquet", str(tmp_path / "torn.parquet"))


def test_a_folder_is_read_file_by_file_and_a_bad_line_is_found_in_its_file(tokenizer: Any, tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", chat("3"))
    lines(tmp_path / "a.jsonl", chat("1"), {"messages": []}, chat("2"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(chat("4")).encode()))
    (tmp_path / "notes.txt").write_text("not data")
    data = load(tokenizer, "jsonl", str(tmp_path), held_out=0)
    assert [text.split("\n")[1][0] for text in texts(tokenizer, data)] == ["1", "2", "3", "4"]
    assert data.skipped.reasons == {"no messages": ["a.jsonl:2"]}
    with pytest.raises(BadData, match=r"data\.path: no \.parquet in /"):
        load(tokenizer, "parquet", str(tmp_path))


@pytest.mark.parametrize("read_by", ["answers", "questions"])
def test_half_an_escaped_character_costs_its_line_not_the_run(tokenizer: Any, tmp_path: Path, read_by: str) -> None:
    """JSON may escape one half of a pair alone, as text cut within an emoji has it: no tokenizer reads that."""
    halves = [chat("cut \ud83d"), chat("a", "\ude00"), {"messages": [ASK, SAY], "tools": [{"name": "\udbff"}]}]
    file = lines(tmp_path / "chats.jsonl", chat("whole \N{GRINNING FACE}"), *halves)
    assert b"\\ud83d\\ude00" in file.read_bytes()  # a pair is a character
    skipped = Skipped()
    found = list(read([Source("jsonl", str(file))], skipped, parse=asked if read_by == "questions" else parsed)[0])
    assert [record.messages[0]["content"] for _, record in found] == ["whole \N{GRINNING FACE}"]
    assert skipped.reasons == {"half of an escaped character": [2, 3, 4]}
    assert len(load(tokenizer, "jsonl", str(file), held_out=0).train) == 1


def test_plain_text_is_supervised_whole_and_long_documents_become_rows(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\ntwo\n\n\n0123456789\n\xe9", encoding="utf-8")
    data = load(tokenizer, "text", str(file), max_length=8, held_out=0)
    assert texts(tokenizer, data) == ["one\ntwo", "01234567", "89\n\xe9"]
    assert all(row.supervised.all() for row in data.train)
    assert data.held_out_conversations == []


def test_files_of_windows_say_what_they_say_elsewhere(tokenizer: Any, tmp_path: Path) -> None:
    book, chats, begin = (tmp_path / name for name in ("book.txt", "chats.jsonl", "begin.txt"))
    book.write_bytes(b"\xef\xbb\xbfOne line.\r\nAnother.\r\n\r\nNext.\r\n")
    assert texts(tokenizer, load(tokenizer, "text", str(book), held_out=0)) == ["One line.\nAnother.", "Next."]
    chats.write_bytes(b"\xef\xbb\xbf" + json.dumps(chat("a")).encode() + b"\r\n")
    assert len(load(tokenizer, "jsonl", str(chats), held_out=0).train) == 1
    begin.write_bytes(b"\xef\xbb\xbfWrite\r\nSum\r\n")
    assert beginnings(str(begin)) == ["Write", "Sum"]


def test_what_the_tokenizer_puts_before_plain_text_is_not_supervised(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(TINY)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    (row,) = load(tokenizer, "jsonl", str(lines(tmp_path / "t.jsonl", {"text": "abc"})), held_out=0).train
    assert row.ids.tolist() == [257, *b"abc"] and row.supervised.tolist() == [False, True, True, True]


def test_hub_streams(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    file = lines(tmp_path / "chats.jsonl", *(chat(str(i)) for i in range(9)))
    data = load(tokenizer, "hub", str(file), limit=3, held_out=0, streaming=True, cache=tmp_path / "cache")
    assert texts(tokenizer, data) == texts(tokenizer, load(tokenizer, "jsonl", str(file), limit=3, held_out=0))
    assert not (tmp_path / "cache").exists(), "what is in a stream is not known before it is read"
    with pytest.raises(BadData, match=r"data\.split: 'train\[:2\]' takes a slice"):
        load(tokenizer, "hub", str(file), split="train[:2]", streaming=True)


def test_a_stream_that_breaks_off_is_said_in_one_line(tokenizer: Any, monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets")

    def rows() -> Iterator[Any]:
        yield chat("a")
        raise ConnectionError("the hub is gone\nmore")

    monkeypatch.setattr(datasets, "load_dataset", lambda **_: rows())
    with pytest.raises(BadData, match=r"^data\.path: 'owner/name' breaks off after 1 rows: ConnectionError: the hub"):
        load(tokenizer, "hub", "owner/name", streaming=True, held_out=0)


# Mixtures


def test_a_mixture_keeps_its_shares_to_the_last_record() -> None:
    taken = list(mixed([iter("a" * 30), iter("b" * 30), iter("c" * 30)], [3, 2, 1]))
    for count in range(6, len(taken) + 1, 6):
        assert sorted(taken[:count]) == sorted("aaabbc" * (count // 6))
    assert taken.count("a") == 30 and len(taken) < 90


def test_bad_records_do_not_count_towards_a_share_and_are_found_by_file(tokenizer: Any, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", chat("1"), {"messages": []}, chat("2"), chat("3"), chat("4"))
    two = lines(tmp_path / "two.jsonl", *(chat(q) for q in "xyz"))
    parts = [{"source": "jsonl", "path": str(one), "weight": 2}, {"source": "jsonl", "path": str(two)}]
    data = load(tokenizer, "mixture", parts=parts, held_out=0)
    assert [text.split("\n")[1][0] for text in texts(tokenizer, data)] == ["1", "2", "x", "3", "4", "y"]
    assert data.skipped.reasons == {"no messages": [f"{one}:2"]}
    assert [part["weight"] for part in data.provenance["parts"]] == [2, 1.0]
    with pytest.raises(BadData, match=r"data\.strict: .*one\.jsonl:2: no messages"):
        load(tokenizer, "mixture", parts=parts, strict=True)
    two = lines(tmp_path / "two.jsonl", {"messages": []})
    with pytest.raises(BadData, match=r"^data\.parts: no conversation in \S*two\.jsonl: skipped 2 records"):
        load(tokenizer, "mixture", parts=parts, held_out=0)  # else it would be of two conversations


def test_the_options_of_a_mixture_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", chat("1"))
    cfg = config("medusa", "target=tiny", "data=mixture", f"data.parts=[{{path: {file}, weight: 2}}, {{source: self}}]")
    assert [Source(**part) for part in cfg.data.keywords()["parts"]] == [
        Source("jsonl", str(file), weight=2),
        Source("self"),
    ]
    for options, message in (
        (["data=mixture"], "data.parts: must be given"),
        ([f"data.parts=[{{path: {file}}}]"], "data.parts: read only by data=mixture"),
        (
            ["data=mixture", "data.parts=[{path: nowhere.jsonl}]"],
            "data.parts: no such file or folder: /.*nowhere.jsonl",
        ),
        (["data=mixture", "data.parts=[{source: hub}]"], "data.parts: must be given with data=hub"),
        (["data=parquet"], "data.path: must be given with data=parquet"),
        ([f"data.template={tmp_path / 'b.jinja'}"], "data.template: no such file"),
    ):
        with pytest.raises(Refusal, match=message):
            config("medusa", "target=tiny", *options)


# Rows on disk and the cache


def test_rows_are_the_examples_written_whatever_the_shards(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.data.rows.SHARD", 10)
    made = [Example(torch.arange(n) + 100000 * n, torch.arange(n) % 3 == 1) for n in (3, 4, 9, 1, 1, 1, 12, 2)]
    writer = Writer(tmp_path, "train")
    for row in made:
        writer.add(row)
    writer.flush()
    rows = Rows(writer.files)
    assert len(writer.files) == 3 and len(rows) == len(made) and rows.lengths() == [len(row) for row in made]
    for row, example in zip([*rows, rows[-1], *rows[2:4]], [*made, made[-1], *made[2:4]], strict=True):
        assert row.ids.equal(example.ids) and row.ids.dtype == torch.long
        assert row.supervised.equal(example.supervised) and row.supervised.dtype == torch.bool
    with pytest.raises(IndexError):
        rows[8]
    assert len(Rows([])) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_rows_on_disk_take_no_memory_of_their_own(tmp_path: Path) -> None:
    def megabytes() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))

    writer, row = Writer(tmp_path, "train"), Example(torch.arange(1000), torch.ones(1000, dtype=torch.bool))
    for _ in range(1100):  # a shard, and what writing one takes
        writer.add(row)
    before = megabytes()
    for _ in range(16000):
        writer.add(row)
    writer.flush()
    rows = Rows(writer.files)
    assert sum(int(row.supervised.sum()) for row in rows) == 17_100_000
    assert megabytes() - before < 50, "85 MB lie on disk, 150 would in memory"


class Encoding:
    """Counts how often rows were really made."""

    def __init__(self, monkeypatch: Any):
        from paceline.data import conversations

        self.times, encode = 0, conversations.encode_all

        def counted(*args: Any) -> Any:
            self.times += 1
            return encode(*args)

        monkeypatch.setattr(conversations, "encode_all", counted)


def test_the_cache_is_hit_only_where_nothing_has_changed(tmp_path: Path, monkeypatch: Any) -> None:
    count, tokenizer = Encoding(monkeypatch), load_tokenizer(TINY)
    file = lines(tmp_path / "chats.jsonl", *(chat(f"question {i}", "answer") for i in range(40)))

    def again(max_length: int = 64, **more: Any) -> tuple[Dataset, int]:
        before = count.times
        data = load(tokenizer, "jsonl", str(file), max_length=max_length, cache=tmp_path / "cache", **more)
        return data, count.times - before

    first, made = again()
    assert made == 1
    second, made = again()
    assert made == 0 and second.provenance == first.provenance and second.skipped == first.skipped
    assert second.held_out_conversations == first.held_out_conversations
    for a, b in zip([*first.train, *first.held_out], [*second.train, *second.held_out], strict=True):
        assert a.ids.equal(b.ids) and a.supervised.equal(b.supervised)

    assert again(max_length=128)[1] == 1
    assert again(held_out=0.5)[1] == 1
    assert again(limit=10)[1] == 1
    marked = tmp_path / "marked.jinja"
    marked.write_text(
        tokenizer.chat_template.replace("{{ '<|im_start|>' +", "{% generation %}{% endgeneration %}{{ '<|im_start|>' +")
    )
    assert again(template=marked)[1] == 1, "the tags of a template are part of the rows"
    tokenizer.chat_template += "{# another #}"
    assert again()[1] == 1, "another template under the same name"
    tokenizer = load_tokenizer(TINY)
    tokenizer.add_tokens(["question"])
    assert again()[1] == 1, "another vocabulary"
    tokenizer = load_tokenizer(TINY)
    assert again()[1] == 0
    text = file.read_text()
    times = os.stat(file)
    file.write_text(text.replace("question 7", "question 8"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert again()[1] == 1, "one character of the data, at the same size and time"


@pytest.mark.parametrize("spoil", ["a byte", "the end", "a file", "the description", "half a write"])
def test_a_spoiled_cache_is_made_anew(tokenizer: Any, tmp_path: Path, monkeypatch: Any, spoil: str) -> None:
    count = Encoding(monkeypatch)
    file = lines(tmp_path / "chats.jsonl", *(chat(f"question {i}", "answer") for i in range(40)))
    first = load(tokenizer, "jsonl", str(file), cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    shard, about = entry / "train-00000.safetensors", entry / "about.json"
    right = {path.name: path.read_bytes() for path in entry.iterdir()}
    if spoil == "a byte":
        shard.write_bytes(right[shard.name][:-1] + bytes([right[shard.name][-1] ^ 1]))
    elif spoil == "the end":
        shard.write_bytes(right[shard.name][:-40])
    elif spoil == "a file":
        shard.unlink()
    elif spoil == "the description":
        about.write_bytes(right[about.name].replace(b": 40,", b": 41,"))
    else:
        about.unlink()
    del first
    load(tokenizer, "jsonl", str(file), cache=tmp_path / "cache")
    assert count.times == 2
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == right
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry.name], "nothing half made is left"


MAKER = """
import os, sys, time
from pathlib import Path
from paceline.data.rows import keep, kept, making
entry, how = Path(sys.argv[1]), sys.argv[2]
with making(entry) as folder:
    if kept(entry) is None:
        (folder / "made.safetensors").write_bytes(b"rows")
        print("making", flush=True)
        time.sleep(600 if how == "killed" else 1)
        keep(folder, entry, {"by": how})
"""


def test_a_cache_names_the_file_that_was_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("here.jsonl", "there.jsonl"):
        file = lines(tmp_path / name, chat("a"), "none")
        data = load(tokenizer, "jsonl", str(file), held_out=0, cache=tmp_path / "cache")
        assert data.provenance["path"] == str(file) and f"records of {file}:" in str(data.skipped)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_refused(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = lines(tmp_path / "chats.jsonl", chat("a"))
    with pytest.raises(BadData, match=r"^data\.cache: \S*/chats\.jsonl cannot be written \(.*Not a directory.*\)"):
        load(tokenizer, "jsonl", str(file), held_out=0, cache=file)

    def full(*_: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("paceline.data.rows.save_file", full)
    for cache, place in ((tmp_path / "cache", "cache"), (None, "")):
        with pytest.raises(BadData, match=rf"^data\.cache: \S*{place} cannot be written \(No space left on device\)"):
            load(tokenizer, "jsonl", str(file), held_out=0, cache=cache)


def test_processes_that_want_the_same_rows_have_them_made_once_and_what_a_kill_leaves_goes_away(tmp_path: Path) -> None:
    def maker(name: str, how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAKER, str(tmp_path / name), how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    entry, other, foreign = 24 * "a", 24 * "b", tmp_path / ".git"
    foreign.mkdir()
    killed = [maker(entry, "killed"), maker(other, "killed")]
    for process in killed:  # both are at it, and neither clears the other's away
        assert process.stdout is not None and process.stdout.readline() == "making\n"
    for process in killed:
        process.kill()
        process.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["." + entry, "." + other, ".git"]
    together = [maker(entry, how) for how in ("first", "second", "third")]
    said = [process.communicate(timeout=60)[0] for process in together]
    assert sorted(said) == ["", "", "making\n"] and not any(process.returncode for process in together)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", entry]
    assert kept(tmp_path / entry) is not None


def test_a_read_gives_a_hash_of_the_content_before_the_first_record(tmp_path: Path) -> None:
    file = lines(tmp_path / "chats.jsonl", chat("1"))
    first = read([Source("jsonl", str(file))], Skipped())[1]
    assert first == read([Source("jsonl", str(file))], Skipped())[1]
    lines(file, chat("2"))
    assert first != read([Source("jsonl", str(file))], Skipped())[1]
