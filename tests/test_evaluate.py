"""scripts/evaluate.py: the report holds what it promises, and an output that is not the target's is found out."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.conf.entry import load
from paceline.decode import VERIFIERS, Verdict, walk
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder, quiet_transformers
from paceline.models.export import save_export
from paceline.models.target import Target
from paceline.scripts import evaluate

PATHS = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]
SMALL = ["eval.limit=4", "eval.max_new_tokens=12", "dtype=float32"]
KEYS = {
    "": "drafter target setting acceptance speed time by_category by_context intervals prompts stalled exactness "
    "drift trace",
    "setting": "dtype exact tree depth nodes width drafts verify lossy temperature top_k top_p min_p "
    "repetition_penalty presence_penalty min_new_tokens seed batch prompts "
    "num_prompts max_new_tokens plain plain_prompts threads device machine command paceline torch transformers",
    "acceptance": "num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos mean_acceptance_length "
    "draft_acceptance_rate per_position_acceptance_rate conditional_acceptance_rate",
    "speed": "tokens_per_second plain_tokens_per_second hf_generate_tokens_per_second speedup speedup_predicted "
    "speedup_vs_hf_generate target_pass_ms verify_pass_ms draft_ms outside_share",
    "exactness": "compared identical first_differences reason",
    "intervals": "confidence resamples seed mean_acceptance_length speedup",
}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads for the tiny target, in a run's folder."""
    target = Target.load(folder("tiny"), "float32", vocab=259)
    drafter = build(options("medusa")(name="medusa", heads=3), Shape.of(target))
    drafter.start(target)
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint, "vocab": target.vocab}
    return save_export(drafter, tmp_path_factory.mktemp("run") / "export", "float32", about, tree={"paths": PATHS})


def measured(out: Path, *words: str) -> dict[str, Any]:
    evaluate.run(load("evaluate", f"out={out}", *SMALL, *words))
    return json.loads((out / "report.json").read_text())


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
    with pytest.raises(SystemExit) as exit_:
        evaluate.main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and err.count("\n") == 1 and err.startswith("paceline: "), (out, err)
    return err


# ---------------------------------------------------------------------------------------------------------------------
# The report


def test_the_report_holds_what_it_promises(export: Path, tmp_path: Path) -> None:
    report = measured(tmp_path, f"drafter={export}")
    for section, names in KEYS.items():
        assert set(report[section] if section else report) == set(names.split()), section
    assert report["drafter"]["name"] == "medusa" and report["target"]["name"] == "tiny"
    assert report["setting"]["num_prompts"] == len(report["prompts"]) == 4
    assert (report["setting"]["tree"], report["setting"]["nodes"], report["setting"]["depth"]) == ("static", 8, 3)
    assert all(value > 0 for value in report["speed"].values())
    assert sum(row["rounds"] for row in report["prompts"]) == report["acceptance"]["num_drafts"]
    assert sum(row["accepted"] for row in report["prompts"]) == report["acceptance"]["num_accepted_tokens"]
    assert sum(group["prompts"] for group in report["by_category"].values()) == 4
    tokens, seconds = (sum(row[name] for row in report["prompts"]) for name in ("tokens", "seconds"))
    assert report["speed"]["tokens_per_second"] == pytest.approx(tokens / seconds)
    for name in ("mean_acceptance_length", "speedup"):
        low, high = report["intervals"][name]
        value = report["acceptance" if name in report["acceptance"] else "speed"][name]
        assert low <= value <= high


