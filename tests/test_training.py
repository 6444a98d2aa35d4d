"""A run trains what it says, touches nothing else, and leaves a folder that explains itself."""

import copy
import itertools
import json
import math
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import yaml
from accelerate import Accelerator
from runs import VOCAB, checkpoint_of_target, config, contents, digest, metrics, steps, windowed
from safetensors.torch import load_file
from torch import Tensor

from paceline.conf.entry import load
from paceline.data.batch import Batch, Loader, pack
from paceline.data.conversations import Example, load_tokenizer, stop_ids
from paceline.data.features import Features
from paceline.decode import Decoder, chain
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.export import load_export
from paceline.models.medusa import MedusaOptions
from paceline.models.target import DTYPES, Target
from paceline.scripts import cache_features
from paceline.train import loop, objective, yardstick
from paceline.train.loop import fit
from paceline.train.record import Record
from paceline.train.trunk import FrozenTrunk
from paceline.train.yardstick import Yardstick


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@dataclass
class Watched:
    """What runs hold in memory: target, its bytes before training, drafter, the tensors that the optimiser knows."""

    targets: list[Target] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)
    optimised: list[set[Tensor]] = field(default_factory=list)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched()
    load_target, optimizer = Target.load, loop._optimizer

    def loaded(*args: Any) -> Target:
        seen.targets.append(load_target(*args))
        seen.before.append(digest(seen.targets[-1]))
        return seen.targets[-1]

    def optimised(cfg: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = optimizer(cfg, groups)
        seen.optimised.append({parameter for group in made.param_groups for parameter in group["params"]})
        return made

    def drafted(*args: Any, **options: Any) -> Drafter:
        seen.drafters.append(made(*args, **options))
        return seen.drafters[-1]

    monkeypatch.setattr(Target, "load", loaded)
    monkeypatch.setattr(loop, "_optimizer", optimised)
    made = loop._drafter
    monkeypatch.setattr(loop, "_drafter", drafted)
    return seen


# ---------------------------------------------------------------- what a run leaves


def test_the_tiny_target_trains_in_seconds_and_its_folder_explains_itself(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path, target_folder, "train.steps=12", "train.log_every=5", "eval.every=6", "decode.tree=static")
    fit(cfg)
    out = tmp_path / "run"
    assert {path.name for path in out.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "export",
        "curve.png",
        "training.html",
    }
    assert yaml.safe_load((out / "config.yaml").read_text()) == cfg.plain()
    assert [line["step"] for line in metrics(out)] == [1, 5, 6, 10, 12, 12]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "training.html").read_text()
    assert "Mean acceptance length, decoded" in page and "on 2 held-out prompts" in page
    losses = [line["loss"] for line in steps(out)]
    assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
    decoded = {line["step"]: line["mean_acceptance_length"] for line in metrics(out) if "loss" not in line}
    about = json.loads((out / "export" / "drafter.json").read_text())
    # the export is the best of the decodes, the earlier of equals
    assert about["acceptance"]["mean_acceptance_length"] == max(decoded.values())
    assert about["provenance"]["step"] == max(decoded, key=decoded.__getitem__)
    assert "Decoded on 2 held-out prompts" in (out / "export" / "README.md").read_text()
    assert (about["target"]["quantize"], about["target"]["trust_remote_code"]) == ("none", False)
    shown = capsys.readouterr().out
    for words in ("supervised tokens:", "⟦supervised", "draft vocabulary 64", "on 2 held-out prompts", "done:"):
        assert words in shown
    assert "answers of SmolLM2" not in shown


