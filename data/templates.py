"""Owns the tokenizer and its chat template: what serving sends, and which part of a rendering the target has to write.

Everything here is text; ids and masks are made of it in conversations.py. Knows no model and no file of records.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from paceline.data.records import BadData, Messages, Record, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGGED = Path(__file__).parent / "tagged"
Span = tuple[int, int]  # characters [begin, end)
REFUSED = (TemplateError, TypeError)  # what templates raise of themselves, and of content they were not made for


class Closing(NamedTuple):
    """What the template writes after the assistant's text. ChatML: ("<|im_end|>", "\\n")."""

    end: str  # the target produces this to end its turn
    rest: str  # this comes with the next turn


class Turn(NamedTuple):
    """What the target says in one turn of a row."""

    prompt: str  # what serving sends before
    end: int  # characters of the row up to the end of what the target produced
    closed: bool  # the last of these are an end-of-turn token


class Row(NamedTuple):
    """A text to train on."""

    text: str
    turns: list[Turn]
    marked: list[Span] | None = None  # where the template has tags: only inside them is supervised


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The fast tokenizer in `folder` (or of that hub id); BadData if it is missing, slow or without chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadData(f"target.path: no tokenizer in {folder}: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise BadData(f"target.path: the tokenizer in {folder} has no tokenizer.json; only fast tokenizers are read")
    if not tokenizer.chat_template:
        raise BadData(f"target.path: the tokenizer in {folder} has no chat template")
    return tokenizer


def known_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids from 0 on lead up to the last that the tokenizer knows: where it leaves some out, it has fewer
    tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the chat template's text: two runs whose hashes differ saw differently rendered conversations."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any = None) -> list[int]:
    """Token ids that serving feeds the target: `messages` and the template's opening of an assistant turn. BadData: it
    refuses them."""
    return tokens(tokenizer, [_served(tokenizer, messages, tools, prompt=True)])[0].ids


def opening(messages: Messages) -> Messages:
    """The messages before the first assistant turn: what a decoder is asked when it is given this conversation."""
    return messages[: next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))]


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end the assistant's turn: the token the template closes it with, and the tokenizer's EOS."""
    end = closing(tokenizer).end
    ids = {tokens(tokenizer, [end])[0].ids[-1]} if end else set()
    return sorted(ids | ({tokenizer.eos_token_id} - {None}))


def tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Any:
    """An encoding (ids, offsets) for each rendered text."""
    # The template has already written every special token that belongs there.
    return tokenizer(texts, add_special_tokens=False, verbose=False).encodings if texts else []


# ---------------------------------------------------------------------------------------------------------------------
# Rendering


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any = None, prompt: bool = False) -> str:
    """The template's text of `messages`; with `prompt` the opening of an assistant turn after it."""
    # As a batch of one: only so may the history before the first turn be empty.
    return tokenizer.apply_chat_template([messages], tools=tools, add_generation_prompt=prompt, tokenize=False)[0]


def _served(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any = None, prompt: bool = False) -> str:
    """`render` of what there is no doing without. Raises BadData where the template refuses it."""
    try:
        return render(tokenizer, messages, tools, prompt)
    except REFUSED as error:
        said = ", ".join(message["role"] for message in messages)
        name = tokenizer.name_or_path
        raise BadData(f"target: the chat template of {name} refuses ({said}): {first_line(error)}") from error


def closing(tokenizer: PreTrainedTokenizerBase) -> Closing:
    """How the template ends the assistant's turn: up to the special token, or the row of them, after the text.

    What only stands at the end of a text (Phi's <|endoftext|>) is not the target's: a turn followed by another tells.
    """
    probe = "paceline-probe"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": probe}]
    _, found, last = _served(tokenizer, chat).rpartition(probe)
    if not found:
        raise BadData(f"target: the chat template of {tokenizer.name_or_path} leaves out what the assistant says")
    try:
        inner = render(tokenizer, [*chat, {"role": "user", "content": "bye"}]).rpartition(probe)[2]
    except REFUSED:
        inner = last
    both = last[: _alike(last, inner)]
    special = re.compile(f"(?:{'|'.join(map(re.escape, special_tokens(tokenizer)))})+")
    run = special.search(both) or special.search(last)
    cut = run.end() if run else 0
    return Closing(last[:cut], last[cut:])


def _alike(one: str, other: str) -> int:
    """Characters that two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that are structure, longest first."""
    texts = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {tokenizer.eos_token}
    return sorted((text for text in texts if text), key=lambda text: (-len(text), text))


def spans(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any, template: str) -> tuple[str, list[Span]]:
    """The text that a template with `{% generation %}` tags renders, and the characters inside them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, found = render_jinja_template(
        [messages], tools, chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    return texts[0], [(begin, end) for begin, end in found[0]]


def has_tags(template: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


def tagged(tokenizer: PreTrainedTokenizerBase, file: str | Path | None) -> str | None:
    """The template whose tags say what is supervised: the one in `file`, else the tokenizer's own if it has any."""
    if file is None:
        own = tokenizer.get_chat_template()
        return own if has_tags(own) else None
    template = Path(file).read_text(encoding="utf-8")
    if not has_tags(template):
        raise BadData(f"data.template: {file} has no {{% generation %}} tag, so it says nothing about a mask")
    return template