def test_an_answer_in_which_the_machine_was_elsewhere_is_named(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ways = evaluate._ways

    def one_stalls(*given: Any) -> Any:
        made = ways(*given)
        plain = made[evaluate.PLAIN]

        def slow(rows: list[int], ids: list[list[int]], limit: int) -> Any:
            if rows == [2]:
                time.sleep(1.0)
            return plain(rows, ids, limit)

        return made | {evaluate.PLAIN: slow}

    monkeypatch.setattr(evaluate, "_ways", one_stalls)
    report = measured(tmp_path, f"drafter={export}")
    named = {stall["prompt"]: stall["times"] for stall in report["stalled"] if stall["way"] == evaluate.PLAIN}
    stalled = report["prompts"][2]["id"]
    assert named[stalled] > evaluate.STALL and report["prompts"][0]["id"] not in named
    assert f"plain rounds of prompt {stalled} took" in capsys.readouterr().out


def test_the_report_lies_in_the_run_that_holds_the_export(export: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(evaluate, "show", lambda console, report: None)
    evaluate.run(load("evaluate", f"drafter={export}", *SMALL, "eval.limit=1"))
    *_, figures, page = capsys.readouterr().out.splitlines()
    assert figures.endswith(f" {export.parent / 'report.json'}") and page.endswith(f" {export.parent / 'report.html'}")
    assert sorted(file.name for file in export.parent.iterdir()) == ["export", "report.html", "report.json"]
    monkeypatch.chdir(export)
    assert load("evaluate", "drafter=.").out == str(export.parent)
    assert load("evaluate", "drafter=ngram").out == str(export / "outputs" / "ngram")
    assert "would write to" in refused(monkeypatch, capsys, "-m", "drafter=ngram", "seed=1,2")


def test_the_table_explains_each_figure(export: Path, tmp_path: Path, capsys: Any) -> None:
    measured(tmp_path, f"drafter={export}")
    shown = capsys.readouterr().out
    for text in ("times the speed without a drafter: ", "tokens emitted per target pass", "4 of 4 answers", "writing"):
        assert text in shown


def test_every_accepted_form_of_prompt_is_measured(tmp_path: Path) -> None:
    forms = [
        {"prompt": "a"},
        {"question": "b", "category": "letters"},
        {"instruction": "c", "input": "d"},
        {"turns": ["e", "f"], "id": "five"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "g"}]},
    ]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(form) + "\n" for form in forms))
    words = ["drafter=none", "target=tiny", "eval.max_new_tokens=2", "eval.limit=null", f"eval.prompts={file}"]
    report = measured(tmp_path, *words)
    assert [row["id"] for row in report["prompts"]] == ["1", "2", "3", "five", "5"]
    assert {name: group["prompts"] for name, group in report["by_category"].items()} == {"all": 4, "letters": 1}


# ---------------------------------------------------------------------------------------------------------------------
# Exactness


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_drafted_output_is_the_targets(tree: str, batch: int, temperature: float, export: Path, tmp_path: Path) -> None:
    options = [f"decode.tree={tree}", f"eval.batch={batch}", f"decode.temperature={temperature}", "hf_baseline=false"]
    report = measured(tmp_path, f"drafter={export}", *options)
    assert report["setting"]["tree"] == tree
    assert report["exactness"] == {"compared": 4, "identical": 4, "first_differences": [], "reason": None}
    assert (report["by_category"]["writing"]["speedup"] is None) == (batch == 4)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_what_needs_no_training_is_measured_the_same_way(drafter: str, tmp_path: Path) -> None:
    report = measured(tmp_path, f"drafter={drafter}", "target=tiny")
    assert report["drafter"]["name"] == drafter and report["exactness"]["identical"] == 4
    assert (report["acceptance"]["num_draft_tokens"] == 0) == (drafter == "none")


def test_sampling_has_no_counterpart_in_transformers(tmp_path: Path) -> None:
    speed = measured(tmp_path, "drafter=none", "target=tiny", "decode.temperature=1.0")["speed"]
    assert speed["hf_generate_tokens_per_second"] is None and speed["speedup_vs_hf_generate"] is None