def test_another_targets_drafter_is_not_trained_on_the_bundled_answers_unawares(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(config(tmp_path, target_folder, "data=self", "data.path=null", "data.limit=20", "train.steps=1"))
    assert "data=self are answers of SmolLM2-135M-Instruct" in capsys.readouterr().out


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(2026, 1, 1, 12)

    monkeypatch.setattr("paceline.train.record.datetime", Noon)
    monkeypatch.chdir(tmp_path)
    cfg = config(tmp_path, target_folder, "out=null")
    names = [Record(cfg, Accelerator(cpu=True)).out.name for _ in range(3)]
    assert names == [f"medusa-20260101-120000{end}" for end in ("", "-1", "-2")]


@pytest.mark.parametrize("output", ["own", "shared"])
def test_a_run_trains_saves_and_exports_the_drafter_and_nothing_of_the_target(
    tmp_path: Path, target_folder: Path, watched: Watched, output: str
) -> None:
    fit(config(tmp_path, target_folder, f"method.output={output}"))
    (target,), (drafter,), (optimised,) = watched.targets, watched.drafters, watched.optimised
    assert target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight  # tied

    assert digest(target) == watched.before[0]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())
    storage = {parameter.data_ptr() for parameter in target.parameters()}
    assert not {parameter.data_ptr() for parameter in optimised} & storage

    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert optimised == set(trained.values())
    place = tmp_path / "run" / "checkpoints" / "step-000003"
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert load_file(place / "drafter.safetensors").keys() == exported.keys() == trained.keys() | {"token_map"}
    moments = {name.split("|")[0] for name in load_file(place / "optimizer.safetensors")}
    assert moments == trained.keys()

    fresh = build(drafter.options, drafter.shape, drafter.vocab_map)
    fresh.start(target)
    for name, start in fresh.named_parameters():
        assert not exported[name].equal(start.detach()), f"{name} is exported as it began"
        assert exported[name].equal(trained[name].detach().cpu())


RELOAD = """
import sys, torch
from pathlib import Path
from paceline.models.export import load_export
from paceline.models.target import Target
folder = Path(sys.argv[1])
for run in folder.glob("*-*"):
    target = Target.load(sys.argv[2], run.name.split("-")[0], "cpu", 259)
    drafter, about = load_export(run / "run" / "export", target)
    state = torch.load(folder / "state.pt").to(drafter.dtype)
    torch.save([drafter.head(drafter.step(state, None, k, None)[1], k) for k in range(4)], run / "logits.pt")
"""


def test_every_pair_of_dtypes_trains_exports_reloads_and_decodes(
    tmp_path: Path, target_folder: Path, watched: Watched
) -> None:
    state = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    torch.save(state, tmp_path / "state.pt")
    pairs = list(product(("float32", "bfloat16"), repeat=2))
    for dtype, exported in pairs:
        folder = tmp_path / f"{dtype}-{exported}"
        folder.mkdir()
        output = "shared" if dtype == exported else "own"
        fit(config(folder, target_folder, f"dtype={dtype}", f"export.dtype={exported}", f"method.output={output}"))
    subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path), str(target_folder)], check=True, timeout=120)

    for (dtype, exported), target, trained in zip(pairs, watched.targets, watched.drafters, strict=True):
        folder = tmp_path / f"{dtype}-{exported}"
        ours = copy.deepcopy(trained).to(DTYPES[exported])
        for k, theirs in enumerate(torch.load(folder / "logits.pt")):
            assert ours.head(ours.step(state.to(ours.dtype), None, k, None)[1], k).equal(theirs)
        drafter, _ = load_export(folder / "run" / "export", target)
        prompt = [list(range(40, 60))]
        assert len(Decoder(target, drafter, chain(4)).generate(prompt, 12).tokens[0]) == 12
        drafter, _ = load_export(folder / "run" / "export", target, dtype)
        found = Decoder(target, drafter, chain(4)).generate(prompt, 12).tokens
        if dtype == "float32":
            assert found == Decoder(target).generate(prompt, 12).tokens


def test_the_export_holds_its_vocabulary_and_the_end_of_a_turn_is_in_it(tmp_path: Path, target_folder: Path) -> None:
    fit(config(tmp_path, target_folder, "method.draft_vocab=16", "decode.width=8"))
    vocabulary = load_file(tmp_path / "run" / "export" / "model.safetensors")["token_map"]
    assert len(vocabulary) == 16 and vocabulary.equal(vocabulary.unique()) and vocabulary.max() < 259
    assert set(stop_ids(load_tokenizer(target_folder))) <= set(vocabulary.tolist())
    about = json.loads((tmp_path / "run" / "export" / "drafter.json").read_text())
    assert 0 < about["vocabulary_coverage"] < 1
    with pytest.raises(Refusal, match="draft_vocab=16 needs a map"):
        build(MedusaOptions(name="medusa", draft_vocab=16), Shape(32, 2, VOCAB))


