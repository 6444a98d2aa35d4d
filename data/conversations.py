"""Owns the way from records to what training reads: token ids and loss masks, held-out split, draft vocabulary.

The door of the room: readers (records.py), templates (templates.py) and rows on disk (rows.py) are reached through it.
Knows no model, no decoder and no configuration.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.data.records import (
    ROLES,
    SELF,
    BadData,
    Messages,
    Place,
    Record,
    Skipped,
    Source,
    asked,
    existing,
    first_line,
    json_lines,
    read,
    set_aside,
)
from paceline.data.rows import Example, Rows, Writer, keep, kept, making
from paceline.data.templates import (
    Row,
    Turn,
    closing,
    known_ids,
    load_tokenizer,
    opening,
    plan,
    prompt_ids,
    stop_ids,
    tagged,
    template_hash,
    tokens,
)

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ROLES",
    "SELF",
    "BadData",
    "Dataset",
    "Example",
    "Messages",
    "Record",
    "Skipped",
    "Source",
    "Supervision",
    "asked",
    "coloured",
    "draft_vocabulary",
    "encode",
    "encode_all",
    "existing",
    "frequencies",
    "json_lines",
    "known_ids",
    "load",
    "load_tokenizer",
    "opening",
    "prompt_ids",
    "read",
    "runs",
    "set_aside",
    "stop_ids",
    "supervision",
    "template_hash",
]

CHUNK = 512  # records encoded at a time: the tokenizer works on many texts at once


class Supervision(NamedTuple):
    """How many tokens of how many are supervised."""

    supervised: int
    total: int

    def __str__(self) -> str:
        share = self.supervised / max(self.total, 1)
        return f"supervised tokens: {self.supervised} of {self.total} ({share:.1%})"


@dataclass
class Dataset:
    """What `load` returns. `held_out_conversations` are the whole chats behind `held_out`, for decoding."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    held_out_conversations: list[Record]
    skipped: Skipped  # records that are no conversation
    unsupervised: Skipped  # assistant turns (and rows cut short) that no loss may look at
    provenance: dict[str, Any]

    @property
    def cut(self) -> str | None:
        """What max_length costs, in words; None where it costs nothing."""
        known, beyond = self.provenance["supervised_tokens"], self.provenance["supervised_tokens_cut"]
        limit = self.provenance["max_length"]
        return f"{beyond} of {known + beyond} supervised tokens lie beyond data.max_length={limit}" if beyond else None


# ---------------------------------------------------------------------------------------------------------------------
# Records -> ids and mask


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    max_length: int,
    finished: bool = True,
    tools: list[dict[str, Any]] | None = None,
    template: str | Path | None = None,
) -> list[Example]:
    """`encode_all` for one conversation: usually one row, none when nothing in it can be supervised."""
    return next(encode_all(tokenizer, [(1, Record(messages, finished, tools))], max_length, template=template))[1]


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[Place, Record]],
    max_length: int,
    unsupervised: Skipped | None = None,
    template: str | Path | None = None,
) -> Iterator[tuple[Record, list[Example], int]]:
    """Each record with its rows of training text, at most `max_length` tokens each, and how many tokens that would be
    supervised lie beyond. Reads as it is read.

    Ids are the tokenizer's own rendering of the whole conversation. Supervised are the tokens of each assistant turn
    that the target would have to produce after the generation prompt: the text and its end-of-turn token. A turn is
    supervised only where that prompt, as serving sends it, is a prefix of the row, token for token; where the template
    has `{% generation %}` tags (its own, or those of the file `template`, which must render the same), only inside
    them. If the template rewrites earlier turns (thinking that is only kept in the last), every assistant turn gets a
    row of its own, as it was when it was the last.
    Where a record is not `finished`, its last turn was cut by a length limit: its end-of-turn token is not supervised.
    All tokens of plain text are; a long one becomes several rows, a long conversation is cut.
    What could not be supervised is added to `unsupervised` under the place of its record.
    """
    unsupervised = Skipped("assistant turns") if unsupervised is None else unsupervised
    close, tags = closing(tokenizer), tagged(tokenizer, template)
    records = iter(records)
    while chunk := list(islice(records, CHUNK)):
        plans = [plan(tokenizer, record, close, tags) for _, record in chunk]
        texts = iter(tokens(tokenizer, [row.text for rows, _ in plans for row in rows]))
        prompts = iter(tokens(tokenizer, [turn.prompt for rows, _ in plans for row in rows for turn in row.turns]))
        for (place, record), (rows, faults) in zip(chunk, plans, strict=True):
            examples: list[Example] = [] if record.messages else _plain(tokenizer, record.text, max_length)
            beyond = 0
            for row in rows:
                ids, supervised = _masked(next(texts), row, [next(prompts).ids for _ in row.turns], faults)
                beyond += int(supervised[max_length:].sum())
                if supervised[:max_length].any():
                    examples.append(Example(torch.tensor(ids[:max_length]), supervised[:max_length]))
                elif supervised.any():
                    faults.append(f"the first reply begins beyond max_length={max_length}")
            for fault in faults:
                unsupervised.add(fault, place)
            yield record, examples, beyond


