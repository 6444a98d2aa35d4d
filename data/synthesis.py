"""Training data in the target's own words: it answers, and where nobody asks it writes the user's turns as well.

    from nothing   the user's turn after the template's opening of one, then the answer, over several turns if asked
    from prompts   answers to user's turns that are given
    regenerated    the same: what the assistant said in a conversation that is given is left out and said anew

Knows templates and records. Does not know how text is generated: an `Engine` is handed one thing to write after the
other, and hands back what was written as it comes.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.conversations import BadData, Messages, Record
from paceline.data.near import Known, repetition
from paceline.data.templates import render, tokens

BEGINNINGS = Path(__file__).parent / "openings.txt"
FRUITLESS = 640  # user's turns in a row of which none is usable, after which no more are tried
SHORTEST = 8  # characters of a user's turn
_MARK = "\u241fhere\u241f"  # stands for the user's words while the template is cut before them


class Sampling(NamedTuple):
    """How one turn is sampled, and its longest length."""

    temperature: float
    top_p: float
    max_tokens: int


class Ask(NamedTuple):
    """One turn to be written: the assistant's, or, where `begin` is given, a user's that begins so.

    messages: what was said before. ids: what the target reads before it writes. key: of the noise, alike in every run.
    """

    chat: str
    messages: Messages
    begin: str | None
    ids: list[int]
    sampling: Sampling
    key: int


class Written(NamedTuple):
    """What was written; `finished` where the writer ended its turn itself rather than at the limit.

    fault: why a server would not write it; the conversation is dropped for this reason.
    """

    text: str
    finished: bool
    fault: str | None = None


# Asked for the next turn to write, None where there is none before others are done; hands each back once.
Engine = Callable[[Callable[[], Ask | None]], Iterator[tuple[Ask, Written]]]


class Start(NamedTuple):
    """A conversation to be made: what it begins with (a system message, or nothing) and its user's turns, None for one
    that the target writes, the first of them beginning with `begin`. `id` sets it apart from the others of a run."""

    id: str
    system: Messages
    turns: list[str | None]
    begin: str = ""


@dataclass(frozen=True)
class Mix:
    """How turns are sampled; each conversation takes one temperature and one length of these, by its id and `seed`."""

    temperatures: Sequence[float]
    top_p: float
    max_tokens: Sequence[int]

    def of(self, chat: str, seed: int) -> Sampling:
        pick = _hashed(seed, chat, "sampling")
        longest = self.max_tokens[pick // len(self.temperatures) % len(self.max_tokens)]
        return Sampling(self.temperatures[pick % len(self.temperatures)], self.top_p, longest)


@dataclass(frozen=True)
class Filters:
    """What is thrown away. near: user's turns this like one before (Jaccard, 0 to 1; None: only equal ones).
    repetition: answers of which a larger share is said again. shortest: characters of an answer."""

    near: float | None = 0.8
    repetition: float = 0.5
    shortest: int = 1


def beginnings(how: str) -> list[str]:
    """First words of user's turns: none for `free`, the bundled ones for `varied`, else the lines of the file `how`.

    A line stands for one beginning, `\\n` in it for a line break.
    Left to itself a small model asks the same few kinds of question; its users ask for code, sums and translations too.
    """
    if how == "free":
        return [""]
    file = BEGINNINGS if how == "varied" else Path(how)
    lines = [line.replace("\\n", "\n") for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise BadData(f"begin={how}: the file has no lines; nearest: varied")
    return lines


def from_nothing(begin: Sequence[str], turns: int) -> Iterator[Start]:
    """Conversations without end, whose first words are taken from `begin` in turn."""
    for number in numbers():
        yield Start(str(number), [], [None] * turns, begin[number % len(begin)])


def from_records(records: Iterable[Record], turns: int | None) -> Iterator[Start]:
    """A conversation for each record of system and user's turns; with `turns`, cut or gone on with to so many."""
    for number, record in enumerate(records):
        system = [message for message in record.messages if message["role"] == "system"]
        asked: list[str | None] = [m["content"] for m in record.messages if m["role"] == "user"]
        if turns is not None:
            asked = asked[:turns] + [None] * (turns - len(asked))
        yield Start(str(number), system, asked)


