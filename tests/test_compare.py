"""Drafters side by side: every job is done once, and the table and the picture are of what the jobs left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load, quoted
from paceline.models.errors import Refusal
from paceline.scripts import compare, jobs
from paceline.scripts.compare import Cell, Row

RECIPE = """
# @package _global_
title: a small family
tokens: 3000
data: {limit: 40}
eval: {prompts: bench, limit: 2, max_new_tokens: 6}
plain_prompts: 1
options: [dtype=float32, export.dtype=float32, train.batch_tokens=150, train.log_every=1, eval.every=0,
          eval.held_out_prompts=1, eval.max_new_tokens=6]
evaluate: [dtype=float32]
drafters:
  heads: {entry: medusa, options: [method.heads=2]}
  "no time": {entry: medusa, options: [train.minutes=0.00001], evaluate: [decode.tree=chain]}
  broken: {entry: eagle, options: ["method.taps=[1,9]"]}
  n-gram: {export: ngram}
"""
STARTS = """
# @package _global_
title: starts
tokens: null
seeds: 2
data: {limit: 40}
options: [train.steps=4, train.log_every=2, eval.every=2, eval.held_out_prompts=2, eval.max_new_tokens=8]
temperatures: []
drafters:
  "random, 1": {entry: eagle, options: [method.start=random]}
