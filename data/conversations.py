"""Owns the way from chat records to token ids and loss mask: readers, templates, held-out split, draft vocabulary.

Knows no model, no decoder and no configuration; `datasets` is imported only when a hub source is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]  # [{"role": "system" | "user" | "assistant", "content": str}, ...]

SELF = Path(__file__).parent / "self" / "smollm2.jsonl.gz"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class BadData(ValueError):
    """Data that cannot be used; the message is one line that names the option, the file and the line."""


@dataclass(frozen=True)
class Example:
    """One row of training text: token ids and which of them the target would have had to write itself."""

    ids: Tensor  # int64 [T]
    supervised: Tensor  # bool [T]

    def __len__(self) -> int:
        return len(self.ids)


class Supervision(NamedTuple):
    """How many tokens of how many are supervised."""

    supervised: int
    total: int

    def __str__(self) -> str:
        share = self.supervised / max(self.total, 1)
        return f"supervised tokens: {self.supervised} of {self.total} ({share:.1%})"


@dataclass
class Skipped:
    """What was left out, why and where: reason -> numbers (lines of a file, rows of a dataset, counted from 1)."""

    what: str = "records"
    where: str = ""
    reasons: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, number: int) -> None:
        self.reasons.setdefault(reason, []).append(number)

    def __len__(self) -> int:
        return sum(map(len, self.reasons.values()))

    def __str__(self) -> str:
        def places(numbers: list[int]) -> str:
            shown = ", ".join(map(str, numbers[:5]))
            more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
            return f"{len(numbers)}: {'line' if len(numbers) == 1 else 'lines'} {shown}{more}"

        found = "; ".join(f"{reason} ({places(numbers)})" for reason, numbers in self.reasons.items())
        return f"skipped {len(self)} {self.what}{self.where and f' of {self.where}'}{found and f': {found}'}"


@dataclass
class Dataset:
    """What `load` returns. `held_out_conversations` are the whole chats behind `held_out`, for decoding."""

    train: list[Example]
    held_out: list[Example]
    held_out_conversations: list[Messages]
    skipped: Skipped  # records that are no conversation
    unsupervised: Skipped  # assistant turns (and rows cut short) that no loss may look at
    provenance: dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer and its chat template


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The fast tokenizer in `folder` (or of that hub id); BadData if it is missing, slow or without chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadData(f"target.path: no tokenizer in {folder}: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise BadData(f"target.path: the tokenizer in {folder} has no tokenizer.json; only fast tokenizers are read")
    if not tokenizer.chat_template:
        raise BadData(f"target.path: the tokenizer in {folder} has no chat template")
    return tokenizer


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the chat template's text: two runs whose hashes differ saw differently rendered conversations."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids that serving feeds the target: `messages` and the template's opening of an assistant turn."""
    return _tokens(tokenizer, [_render(tokenizer, messages, prompt=True)])[0].ids


def opening(messages: Messages) -> Messages:
    """The messages before the first assistant turn: what a decoder is asked when it is given this conversation."""
    return messages[: next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))]


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end the assistant's turn: the token the template closes it with, and the tokenizer's EOS."""
    closing = _closing(tokenizer)[0]
    ids = {_tokens(tokenizer, [closing])[0].ids[-1]} if closing else set()
    return sorted(ids | ({tokenizer.eos_token_id} - {None}))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, prompt: bool = False) -> str:
    # As a batch of one: only so may the history before the first turn be empty.
    return tokenizer.apply_chat_template([messages], add_generation_prompt=prompt, tokenize=False)[0]


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Sequence[Any]:
    # The template has already written every special token that belongs there.
    return tokenizer(texts, add_special_tokens=False, verbose=False).encodings if texts else []


def _closing(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes after the assistant's text, split behind the first special token.

    ChatML: ("<|im_end|>", "\\n"). The target produces the first part; the second comes with the next turn.
    """
    probe = "paceline-probe"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": probe}]
    _, found, after = _render(tokenizer, chat).rpartition(probe)
    if not found:
        raise BadData(f"target: the chat template of {tokenizer.name_or_path} leaves out what the assistant says")
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {tokenizer.eos_token}
    ends = [after.find(token) + len(token) for token in special if token and token in after]
    cut = min(ends, default=0)
    return after[:cut], after[cut:]