class Synthesis:
    """Conversations on their way: says what is to be written next, and what has become of what was written.

    starts: what is to be made, in order. count: records wanted in all, None for as many as there are starts.
    done: ids that an earlier run has written or dropped, not begun again; `written` counts its records.
    known: user's turns there are already. longest: tokens of a conversation, prompt and answer.
    language: names the language of a text, for the records' tag; None: no tag.

    dropped and shortened count, by reason, conversations thrown away and those that end before a turn that was
    unusable. A record that is not `finished` was cut at the limit: its end-of-turn is not the target's, never learnt.
    """

    def __init__(
        self,
        tokenizer: Any,
        starts: Iterator[Start],
        user: Mix,
        answer: Mix,
        count: int | None = None,
        seed: int = 0,
        done: set[str] | None = None,
        written: int = 0,
        known: Known | None = None,
        filters: Filters | None = None,
        longest: int | None = None,
        language: Callable[[str], str] | None = None,
    ):
        self._tokenizer, self._starts, self._mixes = tokenizer, starts, (user, answer)
        self._count, self._seed, self._done, self.written = count, seed, done or set(), written
        self._filters = filters or Filters()
        self._known = known or Known(self._filters.near)
        self._longest, self._language = longest, language
        self._special = set(tokenizer.all_special_tokens)
        self._open: dict[str, _Chat] = {}
        self._waiting: list[_Chat] = []
        self._fruitless = self._tried = self._usable = 0
        self.dropped: Counter[str] = Counter()
        self.shortened: Counter[str] = Counter()

    def run(self, engine: Engine) -> Iterator[tuple[str, dict[str, Any] | None, str | None]]:
        """(id, record, None) of each conversation as it is finished, (id, None, reason) where it was dropped.

        Raises BadData where the target writes no usable user's turn.
        """
        ended: list[tuple[str, dict[str, Any] | None, str | None]] = []

        def more() -> Ask | None:
            while (chat := self._next()) is not None:
                ask = self._ask(chat)
                if isinstance(ask, Ask):
                    return ask
                ended.append(self._end(chat, ask))
            return None

        for ask, written in engine(more):
            chat = self._open[ask.chat]
            reason = self._take(chat, ask, written)
            if reason is not None or not chat.turns or (not written.finished and ask.begin is None):
                ended.append(self._end(chat, reason))
            else:
                self._waiting.append(chat)
            while ended:
                yield ended.pop(0)
        yield from ended

    def _next(self) -> "_Chat | None":
        """A conversation whose next turn can be written now: one begun already before a new one.

        As many are begun as will probably be needed: user's turns of which each answer is awaited by all others would
        leave the rows of a batch idle at the end. Those nobody needs in the end are not answered, and not counted.
        """
        answering = sum(chat.answering for chat in self._open.values())
        missing = None if self._count is None else self._count - self.written - answering
        for index, chat in enumerate(self._waiting):
            if chat.answering or missing is None or missing > 0:
                chat.answering = True
                return self._waiting.pop(index)
        asked = len(self._open) - answering
        usable = len(self._waiting)
        share = (self._usable + 1) / (self._tried + 1)
        if missing is not None and usable + (asked - usable) * share >= missing:
            return None
        for start in self._starts:
            if start.id not in self._done:
                chat = _Chat(start, list(start.system), list(start.turns), start.turns[0] is not None)
                self._open[start.id] = chat
                return chat
        return None

    def _ask(self, chat: "_Chat") -> Ask | str:
        """The chat's next turn, or why it ends here."""
        if chat.to_answer is None and (given := chat.turns[0]) is not None:
            if reason := self._fault(given, known=chat.answered > 0):
                return reason
            chat.say("user", given)
        begin = None if chat.to_answer else "" if chat.answered else chat.start.begin
        text = (
            render(self._tokenizer, chat.messages, None, prompt=True)
            if begin is None
            else opening(self._tokenizer, chat.messages) + begin
        )
        ids = tokens(self._tokenizer, [text])[0].ids
        sampling = self._mixes[begin is None].of(chat.start.id, self._seed)
        if self._longest is not None and len(ids) + sampling.max_tokens > self._longest:
            return "longer than max_length"
        key = _hashed(self._seed, chat.start.id, len(chat.messages))
        return Ask(chat.start.id, list(chat.messages), begin, ids, sampling, key)

    def _take(self, chat: "_Chat", ask: Ask, written: Written) -> str | None:
        """Add what was written to the chat, or say why not."""
        if written.fault:
            return written.fault
        if ask.begin is None:
            if fault := self._answer_fault(written.text):
                return fault
            chat.say("assistant", written.text)
            chat.finished = written.finished
            chat.turns.pop(0)
            return None
        question = (ask.begin + written.text).strip()
        reason: str | None
        if not written.finished:
            reason = "user's turn too long"
        elif len(question) < SHORTEST:
            reason = "user's turn too short"
        else:
            reason = self._fault(question, known=chat.answered > 0)
        if not chat.answered:
            self._tried, self._usable = self._tried + 1, self._usable + (reason is None)
            self._fruitless = self._fruitless + 1 if reason else 0
            if self._fruitless == FRUITLESS:
                reasons = ", ".join(f"{reason} {number}" for reason, number in self.dropped.most_common())
                raise BadData(
                    f"user.temperature, user.max_tokens: no usable user's turn in {FRUITLESS} tries ({reasons})"
                )
        if not reason:
            chat.say("user", question)
        return reason

    def _fault(self, question: str, known: bool) -> str | None:
        """Why a user's turn is of no use. One that is not `known` otherwise must be new, and is known from now on."""
        if _torn(question):
            return "user's turn with half a character"
        if any(token in question for token in self._special):  # rendered again it would be structure, not text
            return "user's turn with special tokens"
        return None if known else self._known.fault(question)

    def _answer_fault(self, text: str) -> str | None:
        if not text.strip():
            return "answer empty"
        if _torn(text):
            return "answer with half a character"
        if any(token in text for token in self._special):
            return "answer with special tokens"
        if len(text.strip()) < self._filters.shortest:
            return "answer too short"
        return "answer repeats itself" if repetition(text) > self._filters.repetition else None

    def _end(self, chat: "_Chat", reason: str | None) -> tuple[str, dict[str, Any] | None, str | None]:
        """What becomes of a chat: a record of its whole turns, if it has any."""
        del self._open[chat.start.id]
        if not chat.answered:
            assert reason is not None
            self.dropped[reason] += 1
            return chat.start.id, None, reason
        if reason is not None:
            self.shortened[reason] += 1
        messages = chat.messages if chat.messages[-1]["role"] == "assistant" else chat.messages[:-1]
        record = {"id": chat.start.id, "messages": messages, "finished": chat.finished}
        answer = self._mixes[1].of(chat.start.id, self._seed)
        record |= {"temperature": answer.temperature, "max_tokens": answer.max_tokens}
        if self._language is not None:
            record["language"] = self._language("\n".join(message["content"] for message in messages))
        self.written += 1
        return chat.start.id, record, None


@dataclass
class _Chat:
    """A conversation on its way: what was said, and the user's turns that are still to be answered."""

    start: Start
    messages: Messages
    turns: list[str | None]
    answering: bool  # its first user's turn is there and is being, or was, answered
    finished: bool = True

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    @property
    def to_answer(self) -> str | None:
        """The user's turn that waits for its answer."""
        return self.messages[-1]["content"] if self.messages and self.messages[-1]["role"] == "user" else None

    @property
    def answered(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


def opening(tokenizer: Any, messages: Messages = ()) -> str:  # type: ignore[assignment]
    """What the template writes before the user's next words, after `messages`."""
    whole = render(tokenizer, [*messages, {"role": "user", "content": _MARK}], None, prompt=False)
    return whole.split(_MARK)[0]


def _torn(text: str) -> bool:
    """Whether a text cannot be written down: a server may cut it within a character that JSON escapes as two."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _hashed(*parts: object) -> int:
    """60 bits that depend on the parts alone."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()) >> 4