def test_a_target_smaller_than_the_draft_vocabulary_is_drafted_whole(tmp_path: Path, target_folder: Path) -> None:
    fit(config(tmp_path, target_folder, "method.draft_vocab=8192"))
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert "token_map" not in exported and exported["lm_heads.0.weight"].shape == (VOCAB, 32)


# ---------------------------------------------------------------- how long, and how fast


def rates(total: int, **train: Any) -> list[float]:
    cfg = SimpleNamespace(train=SimpleNamespace(**{"lr": 1.0, "warmup": 0.0, **train}))
    return [loop._rate(cfg, number, total) for number in range(1, total + 1)]


def test_the_learning_rate_follows_its_schedule_and_no_step_is_wasted_at_zero() -> None:
    assert rates(8, schedule="linear") == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert rates(4, schedule="constant") == [1, 1, 1, 1]
    cosine = [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert rates(8, schedule="cosine") == pytest.approx(cosine)
    assert rates(8, schedule="constant", warmup=0.5) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1])
    assert rates(8, schedule="linear", warmup=0.5, lr=10) == pytest.approx([2.5, 5, 7.5, 10, 8, 6, 4, 2])


def test_a_budget_of_tokens_is_kept_over_epochs(tmp_path: Path, target_folder: Path) -> None:
    fit(config(tmp_path, target_folder, "train.steps=null", "train.tokens=4000"))
    lines = steps(tmp_path / "run")
    assert lines[-2]["tokens"] < 4000 <= lines[-1]["tokens"] < 4300
    epoch = Loader(
        loop.load(load_tokenizer(target_folder), **config(tmp_path, target_folder).data.keywords()).train, 300
    ).steps()
    assert lines[-1]["step"] > epoch  # the data was read more than once
    assert lines[-1]["lr"] < 1e-2 / lines[-1]["step"]


