"""scripts/generate.py: what is streamed is what was decoded, character for character."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.data.conversations import load_tokenizer, prompt_ids, stop_ids
from paceline.decode import Decoder, Sampler
from paceline.models.embedded import folder
from paceline.models.target import Target
from paceline.scripts import generate
from paceline.scripts.generate import Words, ends_with

ROOT = Path(__file__).parent.parent
TINY = ["target=tiny", "dtype=float32", "max_new_tokens=24", "decode.temperature=1.0"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(folder("tiny"))


def spoken(tokenizer: Any, tokens: list[int], stop: list[str] | None = None, drafted: bool = False) -> list[str]:
    """The pieces that tokens give, one list entry a token and one for the end."""
    words = Words(tokenizer, stop=stop or [])
    pieces = [list(words.add(token, drafted)) for token in tokens] + [list(words.end())]
    return ["".join(text for text, _ in piece) for piece in pieces]


# ---------------------------------------------------------------------------------------------------------------------
# Tokens to text


def test_no_half_character_is_shown(tokenizer: Any) -> None:
    tokens = tokenizer.encode("é🙂z", add_special_tokens=False)
    assert len(tokens) == 7  # a byte each
    assert spoken(tokenizer, tokens) == ["", "é", "", "", "", "🙂", "z", ""]


def test_streamed_text_is_the_decoded_text_whatever_the_bytes(tokenizer: Any) -> None:
    dice = random.Random(0)
    for _ in range(300):
        tokens = [dice.choice([dice.randrange(256), dice.randrange(0xC0, 0xFF), 65]) for _ in range(12)]
        assert "".join(spoken(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("one. two", ["."], "one"),
        ("a##b###c", ["###"], "a##b"),
        ("a##", ["###"], "a##"),  # it might have become one, and did not
        ("xyabz", ["abc", "b"], "xya"),
        ("aé🙂!", ["🙂"], "aé"),
        ("plain", [], "plain"),
    ],
)
def test_stop_strings_end_the_text_and_are_not_shown(tokenizer: Any, said: str, stop: list[str], shown: str) -> None:
    tokens = tokenizer.encode(said, add_special_tokens=False)
    pieces = spoken(tokenizer, tokens, stop)
    assert "".join(pieces) == shown
    assert shown.startswith("".join(pieces[:3]))  # nothing is taken back
    judge = ends_with(tokenizer, stop)
    if stop and any(string in said for string in stop):
        ended = next(n for n in range(1, len(tokens) + 1) if judge(tokens[:n]))
        assert "".join(spoken(tokenizer, tokens[:ended], stop)) == shown


def test_a_piece_is_all_drafted_or_all_the_targets(tokenizer: Any) -> None:
    words = Words(tokenizer, stop=["abcd"])
    tokens = tokenizer.encode("abce", add_special_tokens=False)
    pieces = [
        p for token, drafted in zip(tokens, (True, True, False, False), strict=True) for p in words.add(token, drafted)
    ]
    assert pieces == [("ab", True), ("ce", False)]


# ---------------------------------------------------------------------------------------------------------------------
# The program


def test_a_pipe_gets_the_text_and_nothing_else(monkeypatch: Any, capsys: Any, tmp_path: Path, tokenizer: Any) -> None:
    streams = []
    stream = Decoder.stream
    monkeypatch.setattr(Decoder, "stream", lambda *args, **more: streams.append(stream(*args, **more)) or streams[-1])
    generate.run(load("generate", *TINY, "prompt=hi", "drafter=ngram", f"out={tmp_path}"))
    out, err = capsys.readouterr()
    (tokens,) = streams[0].generation.tokens
    assert out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert "24 tokens in" in err and "mean acceptance length" in err and "cut at max_new_tokens=24" in err
    (answer,) = json.loads((tmp_path / "generation.json").read_text())["answers"]
    assert answer["text"] + "\n" == out
    assert [token for one in answer["rounds"] for token in one["tokens"]] == tokens


def test_a_terminal_shows_what_was_drafted(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    # what the tiny target says greedily is blank
    monkeypatch.setattr(Words, "add", lambda self, token, drafted: iter([("da" if drafted else "ta", drafted)]))
    greedy = ["decode.temperature=0", "prompt=hi", "max_new_tokens=4"]
    generate.run(load("generate", *TINY, *greedy, "drafter=ngram"))
    legend, _, text = capsys.readouterr().out.partition("\n\n")
    assert legend == "\x1b[4;32mdrafted and accepted\x1b[0m, the target's own"
    assert text == "ta" + 2 * "\x1b[4;32mda\x1b[0m" + "ta\n"
    generate.run(load("generate", *TINY, *greedy, "drafter=none"))
    assert capsys.readouterr().out == "tatatata\n"


def test_the_model_cannot_command_the_terminal(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(Words, "add", lambda self, token, drafted: iter([("\x1b[2J\r", False)]))
    generate.run(load("generate", *TINY, "prompt=hi", "max_new_tokens=1"))
    assert capsys.readouterr().out.startswith("␛[2J␍")


def test_questions_are_asked_until_an_empty_line(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\nthree\n"))
    generate.run(load("generate", *TINY, "max_new_tokens=2"))
    assert capsys.readouterr().err.count("2 tokens in") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    generate.run(load("generate", *TINY, "max_new_tokens=2"))
    assert capsys.readouterr().err.count("2 tokens in") == 1


def talked(monkeypatch: Any, tmp_path: Path, *lines: str) -> list[dict[str, Any]]:
    """What is answered when these lines are typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    generate.run(load("generate", *TINY, "drafter=ngram", "max_new_tokens=12", f"out={tmp_path}"))
    return json.loads((tmp_path / "generation.json").read_text())["answers"]