"""


def config(folder: Path, *options: str, recipe: str = RECIPE) -> Any:
    (folder / "comparison").mkdir(exist_ok=True)
    (folder / "comparison" / "mine.yaml").write_text(recipe)
    words = [f"hydra.searchpath=['file://{folder}']", "comparison=mine", "target=tiny", f"out={folder}/runs"]
    return load("compare", *words, *options)


def run(folder: Path, *options: str, recipe: str = RECIPE) -> dict[str, Any]:
    compare.run(config(folder, *options, recipe=recipe))
    return json.loads((folder / "runs" / "compare.json").read_text())


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["rows"] if row["name"] == name)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the jobs that are begun from here on."""
    perform, seen = jobs.perform, []

    def counted(job: jobs.Job) -> str | None:
        seen.append(str(job.folder.relative_to(job.folder.parents[job.folder.parts[::-1].index("runs") - 1])))
        return perform(job)

    monkeypatch.setattr(compare, "perform", counted)
    return seen


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison that ran to its end."""
    folder = tmp_path_factory.mktemp("family")
    run(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_the_table_says_what_the_reports_say(family: Path) -> None:
    found = json.loads((family / "runs" / "compare.json").read_text())
    text = (family / "runs" / "compare.md").read_text()
    for name, place in (("heads", "heads-seed0"), ("no time", "no-time-seed0"), ("n-gram", "n-gram")):
        cells = row(found, name)["cells"]
        for at in ("T0", "T1"):
            report = json.loads((family / "runs" / place / at / "report.json").read_text())
            assert report["setting"]["temperature"] == float(at[1:]) and report["setting"]["num_prompts"] == 2
            for column, section, key in (
                ("length", "acceptance", "mean_acceptance_length"),
                ("speed-up", "speed", "speedup"),
            ):
                cell, interval = cells[f"{column}, T={at[1:]}"], report["intervals"][key]
                assert cell["value"] == report[section][key] and [cell["low"], cell["high"]] == (interval or [None] * 2)
                assert f"{cell['value']:.2f}" in cell["text"]
            assert cells[f"identical, T={at[1:]}"]["text"] == "2 of 2"
            assert sum(line["plain_seconds"] is not None for line in report["prompts"]) == 1
        assert f"| {name} | " + " | ".join(cell["text"] for cell in cells.values()) + " |" in text
    assert len(list((family / "runs" / "plain").iterdir())) == 2  # one a temperature, for all
    assert (family / "runs" / "compare.png").read_bytes().startswith(b"\x89PNG")
    first = [(line["cells"]["speed-up, T=0"]["value"] or 0) for line in found["rows"]]
    assert first == sorted(first, reverse=True)
    assert found["conditions"].startswith("target tiny; 3,000 training tokens each; 2 prompts (bench) of at most 6 new")
    assert found["conditions"] in text and found["verdict"] in text and found["verdict"].endswith(".")


def test_training_is_told_as_it_was(family: Path) -> None:
    found = json.loads((family / "runs" / "compare.json").read_text())
    lines = [json.loads(line) for line in (family / "runs" / "heads-seed0" / "metrics.jsonl").open()]
    timed = [line for line in lines if "seconds" in line]
    heads, ngram = row(found, "heads"), row(found, "n-gram")["cells"]
    assert timed[-2]["tokens"] < 3000 <= timed[-1]["tokens"] == heads["cells"]["training tokens"]["value"]
    assert heads["cells"]["tokens/s"]["value"] == pytest.approx(timed[-1]["tokens"] / timed[-1]["seconds"])
    assert heads["cells"]["minutes"]["value"] == pytest.approx(timed[-1]["seconds"] / 60)
    about = json.loads((family / "runs" / "heads-seed0" / "export" / "drafter.json").read_text())
    size = (family / "runs" / "heads-seed0" / "export" / "model.safetensors").stat().st_size
    assert heads["cells"]["trainable parameters"]["value"] == about["provenance"]["parameters"]
    assert 0.95 < 4 * about["provenance"]["parameters"] / size < 1  # float32, and the names of the tensors
    assert heads["curves"][compare.FIRST] == [[[line["tokens"], line["accuracy"][0]] for line in timed]]
    assert heads["notes"] == []
    assert [ngram[name]["text"] for name in ("trainable parameters", "training tokens", "minutes")] == ["0", "0", "-"]


def test_what_a_row_lacks_is_said_in_it_and_the_others_run(family: Path) -> None:
    found = json.loads((family / "runs" / "compare.json").read_text())
    broken, short = row(found, "broken"), row(found, "no time")
    assert found["rows"][-1] == broken
    assert {name: cell["text"] for name, cell in broken["cells"].items()} == dict.fromkeys(found["meaning"], "-")
    (note,) = broken["notes"]
    assert note.startswith("training failed, exit code 2: method.taps") and "broken-seed0/log.txt" in note
    (note,) = short["notes"]
    read = short["cells"]["training tokens"]["value"]
    assert note == f"1e-05 minutes were enough for {read:,} of 3,000 tokens" and 0 < read < 3000
    text = (family / "runs" / "compare.md").read_text()
    assert f"- broken: {broken['notes'][0]}" in text and f"- no time: {note}" in text


# ---------------------------------------------------------------------------------------------------------------------
# Every job once


def test_what_has_ended_is_not_done_again_and_what_failed_is(family: Path, begun: list[str]) -> None:
    before = json.loads((family / "runs" / "compare.json").read_text())
    again = run(family)
    assert begun == ["broken-seed0"]
    assert [line["cells"] for line in again["rows"]] == [line["cells"] for line in before["rows"]]
    assert row(again, "no time")["notes"] == row(before, "no time")["notes"]


def test_an_evaluation_is_done_again_where_its_settings_or_its_drafter_changed(
    family: Path, begun: list[str], tmp_path: Path
) -> None:
    export = family / "runs" / "heads-seed0" / "export"
    loaded = ("plain_prompts=null", "temperatures=[0]", "only=[mine]", f"+drafters.mine={{export: '{export}'}}")
    place = f"out={tmp_path}/runs"
    compare.run(config(family, *loaded, place))
    compare.run(config(family, *loaded, place))
    assert begun == ["mine/T0"]
    compare.run(config(family, *loaded, place, "eval.max_new_tokens=5"))
    assert begun == ["mine/T0"] * 2
    about = json.loads((export / "drafter.json").read_text())
    (export / "drafter.json").write_text(json.dumps(about | {"retold": True}))
    compare.run(config(family, *loaded, place, "eval.max_new_tokens=5"))
    (export / "drafter.json").write_text(json.dumps(about, indent=2) + "\n")
    assert begun == ["mine/T0"] * 3
    (mine,) = json.loads((tmp_path / "runs" / "compare.json").read_text())["rows"]
    # its training is known, though it was not made here; every prompt was decoded both ways
    assert (
        mine["cells"]["training tokens"]
        == row(json.loads((family / "runs" / "compare.json").read_text()), "heads")["cells"]["training tokens"]
    )
    report = json.loads((tmp_path / "runs" / "mine" / "T0" / "report.json").read_text())
    assert all(line["plain_seconds"] for line in report["prompts"]) and report["setting"]["max_new_tokens"] == 5


def alive(word: str) -> list[int]:
    """Processes with this word on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:  # it is gone
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_comparison_that_was_killed_goes_on(tmp_path: Path) -> None:
    words = (
        "only=[heads]",
        "temperatures=[]",
        "tokens=9000",
        "options=['train.batch_tokens=150','train.save_every=5']",
    )
    config(tmp_path, *words)
    command = [sys.executable, "-m", "paceline.scripts.compare", "--config-dir", str(tmp_path), "comparison=mine"]
    command += ["target=tiny", f"out={tmp_path}/runs", *words]
    whole = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    there = tmp_path / "runs" / "heads-seed0" / "checkpoints"
    deadline = time.monotonic() + 300
    while not list(there.glob("step-*")):
        assert whole.poll() is None and time.monotonic() < deadline, whole.stderr and whole.stderr.read()
        time.sleep(0.1)
    os.kill(whole.pid, signal.SIGKILL)
    whole.wait()
    while alive(f"{tmp_path}/runs"):  # the training it had begun ends too
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert jobs.note(jobs.Job("", "", "", [], [], tmp_path / "runs" / "heads-seed0"))["ended"] is False
    assert not (tmp_path / "runs" / "compare.json").exists()
    found = run(tmp_path, *words)
    log = (tmp_path / "runs" / "heads-seed0" / "log.txt").read_text()
    assert log.count("resumed from") == 1 and log.count("done: best mean acceptance length") == 1
    assert row(found, "heads")["cells"]["training tokens"]["value"] >= 9000


