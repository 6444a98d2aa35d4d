"""Used as a library: inside transformers' generate, and where nothing of the trainer's is installed."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from fakes import VOCAB, model_of
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.decode import Decoder, chain
from paceline.models.drafter import Shape, build, options
from paceline.models.errors import Refusal
from paceline.models.target import Target

# What a user's own model has: padded prompts of several lengths.
IDS = torch.tensor([[0, 0, 3, 1, 4, 1, 5, 3, 1, 4], [9, 2, 6, 5, 3, 5, 8, 9, 2, 6]])
MASK = torch.tensor([[0] * 2 + [1] * 8, [1] * 10])


def named(asked: Any) -> str:
    """The id of a case: transformers' classes by name, where their own text would be an address."""
    if not isinstance(asked, dict):
        return str(asked)
    classes = ("stopping_criteria", "logits_processor")
    return " ".join(f"{k}={[type(one).__name__ for one in v] if k in classes else v}" for k, v in asked.items())


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    target = Target(model)
    return Decoder(target, build(options("ngram")(name="ngram"), Shape.of(target)), chain(3))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 8, "eos_token_id": [7, 25, 50]},
        {"max_length": 20, "min_length": 18, "eos_token_id": 25},
        {"stopping_criteria": [MaxLengthCriteria(15)]},
        {"stopping_criteria": [EosTokenCriteria([7, 25, 50])]},
        {"eos_token_id": 3, "stopping_criteria": [EosTokenCriteria(25), MaxLengthCriteria(22)]},
        {"eos_token_id": 25, "logits_processor": [MinNewTokensLengthLogitsProcessor(8, 12, 25)]},
    ],
    ids=named,
)
def test_transformers_generate_says_the_same_with_a_decoder(
    model: Any, decoder: Decoder, asked: dict[str, Any]
) -> None:
    given = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": MASK}
    given |= asked | ({"max_new_tokens": None} if "max_length" in asked else {})
    theirs = model.generate(IDS, **given)
    assert torch.equal(model.generate(IDS, custom_generate=decoder, **given), theirs)
    assert theirs.shape[1] > IDS.shape[1] + 4


def test_sampling_follows_torchs_seed(model: Any, decoder: Decoder) -> None:
    def said(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return model.generate(
            IDS[1:], custom_generate=decoder, do_sample=True, top_k=9, min_p=0.01, max_new_tokens=12, pad_token_id=0
        ).tolist()

    assert said(1) == said(1) != said(2)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"num_beams": 2}, "num_beams: 2 is not available"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"no_repeat_ngram_size": 2}, NoRepeatNGramLogitsProcessor.__name__),
        ({"max_time": 9.0}, "MaxTimeCriteria"),
        ({"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3, 4)]}, r"prompt_ignore_length=\[4, 4\] .*\[2, 0\]"),
        (
            {"do_sample": True, "top_k": 0, "logits_processor": [MinPLogitsWarper(0.1), TopPLogitsWarper(0.9)]},
            "TopPLogitsWarper behind MinPLogitsWarper is another distribution",
        ),
        (
            {"do_sample": True, "logits_processor": [TopKLogitsWarper(9), TopKLogitsWarper(3)]},
            "TopKLogitsWarper behind TopKLogitsWarper",
        ),
        (
            {"do_sample": True, "logits_processor": [TopPLogitsWarper(0.9, min_tokens_to_keep=3)]},
            "TopPLogitsWarper with min_tokens_to_keep=3 .* nearest: 1",
        ),
        (
            {"eos_token_id": 7, "logits_processor": [MinNewTokensLengthLogitsProcessor(10, 3, 8)]},
            r"MinNewTokensLengthLogitsProcessor with eos_token_id=\[8\] .* nearest: \[7\]",
        ),
    ],
    ids=named,
)
def test_what_the_loop_does_not_do_is_refused_by_name(
    model: Any, decoder: Decoder, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(Refusal, match=named):
        model.generate(IDS, attention_mask=MASK, custom_generate=decoder, max_new_tokens=4, pad_token_id=0, **asked)


def test_another_model_is_refused(decoder: Decoder) -> None:
    with pytest.raises(Refusal, match="another model"):
        model_of("llama", vocab_size=VOCAB).generate(IDS, custom_generate=decoder, max_new_tokens=4, pad_token_id=0)


ALONE = """
import sys
absent = "accelerate hydra omegaconf datasets wandb peft rich matplotlib"
sys.modules.update(dict.fromkeys(absent.split()))  # what stands there as None is not installed
import torch
from paceline.decode import Decoder, chain
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder
from paceline.models.target import Target

target = Target.load(folder("tiny"), "float32", vocab=259)
drafter = build(options("ngram")(name="ngram"), Shape.of(target))
decoder = Decoder(target, drafter, chain(4))
prompt = [65, 66, 67, 65, 66]
drafted = decoder.generate([prompt], 24)
assert drafted.tokens == Decoder(target).generate([prompt], 24).tokens
assert drafted.report.mean_acceptance_length > 1
ids = torch.tensor([prompt])
out = target.model.generate(ids, custom_generate=decoder, max_new_tokens=24, pad_token_id=0, do_sample=False)
assert out.tolist() == [prompt + drafted.tokens[0]]
print("decoded", [name for name in ("paceline.train", "paceline.data", "paceline.conf") if name in sys.modules])
"""


def test_it_decodes_where_nothing_of_the_trainers_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == "decoded []", done.stderr