def test_a_conversation_remembers_and_what_was_read_stays_read(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    read, forward = [], Target.forward

    def counted(self: Target, ids: Any, *args: Any, **more: Any) -> Any:
        read.append(ids.shape[1])
        return forward(self, ids, *args, **more)

    monkeypatch.setattr(Target, "forward", counted)
    first, second, third = talked(monkeypatch, tmp_path, "one", "two", "/new", "two")
    tokenizer, target = load_tokenizer(folder("tiny")), Target.load(folder("tiny"), "float32", vocab=259)
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first["text"]}]
    for before, answer in (([], first), (said, second), ([], third)):
        ids = prompt_ids(tokenizer, [*before, {"role": "user", "content": answer["prompt"]}])
        alone = Decoder(target).generate([ids], 12, sampler=Sampler(temperature=1.0), eos=stop_ids(tokenizer))
        assert [token for one in answer["rounds"] for token in one["tokens"]] == alone.tokens[0]
        assert answer["prompt_tokens"] == len(ids)
        assert len(ids) - answer["prompt_tokens_reused"] in read  # the prompt's pass was over the rest
    assert first["prompt_tokens_reused"] == 0 and second["prompt_tokens_reused"] >= first["prompt_tokens"] - 1
    assert 0 < third["prompt_tokens_reused"] < third["prompt_tokens"]


def test_commands_say_how_it_went_and_compare(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    (answer,) = talked(monkeypatch, tmp_path, "/stats", "/plain", "hello hello", "/stats", "/plain", "/halp")
    out, err = capsys.readouterr()
    nothing, ask, _, stats, _, compared, unknown = err.splitlines()
    assert nothing == "nothing has been answered yet" and ask == "ask something first"
    assert "1 answers, 12 tokens in" in stats and "tokens per pass of the target" in stats
    assert f"0 of {answer['prompt_tokens']} prompt tokens were in the cache already" in stats
    assert compared.startswith("after the first token: drafted ") and compared.endswith("times as fast; the same text")
    assert unknown.startswith("/halp: no such command; /stats")
    assert out == 2 * (answer["text"] + "\n")


def test_stopping_it_is_no_accident(monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream", interrupted)
    monkeypatch.setattr(sys, "argv", ["generate.py", *TINY, "prompt=hi"])
    with pytest.raises(SystemExit) as exit_:
        generate.main()
    assert exit_.value.code == 130 and capsys.readouterr().err == "\npaceline: stopped\n"


def test_it_runs_from_the_command_line_with_a_prompt_as_typed() -> None:
    words = ["target=tiny", "dtype=float32", "max_new_tokens=3", "prompt=Why, {really}?"]
    done = subprocess.run([sys.executable, "scripts/generate.py", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "3 tokens in" in done.stderr, done
    done = subprocess.run([sys.executable, "scripts/generate.py", "drafter=gone"], capture_output=True, text=True)
    assert done.returncode == 2