def test_seeds_are_drawn_and_told_from_the_least_to_the_most(tmp_path: Path) -> None:
    found = run(tmp_path, recipe=STARTS)
    (line,) = found["rows"]
    for seed in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / "runs" / f"random-1-seed{seed}" / "metrics.jsonl").open()]
        decoded = [line for line in lines if "mean_acceptance_length" in line]
        assert line["curves"]["held-out length"][seed] == [[x["tokens"], x["mean_acceptance_length"]] for x in decoded]
        assert len(decoded) == 2 and decoded[0]["tokens"] < decoded[1]["tokens"]
    last = [points[-1][1] for points in line["curves"]["held-out length"]]
    cell = line["cells"]["held-out length"]
    assert (cell["value"], cell["low"], cell["high"]) == (pytest.approx(sum(last) / 2), min(last), max(last))
    assert "2 seeds" in found["meaning"]["held-out length"] and (tmp_path / "runs" / "compare.png").exists()
    with pytest.raises(Refusal, match=r"drafters.random, 1: what lies in .*random-1-seed0 was trained otherwise"):
        run(tmp_path, "data.limit=39", recipe=STARTS)


def test_a_training_that_never_began_may_begin_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "heads-seed0"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"asked": ["method.taps=[9]"], "about": "", "ended": False}))
    assert compare.planned(config(tmp_path, "only=[heads]"))[0].folder == folder
    (folder / "config.yaml").touch()
    with pytest.raises(Refusal, match=r"drafters.heads: what lies in .* was trained otherwise \(method.taps=\[9\]\)"):
        compare.planned(config(tmp_path, "only=[heads]"))


