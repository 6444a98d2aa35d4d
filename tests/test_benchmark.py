"""scripts/benchmark.py decode: every decoder answers the same prompts, and a row says what was counted."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from paceline.conf.entry import load
from paceline.conf.schema_scripts import BenchmarkRow
from paceline.decode.verify import Verdict
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder
from paceline.models.export import save_export
from paceline.models.kernels import kernels
from paceline.models.packed import packable
from paceline.models.target import Target
from paceline.scripts import benchmark_decode, benchmark_passes
from paceline.scripts.benchmark import run

SMALL = ["target=tiny", "part=decode", "dtype=float32", "eval.limit=3", "eval.max_new_tokens=12"]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name untrained drafters for the tiny target."""
    target, out = Target.load(folder("tiny"), "float32", vocab=259), tmp_path_factory.mktemp("drafters")
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint}
    for option, made in (("medusa", {"heads": 2}), ("eagle3", {"draft_vocab": 64})):
        name = {"eagle3": "eagle"}.get(option, option)
        drafter = build(
            options(name)(name=name, **made).fitted(target),
            Shape.of(target),
            torch.arange(64) if "draft_vocab" in made else None,
        )
        drafter.start(target)
        save_export(drafter, out / option, "float32", about, tree={"paths": [[0], [0, 0], [1]]})
    return [f"{option}={out / option}" for option in ("medusa", "eagle3")]


def rows(out: Path, *words: str) -> list[dict[str, Any]]:
    run(load("benchmark", *SMALL, f"out={out}", *words))
    return json.loads((out / "benchmark.json").read_text())["rows"]


def test_every_row_decodes_the_same_prompts_to_the_same_text(drafters: list[str], tmp_path: Path) -> None:
    measured = rows(tmp_path, *drafters)
    assert [row["name"] for row in measured] == [row for row in get_args(BenchmarkRow) if "economize" not in row]
    for row in measured:
        assert set(row) == {
            "part",
            "name",
            "tokens_per_second",
            "mean_acceptance_length",
            "identical",
            "compared",
        }
        assert row["part"] == "decode" and row["tokens_per_second"] > 0
        assert row["identical"] == row["compared"] == 3, row
    lengths = {row["name"]: row["mean_acceptance_length"] for row in measured}
    assert lengths["hf-generate"] == lengths["paceline-plain"] == 1
    assert lengths["hf-prompt-lookup"] > 1 < lengths["paceline-ngram"] and lengths["paceline-medusa"] > 1
    assert lengths["paceline-hybrid"] > lengths["paceline-eagle3"], "its text repeats itself"


def test_every_tree_and_batch_is_held_to_plain_decoding(
    drafters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = rows(tmp_path, "part=exact", "eval.limit=5", *drafters)
    assert [row["name"] for row in cells[:2]] == ["medusa, chain, batch 1", "medusa, chain, batch 4"]
    less = rows(tmp_path / "less", "part=exact", "eval.limit=1", "medusa=null", drafters[1])
    assert [row["name"] for row in less] == [row["name"] for row in cells[6:]]
    assert len(cells) == 12 and cells[-1]["name"] == "eagle3, tree of 64, batch 4"
    for row in cells:
        assert row["identical"] == row["compared"] == 5, row
        assert row["mean_acceptance_length"] > 1 or "eagle3" in row["name"], "it is untrained"
    right = benchmark_decode._drafting

    def wrong(*given: Any) -> Any:
        decoder = right(*given)
        decoder.verify = lambda tree, *_: Verdict([[0] for _ in tree.tokens], [7 for _ in tree.tokens])
        return decoder

    monkeypatch.setattr(benchmark_decode, "_drafting", wrong)
    assert all(row["identical"] < row["compared"] for row in rows(tmp_path, "part=exact", "eval.limit=5", *drafters))


def test_a_run_that_is_stopped_leaves_what_it_measured(
    drafters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = benchmark_decode._WAYS["paceline-plain"]

    def stopped(*given: Any) -> Any:
        way = right(*given)
        return lambda prompts, ids, limit: pytest.fail("stopped") if prompts == [2] else way(prompts, ids, limit)

    monkeypatch.setattr(benchmark_decode, "KEPT", 2)
    monkeypatch.setitem(benchmark_decode._WAYS, "paceline-plain", stopped)
    only = "only=[paceline-plain,paceline-ngram]"
    with pytest.raises(pytest.fail.Exception):
        rows(tmp_path, only)
    left = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["name"], row["so_far"]) for row in left] == [("paceline-plain", 2), ("paceline-ngram", 2)]
    monkeypatch.setitem(benchmark_decode._WAYS, "paceline-plain", right)
    again = rows(tmp_path, only)
    assert len(again) == 2 and not any("so_far" in row for row in again), "the whole run's rows take their place"


def test_a_row_that_says_something_else_is_found_out(
    drafters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = benchmark_decode._WAYS["paceline-ngram"]

    def wrong(*given: Any) -> Any:
        way = right(*given)

        def generate(prompts: list[int], ids: list[list[int]], limit: int) -> Any:
            out = way(prompts, ids, limit)
            out.tokens[0][-1] += prompts[0] % 2  # of three prompts, the second
            return out

        return generate

    monkeypatch.setitem(benchmark_decode._WAYS, "paceline-ngram", wrong)
    (plain, ngram) = rows(tmp_path, "only=[paceline-ngram,paceline-plain]")
    assert (plain["name"], plain["compared"]) == ("paceline-plain", 0), "there is no other plain decoding to hold it to"
    assert (ngram["identical"], ngram["compared"]) == (2, 3)


def test_the_schema_knows_the_rows() -> None:
    assert list(get_args(BenchmarkRow)) == list(benchmark_decode._WAYS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["only=[paceline-eagel3]"], "nearest: paceline-eagle3"),
        (["medusa=/nowhere"], "medusa: paceline-medusa decodes with the drafter at /nowhere, which is not there"),
        (["only=[economize-medusa]"], "economize"),
        (["decode.temperature=0.7"], "every row decodes greedily"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_loads(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.scripts import benchmark

    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "decode", *SMALL[:1], *SMALL[2:], *words])
    with pytest.raises(SystemExit) as exit_:
        benchmark.main()
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.count("\n") == 1 and said in err, err


def test_passes_are_timed_and_held_to_the_model_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_passes, "REPEATS", 2)
    functions, packed = kernels(), packable(torch.zeros(1, 1, dtype=torch.bfloat16))
    if functions is None or not packed:
        pytest.skip("this machine compiles no passes")
    before = functions.tiled
    measured = {row["name"]: row for row in rows(tmp_path, "part=passes", "dtype=bfloat16", "eval.limit=2")}
    assert set(measured) == {"onednn", "transformers"} | ({"tiles"} if before else set()) and functions.tiled == before
    for name, row in measured.items():
        assert 0 < row["kl"] < 0.05
        assert name == "transformers" or all(row["milliseconds"][str(nodes)] > 0 for nodes in benchmark_passes.NODES)