def test_rejection_sampling_is_not_compared_and_typical_is_called_lossy(
    export: Path, tmp_path: Path, capsys: Any
) -> None:
    for verify, reason in (("reject", "same distribution"), ("typical", "lossy")):
        report = measured(tmp_path, f"drafter={export}", f"decode.verify={verify}", "decode.temperature=0.7")
        assert report["setting"]["lossy"] == (verify == "typical")
        assert report["setting"]["drafts"] == ("sampled" if verify == "reject" else "likeliest")
        assert report["exactness"]["identical"] is None and reason in report["exactness"]["reason"]
        assert ("LOSSY" in capsys.readouterr().out) == (verify == "typical")
    greedy = measured(tmp_path, f"drafter={export}", "decode.verify=reject")
    assert greedy["exactness"]["identical"] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_verifier_is_found_out(
    dtype: str, export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def broken(tree: Any, logits: Any, sampler: Any, places: Any) -> Verdict:
        verdict = walk(tree, logits, sampler, places)
        worst = logits[torch.arange(len(logits)), [path[-1] for path in verdict.paths]].argmin(-1)
        late = [position > 300 for _, position in places]
        return Verdict(verdict.paths, [int(w) if x else b for w, x, b in zip(worst, late, verdict.bonus, strict=True)])

    monkeypatch.setitem(VERIFIERS, "walk", broken)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in (10, 300)))
    with pytest.raises(SystemExit) as exit_:
        measured(tmp_path, f"drafter={export}", f"eval.prompts={asked}", f"dtype={dtype}")
    report = json.loads((tmp_path / "report.json").read_text())
    (difference,) = report["exactness"]["first_differences"]
    assert exit_.value.code == 1 and report["exactness"]["identical"] == 1
    assert difference["prompt"] == "2" and not difference["near_tie"] and difference["position"] > 0
    assert "NOT THE TARGET'S OUTPUT" in capsys.readouterr().out


@pytest.mark.parametrize(("drafted", "near"), [([5, 2], True), ([5, 3], False), ([5], False)])
def test_a_near_tie_is_between_the_two_tokens_that_were_chosen(drafted: list[int], near: bool) -> None:
    logits = torch.tensor([0.0, 20.0, 19.5, 15.0, -30.0, 0.0])  # 2% of 30 is 0.6

    class Two:
        vocab, device = 6, torch.device("cpu")

        def __call__(self, ids: torch.Tensor) -> tuple[None, torch.Tensor]:
            assert ids.tolist() == [[4, 5]]  # prompt and what both outputs begin with
            return None, torch.zeros(1, 2, 3)

        def head(self, last: torch.Tensor) -> torch.Tensor:
            return logits

    sampler = SimpleNamespace(greedy=True, looks_back=False)
    ready: Any = SimpleNamespace(decoder=SimpleNamespace(target=Two()), sampler=sampler)
    found = evaluate._first_difference(ready, [4], [5, 1], drafted)
    assert found["position"] == 1 and found["near_tie"] is near
    assert found["top2_gap"] == 0.5 and found["logit_scale"] == 30.0


def test_an_interval_is_of_the_ratio_of_sums() -> None:
    assert evaluate.interval([[2, 4, 6]], [[1, 2, 3]], seed=0) == [2.0, 2.0]
    assert evaluate.interval([[2]], [[1]], seed=0) is None
    assert evaluate.interval([[0, 0]], [[0, 0]], seed=0) is None
    low, high = evaluate.interval([[1.0] * 50 + [3.0] * 50], [[1.0] * 100], seed=0) or (0, 0)
    assert low == pytest.approx(2 - 0.196, abs=0.03) and high == pytest.approx(2 + 0.196, abs=0.03)


# ---------------------------------------------------------------------------------------------------------------------
# The target's own outputs, computed once (plain=FILE)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_that_were_computed_once_serve_every_drafter(
    temperature: float, export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plain=own/plain.json", f"decode.temperature={temperature}"]
    first = measured(tmp_path, f"drafter={export}", *words)
    plain = tmp_path / "own" / "plain.json"
    written = plain.read_bytes()
    assert [file.name for file in plain.parent.iterdir()] == ["plain.json"]
    second = measured(tmp_path, "drafter=ngram", "target=tiny", "eval.batch=4", *words)
    alone = measured(tmp_path, f"drafter={export}", f"decode.temperature={temperature}")
    assert plain.read_bytes() == written
    assert first["exactness"] == second["exactness"] == alone["exactness"]
    assert first["exactness"]["identical"] == 4 and first["setting"]["plain"] == str(plain)
    assert [len(tokens) for tokens in json.loads(written)["tokens"]] == [row["tokens"] for row in alone["prompts"]]


