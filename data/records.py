"""Owns the readers: what lies in a file or a data set, in whatever form, becomes a `Record`: a chat, or plain text.

Knows forms of records and kinds of files. Knows no tokenizer and no template. pyarrow and `datasets` are imported only
where a parquet file or a hub source is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Messages = list[dict[str, Any]]  # [{"role": "system" | "user" | "assistant" | "tool", "content": str, ...}, ...]
Place = (
    int | str
)  # where a record was found: its line (row) from 1, with the file's name before it where there are many
Found = tuple[Place, Any]  # a place and the parsed record, or the ValueError that parsing it gave
T = TypeVar("T")

SELF = Path(__file__).parent / "self" / "smollm2.jsonl.gz"
SUFFIXES = {
    "self": (".jsonl.gz",),
    "jsonl": (".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".txt.gz"),
}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# A question and its answer under the names they go by; the first pair that a record has.
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
FURTHER = ("input", "context")  # what an instruction is about, written below it
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")  # templates may read them


class BadData(ValueError):
    """Data that cannot be used; the message is one line that names the option, the file and the line."""


class Record(NamedTuple):
    """A conversation; or plain text, where there are no `messages`."""

    messages: Messages
    finished: bool = True  # False: the last turn was cut by a length limit, its end is not its writer's
    tools: list[dict[str, Any]] | None = None  # functions the template may describe, as JSON schemas
    text: str = ""

    @property
    def asked(self) -> str:
        """What sets this record apart from others: the first user turn, or the text."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), self.text)


def set_aside(asked: str, share: float) -> bool:
    """Whether a conversation is among the `share` that is never trained on: its first user's turn alone decides."""
    return int.from_bytes(hashlib.sha256(asked.strip().encode()).digest()[:8], "big") < share * 2**64


class Source(NamedTuple):
    """Where records come from."""

    source: str  # self, jsonl, parquet, text, hub
    path: str | None = None
    split: str | None = None  # of a hub data set
    streaming: bool = False  # of a hub data set: read as it arrives, nothing kept on disk
    weight: float = 1.0  # in a mixture

    def __str__(self) -> str:
        return str(self.path or self.source)


@dataclass
class Skipped:
    """What was left out, why and where: reason -> places (lines of a file, rows of a dataset, counted from 1)."""

    what: str = "records"
    where: str = ""
    reasons: dict[str, list[Place]] = field(default_factory=dict)

    def add(self, reason: str, place: Place) -> None:
        self.reasons.setdefault(reason, []).append(place)

    def __len__(self) -> int:
        return sum(map(len, self.reasons.values()))

    def __str__(self) -> str:
        def places(numbers: list[Place]) -> str:
            shown = ", ".join(map(str, numbers[:5]))
            more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
            return f"{len(numbers)}: {'line' if len(numbers) == 1 else 'lines'} {shown}{more}"

        found = "; ".join(f"{reason} ({places(numbers)})" for reason, numbers in self.reasons.items())
        return f"skipped {len(self)} {self.what}{self.where and f' of {self.where}'}{found and f': {found}'}"


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def read(
    sources: Sequence[Source],
    skipped: Skipped,
    strict: bool = False,
    parse: Callable[[Any], tuple[Record, str]] | None = None,
) -> tuple[Iterator[tuple[Place, Record]], str | None]:
    """The usable records of all sources with their places, and a hash of the content (None: it cannot be known).

    Several sources are mixed: each record comes from the source that is furthest behind its weight, and the first
    source to end ends the mixture, so that the shares are the weights to the last record. Nothing is drawn: the order
    is always the same. What cannot be read is added to `skipped`, or is BadData at once under `strict`. `parse` is
    `parsed`, or `asked` where only the user's side is wanted.
    """
    opened = [_opened(source) for source in sources]
    whole = hashlib.sha256()
    for source, (_, content) in zip(sources, opened, strict=True):
        whole.update(f"{source.source} {source.weight} {content}\n".encode())
    named = [f"{source}:" if len(sources) > 1 else "" for source in sources]
    usable = [
        _usable(found, str(source), name, skipped, strict, parse or parsed)
        for source, name, (found, _) in zip(sources, named, opened, strict=True)
    ]
    known = all(content is not None for _, content in opened)
    return mixed(usable, [source.weight for source in sources]), whole.hexdigest() if known else None


