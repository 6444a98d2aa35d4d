"""Training data from nothing: the target writes the user's turn after its template's opening, then answers it.

Knows templates and records. Does not know how text is generated: it is handed `generate`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.conversations import BadData


class Written(NamedTuple):
    """What the target wrote after a prompt; `finished` where it ended its turn itself rather than at the limit."""

    text: str
    finished: bool


Generate = Callable[[list[str]], list[Written]]

BEGINNINGS = Path(__file__).parent / "openings.txt"
FRUITLESS = 5  # batches without one usable user's turn, after which no more are tried
_MARK = "\u241fhere\u241f"  # stands for the user's words while the template is cut before them


def opening(tokenizer: Any) -> str:
    """What the template writes before the first user's words."""
    whole = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return whole.split(_MARK)[0]


def beginnings(how: str) -> list[str]:
    """First words of user's turns: none for `free`, the bundled ones for `varied`, else the lines of the file `how`.

    A line stands for one beginning, `\\n` in it for a line break.
    Left to itself a small model asks the same few kinds of question; its users ask for code, sums and translations too.
    """
    if how == "free":
        return [""]
    file = BEGINNINGS if how == "varied" else Path(how)
    lines = [line.replace("\\n", "\n") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise BadData(f"prompt.begin={how}: the file has no lines; nearest: varied")
    return lines


def conversations(
    tokenizer: Any,
    ask: Generate,
    answer: Generate,
    count: int,
    batch: int,
    known: set[str] | None = None,
    dropped: Counter | None = None,
    begin: Sequence[str] = ("",),
) -> Iterator[dict[str, Any]]:
    """Records {"messages": [user, assistant], "finished": bool} that the target wrote itself, both sides.

    Args:
        ask: continues the opening of a user's turn.
        answer: continues a prompt that ends in the opening of an assistant's turn.
        count: records to write. batch: prompts handed to `ask` and `answer` at a time.
        known: user turns not to be written again (added to).
        dropped: counts, by reason, what was thrown away (added to).
        begin: first words of the user's turns, taken in turn.

    A record that is not `finished` was cut at the answer's limit: its end-of-turn is not the target's, never learnt.

    Raises:
        BadData: the target writes no usable user's turn.
    """
    known = set() if known is None else known
    dropped = Counter() if dropped is None else dropped
    special = set(tokenizer.all_special_tokens)
    start = opening(tokenizer)
    first_words = cycle(begin)
    written = 0
    pool: list[str] = []  # questions asked and not yet answered
    while written < count:
        wanted = min(batch, count - written)
        fruitless = 0
        while len(pool) < wanted:
            before = len(pool)
            begun = [next(first_words) for _ in range(batch)]
            for words, turn in zip(begun, ask([start + words for words in begun]), strict=True):
                question = (words + turn.text).strip()
                reason = _fault(turn, question, known, special)
                if reason:
                    dropped[reason] += 1
                else:
                    known.add(folded(question))
                    pool.append(question)
            fruitless = 0 if len(pool) > before else fruitless + 1
            if fruitless == FRUITLESS:
                reasons = ", ".join(f"{reason} {number}" for reason, number in dropped.most_common())
                raise BadData(
                    f"prompt.temperature, prompt.max_tokens: no usable user's turn in {FRUITLESS} batches ({reasons})"
                )
        questions, pool = pool[:wanted], pool[wanted:]
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            for q in questions
        ]
        for question, reply in zip(questions, answer(prompts), strict=True):
            if not reply.text.strip() or any(token in reply.text for token in special):
                dropped["answer empty or with special tokens"] += 1
                continue
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
            yield {"messages": messages, "finished": reply.finished}
            written += 1


def _fault(turn: Written, question: str, known: set[str], special: set[str]) -> str | None:
    if not turn.finished:
        return "user's turn too long"
    if len(question) < 8:
        return "user's turn too short"
    if any(token in question for token in special):  # rendered again it would be structure, not text
        return "user's turn with special tokens"
    if folded(question) in known:
        return "user's turn written before"
    return None


def folded(text: str) -> str:
    """What two user's turns have in common that are the same but for case and spaces."""
    return " ".join(text.lower().split())