# ---------------------------------------------------------------------------------------------------------------------
# Conversation -> ids and mask


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, max_length: int, finished: bool = True
) -> list[Example]:
    """`encode_all` for one conversation: usually one row, none when nothing in it can be supervised."""
    return encode_all(tokenizer, [messages], max_length, finished=[finished])[0]


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    max_length: int,
    unsupervised: Skipped | None = None,
    numbers: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
) -> list[list[Example]]:
    """Rows of training text per conversation, at most `max_length` tokens each.

    Ids are the tokenizer's own rendering of the whole conversation. Supervised are the tokens of each assistant turn
    that the target would have to produce after the generation prompt: the text and its end-of-turn token. A turn is
    supervised only where that prompt, as serving sends it, is a prefix of the row, token for token; where the template
    has `{% generation %}` marks, only inside them. If the template rewrites earlier turns (thinking that is only kept
    in the last), every assistant turn gets a row of its own, rendered as it was when it was the last.
    Where `finished` is false, the last turn was cut by a length limit: its end-of-turn token is not supervised.
    What could not be supervised is added to `unsupervised` under `numbers` (line numbers of the conversations).
    """
    unsupervised = Skipped("assistant turns") if unsupervised is None else unsupervised
    numbers = range(1, len(conversations) + 1) if numbers is None else numbers
    finished = [True] * len(conversations) if finished is None else finished
    closing = _closing(tokenizer)
    marked = "endgeneration" in tokenizer.get_chat_template()
    encoded: list[list[Example]] = []
    for first in range(0, len(conversations), 512):  # the tokenizer works on many texts at once
        chunk = range(first, min(first + 512, len(conversations)))
        plans = [_plan(tokenizer, conversations[i], finished[i], closing) for i in chunk]
        texts = iter(_tokens(tokenizer, [row.text for rows, _ in plans for row in rows]))
        prompts = iter(_tokens(tokenizer, [turn.prompt for rows, _ in plans for row in rows for turn in row.turns]))
        for i, (rows, faults) in zip(chunk, plans, strict=True):
            encoded.append([])
            for row in rows:
                tokens = next(texts)
                marks = _marks(tokenizer, row.messages) if marked else torch.ones(len(tokens.ids), dtype=torch.bool)
                supervised = torch.zeros_like(marks)
                for turn in row.turns:
                    said = next(prompts).ids  # what was served: the target's own tokens begin at len(said)
                    stop = _stop(tokens, turn)
                    if tokens.ids[: len(said)] == said and len(said) < stop:
                        supervised[len(said) : stop] = marks[len(said) : stop]
                        supervised[stop - 1] |= turn.closed  # some templates close the turn after the mark
                    else:
                        faults.append("the reply's first token is fused with the prompt's last")
                if supervised[:max_length].any():
                    encoded[-1].append(Example(torch.tensor(tokens.ids[:max_length]), supervised[:max_length]))
                elif supervised.any():
                    faults.append(f"the first reply begins beyond max_length={max_length}")
            for fault in faults:
                unsupervised.add(fault, numbers[i])
    return encoded


class _Turn(NamedTuple):
    prompt: str  # what serving sends before this turn
    end: int  # characters of the row up to the end of what the target produced
    closed: bool  # the last of these are an end-of-turn token


class _Row(NamedTuple):
    messages: Messages
    text: str
    turns: list[_Turn]


def _plan(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, finished: bool, closing: tuple[str, str]
) -> tuple[list[_Row], list[str]]:
    """The rows of a conversation as text, and why a turn is in none of them."""
    from jinja2 import TemplateError

    rows: list[_Row] = []
    faults: list[str] = []
    replies = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        whole = _render(tokenizer, messages)
    except TemplateError as error:
        return [], [f"the chat template refuses the conversation: {_first_line(error)}"]
    for j in replies:
        try:
            prompt = _render(tokenizer, messages[:j], prompt=True)
            text = _render(tokenizer, messages[: j + 1])
        except TemplateError as error:
            faults.append(f"the chat template refuses the turn: {_first_line(error)}")
            continue
        closed = bool(closing[0]) and (finished or j < replies[-1])
        after = closing[1] if closed else "".join(closing)
        end = len(text) - len(after)
        if text.startswith(prompt) and text.endswith(after) and len(prompt) < end:
            rows.append(_Row(messages[: j + 1], text, [_Turn(prompt, end, closed)]))
        else:
            faults.append("the rendered turn does not continue the generation prompt")
    if rows and all(whole.startswith(row.text[: row.turns[0].end]) for row in rows):  # history stays as it was served
        rows = [_Row(messages, whole, [turn for row in rows for turn in row.turns])]
    return rows, faults


def _stop(tokens: Any, turn: _Turn) -> int:
    """Number of tokens up to the end of what the target produced in this turn."""
    stop = bisect_left(tokens.offsets, (turn.end, 0))
    if not turn.closed and tokens.offsets[stop - 1][1] > turn.end:
        stop -= 1  # the last token is half the reply's, half the template's
    return stop