def test_a_training_is_not_there_already_once_its_data_is_other_data(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n')
    words = ("only=[heads]", "data=jsonl", f"data.path={data}")
    (before,) = compare.planned(config(tmp_path, *words))
    assert before.training is not None
    before.folder.mkdir(parents=True)
    (before.folder / "config.yaml").touch()  # what a training leaves, as far as it is asked for here
    (before.folder / "job.json").write_text(json.dumps(before.training.as_noted(True)))
    (again,) = compare.planned(config(tmp_path, *words))
    assert again.training is not None and jobs.ended(again.training)
    data.write_text('{"prompt": "a", "response": "c"}\n')
    with pytest.raises(Refusal, match=r"drafters.heads: data.path: what lies in .* was trained on what stood"):
        compare.planned(config(tmp_path, *words))


# ---------------------------------------------------------------------------------------------------------------------
# The winner


def rows(**figures: tuple[float, float, float]) -> list[Row]:
    return [
        Row(name, {"speed-up, T=0": Cell("{:.2f} ({:.2f} to {:.2f})".format(*f), *f)}, [], {}, [], name != "wrong")
        for name, f in figures.items()
    ]


def test_the_winner_is_named_and_so_is_who_may_be_as_good(tmp_path: Path) -> None:
    cfg = config(tmp_path, "temperatures=[0]")
    clear = compare.verdict(cfg, rows(a=(1.2, 1.1, 1.3), b=(1.6, 1.5, 1.7), wrong=(9.0, 8.0, 10.0)))
    assert clear == (
        "on this machine b is fastest at T=0, 1.60 (1.50 to 1.70) times as fast as decoding without a drafter."
    )
    near = compare.verdict(cfg, rows(a=(1.4, 1.3, 1.55), b=(1.6, 1.5, 1.7), c=(1.1, 1.0, 1.2)))
    assert near.endswith(", but the interval of a overlaps: chance may have decided.")
    none = compare.verdict(cfg, rows(a=(0.9, 0.8, 0.95), b=(0.5, 0.4, 0.6)))
    assert none == "on this machine no drafter gains time at T=0, and a loses least (0.90 (0.80 to 0.95))."
    level = compare.verdict(cfg, rows(a=(1.05, 0.97, 1.12), b=(0.5, 0.4, 0.6)))
    assert level == (
        "on this machine no drafter gains time at T=0 that could be told, and a is nearest to it (1.05 (0.97 to 1.12))."
    )
    assert compare.verdict(cfg, []) == "Nothing was measured that could be compared."


# ---------------------------------------------------------------------------------------------------------------------
# Refusals, and jobs by themselves


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["drafters.heads.options=['method.heds=2']"],
            r"drafters.heads: method.heds: no such option; nearest: method.heads",
        ),
        (["drafters.heads.entry=medsua"], r"drafters.heads: entry: no such entry 'medsua'; nearest: medusa"),
        (["evaluate=['decode.depth=9']"], r"drafters.heads: .*9 is deeper than the drafter's 2 heads; nearest: 2"),
        (["evaluate=['decode.dept=9']"], r"drafters.heads: decode.dept: no such option; nearest: decode.depth"),
        (["+drafters.mine={export: gone}"], r"drafters.mine: export: no such file or folder: .*/gone"),
        (["+drafters.mine={entry: medusa, export: ngram}"], r"drafters.mine: give it an entry"),
        (["+drafters.mine={exprt: ngram}"], r"drafters.mine: exprt: no such option; nearest: export"),
        (["drafters.n-gram.evaluat=[]"], r"drafters.n-gram.evaluat"),
        (["+drafters.mine={export: ngram, processes: 2}"], r"drafters.mine: processes are of a training"),
        (["only=[head]"], r"only: no such drafter 'head'; nearest: heads"),
        (["+drafter.mine={export: ngram}"], r"drafter.mine: no such option"),
        (["temperatures=[-1]"], r"temperatures.0: -1"),
        (["+drafters.no-time={entry: medusa}"], r"drafters.no-time: another one is kept in .*no-time-seed0"),
        (["target=export"], r"target: whom all drafters are for"),
    ],
)
def test_what_is_wrong_with_any_row_is_refused_before_the_first_job(
    options: list[str], line: str, tmp_path: Path, begun: list[str]
) -> None:
    with pytest.raises(Refusal, match=line):
        run(tmp_path, *options)
    assert not begun and not (tmp_path / "runs").exists()