def mixed(parts: Sequence[Iterator[T]], weights: Sequence[float]) -> Iterator[T]:
    """One from each part in turn, as often as its weight says, until a part that is due has no more."""
    taken = [0] * len(parts)
    while True:
        due = min(range(len(parts)), key=lambda i: ((taken[i] + 1) / weights[i], i))
        try:
            yield next(parts[due])
        except StopIteration:
            return
        taken[due] += 1


def _usable(
    found: Iterator[Found],
    where: str,
    prefix: str,
    skipped: Skipped,
    strict: bool,
    parse: Callable[[Any], tuple[Record, str]],
) -> Iterator[tuple[Place, Record]]:
    some = False
    for number, raw in found:
        place = f"{prefix}{number}" if prefix else number
        record, reason = parse(raw)
        if not reason:
            some = True
            yield place, record
        elif strict:
            raise BadData(f"data.strict: {where}:{number}: {reason}")
        else:
            skipped.add(reason, place)
    if prefix and not some:  # with it the mixture would end, at once
        raise BadData(f"data.parts: no conversation in {where}: {skipped}")


def _opened(source: Source) -> tuple[Iterator[Found], str | None]:
    """The records of a source as they are found, and a hash of all that is in it (None where it is only streamed)."""
    if source.source == "hub":
        return _hub(source)
    if source.source not in SUFFIXES:
        near = get_close_matches(source.source, [*SUFFIXES, "hub"], n=1, cutoff=0.0)[0]
        raise BadData(f"data.source: no source named {source.source!r}; nearest: {near}")
    if source.split is not None:
        raise BadData(f"data.split: {source.split!r} was asked of a {source.source} file; only data=hub has splits")
    if source.source == "self":
        if not SELF.is_file():
            raise BadData(f"data=self: no file {SELF}; scripts/synthesize.py writes it")
        files = [SELF]
    else:
        files = _files(source)
    reader: Callable[[Path], Iterator[Found]] = {"parquet": _parquet, "text": _paragraphs}.get(
        source.source, json_lines
    )
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return _each(files, reader), digest.hexdigest()


def _files(source: Source) -> list[Path]:
    """The file, or all files of the kind in the folder, in the order of their names."""
    if source.path is None:
        raise BadData(f"data.path: data={source.source} needs a file, data.path=FILE{SUFFIXES[source.source][0]}")
    folder = Path(source.path).expanduser()
    if not folder.is_dir():
        return [existing(folder, "data.path")]
    files = sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES[source.source]) and file.is_file())
    if not files:
        raise BadData(f"data.path: no {' or '.join(SUFFIXES[source.source])} in {folder.absolute()}")
    return files


def _each(files: Sequence[Path], reader: Callable[[Path], Iterator[Found]]) -> Iterator[Found]:
    for file in files:
        for number, record in reader(file):
            yield number if len(files) == 1 else f"{file.name}:{number}", record


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


_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character that JSON escapes as two


def json_lines(path: Path, option: str = "data.path") -> Iterator[tuple[int, Any]]:
    """(line number from 1, record) of a .jsonl or .jsonl.gz; a line that is no JSON, or holds text that no tokenizer
    reads, gives its ValueError as record."""
    for number, line in _lines(path, option):
        if line.strip():
            try:
                record = json.loads(line)
                if _HALF.search(line):  # most are pairs: written out, half a pair is none
                    json.dumps(record, ensure_ascii=False).encode()
                yield number, record
            except ValueError as error:  # bad JSON, bad UTF-8 or half a character
                yield number, error