def _marks(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Tensor:
    """The template's own `{% generation %}` mask, bool [T]."""
    rendered = tokenizer.apply_chat_template([messages], return_dict=True, return_assistant_tokens_mask=True)
    return torch.tensor(rendered["assistant_masks"][0], dtype=torch.bool)


def supervision(examples: Iterable[Example]) -> Supervision:
    """Counts that print as 'supervised tokens: n of N'."""
    pairs = [(int(e.supervised.sum()), len(e)) for e in examples]
    return Supervision(sum(n for n, _ in pairs), sum(total for _, total in pairs))


def coloured(example: Example, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The example with its mask to look at: supervised text is green and underlined, and bracketed for plain output."""
    from rich.text import Text

    text = Text()
    text.append("⟦supervised: the drafter learns to predict this⟧", style="bold green underline")
    text.append("  context only\n", style="dim")
    # [0 0 1 1 1 0] -> runs start at 0, 2, 5
    edges = torch.nonzero(example.supervised[1:] != example.supervised[:-1]).flatten().add(1).tolist()
    for start, stop in zip([0, *edges], [*edges, len(example)], strict=True):
        piece = tokenizer.decode(example.ids[start:stop])
        if example.supervised[start]:
            text.append(f"⟦{piece}⟧", style="bold green underline")
        else:
            text.append(piece, style="dim")
    return text


def draft_vocabulary(examples: Iterable[Example], size: int, keep: Iterable[int] = ()) -> tuple[Tensor, float]:
    """The `size` target ids a drafter may propose, sorted (int64 [size]), and their share of the supervised tokens.

    `keep` (the end-of-turn ids) is always in; then the most frequent supervised tokens, ties to the lower id; if there
    are fewer of them than `size`, the lowest unused ids.
    """
    kept = torch.tensor(sorted(set(keep)), dtype=torch.long)
    if len(kept) > size:
        raise BadData(f"method.draft_vocab: {size} ids cannot hold the {len(kept)} that must be in it")
    tokens = torch.cat([e.ids[e.supervised] for e in examples] or [kept[:0]])
    # [size] columns hold enough unused ids, whatever the tokens are.
    count = torch.bincount(torch.cat([tokens, kept]), minlength=size)
    count[kept] += len(tokens)
    ids = torch.sort(count, descending=True, stable=True).indices[:size].sort().values
    return ids, torch.isin(tokens, ids).sum().item() / max(len(tokens), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Records


def load(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    path: str | None = None,
    split: str | None = None,
    max_length: int = 512,
    limit: int | None = None,
    strict: bool = False,
    held_out: float = 0.02,
) -> Dataset:
    """Read `source` (self | jsonl | hub), encode it and set a share `held_out` of it aside.

    A record has `messages` (role, content), `conversations` (from, value), or `prompt` and `response`; with
    `finished: false` its last turn was cut by a length limit. Bad records are skipped and counted, or refused at the
    first under `strict`. `limit` counts usable records. The held-out conversations are chosen by a hash of the first
    user turn: order and limit never move one into training.
    Raises BadData, also when nothing would be supervised.
    """
    skipped = Skipped(where=str(path or source))
    conversations: list[Messages] = []
    numbers: list[int] = []
    finished: list[bool] = []
    digest = hashlib.sha256()
    for number, record in _records(source, path, split):
        if limit is not None and len(conversations) >= limit:
            break
        messages, reason = _messages(record)
        if reason:
            if strict:
                raise BadData(f"data.strict: {path or source}:{number}: {reason}")
            skipped.add(reason, number)
            continue
        conversations.append(messages)
        numbers.append(number)
        finished.append(record.get("finished") is not False)
        digest.update(json.dumps([messages, finished[-1]], sort_keys=True).encode())
    if not conversations:
        raise BadData(f"data.path: no conversation in {path or source}: {skipped}")

    unsupervised = Skipped("assistant turns", str(path or source))
    rows = encode_all(tokenizer, conversations, max_length, unsupervised, numbers, finished)
    aside = [_held_out(messages, held_out) for messages in conversations]
    train = [example for out, some in zip(aside, rows, strict=True) if not out for example in some]
    rest = [example for out, some in zip(aside, rows, strict=True) if out for example in some]
    if not train and not rest:
        raise BadData(
            f"data: not one supervised token in {path or source} under the chat template of "
            f"{tokenizer.name_or_path}: {unsupervised}"
        )
    if not train:
        raise BadData(f"data.held_out: {held_out} of {len(conversations)} conversations leaves none to train on")
    provenance = {
        "source": source,
        "path": path,
        "split": split,
        "conversations": len(conversations),
        "held_out": sum(aside),
        "skipped": {reason: len(lines) for reason, lines in skipped.reasons.items()},
        "supervised_tokens": supervision(train).supervised,
        "max_length": max_length,
        "sha256": digest.hexdigest(),
        "template_sha256": template_hash(tokenizer),
    }
    chats = [messages for out, messages in zip(aside, conversations, strict=True) if out]
    return Dataset(train, rest, chats, skipped, unsupervised, provenance)


def _held_out(messages: Messages, share: float) -> bool:
    asked = next(m["content"] for m in messages if m["role"] == "user")
    return int.from_bytes(hashlib.sha256(asked.strip().encode()).digest()[:8], "big") < share * 2**64


def _records(source: str, path: str | None, split: str | None) -> Iterator[tuple[int, Any]]:
    """(line or row number, parsed record or ValueError)."""
    if source == "hub":
        yield from _hub(path, split)
    elif source == "self":
        if not SELF.is_file():
            raise BadData(f"data=self: no file {SELF}; scripts/synthesize.py writes it")
        yield from json_lines(SELF)
    elif source == "jsonl":
        if path is None:
            raise BadData("data.path: data=jsonl needs a file, data.path=FILE.jsonl")
        if split is not None:
            raise BadData(f"data.split: {split!r} was asked of a jsonl file; only data=hub has splits")
        yield from json_lines(existing(path, "data.path"))
    else:
        raise BadData(f"data.source: no source named {source!r}; self, jsonl or hub")


def existing(path: str | Path, option: str, also: Sequence[str] = ()) -> Path:
    """`path` if it is a file; otherwise BadData with the absolute path and the nearest name there or in `also`."""
    path = Path(path).expanduser()
    if path.is_file():
        return path
    beside = {p.name: str(p) for p in path.parent.iterdir()} if path.parent.is_dir() else {}
    names = beside | {name: name for name in also}
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"; nearest: {names[near[0]]}" if near else ""
    raise BadData(f"{option}: no file {path.absolute()}{hint}")


def json_lines(path: Path, option: str = "data.path") -> Iterator[tuple[int, Any]]:
    """(line number from 1, record) of a .jsonl or .jsonl.gz; a line that is no JSON gives its ValueError as record."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError as error:  # bad JSON or bad UTF-8
                        yield number, error
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{option}: cannot read {path}: {_first_line(error)}") from error


def _hub(path: str | None, split: str | None) -> Iterator[tuple[int, Any]]:
    if path is None:
        raise BadData("data.path: data=hub needs a dataset, data.path=OWNER/NAME")
    import datasets

    file = Path(path).expanduser()
    kind = {".json": "json", ".jsonl": "json", ".gz": "json", ".parquet": "parquet", ".csv": "csv"}.get(file.suffix)
    try:
        if kind and file.is_file():
            rows = datasets.load_dataset(kind, data_files=str(file), split=split or "train")
        else:
            rows = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # the library raises many kinds, among them those of its HTTP client
        where = f"data.path: cannot load dataset {path!r}, split {split or 'train'!r}"
        raise BadData(f"{where}: {type(error).__name__}: {_first_line(error)}") from error
    yield from enumerate(rows, 1)


def _messages(record: Any) -> tuple[Messages, str]:
    """(messages, "") of a record in any of the known forms, or ([], why it is no conversation)."""
    if isinstance(record, ValueError):
        return [], "invalid JSON"
    if not isinstance(record, dict):
        return [], "no JSON object"
    if (turns := record.get("messages", record.get("conversations"))) is None:
        if "prompt" not in record or "response" not in record:
            return [], "neither messages, conversations, nor prompt and response"
        turns = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    if not isinstance(turns, list) or not turns:
        return [], "no messages"
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            return [], "a message is no object"
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in ROLES:
            return [], f"unknown role {role!r}"
        if content is None:
            return [], "content is null"
        if not isinstance(content, str):
            return [], "content is no text"
        if not content.strip():
            return [], "content is empty"
        messages.append({"role": ROLES[role], "content": content})
    roles = [m["role"] for m in messages]
    talk = roles[1:] if roles[0] == "system" else roles
    if not talk:
        return [], "only a system message"
    if talk[0] == "assistant":
        return [], "starts with the assistant"
    if "system" in talk:
        return [], "a system message after the first"
    for role, following in pairwise(talk):
        if role == following:
            return [], f"two {role} turns in a row"
    if "assistant" not in talk:
        return [], "no assistant turn"
    return messages, ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