def test_known_outputs_are_not_timed_and_no_speed_up_is_claimed(export: Path, tmp_path: Path, capsys: Any) -> None:
    words = [f"drafter={export}", f"plain={tmp_path / 'plain.json'}"]
    for _ in ("writes", "reads"):
        report = measured(tmp_path, *words)
        timed = {name for name, value in report["speed"].items() if value is not None}
        assert timed == {"tokens_per_second", "verify_pass_ms", "draft_ms", "outside_share"}
        assert report["intervals"]["speedup"] is None and report["intervals"]["mean_acceptance_length"]
        assert {group["speedup"] for group in report["by_category"].values()} == {None}
        assert {row["plain_seconds"] for row in report["prompts"]} == {None}
        assert set(report["speed"]) == set(KEYS["speed"].split())
        shown = capsys.readouterr().out
        assert (
            "the speed without a drafter" not in shown
            and "tokens per pass of the target" in shown
            and "4 of 4 answers" in shown
        )


def test_of_known_outputs_some_are_timed_in_turn_for_the_speed_up(export: Path, tmp_path: Path) -> None:
    words = [f"drafter={export}", f"plain={tmp_path / 'plain.json'}", "plain_prompts=2"]
    report = measured(tmp_path, *words)
    assert [row["plain_seconds"] is not None for row in report["prompts"]] == [True, False, True, False]
    low, high = report["intervals"]["speedup"]
    timed = [row for row in report["prompts"] if row["plain_seconds"]]
    plain, drafted = (sum(row[name] for row in timed) for name in ("plain_seconds", "seconds"))  # of as many tokens
    assert report["speed"]["speedup"] == pytest.approx(plain / drafted) and low <= plain / drafted <= high
    assert report["exactness"]["compared"] == report["exactness"]["identical"] == 4
    both = measured(tmp_path, *words, "eval.batch=3")  # a batch with a prompt that is timed is timed
    assert [row["plain_seconds"] is not None for row in both["prompts"]] == [True] * 3 + [False]