def test_a_row_may_be_trained_by_fewer_processes_than_the_others(tmp_path: Path) -> None:
    runs = compare.planned(config(tmp_path, "processes=2", "+drafters.alone={entry: medusa, processes: 1}"))
    processes = {run.name: run.training.processes for run in runs if run.training is not None}
    assert processes.pop("alone") == 1 and set(processes.values()) == {2}


def test_sections_reach_the_processes_as_they_are(tmp_path: Path) -> None:
    odd = tmp_path / "it's, \\{odd}"
    odd.mkdir()
    (odd / "a.jsonl").touch()
    part = f"{{source: jsonl, path: {quoted(str(odd / 'a.jsonl'))}, weight: 2.5}}"
    cfg = config(tmp_path, "data=mixture", f"data.parts=[{part}]", "data.held_out=0.1", "target.device=cpu")
    words = [*compare.as_options("data", "mixture", cfg.data), *compare.as_options("target", "tiny", cfg.target)]
    trained = load("medusa", *words)
    assert (trained.data, trained.target) == (cfg.data, cfg.target)
    assert trained.data.parts[0].path == str(odd / "a.jsonl")


def job(folder: Path, code: str, result: Path | None = None) -> jobs.Job:
    """A job that runs one line of Python."""
    return jobs.Job("it", "kind", "timeit", ["-n1", "-r1", code], [], folder, result=result)


def test_a_job_has_ended_when_it_says_so_or_leaves_its_result(tmp_path: Path) -> None:
    result = tmp_path / "result"
    words = "import os; os.write(2, b'paceline: no such luck\\nbye'); os._exit(4)"
    good, bad = job(tmp_path / "good", "pass"), job(tmp_path / "bad", words)
    assert not jobs.ended(good) and jobs.perform(good) is None and jobs.ended(good)
    assert not jobs.ended(job(tmp_path / "good", "1"))  # asked for something else
    said = jobs.perform(bad)
    assert said == f"exit code 4: no such luck (all of it: {tmp_path / 'bad' / 'log.txt'})" and not jobs.ended(bad)
    words = (
        "import sys; sys.stderr.write('ValueError: no such luck\\nx.ChildFailedError: \\n====\\n'); raise SystemExit(1)"
    )
    drawn = jobs.perform(job(tmp_path / "drawn", words))  # as torchrun ends
    assert drawn is not None and drawn.startswith("exit code 1: ValueError: no such luck (")
    left = job(tmp_path / "left", f"open({str(result)!r}, 'w').close(); raise SystemExit(1)", result)
    assert jobs.perform(left) is None and jobs.ended(left)
    failed = job(tmp_path / "left", "raise ValueError('a pity')", result)
    assert "ValueError: a pity" in str(jobs.perform(failed))
    assert not result.exists() and not jobs.ended(left)  # an old result stands for nothing new


def test_the_time_left_is_that_of_jobs_of_the_same_kind() -> None:
    forecast = jobs.Forecast(["training", "training", "decoding", "decoding"], {"training": 300.0})
    assert str(forecast) == "0 of 4 done, 0 min spent, more than 10 min left"
    forecast.done("training", 120.0)
    forecast.done("decoding", 60.0)
    assert str(forecast) == "2 of 4 done, 0 min spent, about 3 min left"
    forecast.skip("training")
    assert str(forecast) == "3 of 4 done, 0 min spent, about 1 min left"
