"""Training data from nothing: the target writes the user's turn after its template's opening, then answers it.

Knows templates and records. Does not know how text is generated: it is handed `generate`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Written(NamedTuple):
    """What the target wrote after a prompt; `finished` where it ended its turn itself rather than at the limit."""

    text: str
    finished: bool


Generate = Callable[[list[str]], list[Written]]

_MARK = "\u241fhere\u241f"  # stands for the user's words while the template is cut before them


def opening(tokenizer: Any) -> str:
    """What the template writes before the first user's words."""
    whole = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return whole.split(_MARK)[0]


def conversations(
    tokenizer: Any,
    ask: Generate,
    answer: Generate,
    count: int,
    batch: int,
    known: set[str] | None = None,
    dropped: Counter | None = None,
) -> Iterator[dict[str, Any]]:
    """Records {"messages": [user, assistant], "finished": bool} that the target wrote itself, both sides.

    Args:
        ask: continues the opening of a user's turn. answer: continues a prompt that ends in the opening of an assistant's turn.
        count: records to write. batch: prompts handed to `ask` and `answer` at a time.
        known: user turns not to be written again (added to). dropped: counts, by reason, what was thrown away (added to).

    A record that is not `finished` was cut at the answer's limit: its end-of-turn is not the target's and must not be learnt.
    """
    known = set() if known is None else known
    dropped = Counter() if dropped is None else dropped
    start = opening(tokenizer)
    written = 0
    pool: list[str] = []  # questions asked and not yet answered
    while written < count:
        wanted = min(batch, count - written)
        while len(pool) < wanted:
            for turn in ask([start] * batch):
                question = turn.text.strip()
                reason = _fault(turn, question, known)
                if reason:
                    dropped[reason] += 1
                else:
                    known.add(_folded(question))
                    pool.append(question)
        questions, pool = pool[:wanted], pool[wanted:]
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            for q in questions
        ]
        for question, reply in zip(questions, answer(prompts), strict=True):
            if not reply.text.strip():
                dropped["empty answer"] += 1
                continue
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
            yield {"messages": messages, "finished": reply.finished}
            written += 1


def _fault(turn: Written, question: str, known: set[str]) -> str | None:
    if not turn.finished:
        return "user's turn too long"
    if len(question) < 8:
        return "user's turn too short"
    if _folded(question) in known:
        return "user's turn written before"
    return None


def _folded(text: str) -> str:
    return " ".join(text.lower().split())