def _masked(encoding: Any, row: Row, prompts: list[list[int]], faults: list[str]) -> tuple[list[int], Tensor]:
    """Ids of a row and its mask, bool [T]; a turn that does not go on from the ids of its prompt is a fault."""
    ids, offsets = encoding.ids, encoding.offsets
    allowed = torch.ones(len(ids), dtype=torch.bool)
    if row.marked is not None:
        allowed[:] = False
        for begin, end in row.marked:  # every token that has a character inside
            allowed[
                bisect_left(offsets, begin + 1, key=lambda o: o[1]) : bisect_left(offsets, end, key=lambda o: o[0])
            ] = True
    supervised = torch.zeros_like(allowed)
    for turn, said in zip(row.turns, prompts, strict=True):  # the target's own tokens begin at len(said)
        stop = _stop(offsets, turn)
        if ids[: len(said)] == said and len(said) < stop:
            supervised[len(said) : stop] = allowed[len(said) : stop]
            supervised[stop - 1] |= turn.closed  # some templates close the turn after the tag
        else:
            faults.append("the reply's first token is fused with the prompt's last")
    return ids, supervised


def _stop(offsets: list[tuple[int, int]], turn: Turn) -> int:
    """Number of tokens up to the end of what the target produced in this turn."""
    stop = bisect_left(offsets, (turn.end, 0))
    if not turn.closed and offsets[stop - 1][1] > turn.end:
        stop -= 1  # the last token is half the reply's, half the template's
    return stop


