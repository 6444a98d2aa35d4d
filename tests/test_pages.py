"""Traces and pages: what is shown is what was decoded, and a page needs nothing but itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, Dictated, counts, slow_greedy, target_of

from paceline.conf.entry import load
from paceline.decode import Decoder, DynamicShape, Round, Sampler, chain
from paceline.decode.charts import chart, ticks
from paceline.decode.pages import METHODS, method, report_page, training_page
from paceline.models.drafter import methods
from paceline.scripts import evaluate, watch

PROMPT = [3, 1, 4, 1, 5]
SCRIPT = [0, 4, 1, 0, 3]  # drafts accepted, round by round
SMALL = ["drafter=ngram", "target=tiny", "dtype=float32", "eval.limit=3", "eval.max_new_tokens=12"]


def traced(shape: Any, sampler: Sampler | None = None, new: int = 14) -> tuple[Any, Any]:
    target = target_of()
    text = PROMPT + slow_greedy(target, PROMPT, 24)
    drafter = Dictated([text], counts(SCRIPT, len(PROMPT)) if shape == chain(4) else lambda place: place % 3)
    made = Decoder(target, drafter, shape).generate([PROMPT], new, traced=True, sampler=sampler)
    return target, made


@pytest.mark.parametrize("shape", [chain(4), DynamicShape(12, 3, 3)], ids=["chain", "tree"])
def test_a_trace_plays_back_what_was_decoded(shape: Any) -> None:
    _, made = traced(shape)
    (rounds,) = made.trace
    text = made.tokens[0][:1]
    for one in rounds:
        assert one.tokens[0] == text[-1] and one.parents[0] == -1
        assert all(one.parents[node] == above for above, node in zip(one.path, one.path[1:], strict=False))
        assert one.new[: len(one.path) - 1] == [one.tokens[node] for node in one.path[1:]]
        assert (len(one.new) == len(one.path)) == (one.own is not None)
        text += one.new
    assert text == made.tokens[0]
    report = made.report
    assert len(rounds) == report.rounds and sum(len(one.path) - 1 for one in rounds) == report.num_accepted_tokens
    assert [len(one.new) for one in rounds] == made.gained[0]
    if shape == chain(4):
        assert [len(one.path) - 1 for one in rounds] == SCRIPT
        assert [one.corrected for one in rounds][:2] == [True, False]  # four of four kept: what follows is a bonus


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.7, top_k=20, seed=1)], ids=["greedy", "sampled"])
def test_the_probabilities_of_a_trace_are_those_of_the_models(sampler: Sampler) -> None:
    target = target_of()
    drafter = Dictated([PROMPT + Decoder(target).generate([PROMPT], 14, sampler=sampler).tokens[0]])
    made = Decoder(target, drafter, DynamicShape(8, 2, 2)).generate([PROMPT], 14, traced=True, sampler=sampler)
    falling = (-torch.arange(VOCAB).float()).softmax(0).tolist()  # Dictated's scores fall by one from rank to rank
    text = PROMPT + made.tokens[0][:1]
    for one in made.trace[0]:
        for node in range(1, len(one.tokens)):
            path, above = [], one.parents[node]
            rank = sum(parent == above for parent in one.parents[:node])
            while above:
                path, above = [one.tokens[above], *path], one.parents[above]
            logits = target.model(torch.tensor([text + path])).logits[0, -1]
            p = logits.softmax(-1) if sampler.greedy else sampler.probs(logits)
            assert one.target[node] == pytest.approx(float(p[one.tokens[node]]), abs=1e-3)
            assert one.draft[node] == pytest.approx(falling[rank], abs=1e-3)
        text += one.new


def test_a_large_round_keeps_its_path_and_its_likeliest_nodes() -> None:
    whole = Round(
        [9, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [None, 0.6, 0.3, 0.9, 0.1], [None] * 4 + [1.0], [0, 2, 4], [2, 4], None, True
    )
    small = whole.likeliest(4)
    assert (small.tokens, small.parents, small.path) == ([9, 1, 2, 4], [-1, 0, 0, 2], [0, 2, 3])
    assert small.left_out == 1 and small.new == whole.new
    assert whole.likeliest(1).tokens == [9, 2, 4] and whole.likeliest(9) == whole


def test_every_method_has_a_picture() -> None:
    assert set(METHODS) == {*methods(), "none"}
    both = method({"name": "medusa and lookup", "reads_target": True, "reads_tokens": True})
    assert both["part"] == "head {}" and "Beside it" in both["idea"]
    other = method({"name": "mine", "reads_target": True, "reads_tokens": False})
    assert other["part"].format(2) == "depth 2" and other["trunk"] and not other["chained"]


def test_an_evaluation_leaves_a_page_that_needs_nothing_else(tmp_path: Path, capsys: Any) -> None:
    evaluate.run(load("evaluate", *SMALL, f"out={tmp_path}"))
    report, page = (tmp_path / name for name in ("report.json", "report.html"))
    said, html = json.loads(report.read_text()), page.read_text()
    assert str(page) in capsys.readouterr().out and page.stat().st_size < 2e6
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", html)
    assert "default-src 'none'" in html
    for name in ("speedup", "mean_acceptance_length"):
        section = said["speed" if name == "speedup" else "acceptance"]
        assert f'<div class="number">{section[name]:.2f}</div>' in html
    for text in ("Accepted per round", "By length of context", "Where the time goes", said["setting"]["prompts"]):
        assert text in html
    assert len(said["trace"]["prompts"]) == 3
    # rounds sum to what was counted, by context and by time
    assert sum(part["rounds"] for part in said["by_context"]) == said["acceptance"]["num_drafts"]
    emitted = sum(part["rounds"] * part["mean_acceptance_length"] for part in said["by_context"])
    assert emitted == pytest.approx(said["acceptance"]["num_drafts"] * said["acceptance"]["mean_acceptance_length"])
    for way, seconds in (("drafted", "seconds"), ("plain", "plain_seconds")):
        assert sum(said["time"][way].values()) == pytest.approx(sum(row[seconds] for row in said["prompts"]))
    speed, length = said["speed"], said["acceptance"]["mean_acceptance_length"]
    passes = speed["verify_pass_ms"] + speed["draft_ms"]
    assert speed["speedup_predicted"] == pytest.approx(length * speed["target_pass_ms"] / passes)


def test_a_traced_answer_is_the_measured_one(tmp_path: Path) -> None:
    evaluate.run(load("evaluate", *SMALL, f"out={tmp_path}", "decode.temperature=0.9"))
    said = json.loads((tmp_path / "report.json").read_text())
    for one, row in zip(said["trace"]["prompts"], said["prompts"], strict=True):
        assert (one["id"], len(one["tokens"]), len(one["rounds"])) == (row["id"], row["tokens"], row["rounds"])
        assert one["tokens"] == one["plain"] and len(one["pieces"]) == len(one["tokens"])
        assert set(map(str, one["tokens"])) <= said["trace"]["words"].keys()


def test_text_of_a_model_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evaluate.run(load("evaluate", *SMALL, f"out={tmp_path}"))
    said = json.loads((tmp_path / "report.json").read_text())
    evil = "</script><script>alert(1)</script><img src=x>"
    said["trace"]["prompts"][0]["prompt"] = evil
    said["trace"]["words"] = dict.fromkeys(said["trace"]["words"], evil)
    said["setting"]["command"] = evil
    html = report_page(said, evaluate._facts(said), [("", evil)], evaluate._meanings())
    assert "<script>alert" not in html and "<img" not in html


@pytest.fixture
def said(tmp_path: Path) -> dict[str, Any]:
    """report.json of an evaluation."""
    evaluate.run(load("evaluate", *SMALL, "traces=0", f"out={tmp_path}"))
    return json.loads((tmp_path / "report.json").read_text())


def test_a_speed_up_is_called_one_where_its_interval_says_so(said: dict[str, Any]) -> None:
    for spread, told in (
        ([1.04, 1.2], "1.10 (1.04 to 1.20) times the speed without a drafter: faster"),
        (
            [0.97, 1.12],
            "1.10 (0.97 to 1.12) times the speed without a drafter: no faster and no slower that could be told",
        ),
        ([0.7, 0.99], "1.10 (0.70 to 0.99) times the speed without a drafter: slower"),
        (None, "1.10 times the speed without a drafter: too few prompts to tell"),
    ):
        said["speed"]["speedup"], said["intervals"]["speedup"] = 1.1, spread
        facts = evaluate._facts(said)
        assert facts["result"].startswith(f"{told}; ")
        judgement = told.rpartition(": ")[2].capitalize()
        assert f"<strong>{judgement}.</strong>" in report_page(said, facts, [], evaluate._meanings())
    said["speed"]["speedup"] = None
    assert "without a drafter" not in evaluate._facts(said)["result"]


def test_a_target_of_ones_own_is_called_by_its_folder(said: dict[str, Any]) -> None:
    for name, path, called in (("tiny", "/cache/tiny-1", "tiny"), ("hf", "/models/mine", "/models/mine")):
        said["target"] |= {"name": name, "path": path}
        facts = evaluate._facts(said)
        assert facts["target"].startswith(f"{called}, float32, on ")
        assert f"<title>ngram for {called}</title>" in report_page(said, facts, [], evaluate._meanings())


def test_an_evaluation_without_traces_or_drafter_has_a_page_too(tmp_path: Path) -> None:
    evaluate.run(load("evaluate", *SMALL, "traces=0", f"out={tmp_path}"))
    assert json.loads((tmp_path / "report.json").read_text())["trace"] is None
    assert "trace-data" not in (tmp_path / "report.html").read_text()
    evaluate.run(load("evaluate", *SMALL, "drafter=none", "eval.batch=3", f"plain={tmp_path / 'p'}", f"out={tmp_path}"))
    html = (tmp_path / "report.html").read_text()
    assert "Nothing was drafted" in html and "trace-data" in html


def test_one_answer_is_watched(tmp_path: Path, capsys: Any) -> None:
    words = ["drafter=ngram", "target=tiny", "dtype=float32", "max_new_tokens=20", "prompt=hi hi hi"]
    watch.run(load("watch", *words, f"out={tmp_path}"))
    lines = capsys.readouterr().out.splitlines()
    said = json.loads((tmp_path / "watch.json").read_text())
    (one,) = said["trace"]["prompts"]
    assert one["tokens"] == one["plain"] and len(one["tokens"]) == 20
    rounds = len(one["rounds"])
    assert f"20 tokens in {rounds} passes" in lines[rounds + 1] and "takes 19 for its 20" in lines[rounds + 1]
    assert "20 tokens in" in (tmp_path / "watch.html").read_text()


# ---------------------------------------------------------------- training


def test_a_training_run_is_charted_over_tokens() -> None:
    lines: list[dict[str, Any]] = [
        {
            "step": n,
            "tokens": 100 * n,
            "loss": [3 / n, None if n == 1 else 4 / n],
            "accuracy": [0.1 * n, None],
            "lr": 1e-3,
        }
        | {"tokens_per_second": 50.0}
        for n in range(1, 5)
    ]
    lines.insert(2, {"step": 2, "tokens": 200, "mean_acceptance_length": 1.25, "held_out_accuracy": [0.5, None]})
    config = {"method": {"name": "medusa"}, "target": {"name": "tiny"}, "data": {"source": "self"}}
    html = training_page(config, "a: <b>", lines)
    assert "Loss by depth (nats a token), over tokens read. From first to last: 1: 3 to 0.75, 2: 2 to 1" in html
    assert '<div class="number">1.25</div>' in html and "a: &lt;b&gt;" in html
    assert html.count("<figure>") == 5
    assert training_page(config, "", []).count("<figure>") == 0


def test_a_line_is_drawn_where_its_numbers_are() -> None:
    drawn = chart("", {"a": [(0, 0.0), (50, 1.0), (100, 0.5)]})
    assert drawn and drawn["series"][0]["points"] == "44.0,188.0 198.0,10.0 352.0,99.0"
    assert [tick["label"] for tick in drawn["across"]] == ["0", "20", "40", "60", "80", "100"]
    many = chart("", {"a": [(float(n), 1.0) for n in range(10_001)]})
    assert (
        many and many["series"][0]["points"].count(" ") < 450 and many["series"][0]["points"].split()[-1][:3] == "352"
    )
    assert ticks(3, 3)[0] < ticks(3, 3)[-1] and ticks(0, 0.0007) == [0, 0.0002, 0.0004, 0.0006, 0.0008]
    assert chart("", {"a": []}) is None
    rates = chart("", {"": [(0, 2e-5), (1, 2.5e-4)]})
    assert rates and [one["label"] for one in rates["up"]] == ["0", "5e-5", "1e-4", "1.5e-4", "2e-4", "2.5e-4"]