def test_a_known_output_that_is_not_the_targets_is_found_out(export: Path, tmp_path: Path, capsys: Any) -> None:
    words = [f"drafter={export}", f"plain={tmp_path / 'plain.json'}"]
    measured(tmp_path, *words)
    content = json.loads((tmp_path / "plain.json").read_text())
    content["tokens"][2][5] ^= 1
    (tmp_path / "plain.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        measured(tmp_path, *words)
    exact = json.loads((tmp_path / "report.json").read_text())["exactness"]
    (difference,) = exact["first_differences"]
    assert exact["identical"] == 3 and difference["position"] == 5
    assert difference["plain_token"] == content["tokens"][2][5] == difference["drafted_token"] ^ 1


def test_outputs_of_other_settings_are_refused_by_name(
    export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    plain = tmp_path / "plain.json"
    words = [f"drafter={export}", *SMALL, f"plain={plain}", f"out={tmp_path}"]
    evaluate.run(load("evaluate", *words))
    others = {
        "dtype=bfloat16": "dtype=float32, not bfloat16",
        "eval.limit=3": "number of prompts=4, not 3",
        "eval.prompts=demo": "eval.prompts=bench, not demo",
        "eval.max_new_tokens=13": "eval.max_new_tokens=12, not 13",
        "decode.temperature=0.5": "decode.temperature=0.0, not 0.5",
        "decode.seed=1": "decode.seed=0, not 1",
    }
    capsys.readouterr()
    for word, difference in others.items():
        assert f"plain: {plain} was made with {difference};" in refused(monkeypatch, capsys, *words, word), word
    content = json.loads(plain.read_text())
    plain.write_text(json.dumps(content | {"tokens": content["tokens"][1:]}))
    assert f"plain: {plain} holds 3 outputs of 4;" in refused(monkeypatch, capsys, *words)
    plain.write_text("{}")
    assert f"plain: {plain} holds no outputs" in refused(monkeypatch, capsys, *words)
    assert f"plain: {tmp_path} holds no outputs" in refused(monkeypatch, capsys, *words, f"plain={tmp_path}")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals: one line, before the target loads


def test_what_contradicts_the_export_is_refused_before_the_target_loads(
    export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(Target, "load", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert f"no such file or folder: {tmp_path}/gone" in refused(monkeypatch, capsys, "drafter=gone")
    assert "no export there" in refused(monkeypatch, capsys, "drafter=empty")
    line = refused(monkeypatch, capsys, f"drafter={export}", "decode.depth=4")
    assert "decode.depth: 4 is deeper than the drafter's 3 heads; nearest: 3" in line
    assert "nearest: tiny" in refused(monkeypatch, capsys, f"drafter={export}", "target=smollm2")
    assert "dtype=float32" in refused(monkeypatch, capsys, f"drafter={export}", "decode.exact=true", "dtype=float16")
    line = refused(monkeypatch, capsys, f"drafter={export}", "plain_prompts=2")
    assert "plain_prompts: without plain=FILE" in line and "nearest: null" in line
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert "bad.jsonl:1" in refused(monkeypatch, capsys, f"drafter={export}", "eval.prompts=bad.jsonl")


def test_with_a_lookup_drafts_go_deeper_than_the_heads(
    export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    deep = [f"drafter={export}", "decode.tree=chain", "decode.depth=8"]
    report = measured(tmp_path, *deep, "decode.lookup=2", "hf_baseline=false")
    assert report["setting"]["depth"] == 8
    assert report["exactness"]["identical"] == report["exactness"]["compared"] > 0
    line = refused(monkeypatch, capsys, *deep)
    assert "decode.depth: 8 is deeper than the drafter's 3 heads; nearest: 3" in line


@pytest.mark.parametrize("lookup", [0, 2])
def test_a_prompt_beyond_the_draft_models_window_is_refused_before_anything_is_measured(
    lookup: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    target = Target.load(folder("tiny"), "float32", vocab=259)
    asked = options("draft")(name="draft", target_layers=(0,), tables="own").fitted(target)
    form = asked.config | {"max_position_embeddings": 48}
    form["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    drafter = build(asked.model_copy(update={"config": form}), Shape.of(target))
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint, "vocab": target.vocab}
    export = save_export(drafter, tmp_path / "export", "float32", about)
    monkeypatch.setattr(evaluate, "measured", None)
    line = refused(monkeypatch, capsys, *SMALL, f"drafter={export}", f"decode.lookup={lookup}", f"out={tmp_path}")
    assert "eval.prompts: prompt " in line and "this draft model's window is 48: leave it out" in line


def retold(export: Path, folder: Path, **target: Any) -> Path:
    """A description of the same drafter that says something else of its target."""
    folder.mkdir()
    about = json.loads((export / "drafter.json").read_text())
    about["target"] |= target
    (folder / "drafter.json").write_text(json.dumps(about))
    return folder


def test_a_target_that_moved_away_is_named(export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    moved = retold(export, tmp_path / "export", name="hf", path=str(tmp_path / "gone"))
    line = refused(monkeypatch, capsys, f"drafter={moved}")
    assert str(tmp_path / "gone") in line and "target.path=FOLDER" in line


def test_a_target_is_loaded_as_the_export_says_unless_asked_otherwise(
    export: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    asked = []

    def loading(*args: Any) -> None:
        asked.append(args[4:])
        raise KeyboardInterrupt

    monkeypatch.setattr(Target, "load", loading)
    packed = retold(export, tmp_path / "packed", quantize="4bit")
    trusted = retold(export, tmp_path / "trusted", trust_remote_code=True)
    for words in (
        [f"drafter={packed}"],
        [f"drafter={packed}", "target.quantize=none"],
        [f"drafter={packed}", "target=tiny"],
        [f"drafter={export}"],
        [f"drafter={trusted}", "target.trust_remote_code=true"],
        ["drafter=none"],
    ):
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path, *words)
    unpacked = ("none", False)
    assert asked == [("4bit", False), unpacked, unpacked, unpacked, ("none", True), unpacked]


def test_code_of_a_target_runs_only_where_that_is_asked_for_anew(
    export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(Target, "load", None)
    trusted = retold(export, tmp_path / "trusted", trust_remote_code=True)
    line = refused(monkeypatch, capsys, f"drafter={trusted}")
    assert f"target.trust_remote_code: that of drafter={trusted} " in line and "target.trust_remote_code=true" in line


def test_another_target_with_the_same_shape_is_refused(
    export: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    target = Target.load(folder("tiny"), "float32", vocab=259)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.copy_(torch.randn_like(weight))
    shutil.copytree(folder("tiny"), tmp_path / "other")
    with quiet_transformers():
        target.model.save_pretrained(tmp_path / "other")
    line = refused(monkeypatch, capsys, f"drafter={export}", "target=hf", f"target.path={tmp_path / 'other'}")
    assert "trained for a target with fingerprint" in line