def _paragraphs(path: Path) -> Iterator[tuple[int, Any]]:
    """(line it begins at, {"text": ...}) for each stretch of plain text between blank lines."""
    lines: list[bytes] = []
    number = 0
    for number, line in _lines(path, "data.path"):
        if line.strip():
            lines.append(line)
        elif lines:
            yield number - len(lines), _text(lines)
            lines = []
    if lines:
        yield number - len(lines) + 1, _text(lines)


def _text(lines: list[bytes]) -> Any:
    try:
        # Windows begins a file with a mark and ends lines otherwise: nobody wrote that
        return {"text": b"".join(lines).replace(b"\r\n", b"\n").decode("utf-8-sig").rstrip("\n")}
    except ValueError as error:
        return error


def _lines(path: Path, option: str) -> Iterator[tuple[int, bytes]]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            yield from enumerate(lines, 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{option}: cannot read {path}: {first_line(error)}") from error


def _parquet(path: Path) -> Iterator[Found]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            for record in batch.to_pylist():
                yield (number := number + 1), record
    except (OSError, ArrowException) as error:
        raise BadData(f"data.path: cannot read {path}: {first_line(error)}") from error


def _hub(source: Source) -> tuple[Iterator[Found], str | None]:
    if source.path is None:
        raise BadData("data.path: data=hub needs a dataset, data.path=OWNER/NAME")
    import datasets

    file = Path(source.path).expanduser()
    kind = {".json": "json", ".jsonl": "json", ".gz": "json", ".parquet": "parquet", ".csv": "csv"}.get(file.suffix)
    split = source.split or "train"
    if source.streaming and "[" in split:
        raise BadData(f"data.split: {split!r} takes a slice, which data.streaming=true cannot; nearest: data.limit")
    named: dict[str, Any] = (
        {"path": kind, "data_files": str(file)} if kind and file.is_file() else {"path": source.path}
    )
    try:
        rows = datasets.load_dataset(**named, split=split, streaming=source.streaming)
    except Exception as error:  # the library raises many kinds, among them those of its HTTP client
        where = f"data.path: cannot load dataset {source.path!r}, split {split!r}"
        raise BadData(f"{where}: {type(error).__name__}: {first_line(error)}") from error
    return _arriving(rows, source.path), None if source.streaming else rows._fingerprint


def _arriving(rows: Any, path: str) -> Iterator[Found]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield number, row
    except Exception as error:  # as above: a stream may break off at any row
        raise BadData(
            f"data.path: {path!r} breaks off after {number} rows: {type(error).__name__}: {first_line(error)}"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Forms of records


def parsed(raw: Any) -> tuple[Record, str]:
    """(record, "") of what was found, in any of the known forms, or (nothing, why it is no conversation)."""
    try:
        return _record(raw), ""
    except _Unusable as reason:
        return Record([]), str(reason)


def asked(raw: Any) -> tuple[Record, str]:
    """(the system and user's turns, "") of a conversation or a mere prompt, what was answered left out; or why not.

    A prompt may be `prompt`, `question` or `instruction` without its answer, a list of `turns`, messages that end with
    the user's, or plain text.
    """
    try:
        if isinstance(raw, dict):
            raw = {key: value for key, value in raw.items() if value is not None}
        if isinstance(raw, dict) and isinstance(turns := raw.get("turns"), list):
            raw = {"messages": [m for turn in turns for m in ({"role": "user", "content": turn}, _ANSWER)]}
        elif isinstance(raw, dict) and not any(key in raw for key in ("messages", "conversations", "conversation")):
            named = next((key for pair in PAIRS for key in pair[:1] if key in raw), "text")
            given = raw.get(named)
            about = [raw[key] for key in FURTHER if named == "instruction" and isinstance(raw.get(key), str)]
            if isinstance(given, str):
                raw = {"prompt": "\n\n".join(filter(str.strip, [given, *about])), "response": _ANSWER["content"]}
            elif isinstance(given, list):
                raw = {"messages": given}
        if isinstance(raw, dict):
            name = next((key for key in ("messages", "conversations", "conversation") if raw.get(key)), None)
            last = raw[name][-1] if name and isinstance(raw[name], list) else None
            if isinstance(last, dict) and ROLES.get(str(last.get("role", last.get("from")))) == "user":
                raw = raw | {name: [*raw[name], _ANSWER]}
        record = _record(raw)
        if not record.messages:
            raise _Unusable("no user turn")
        if record.tools or any(m["role"] == "tool" or "tool_calls" in m for m in record.messages):
            raise _Unusable("tools are called in it")
        return record._replace(messages=[m for m in record.messages if m["role"] != "assistant"]), ""
    except _Unusable as reason:
        return Record([]), str(reason)


_ANSWER = {"role": "assistant", "content": "-"}  # stands where an answer will


class _Unusable(Exception):
    """Why a record is no conversation."""


def _record(raw: Any) -> Record:
    if isinstance(raw, UnicodeEncodeError):
        raise _Unusable("half of an escaped character")
    if isinstance(raw, ValueError):
        raise _Unusable("invalid JSON")
    if not isinstance(raw, dict):
        raise _Unusable("no JSON object")
    raw = {key: value for key, value in raw.items() if value is not None}  # tables hold a null for what a row lacks
    turns = _turns(raw)
    if isinstance(turns, str):
        if not turns.strip():
            raise _Unusable("the text is empty")
        return Record([], text=turns)
    if not isinstance(turns, list) or not turns:
        raise _Unusable("no messages")
    messages = [_message(turn) for turn in turns]
    if isinstance(system := raw.get("system"), str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    _check_order(messages)
    return Record(messages, raw.get("finished") is not False, _tools(raw.get("tools")))


def _turns(raw: dict[str, Any]) -> Any:
    """The messages of a record as they are written there; a string where it is plain text."""
    for key in ("messages", "conversations", "conversation"):
        if key in raw:
            return raw[key]
    for asked, answered in PAIRS:
        if asked not in raw or answered not in raw:
            continue
        question, answer = raw[asked], raw[answered]
        if isinstance(question, list) and isinstance(answer, list):
            return question + answer
        if isinstance(question, str):
            about = [raw[key] for key in FURTHER if isinstance(raw.get(key), str) and raw[key].strip()]
            question = "\n\n".join([question, *about])
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if isinstance(raw.get("text"), str):
        return raw["text"]
    raise _Unusable("neither messages, conversations, prompt and response, instruction and output, nor text")


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _Unusable("a message is no object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise _Unusable(f"unknown role {role!r}")
    message = {"role": ROLES[role]} | {key: turn[key] for key in KEPT if turn.get(key)}
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
        content = content or ""
    if content is None:
        raise _Unusable("content is null")
    if not isinstance(content, str):
        raise _Unusable("content is no text")
    if not content.strip() and "tool_calls" not in message:
        raise _Unusable("content is empty")
    return message | {"content": content}


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: templates write them out themselves, servers give them as text."""
    read = []
    for given in calls if isinstance(calls, list) else [None]:
        call = given if isinstance(given, dict) else {}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Unusable("a tool call that is none")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise _Unusable("the arguments of a tool call are no JSON") from None
        read.append({"type": "function", "function": function | {"arguments": arguments}})
        if isinstance(call.get("id"), str):
            read[-1]["id"] = call["id"]
    return read


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise _Unusable("tools are no JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Unusable("tools are no list of objects")
    return tools


def _check_order(messages: Messages) -> None:
    """A system message if any, then user and assistant in turn; tools answer the assistant, as many as it called."""
    roles = [message["role"] for message in messages]
    talk = roles[1:] if roles[0] == "system" else roles
    if not talk:
        raise _Unusable("only a system message")
    if talk[0] != "user":
        raise _Unusable("starts with the assistant" if talk[0] == "assistant" else f"starts with a {talk[0]} message")
    if "system" in talk:
        raise _Unusable("a system message after the first")
    for before, after in pairwise(talk):
        if before == after != "tool":
            raise _Unusable(f"two {before} turns in a row")
        if before == "user" and after == "tool":
            raise _Unusable("a tool message that nobody asked for")
    if "assistant" not in talk:
        raise _Unusable("no assistant turn")


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
