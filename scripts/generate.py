"""Stream the target's answer as it is decoded; what the drafter guessed and the target accepted is coloured.

    python scripts/generate.py drafter=outputs/demo/export prompt="Why is the sky blue?"

Without a prompt it asks for one after the other and remembers what was said; what the target has read stays read.

Owns the way from tokens to a terminal. Without a terminal it writes the bare text; notes go to stderr. Does not know
how drafts are made or judged.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.decode import AcceptanceReport
    from paceline.scripts.decoding import Runtime

ACCEPTED = "green underline"
COMMANDS = "/stats: how it went so far, /plain: the last answer again without a drafter, /new: forget what was said"
# Control characters that a model may write and a terminal would obey, as their pictures.
HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.models.errors import Refusal
    from paceline.scripts.decoding import runtime, setting, write_json

    ready = runtime(cfg)
    screen = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    if screen.is_terminal and ready.decoder.drafter is not None:
        screen.print(f"[{ACCEPTED}]drafted and accepted[/], the target's own\n")
    about = {"drafter": ready.drafter, "target": ready.target, "setting": setting(cfg, ready)}
    talk = Talk(cfg, ready, screen, notes)
    if cfg.prompt is None and sys.stdin.isatty():
        notes.print(f"{COMMANDS}; an empty line ends", style="dim")
    for said in [cfg.prompt] if cfg.prompt is not None else _questions():
        try:
            talk.obey(said) if said.startswith("/") and cfg.prompt is None else talk.ask(said)
        except KeyboardInterrupt:
            if cfg.prompt is not None or not sys.stdin.isatty():
                raise
            notes.print("\nstopped; what was asked is forgotten", style="dim")
        except Refusal as refusal:  # the conversation has outgrown the target, say
            if cfg.prompt is not None:
                raise
            notes.print(f"paceline: {refusal}; /new begins afresh", style="yellow")
        if cfg.out:
            write_json(Path(cfg.out) / "generation.json", {**about, "answers": talk.answers})


def _questions() -> Iterator[str]:
    """What the user types, until an empty line or the end of the input."""
    with contextlib.suppress(ImportError):  # not everywhere
        import readline  # noqa: F401  (its import lets `input` edit lines and go back to earlier ones)
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not question.strip():
            return
        yield question


class Talk:
    """A conversation: what was said so far, and the caches that spare reading it again, drafted and plain."""

    def __init__(self, cfg: Any, ready: Runtime, screen: Console, notes: Console):
        from paceline.decode import Held

        self.cfg, self.ready, self.screen, self.notes = cfg, ready, screen, notes
        self.answers: list[dict[str, Any]] = []  # for generation.json
        self._held = {False: Held(), True: Held()}  # by whether decoding is plain
        self._reports: list[AcceptanceReport] = []  # of the answers
        self._messages: list[dict[str, str]] = []
        self._forget()

    def _forget(self) -> None:
        self._messages = [{"role": "system", "content": self.cfg.system}] if self.cfg.system is not None else []

    def ask(self, question: str) -> None:
        """Decode the answer onto the screen, then a closing line."""
        self._messages.append({"role": "user", "content": question})
        try:
            answer, report = self._decoded(plain=False)
        except BaseException:
            self._messages.pop()  # as if it had not been asked
            raise
        self._messages.append({"role": "assistant", "content": answer["text"]})
        self.answers.append({"prompt": question, **answer})
        self._reports.append(report)

    def obey(self, command: str) -> None:
        if command == "/new":
            self._forget()
            self.notes.print("a new conversation", style="dim")
        elif command == "/stats":
            self._stats()
        elif command == "/plain":
            self._compare()
        else:
            self.notes.print(f"{command}: no such command; {COMMANDS}", style="yellow")

    def _stats(self) -> None:
        """All answers together."""
        from paceline.decode import AcceptanceReport

        tokens, seconds = (sum(answer[name] for answer in self.answers) for name in ("tokens", "seconds"))
        if not tokens:
            self.notes.print("nothing has been answered yet", style="dim")
            return
        whole = sum(self._reports, AcceptanceReport())
        rates = enumerate(whole.per_position_acceptance_rate, 1)
        places = ", ".join(f"{i}. {rate:.0%}" for i, rate in rates if rate is not None)
        reused, read = (
            sum(answer[name] for answer in self.answers) for name in ("prompt_tokens_reused", "prompt_tokens")
        )
        length = whole.mean_acceptance_length
        self.notes.print(
            f"{len(self.answers)} answers, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s"
            + ("" if length is None else f", {length:.2f} tokens per pass of the target")
            + (f"; draft tokens accepted: {places}" if places else "")
            + f"; {reused} of {read} prompt tokens were in the cache already",
            style="dim",
        )

    def _compare(self) -> None:
        """The last question again, without a drafter."""
        if not self.answers or len(self._messages) < 2:
            self.notes.print("ask something first", style="dim")
            return
        drafted, said = self.answers[-1], self._messages.pop()
        try:
            plain, _ = self._decoded(plain=True)
        finally:
            self._messages.append(said)
        same = "the same text" if plain["text"] == drafted["text"] else "another text"
        if min(drafted["tokens"], plain["tokens"]) < 2:
            self.notes.print(f"{same}, too short to compare", style="dim")
            return
        # from the first token on: what of the prompt was in the cache already differs
        rates = [(answer["tokens"] - 1) / answer["seconds_after_first"] for answer in (drafted, plain)]
        self.notes.print(
            f"after the first token: drafted {rates[0]:.1f} tokens/s, plain {rates[1]:.1f}: "
            f"{rates[0] / rates[1]:.2f} times as fast; {same}",
            style="dim",
        )

    def _decoded(self, plain: bool) -> tuple[dict[str, Any], AcceptanceReport]:
        """Stream the answer to what was said so far; returns it for generation.json, and its counts."""
        from paceline.data.conversations import prompt_ids

        cfg, ready = self.cfg, self.ready
        ids = prompt_ids(ready.tokenizer, self._messages)
        words = Words(ready.tokenizer, ready.stops, cfg.stop)
        decoder, held = (ready.plain if plain else ready.decoder), self._held[plain]
        judge = ends_with(ready.tokenizer, cfg.stop)
        start = time.perf_counter()
        stream = decoder.stream(
            [ids], cfg.max_new_tokens, sampler=ready.sampler, eos=ready.stops, stop=judge, held=held
        )
        text: list[str] = []
        rounds: list[dict[str, Any]] = []
        first = start
        for emitted in stream:
            if not rounds:
                first = time.perf_counter()
            for place, token in enumerate(emitted.tokens):
                self._put(words.add(token, place < emitted.drafted), text)
            rounds.append({"tokens": emitted.tokens, "accepted": emitted.drafted})
        self._put(words.end(), text)
        end = time.perf_counter()
        seconds = end - start
        self.screen.out("")
        report, new = stream.generation.report, stream.generation.tokens[0]
        count, length = len(new), report.mean_acceptance_length
        cut = count == cfg.max_new_tokens and new[-1] not in ready.stops
        self.notes.print(
            f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s"
            + ("" if length is None else f", {length:.2f} tokens per pass of the target (mean acceptance length)")
            + (f"; cut at max_new_tokens={cfg.max_new_tokens}" if cut else "")
            + ("; LOSSY: verify=typical" if cfg.decode.verify == "typical" else ""),
            style="dim",
        )
        answer = {
            "text": "".join(text),
            "tokens": count,
            "seconds": seconds,
            "seconds_after_first": end - first,
            "prompt_tokens": len(ids),
            "prompt_tokens_reused": stream.generation.reused,
            "acceptance": report.as_dict(),
            "rounds": rounds,  # the first is the token that the prompt alone gave
        }
        return answer, report

    def _put(self, pieces: Iterator[tuple[str, bool]], text: list[str]) -> None:
        for piece, accepted in pieces:
            text.append(piece)
            shown = piece.translate(HARMLESS) if self.screen.is_terminal else piece
            self.screen.out(shown, style=ACCEPTED if accepted else None, end="", highlight=False)
        self.screen.file.flush()


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