@cache
def bundled() -> list[str]:
    """Templates with tags that stand in for well-known ones without, wherever they render the same text."""
    return [file.read_text(encoding="utf-8") for file in sorted(TAGGED.glob("*.jinja"))]


# ---------------------------------------------------------------------------------------------------------------------
# A conversation as rows of text


def plan(
    tokenizer: PreTrainedTokenizerBase, record: Record, close: Closing, tags: str | None
) -> tuple[list[Row], list[str]]:
    """The rows of a conversation as text, and why a turn is in none of them. `tags`: see `tagged`.

    One row holds all turns where the history stays as it was served. Where the template rewrites it (thinking that is
    kept in the last turn only, an end of turn that differs there), each turn has a row of its own.
    """
    rows: list[Row] = []
    faults: list[str] = []
    replies = [j for j, message in enumerate(record.messages) if message["role"] == "assistant"]
    try:
        whole = render(tokenizer, record.messages, record.tools)
    except REFUSED as error:
        return [], [f"the chat template refuses the conversation: {first_line(error)}"]
    for j in replies:
        try:
            rows.append(_row(tokenizer, record, j, record.finished or j < replies[-1], close, tags))
        except REFUSED as error:
            faults.append(f"the chat template refuses the turn: {first_line(error)}")
        except _Unfit as reason:
            faults.append(str(reason))
    if len(rows) > 1 or (rows and rows[0].text != whole):
        try:
            if all(whole.startswith(row.text[: row.turns[0].end]) for row in rows):
                marked = _marked(tokenizer, record.messages, record.tools, whole, tags)
                rows = [Row(whole, [turn for row in rows for turn in row.turns], marked)]
        except _Unfit as reason:
            faults.append(str(reason))
    return rows, faults


class _Unfit(Exception):
    """Why a turn is not supervised."""


def _row(
    tokenizer: PreTrainedTokenizerBase, record: Record, j: int, finished: bool, close: Closing, tags: str | None
) -> Row:
    """The conversation up to and with message j, which is the assistant's, as it was when it was the last."""
    upto, calls = record.messages[: j + 1], "tool_calls" in record.messages[j]
    closed = bool(close.end) and finished
    if calls and close.end and not finished:
        raise _Unfit("a tool call that was cut short")
    prompt = render(tokenizer, record.messages[:j], record.tools, prompt=True)
    text = render(tokenizer, upto, record.tools)
    marked = _marked(tokenizer, upto, record.tools, text, tags)
    inside = text.removesuffix(close.rest)
    # a call may end otherwise than an answer: <|call|>, <|eom_id|>
    ends = inside.endswith(tuple(special_tokens(tokenizer)) if calls and close.end else close.end)
    end = len(inside) if closed else len(inside.removesuffix(close.end))
    if text.endswith(close.rest) and ends and text.startswith(prompt) and len(prompt) < end:
        return Row(text, [Turn(prompt, end, closed)], marked)
    said = _said(tokenizer, record, j, prompt, text, close.end if closed else "", tags)
    said = said if closed else said.removesuffix(close.end)
    return Row(prompt + said, [Turn(prompt, len(prompt + said), closed)])


def _said(
    tokenizer: PreTrainedTokenizerBase, record: Record, j: int, prompt: str, text: str, end: str, tags: str | None
) -> str:
    """What the target said in message j, where the rendering `text` does not go on as `prompt`, which was served, does.

    Either a template with tags renders the same text: what is inside them was said, though the template writes
    something else before it once the turn is over. Or the prompt opens a thought that the template drops afterwards:
    the message is then what was said, if it closes the thought.
    """
    unprompted = render(tokenizer, record.messages[:j], record.tools) if j else ""
    header = prompt[_alike(prompt, unprompted) :]  # "<|im_start|>assistant\n"
    for template in [tags] if tags else bundled():
        try:
            same, marked = spans(tokenizer, record.messages[: j + 1], record.tools, template)
        except REFUSED:
            continue
        if same == text and marked and text[: marked[-1][0]].endswith(header):
            begin, stop = marked[-1]
            return text[begin:stop].removesuffix(end) + end
    thought = re.search(r"<(\w+)>\s*\Z", prompt)
    if thought and "tool_calls" not in record.messages[j]:
        content = record.messages[j]["content"]
        if f"</{thought[1]}>" not in content:
            raise _Unfit(f"the generation prompt opens <{thought[1]}>, which the reply never closes")
        own = re.match(rf"\s*<{thought[1]}>\s*", content)
        return content[own.end() if own else 0 :] + end
    raise _Unfit("the rendered turn does not continue the generation prompt")


def _marked(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any, text: str, tags: str | None
) -> list[Span] | None:
    """Where the tags are in `text`, the template's own rendering; None for no tags."""
    if tags is None:
        return None
    same, marked = spans(tokenizer, messages, tools, tags)
    if same != text:
        raise _Unfit("data.template renders the conversation otherwise than the target's own template")
    return marked