def _plain(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[Example]:
    """Rows of plain text, begun as a server begins a completion; what the tokenizer adds is not supervised."""
    encoding = tokenizer([text], verbose=False).encodings[0]
    ids = torch.tensor(encoding.ids)
    supervised = ~torch.tensor(encoding.special_tokens_mask, dtype=torch.bool)
    pieces = zip(ids.split(max_length), supervised.split(max_length), strict=True)
    return [Example(*piece) for piece in pieces if piece[1].any()]


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
    for start, stop in runs(example):
        piece = tokenizer.decode(example.ids[start:stop])
        if example.supervised[start]:
            text.append(f"⟦{piece}⟧", style="bold green underline")
        else:
            text.append(piece, style="dim")
    return text


def runs(example: Example) -> Iterator[tuple[int, int]]:
    """[start, stop) of each stretch of tokens that are all supervised, or all not."""
    # [0 0 1 1 1 0] -> runs start at 0, 2, 5
    edges = torch.nonzero(example.supervised[1:] != example.supervised[:-1]).flatten().add(1).tolist()
    yield from zip([0, *edges], [*edges, len(example)], strict=True)


def draft_vocabulary(examples: Iterable[Example], size: int, keep: Iterable[int] = ()) -> tuple[Tensor, float]:
    """The `size` target ids a drafter may propose, sorted (int64 [size]), and their share of the supervised tokens.

    `keep` (the end-of-turn ids) is always in; then the most frequent supervised tokens, ties to the lower id; if there
    are fewer of them than `size`, the lowest unused ids.
    """
    kept = torch.tensor(sorted(set(keep)), dtype=torch.long)
    if len(kept) > size:
        raise BadData(f"method.draft_vocab: {size} ids cannot hold the {len(kept)} that must be in it")
    # [size] columns hold enough unused ids, whatever the tokens are.
    seen = frequencies(examples, max(size, int(kept.max()) + 1 if len(kept) else 0))
    total = int(seen.sum())
    first = seen.clone()
    first[kept] += total + 1
    ids = torch.sort(first, descending=True, stable=True).indices[:size].sort().values
    return ids, int(seen[ids].sum()) / max(total, 1)


def frequencies(examples: Iterable[Example], at_least: int = 0) -> Tensor:
    """How often each id is supervised, int64 [ids]; at least so many columns."""
    seen = torch.zeros(at_least, dtype=torch.long)
    examples = iter(examples)
    while some := list(islice(examples, 4096)):  # not all tokens at once
        found = torch.bincount(torch.cat([e.ids[e.supervised] for e in some]), minlength=len(seen))
        found[: len(seen)] += seen
        seen = found
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# A data set


def load(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    path: str | None = None,
    split: str | None = None,
    max_length: int = 512,
    limit: int | None = None,
    strict: bool = False,
    held_out: float = 0.02,
    streaming: bool = False,
    parts: Sequence[Mapping[str, Any]] = (),
    template: str | Path | None = None,
    cache: str | Path | None = None,
    watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Dataset:
    """Read `source` (self | jsonl | parquet | text | hub, or the `parts` of a mixture), encode it, and set a share
    `held_out` of it aside.

    Forms of records are those of records.py; with `finished: false` the last turn was cut by a length limit. Bad
    records are skipped and counted, or refused at the first under `strict`. `limit` counts usable records. What is
    held out is chosen by a hash of the first user turn: order and limit never move a conversation into training.
    Rows are written to the folder `cache` under a name made of everything that changes them, and found there the next
    time; without it, to a folder that goes with the Dataset. Either way memory does not grow with the data.
    What is encoded passes through `watch`, conversation by conversation: it may count them.
    Raises BadData, also when nothing would be supervised, or a folder cannot be written.
    """
    sources = [Source(**p) for p in parts] if source == "mixture" else [Source(source, path, split, streaming)]
    if not sources:
        raise BadData("data.parts: data=mixture needs parts: [{source: jsonl, path: FILE, weight: 1}, ...]")
    where = " + ".join(map(str, sources))
    skipped, unsupervised = Skipped(where=where), Skipped("assistant turns", where)
    records, content = read(sources, skipped, strict)
    settings = {"max_length": max_length, "limit": limit, "held_out": held_out, "strict": strict}

    def made(folder: Path) -> dict[str, Any]:
        usable = islice(records, limit)
        rows = watch(encode_all(tokenizer, usable, max_length, unsupervised, template))
        about = _written(rows, folder, tokenizer, where, skipped, unsupervised, settings)
        provenance = {"source": source, "path": path, "split": split, **about["provenance"]}
        if source == "mixture":
            provenance["parts"] = [part._asdict() for part in sources]
        return about | {"provenance": provenance}

    try:
        if cache is None or content is None:
            work = tempfile.TemporaryDirectory(prefix=".")
            return _dataset(Path(work.name), made(Path(work.name)), work)
        entry = Path(cache) / _key(tokenizer, content, template, settings)
        if (about := kept(entry)) is None:
            with making(entry) as folder:
                if (about := kept(entry)) is None:  # no other process has made it meanwhile
                    about = made(folder)
                    keep(folder, entry, about)
    except (OSError, SafetensorError) as error:
        place = cache or tempfile.gettempdir()
        raise BadData(
            f"data.cache: {place} cannot be written ({first_line(error)}); nearest: another folder"
        ) from error
    # the same content may have been met elsewhere before
    about["provenance"] |= {"source": source, "path": path, "split": split}
    return _dataset(entry, about | {"where": where})


def _written(
    encoded: Iterable[tuple[Record, list[Example], int]],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    skipped: Skipped,
    unsupervised: Skipped,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write what `encode_all` gives into shards in `folder`; returns what there is to say about them."""
    train, rest = Writer(folder, "train"), Writer(folder, "held_out")
    chats: list[Record] = []
    supervised = cut = count = aside = 0
    digest = hashlib.sha256()
    for record, rows, beyond in encoded:
        out = set_aside(record.asked, settings["held_out"])
        for row in rows:
            (rest if out else train).add(row)
            supervised += 0 if out else int(row.supervised.sum())
        cut += 0 if out else beyond
        if out and rows and record.messages:  # what the template refuses cannot be asked either
            chats.append(record)
        count, aside = count + 1, aside + out
        digest.update(json.dumps(record._asdict(), sort_keys=True).encode())
    train.flush()
    rest.flush()
    if not count:
        raise BadData(f"data.path: no conversation in {where}: {skipped}")
    if not train.files and not rest.files:
        raise BadData(
            f"data: not one supervised token in {where} under the chat template of "
            f"{tokenizer.name_or_path}: {unsupervised}"
        )
    if not train.files:
        raise BadData(f"data.held_out: {settings['held_out']} of {count} conversations leaves none to train on")
    provenance: dict[str, Any] = {
        "conversations": count,
        "held_out": aside,
        "skipped": {reason: len(places) for reason, places in skipped.reasons.items()},
        "supervised_tokens": supervised,
        "supervised_tokens_cut": cut,
        "max_length": settings["max_length"],
        "sha256": digest.hexdigest(),
        "template_sha256": template_hash(tokenizer),
    }
    return {
        "provenance": provenance,
        "skipped": skipped.reasons,
        "unsupervised": unsupervised.reasons,
        "where": where,
        "held_out_conversations": chats,
    }


def _key(tokenizer: Any, content: str, template: str | Path | None, settings: dict[str, Any]) -> str:
    """A name of all that changes the rows: what is read, how it is written out, cut and split, and by what code."""
    code = hashlib.sha256()
    for name in ("conversations.py", "records.py", "rows.py", "templates.py", "tagged"):
        place = Path(__file__).parent / name
        for file in sorted(place.glob("*")) if place.is_dir() else [place]:
            code.update(file.read_bytes())
    parts = {
        "content": content,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "template": None if template is None else Path(template).read_text(encoding="utf-8"),
        "settings": settings,
        "code": code.hexdigest(),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _dataset(folder: Path, about: dict[str, Any], owner: object = None) -> Dataset:
    train, rest = (Rows(sorted(folder.glob(f"{stem}-*.safetensors")), owner) for stem in ("train", "held_out"))
    skipped = Skipped(where=about["where"], reasons=about["skipped"])
    unsupervised = Skipped("assistant turns", about["where"], about["unsupervised"])
    chats = [Record(*chat) for chat in about["held_out_conversations"]]
    return Dataset(train, rest, chats, skipped, unsupervised, about["provenance"])
