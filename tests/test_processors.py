"""What penalties, temperature and cut-offs make of logits: as transformers has it, and the same drafted as plainly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import VOCAB, Dictated, target_of
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.decode import Decoder, DynamicShape, Sampler, chain
from paceline.models.target import Target

PROMPTS, NEW = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]], 24
SAMPLERS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.1, "top_k": 5},
    "top_p": {"temperature": 1.1, "top_p": 0.7},
    "top_p 0": {"temperature": 1.1, "top_p": 0.0},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "min_new_tokens": {"min_new_tokens": 15},
    "all": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "min_new_tokens": 10,
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


@pytest.fixture(scope="module")
def plainly(target: Target) -> Callable[[str], tuple[list[list[int]], dict[str, Any]]]:
    """name -> what the target says under it alone, and options of generate: the sampler, ids that end a text."""
    says: dict[str, Any] = {}

    def under(name: str) -> tuple[list[list[int]], dict[str, Any]]:
        if name not in says:
            free = Decoder(target).generate(
                PROMPTS, NEW, sampler=Sampler(**SAMPLERS[name] | {"min_new_tokens": 0}, seed=5)
            )
            stops = [row[6] for row in free.tokens] if "min_new_tokens" in SAMPLERS[name] else []
            given = {"sampler": Sampler(**SAMPLERS[name], seed=5), "eos": stops}
            says[name] = Decoder(target).generate(PROMPTS, NEW, **given).tokens, given
        return says[name]

    return under


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_is_what_transformers_makes_of_logits(name: str) -> None:
    """All but the presence penalty, which transformers has not: the OpenAI API's, taken from what was answered."""
    draw = torch.Generator().manual_seed(1)
    made, stops = SAMPLERS[name], [7, 11]
    processors: dict[str, Callable[[Any], Any]] = {  # in transformers' own order
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "min_new_tokens": lambda least: MinNewTokensLengthLogitsProcessor(4, least, stops),
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    theirs = LogitsProcessorList([make(made[option]) for option, make in processors.items() if option in made])
    sampler = Sampler(**{"temperature": 1.0} | made)
    for answered in (1, 12, 20):
        text = torch.randint(VOCAB, (3, 4 + answered), generator=draw)
        logits = 4 * torch.randn(3, VOCAB, generator=draw)
        before = logits.clone()
        texts = [(row[:4], row[4:]) for row in text.tolist()]
        ours = sampler.probs(sampler.adjusted(logits[:, None], texts, stops)[:, 0])
        assert torch.equal(logits, before)
        if penalty := made.get("presence_penalty"):
            penalised = (
                RepetitionPenaltyLogitsProcessor(made["repetition_penalty"])(text, logits) if name == "all" else logits
            )
            for row, (_, answer) in enumerate(texts):
                penalised[row, list(set(answer))] -= penalty
            logits, kept = penalised, [one for one in theirs if not isinstance(one, RepetitionPenaltyLogitsProcessor)]
            theirs = LogitsProcessorList(kept)
        torch.testing.assert_close(ours, theirs(text, logits).softmax(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_drafted_text_is_plain_text(target: Target, plainly: Any, name: str, depth: int) -> None:
    said, given = plainly(name)
    known = [prompt + answer + [0] * 9 for prompt, answer in zip(PROMPTS, said, strict=True)]
    # right but for every seventh place, so that paths of all lengths are accepted and turned down
    drafter = Dictated(known, lambda place: 3 if place % 7 == 0 else 0)
    for shape in (chain(depth), DynamicShape(14, depth, 5)):
        together = Decoder(target, drafter, shape).generate(PROMPTS, NEW, **given)
        assert together.tokens == said
        assert together.report.num_accepted_tokens_per_pos[:1] > [3]
        swapped = Decoder(target, drafter, shape).generate(PROMPTS[::-1], NEW, rows=[1, 0], **given)
        assert swapped.tokens == said[::-1]


def test_penalties_and_lengths_say_something_else(plainly: Any) -> None:
    free = Decoder(target_of("llama")).generate(PROMPTS, NEW).tokens
    for name in ("repetition_penalty", "presence_penalty"):
        assert all(len(set(row)) > len(set(other)) for row, other in zip(plainly(name)[0], free, strict=True)), name
    said, given = plainly("min_new_tokens")
    assert all(len(row) >= 15 and not set(row[:15]) & set(given["eos"]) for row in said)
