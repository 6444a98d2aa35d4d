"""Stream the target's answer as it is decoded; what the drafter guessed and the target accepted is coloured.

    python scripts/generate.py drafter=outputs/demo/export prompt="Why is the sky blue?"

Owns the way from tokens to a terminal. Without a terminal it writes the bare text; notes go to stderr. Does not know
how drafts are made or judged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.scripts.decoding import Runtime

ACCEPTED = "green underline"
# Control characters that a model may write and a terminal would obey, as their pictures.
HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.scripts.decoding import runtime, setting, write_json

    ready = runtime(cfg)
    screen = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    if screen.is_terminal and ready.decoder.drafter is not None:
        screen.print(f"[{ACCEPTED}]drafted and accepted[/], the target's own\n")
    about = {"drafter": ready.drafter, "target": ready.target, "setting": setting(cfg, ready)}
    answers = []
    for question in [cfg.prompt] if cfg.prompt is not None else _questions():
        answers.append(_answered(cfg, ready, question, screen, notes))
        if cfg.out:
            write_json(Path(cfg.out) / "generation.json", {**about, "answers": answers})


def _questions() -> Iterator[str]:
    """What the user types, until an empty line or the end of the input."""
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not question.strip():
            return
        yield question


def _answered(cfg: Any, ready: Runtime, question: str, screen: Console, notes: Console) -> dict[str, Any]:
    """Decode one answer onto the screen, then a closing line; returns it for generation.json."""
    from paceline.data.conversations import prompt_ids

    messages = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
    ids = prompt_ids(ready.tokenizer, [*messages, {"role": "user", "content": question}])
    words = Words(ready.tokenizer, ready.stops, cfg.stop)
    stream = ready.decoder.stream(
        [ids], cfg.max_new_tokens, sampler=ready.sampler, eos=ready.stops, stop=ends_with(ready.tokenizer, cfg.stop)
    )
    text, rounds, start = [], [], time.perf_counter()

    def put(pieces: Iterator[tuple[str, bool]]) -> None:
        for piece, accepted in pieces:
            text.append(piece)
            shown = piece.translate(HARMLESS) if screen.is_terminal else piece
            screen.out(shown, style=ACCEPTED if accepted else None, end="", highlight=False)
        screen.file.flush()

    for emitted in stream:
        for place, token in enumerate(emitted.tokens):
            put(words.add(token, place < emitted.drafted))
        rounds.append({"tokens": emitted.tokens, "accepted": emitted.drafted})
    put(words.end())
    seconds = time.perf_counter() - start
    screen.out("")
    report, new = stream.generation.report, stream.generation.tokens[0]
    count, length = len(new), report.mean_acceptance_length
    cut = count == cfg.max_new_tokens and new[-1] not in ready.stops
    notes.print(
        f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s"
        + ("" if length is None else f", {length:.2f} tokens per pass of the target (mean acceptance length)")
        + (f"; cut at max_new_tokens={cfg.max_new_tokens}" if cut else ""),
        style="dim",
    )
    return {
        "prompt": question,
        "text": "".join(text),
        "seconds": seconds,
        "acceptance": report.as_dict(),
        "rounds": rounds,  # the first is the token that the prompt alone gave
    }


def ends_with(tokenizer: Any, stop: Sequence[str]) -> Any:
    """The decoder's condition: the text of the new tokens holds one of the strings. None for no strings."""
    if not stop:
        return None
    # A token holds at least a byte, a character at most four: so far back lies whatever the last token completes.
    reach = 4 * max(map(len, stop)) + 4

    def judge(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens[-reach:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(string in text for string in stop)

    return judge


class Words:
    """Tokens in, text out as soon as it is final: no half characters, nothing that may still become a stop string.

    Pieces are (text, whether it was drafted); a character of several tokens belongs to the one that completes it.
    stops: ids that are no text. stop: strings that end the text and are left out of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[int] = (), stop: Sequence[str] = ()):
        self._tokenizer, self._stops, self._stop = tokenizer, frozenset(stops), stop
        self._tokens: list[int] = []
        self._from, self._read = 0, 0  # the window: a decoded prefix keeps what a tokenizer does at the start of a text
        self._held: list[tuple[str, bool]] = []  # characters that may be the beginning of a stop string
        self._stopped = False

    def add(self, token: int, drafted: bool) -> Iterator[tuple[str, bool]]:
        """The pieces that became final with `token`."""
        if token not in self._stops:
            self._tokens.append(token)
        known, text = self._decoded(self._tokens[self._from : self._read]), self._decoded(self._tokens[self._from :])
        if len(text) > len(known) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._from, self._read = self._read, len(self._tokens)
            yield from self._release(text[len(known) :], drafted)

    def end(self) -> Iterator[tuple[str, bool]]:
        """What is left when no token follows."""
        known, text = self._decoded(self._tokens[self._from : self._read]), self._decoded(self._tokens[self._from :])
        yield from self._release(text[len(known) :], False)
        if not self._stopped:
            yield from self._held

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str, drafted: bool) -> Iterator[tuple[str, bool]]:
        if self._stopped:
            return
        self._held += [(character, drafted) for character in text]
        waiting = "".join(character for character, _ in self._held)
        found = [place for string in self._stop if (place := waiting.find(string)) >= 0]
        self._stopped = bool(found)
        safe = min(found) if found else len(waiting) - self._beginning(waiting)
        ready, self._held = self._held[:safe], self._held[safe:]
        yield from _joined(ready)

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = (n for string in self._stop for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n]))
        return max(lengths, default=0)


def _joined(pieces: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Neighbours of one kind as one piece."""
    start = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end][1] != pieces[start][1]:
            yield "".join(text for text, _ in pieces[start:end]), pieces[start][1]
            start = end


main = entry("generate", run, text=("prompt", "system"))

if __name__ == "__main__":
    main()