def test_when_its_time_is_over_a_run_ends_as_any_other(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = ("train.steps=1000", "train.minutes=0.5", "train.schedule=linear", "train.warmup=0.01")
    ticks = itertools.count(step=0.5)  # what lies between two looks at the clock, as a step does
    monkeypatch.setattr("paceline.train.record.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    fit(config(tmp_path, target_folder, *limited))
    lines = steps(tmp_path / "run")
    seconds = [json.loads(line).get("seconds") for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert lines[-1]["step"] == 61 and seconds[-2:] == [pytest.approx(30.5), None]
    assert lines[14]["lr"] > 0.9 * 1e-2 and lines[-1]["lr"] < 0.03 * 1e-2  # and fell by then
    left = contents(tmp_path / "run")
    assert json.loads(left["export/drafter.json"])["provenance"]["step"] == 61
    assert "checkpoints/step-000061/state.json" in left
    fit(config(tmp_path, target_folder, *limited, "resume=true"))
    assert contents(tmp_path / "run")["metrics.jsonl"] == left["metrics.jsonl"]


def test_epochs_are_counted_in_steps_of_the_data(tmp_path: Path, target_folder: Path) -> None:
    fit(config(tmp_path, target_folder, "train.steps=null", "train.epochs=1.5", "train.batch_tokens=600"))
    counts = json.loads((tmp_path / "run" / "export" / "drafter.json").read_text())["provenance"]
    (place,) = (tmp_path / "run" / "checkpoints").iterdir()
    last = int(place.name.removeprefix("step-"))
    examples = [Example(torch.zeros(n), torch.zeros(n)) for n in (200, 200, 200, 200, 200)]
    assert Loader(examples, 400).steps() == 3
    assert counts["step"] == last == steps(tmp_path / "run")[-1]["step"]
    # each document once, and half of them again
    assert 1.2 < counts["tokens"] / tokens_of_an_epoch(tmp_path, target_folder) < 1.8


def tokens_of_an_epoch(folder: Path, target_folder: Path) -> int:
    data = loop.load(load_tokenizer(target_folder), **config(folder, target_folder).data.keywords())
    return sum(map(len, data.train))


# ---------------------------------------------------------------- what must not ruin a run


class Spoilt:
    """A loss term that is not a number in the given optimiser steps (from 1), of one chunk a step."""

    def __init__(self, wrong: set[int], term: objective.Term):
        self.wrong, self.term, self.calls = wrong, term, 0

    def __call__(self, drafted: objective.Drafted, labels: Tensor, teacher: Any, weight: float, out: Tensor) -> Tensor:
        self.calls += 1
        wrong = math.nan if (self.calls + 3) // 4 in self.wrong else 1.0
        return self.term(drafted, labels, teacher, weight * wrong, out) * wrong


def test_a_step_without_finite_gradients_is_left_out_and_counted(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objective.TERMS, "kl", Spoilt({2}, objective.kl))
    fit(config(tmp_path, target_folder, "train.save_every=1", "train.keep=3"))
    lines = steps(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert lines[1]["loss"] == [None] * 4 and lines[1]["grad_norm"] is None and None not in lines[2]["loss"]
    places = [tmp_path / "run" / "checkpoints" / f"step-00000{n}" for n in (1, 2, 3)]
    first, second, third = (contents(place) for place in places)
    for file in ("drafter.safetensors", "optimizer.safetensors"):
        assert first[file] == second[file] != third[file]


def test_five_steps_in_a_row_without_finite_gradients_end_the_run(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objective.TERMS, "kl", Spoilt({2, 4, 5, 6, 7, 8}, objective.kl))
    # and the examples that were read then are named, the first by its words
    said = r"train.lr=0.01: the gradients of five steps .* \(step 8: .* at examples \d+, .* begins '<.im_start.>user"
    with pytest.raises(Refusal, match=said):
        fit(config(tmp_path, target_folder, "train.steps=20"))
    assert steps(tmp_path / "run")[-1]["step"] == 7


def updates(target: Target, *parts: list[Batch], scaled: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and news after optimiser steps of these micro-batches. scaled: gradients are, as with float16."""
    accelerator = Accelerator(cpu=True)
    if scaled:
        scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        accelerator.unscale_gradients = lambda *_: scaler.unscale_(optimizer.optimizer)
    drafter = build(MedusaOptions(name="medusa", heads=3), Shape.of(target))
    drafter.start(target)
    cfg = SimpleNamespace(train=SimpleNamespace(clip=1.0))

    def say(batch: Batch) -> tuple[Tensor, Tensor]:
        return target(batch.ids, drafter.taps, documents=batch.document, positions=batch.positions)

    trunk = FrozenTrunk(target, Features(say, drafter.taps))
    step = trunk.step(drafter, 512, target.vocab)
    trained, optimizer = accelerator.prepare(step, torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.1))
    for batches in parts:
        news = loop._update(cfg, accelerator, trained, step, trunk, optimizer, batches)
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}, news


def test_a_batch_with_nothing_supervised_is_as_if_it_were_absent(target_folder: Path) -> None:
    target = Target.load(str(target_folder), "float32")
    draw = torch.Generator().manual_seed(0)
    batches = [
        pack([Example(torch.randint(259, (20,), generator=draw), torch.arange(20) >= 5 * i)]) for i in range(1, 4)
    ]
    blank = Batch(batches[0].ids, batches[0].positions, batches[0].document, batches[0].supervised & False)
    without, _ = updates(target, batches)
    beside, news = updates(target, [batches[0], blank, *batches[1:]])
    assert not news["skipped"] and not news["empty"]
    assert all(without[name].equal(beside[name]) for name in without)
    # alone it moves neither weights nor moments, and is counted
    alone, news = updates(target, batches, [blank])
    assert news["empty"] and not news["skipped"] and not any(news["loss"])
    assert all(without[name].equal(alone[name]) for name in without)
    # and with float16's scaler the next step is one as any
    twice, _ = updates(target, batches, batches)
    around, news = updates(target, batches, [blank], batches, scaled=True)
    assert not news["empty"] and all(twice[name].equal(around[name]) for name in twice)


def test_what_a_targets_window_cannot_hold_is_refused_or_left_out_before_the_first_step(
    tmp_path: Path, target_folder: Path
) -> None:
    target = windowed(tmp_path / "target", target_folder, 91)  # the longest text has as many tokens
    tree = ("decode.tree=static", "decode.nodes=16")
    fit(config(tmp_path, target, *tree, "data.max_length=91", "eval.max_new_tokens=44"))  # leaves 31 to a prompt
    assert metrics(tmp_path / "run")[-1]["mean_acceptance_length"]
    with pytest.raises(Refusal, match=r"eval.max_new_tokens: 46, .* window of 91; nearest: 45"):
        fit(config(tmp_path, target, *tree, "eval.max_new_tokens=46", f"out={tmp_path}/long"))
    narrow = windowed(tmp_path / "narrow", target_folder, 90)
    with pytest.raises(Refusal, match=r"data.max_length: the longest text has 91 tokens, .* 90; nearest: 90"):
        fit(config(tmp_path, narrow, f"out={tmp_path}/long"))
    with pytest.raises(Refusal, match=r"data.max_length: the longest text has 91 tokens, .* 90; nearest: 90"):
        cache_features.run(config(tmp_path, narrow, "data.held_out=0.0", program="cache_features"))
    assert not list((tmp_path / "long").iterdir())

    tokenizer = load_tokenizer(target_folder)

    def prompts(window: int | None, *more: str) -> tuple[list[int], str]:
        cfg = config(tmp_path, target_folder, *tree, "eval.max_new_tokens=44", *more)
        data = loop.load(tokenizer, **cfg.data.keywords())
        made = Yardstick(cfg, tokenizer, data, window)
        return [len(ids) for ids in made.prompts], made.decoded

    assert prompts(None) == ([30, 33], "2 held-out prompts") and prompts(91) == ([30], "1 held-out prompt")
    # with nothing held out the bundled ones are asked, here those of at most 102 tokens
    assert prompts(162, "data.held_out=0.0", "eval.held_out_prompts=9") == (
        [78, 100, 100, 102],
        "4 bundled prompts, for want of held-out ones",
    )


def test_text_with_an_id_that_the_target_has_no_row_for_is_refused(tmp_path: Path, target_folder: Path) -> None:
    """As where a token was added to a tokenizer, and its table stayed as it was."""
    target = shutil.copytree(target_folder, tmp_path / "target")
    small = Target.load(str(target), "float32").model
    small.resize_token_embeddings(258)  # the end of a turn is id 258
    small.save_pretrained(target)
    for program, run in (("medusa", fit), ("cache_features", cache_features.run)):
        with pytest.raises(Refusal, match=r"data\.path: the text has id 258, its table has 258 rows"):
            run(config(tmp_path, target, f"data.features_in={tmp_path}/features", program=program))


def test_where_no_round_is_played_the_latest_weights_are_exported(tmp_path: Path, target_folder: Path) -> None:
    """Held-out answers of one token say nothing of drafts: the first weights are not the best for that."""
    fit(config(tmp_path, target_folder, "eval.max_new_tokens=1", "eval.every=1"))
    run = tmp_path / "run"
    about = json.loads((run / "export" / "drafter.json").read_text())
    assert about["provenance"]["step"] == 3 and about["acceptance"]["mean_acceptance_length"] is None
    assert not any("mean_acceptance_length" in line for line in metrics(run))


def test_held_out_prompts_are_decoded_a_few_at_a_time_and_found_to_be_worth_the_same(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = ("decode.temperature=1.0", "eval.held_out_prompts=3", "data.held_out=0.4")
    cfg = config(tmp_path, target_folder, "decode.tree=static", *hot)
    tokenizer = load_tokenizer(target_folder)
    target = Target.load(str(target_folder), "float32", vocab=len(tokenizer))
    drafter = build(cfg.method.model_copy(update={"draft_vocab": None}), Shape.of(target))
    drafter.start(target)
    trunk = FrozenTrunk(target, Features(lambda batch: (batch.ids, batch.ids), drafter.taps))
    data = loop.load(tokenizer, **cfg.data.keywords())
    generate, sizes = Decoder.generate, list[int]()

    def seen(self: Decoder, prompts: Any, new: int, **options: Any) -> Any:
        sizes.append(len(prompts) * (max(map(len, prompts)) + new + self.shape.nodes))
        return generate(self, prompts, new, **options)

    monkeypatch.setattr(Decoder, "generate", seen)
    whole = Yardstick(cfg, tokenizer, data).measure(drafter, trunk)
    assert len(sizes) == 2  # of the prompts that grow the tree, and of those it is judged on
    sizes.clear()
    monkeypatch.setattr(yardstick, "AT_ONCE", 130)
    apart = Yardstick(cfg, tokenizer, data)
    assert apart.measure(drafter, trunk) == whole
    assert len(apart.text) > 1 and len(sizes) > 3 and max(sizes) <= 130
    assert yardstick._groups([50, 140, 60, 70]) == [[0, 2], [3], [1]]  # what is longer goes alone
    assert yardstick._groups([]) == [[]]


# ---------------------------------------------------------------- trackers


def test_without_a_tracker_wandb_need_not_be_there_and_with_it_that_is_said(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails
    fit(config(tmp_path, target_folder))
    with pytest.raises(Refusal, match="tracker=wandb needs wandb"):  # before anything loads
        config(tmp_path, target_folder, "tracker=wandb")


def log_records(log: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format: blocks of 32 KiB, a record in one chunk or in several."""
    place, record = 7, b""  # behind the file's own header
    while place + 7 <= len(log):
        _, size, kind = struct.unpack("<IHB", log[place : place + 7])
        record += log[place + 7 : place + 7 + size]
        if kind in (1, 4):  # whole, or the last of several
            yield record
            record = b""
        place += 7 + size
        if 32768 - place % 32768 < 7:  # no room for another chunk's header in this block
            place += 32768 - place % 32768


def written(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Configuration and history of the one offline run in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    tree: dict[str, Any] = {}
    history = []
    for data in log_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            tree |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("config"):  # where wandb was quicker to open the run than to be told of it
            tree |= {item.key: json.loads(item.value_json) for item in record.config.update}
        if record.HasField("history"):
            history.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return tree, history


def test_wandb_holds_the_whole_configuration_and_the_last_step_of_a_run_that_broke(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objective.TERMS, "kl", Spoilt(set(range(4, 9)), objective.kl))
    cfg = config(tmp_path, target_folder, "tracker=wandb", "train.steps=20")
    with pytest.raises(Refusal):
        fit(cfg)
    for _ in range(150):  # wandb's own process may still be writing
        tree, history = written(tmp_path / "run")
        if tree and history and history[-1]["_step"] == 7:
            break
        time.sleep(0.2)
    assert {key: tree[key] for key in cfg.plain()} == cfg.plain()
    assert history[-1]["_step"] == 7 and history[-1]["skipped"] == 4 and "loss/0" in history[2]


def test_a_gpu_that_is_not_there_is_refused_by_name(tmp_path: Path, target_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(Refusal, match=r"target.device=cuda:1: there is no such GPU"):
        fit(config(tmp_path, target_folder, "target.device=cuda:1"))
    with pytest.raises(Refusal, match="dtype=float16 needs a CUDA GPU"):
        fit(load("medusa", "dtype=float16", "target=tiny"))


def test_processes_wait_for_one_that_decodes_for_an_hour(tmp_path: Path, target_folder: Path) -> None:
    waiting = loop._accelerator(config(tmp_path, target_folder)).init_handler
    assert waiting is not None and list(waiting.to_kwargs()) == ["timeout"]  # and no other backend
    assert waiting.timeout is not None and waiting.timeout > timedelta(hours=1)


def asking(wish: bool | str, dtype: str) -> Any:
    return SimpleNamespace(train=SimpleNamespace(compile=wish), dtype=dtype)


def test_compiling_without_a_compiler_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, found = torch.device("cpu"), set[str]()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(loop.shutil, "which", lambda name: name if name in found else None)
    wishes = {wish: asking(wish, "float32") for wish in (False, True, "auto", "loss")}
    assert [loop._compiles(wishes[wish], cpu) for wish in (False, "auto")] == [False, False]
    with pytest.raises(Refusal, match=r"train.compile=true needs a compiler, .* no g\+\+; nearest: train.compile=auto"):
        loop._compiles(wishes[True], cpu)
    with pytest.raises(Refusal, match=r"train\.compile=loss needs a compiler"):
        loop._compiles(wishes["loss"], cpu)
    found.add("clang++")
    assert [loop._compiles(wish, cpu) for wish in wishes.values()] == [False, True, True, True]


@pytest.mark.parametrize("there", [True, False])
def test_where_kernels_train_auto_compiles_nothing_beside(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "kernels", lambda: object() if there else None)
    monkeypatch.setattr(loop.shutil, "which", lambda name: name)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert loop._compiles(asking("auto", "bfloat16"), cpu) is not there
    assert loop._compiles(asking(True, "bfloat16"), cpu), "as asked"
    assert loop._compiles(asking("auto", "float32"), cpu) and loop._compiles(asking("auto", "bfloat16"), gpu)
