"""Conversations become the ids that serving would send, and the mask covers what the target itself has to write."""

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.conversations import (
    BadData,
    Example,
    Record,
    coloured,
    draft_vocabulary,
    encode,
    encode_all,
    known_ids,
    load,
    load_tokenizer,
    opening,
    prompt_ids,
    stop_ids,
    supervision,
)

TINY = Path(__file__).parent.parent / "models" / "tiny"
END, START, PAD = 258, 257, 256

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS_LAST = (  # an empty thinking block before the last assistant turn only
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # no header: a reply may be the very first token
BARE_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
UNPROMPTED = (  # the generation prompt opens a thought that the rendered turn does not contain
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PHI = (  # the turn's end is not the text's end
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def learnt(tokenizer: Any, example: Example) -> list[str]:
    """The supervised runs as text."""
    runs: list[list[int]] = []
    previous = False
    for token, mask in zip(example.ids.tolist(), example.supervised.tolist(), strict=True):
        if mask:
            runs.append([*(runs.pop() if previous else []), token])
        previous = mask
    return [tokenizer.decode(run) for run in runs]


def own_rendering(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages)["input_ids"]


# The bundled tokenizer


def test_tiny_tokenizer_gives_bytes_and_decodes_back_exactly(tokenizer: Any) -> None:
    text = "naïve 😀\n\t  don't , . \x00 e\u0301 end "
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 259
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, END)
    assert stop_ids(tokenizer) == [END]
    assert "generation %}" not in tokenizer.chat_template


# The mask


def test_mask_is_the_reply_and_its_end_of_turn_token_by_token(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, [user("hi"), assistant("é!")], 512)
    ids = [START, *b"user\nhi", END, 10, START, *b"assistant\n", *"é!".encode(), END, 10]
    mask = [False] * 21 + [True] * 4 + [False]
    assert example.ids.tolist() == ids == own_rendering(tokenizer, [user("hi"), assistant("é!")])
    assert example.supervised.tolist() == mask


@pytest.mark.parametrize("template", [None, SMOLLM2, MARKED, PHI])
def test_every_reply_of_a_conversation_is_supervised_in_one_row(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    chat = [{"role": "system", "content": "be kind"}, user("a"), assistant("b c "), user("d"), assistant("e")]
    for messages in (chat, chat[1:], [*chat, user("and?")]):
        (example,) = encode(tokenizer, messages, 512)
        assert example.ids.tolist() == own_rendering(tokenizer, messages)
        assert learnt(tokenizer, example) == ["b c <|im_end|>", "e<|im_end|>"]


def test_prompt_as_served_is_a_prefix_of_the_row_up_to_the_mask(tokenizer: Any) -> None:
    tokenizer.chat_template = SMOLLM2
    chat = [user("a"), assistant("b")]
    (example,) = encode(tokenizer, chat, 512)
    served = prompt_ids(tokenizer, opening(chat))
    assert example.ids[: len(served)].tolist() == served
    assert example.supervised.tolist().index(True) == len(served)


def test_mask_of_stock_template_is_not_empty(tokenizer: Any) -> None:
    tokenizer.chat_template = SMOLLM2
    (example,) = encode(tokenizer, [user("question"), assistant("answer")], 512)
    assert str(supervision([example])) == f"supervised tokens: 7 of {len(example)} ({7 / len(example):.1%})"


@pytest.mark.parametrize("template", [BARE, BARE_MARKED])
def test_reply_that_ends_at_token_zero_marks_nothing_else(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    (example,) = encode(tokenizer, [assistant("A"), user("question")], 512)
    assert example.ids.tolist() == list(b"Aquestion")
    assert example.supervised.tolist() == [True] + [False] * 8


def test_first_message_may_be_the_assistants(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, [assistant("A"), user("q")], 512)
    assert learnt(tokenizer, example) == ["A<|im_end|>"]


def test_empty_reply_supervises_its_end_of_turn_alone(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, [user("q"), assistant("")], 512)
    assert learnt(tokenizer, example) == ["<|im_end|>"]
    tokenizer.chat_template = BARE
    assert encode(tokenizer, [user("q"), assistant("")], 512) == []


def test_reply_cut_by_max_length_keeps_the_visible_half_of_its_mask(tokenizer: Any) -> None:
    chat = [user("hi"), assistant("0123456789")]
    (whole,) = encode(tokenizer, chat, 512)
    (cut,) = encode(tokenizer, chat, 26)
    assert cut.ids.tolist() == whole.ids[:26].tolist()
    assert learnt(tokenizer, cut) == ["01234"]
    assert encode(tokenizer, chat, 21) == []  # nothing of the reply is left
    # what is cut away is counted, the end of the turn too
    counts = [
        next(encode_all(tokenizer, [(1, record)], limit))[2]
        for record, limit in product((Record(chat), Record([], text="0123456789")), (512, 26, 21))
    ]
    assert counts == [0, 6, 11, 0, 0, 0]  # plain text goes on in another row


@pytest.mark.parametrize("template", [SMOLLM2, MARKED, PHI])
def test_reply_cut_by_its_writer_does_not_teach_the_end_of_turn(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    (example,) = encode(tokenizer, chat, 512, finished=False)
    assert example.ids.tolist() == own_rendering(tokenizer, chat)
    assert learnt(tokenizer, example) == ["b<|im_end|>", "d"]


def test_unfinished_record_is_read_as_such(tokenizer: Any, tmp_path: Path) -> None:
    file = jsonl(tmp_path, GOOD | {"finished": False}, GOOD | {"finished": True}, GOOD)
    rows = load(tokenizer, "jsonl", file, held_out=0).train
    assert [learnt(tokenizer, row) for row in rows] == [["b"], ["b<|im_end|>"], ["b<|im_end|>"]]


def test_conversations_can_be_counted_while_they_are_encoded(tokenizer: Any, tmp_path: Path) -> None:
    seen = []

    def watch(encoded: Iterable[Any]) -> Iterator[Any]:
        for one in encoded:
            yield one
            seen.append(one)

    file = jsonl(tmp_path, *[GOOD] * 3)
    for made in (3, 0):  # then they are there already
        rows = load(tokenizer, "jsonl", file, held_out=0, cache=tmp_path / "cache", watch=watch).train
        assert len(rows) == 3 and len(seen) == made
        seen.clear()


def test_control_tokens_inside_a_reply_do_not_end_it(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, [user("q"), assistant("a<|im_end|>b")], 512)
    assert learnt(tokenizer, example) == ["a<|im_end|>b<|im_end|>"]


def test_template_that_rewrites_history_gives_one_row_per_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKS_LAST
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    rows = encode(tokenizer, chat, 512)
    assert len(rows) == 2
    for row, upto, said in zip(rows, (2, 4), ("b", "d"), strict=True):
        assert row.ids.tolist() == own_rendering(tokenizer, chat[:upto])
        assert learnt(tokenizer, row) == [f"<think></think>{said}<|im_end|>"]
        served = prompt_ids(tokenizer, chat[: upto - 1])
        assert row.ids[: len(served)].tolist() == served


def test_only_what_the_template_marks_is_supervised(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED.replace("{% generation %}", "{{ '<tool>' }}{% generation %}")
    (example,) = encode(tokenizer, [user("a"), assistant("b"), user("c"), assistant("d")], 512)
    assert learnt(tokenizer, example) == ["b<|im_end|>", "d<|im_end|>"]


def test_turn_that_serving_would_not_reach_is_reported_not_supervised(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = UNPROMPTED
    file = jsonl(tmp_path, {"messages": [user("a"), assistant("b")]})
    with pytest.raises(BadData, match=r"not one supervised token.*models/tiny.*never closes \(1: line 1\)"):
        load(tokenizer, "jsonl", file)


def test_reply_fused_with_its_prompt_is_not_supervised(tokenizer: Any) -> None:
    """A newline that merges with the template's own: the ids after the served prompt cannot be the target's."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = 259
    state["model"]["merges"] = [["Ċ", "Ċ"]]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    chat = [user("a"), assistant("\n\nb"), user("c"), assistant("d")]
    (example,) = encode(tokenizer, chat, 512)
    assert 259 in example.ids.tolist()
    assert learnt(tokenizer, example) == ["d<|im_end|>"]


def test_order_and_company_do_not_change_an_encoding(tokenizer: Any) -> None:
    chats = [[user(f"q{i}"), assistant("a" * (i % 7 + 1))] for i in range(1100)]  # several tokenizer batches
    records = enumerate(map(Record, chats), 1)
    for chat, (_, rows, _) in list(zip(chats, encode_all(tokenizer, records, 64), strict=True))[::50]:
        (alone,) = encode(tokenizer, chat, 64)
        assert alone.ids.equal(rows[0].ids) and alone.supervised.equal(rows[0].supervised)


def test_mask_can_be_seen_without_colour(tokenizer: Any) -> None:
    (example,) = encode(tokenizer, [user("hi"), assistant("é!")], 512)
    text = coloured(example, tokenizer)
    assert text.plain.splitlines()[1:] == [
        "<|im_start|>user",
        "hi<|im_end|>",
        "<|im_start|>assistant",
        "⟦é!<|im_end|>⟧",
    ]
    assert "supervised" in text.plain.splitlines()[0] and "context" in text.plain.splitlines()[0]
    assert any("underline" in str(span.style) for span in text.spans)


# Records


def jsonl(folder: Path, *records: Any) -> str:
    file = folder / "chats.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return str(file)


GOOD = {"messages": [user("a"), assistant("b")]}
BAD = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "s"}]},
    {"messages": [assistant("a"), user("b")]},
    {"messages": [user("a"), user("b"), assistant("c")]},
    {"messages": [user("a"), {"role": "assistant", "content": None}]},
    {"messages": [user("a"), assistant("")]},
]


def test_odd_conversations_are_skipped_counted_and_named(tokenizer: Any, tmp_path: Path) -> None:
    data = load(tokenizer, "jsonl", jsonl(tmp_path, *BAD, GOOD, "{not json", {"messages": [user("a")]}), held_out=0)
    assert len(data.train) == 1
    assert data.skipped.reasons == {
        "no messages": [1],
        "only a system message": [2],
        "starts with the assistant": [3],
        "two user turns in a row": [4],
        "content is null": [5],
        "content is empty": [6],
        "invalid JSON": [8],
        "no assistant turn": [9],
    }
    assert "skipped 8 records of " in str(data.skipped) and "content is null (1: line 5)" in str(data.skipped)
    assert "\n" not in str(data.skipped)


def test_strict_refuses_the_first_bad_line(tokenizer: Any, tmp_path: Path) -> None:
    file = jsonl(tmp_path, *BAD, GOOD)
    with pytest.raises(BadData, match=r"data\.strict: .*chats\.jsonl:1: no messages$"):
        load(tokenizer, "jsonl", file, strict=True)


def test_a_file_of_bad_lines_only_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no conversation in .*: skipped 6 records"):
        load(tokenizer, "jsonl", jsonl(tmp_path, *BAD))


@pytest.mark.parametrize(
    "record",
    [
        GOOD,
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"prompt": "a", "response": "b"},
    ],
)
def test_every_known_form_of_record_gives_the_same_row(tokenizer: Any, tmp_path: Path, record: Any) -> None:
    (example,) = load(tokenizer, "jsonl", jsonl(tmp_path, record), held_out=0).train
    assert example.ids.tolist() == own_rendering(tokenizer, GOOD["messages"])
    packed = tmp_path / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(record).encode()))
    assert load(tokenizer, "jsonl", str(packed), held_out=0).train[0].ids.equal(example.ids)


def test_hub_reads_a_dataset_from_a_folder_and_from_a_file(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    file = jsonl(tmp_path / "set", GOOD, {"messages": [user("c"), assistant("d")]})
    for path in (str(tmp_path / "set"), file):
        data = load(tokenizer, "hub", path, held_out=0)
        assert data.train[0].ids.tolist() == own_rendering(tokenizer, GOOD["messages"])
        assert len(data.train) == 2
    with pytest.raises(BadData, match=r"^data\.path: cannot load dataset .*split 'tset'.*$"):
        load(tokenizer, "hub", str(tmp_path / "set"), split="tset")


@pytest.mark.parametrize(
    ("source", "path", "split", "message"),
    [
        ("jsonl", None, None, "data.path: data=jsonl needs a file"),
        ("jsonl", "chats.jsonl", "train", "data.split"),
        ("jsonl", "chat.jsonl", None, "no file /.*; nearest: .*chats.jsonl$"),
        ("hub", None, None, "data.path: data=hub needs a dataset"),
        ("selv", None, None, "no source named 'selv'"),
    ],
)
def test_wrong_sources_are_refused_in_one_line(
    tokenizer: Any, tmp_path: Path, source: str, path: str | None, split: str | None, message: str
) -> None:
    jsonl(tmp_path, GOOD)
    with pytest.raises(BadData, match=message) as refusal:
        load(tokenizer, source, path and str(tmp_path / path), split)
    assert "\n" not in str(refusal.value)


def test_ids_that_a_tokenizer_leaves_out_do_not_hide_those_behind_them(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["<|far|>"] = 280  # 259 to 279 are nobody's
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == 260 and tokenizer.convert_tokens_to_ids("<|far|>") == 280
    assert known_ids(tokenizer) == 281 and known_ids(load_tokenizer(TINY)) == 259


def test_a_folder_without_tokenizer_or_template_is_refused_in_one_line(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"^target\.path: no tokenizer in [^\n]*$"):
        load_tokenizer(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadData, match="has no chat template"):
        load_tokenizer(tmp_path)


def test_held_out_conversations_stay_out_whatever_the_order_and_the_limit(tokenizer: Any, tmp_path: Path) -> None:
    # Two chats open with the same question: they must fall on the same side.
    records = [{"messages": [user(f"question {i // 2}"), assistant(f"answer {i}")]} for i in range(400)]

    def sides(some: list[Any], limit: int | None = None) -> tuple[set[str], set[str]]:
        data = load(tokenizer, "jsonl", jsonl(tmp_path, *some), held_out=0.2, limit=limit)
        assert len(data.held_out) == len(data.held_out_conversations) == data.provenance["held_out"]
        train, held = ({tokenizer.decode(e.ids) for e in side} for side in (data.train, data.held_out))
        assert len(train) + len(held) == (limit or 400)
        return train, held

    train, held = sides(records)
    assert 40 <= len(held) <= 120
    assert not {text.split("answer")[0] for text in train} & {text.split("answer")[0] for text in held}
    assert sides(records[::-1]) == (train, held)
    few, few_held = sides(records, limit=100)
    assert few <= train and few_held <= held


def test_provenance_tells_other_data_and_other_templates_apart(tokenizer: Any, tmp_path: Path) -> None:
    first = load(tokenizer, "jsonl", jsonl(tmp_path, GOOD), held_out=0).provenance
    assert load(tokenizer, "jsonl", jsonl(tmp_path, GOOD), held_out=0).provenance == first
    other = load(tokenizer, "jsonl", jsonl(tmp_path, {"messages": [user("a"), assistant("c")]}), held_out=0).provenance
    assert other["sha256"] != first["sha256"] and other["template_sha256"] == first["template_sha256"]
    tokenizer.chat_template = SMOLLM2
    again = load(tokenizer, "jsonl", jsonl(tmp_path, GOOD), held_out=0).provenance
    assert again["sha256"] == first["sha256"] and again["template_sha256"] != first["template_sha256"]


# The draft vocabulary


def row(ids: list[int], supervised: list[int]) -> Example:
    return Example(torch.tensor(ids), torch.tensor(supervised, dtype=torch.bool))


def test_draft_vocabulary_is_the_most_frequent_supervised_tokens() -> None:
    examples = [row([7, 7, 7, 5, 5, 9, 3, 60], [0, 0, 1, 1, 1, 1, 1, 0])]  # 5 twice; 3, 7, 9 once; 60 never supervised
    ids, coverage = draft_vocabulary(examples, 3)
    assert ids.tolist() == [3, 5, 7] and coverage == pytest.approx(4 / 5)
    ids, coverage = draft_vocabulary(examples, 3, keep=[63])
    assert ids.tolist() == [3, 5, 63] and coverage == pytest.approx(3 / 5)
    ids, coverage = draft_vocabulary(examples, 8, keep=[63, 5])
    assert ids.tolist() == [0, 1, 2, 3, 5, 7, 9, 63] and coverage == 1.0
    assert ids.dtype == torch.long
    with pytest.raises(BadData, match=r"method\.draft_vocab"):
        draft_vocabulary(examples, 1, keep=[1, 2])
