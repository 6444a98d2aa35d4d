"""What every method promises when text is sampled: the output's distribution is the target's, whatever is drafted.

The target is a random model of six tokens, the drafter that of each file of conf/method, untrained, noise on every
weight. Three tokens are enumerated with a sampler that branches instead of drawing, and drawn 4,000 times.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from fakes import target_of
from test_verify import chi_square, outcomes
from torch import Tensor

from paceline.conf.entry import load
from paceline.decode import Decoder, DynamicShape, Sampler, StaticShape, chain, reject, walk
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.drafter import options as options_of
from paceline.models.target import Target

V = 6
PROMPT = [1, 4, 1]  # it repeats, for prompt lookup
LIKE = {False: Sampler(0.7, top_k=5, seed=1), True: Sampler(0.7, top_k=3, seed=1)}  # drawn drafts branch more
TREE = StaticShape(((0,), (1,), (0, 0)))
SHAPES = {"chain": chain(2), "tree": TREE, "dynamic": DynamicShape(5, 2, 2)}
ROWS = 4000
ENTRIES = {"draft": "draft", "medusa": "medusa", "medusa2": "medusa", "hydra_heads": "medusa"} | {
    name: "mtp" for name in ("mtp", "mtp_sequential")
}  # by method; the others: eagle
METHODS = sorted(file.stem for file in (Path(__file__).parents[1] / "conf" / "method").glob("*.yaml"))
# Drafts that are the drafter's likeliest, chosen among by the target's own draw; drafts that are drawn, taken with p/q.
CASES = [(method, shape, False) for method in METHODS for shape in SHAPES] + [
    (method, shape, True) for method in METHODS if method != "ngram" for shape in ("chain", "tree")
]


def each(cases: list[tuple[str, str, bool]]) -> pytest.MarkDecorator:
    names = [f"{method}-{shape}{'-drawn' * drawn}" for method, shape, drawn in cases]
    return pytest.mark.parametrize(("method", "shape", "drawn"), cases, ids=names)


def target() -> Target:
    return target_of("llama", vocab_size=V)


def drafter_of(method: str, target: Target) -> Drafter:
    if method == "ngram":  # nothing to train: no entry has it
        options = options_of(method)(name=method)
    else:
        options = load(ENTRIES.get(method, "eagle"), f"method={method}", "target=tiny").method
    settled = options.model_copy(update={"draft_vocab": None}).fitted(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build(settled, Shape.of(target))
        drafter.start(target)
        drafter.borrow(target)
        for parameter in drafter.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter.eval()


def truth(target: Target, like: Sampler) -> Tensor:
    """[216] float64: how likely each three tokens are, by one plain pass over each."""
    texts = torch.tensor([[*PROMPT, *said] for said in product(range(V), repeat=3)])
    probs = like.probs(target.model(texts).logits.double())
    begin = len(PROMPT)
    return probs[:, begin - 1 : -1].gather(2, texts[:, begin:, None])[..., 0].prod(1)


def decoder_of(method: str, shape: str, drawn: bool) -> Decoder:
    known = target()
    return Decoder(known, drafter_of(method, known), SHAPES[shape], reject if drawn else walk, sampled=drawn)


def index(said: Tensor) -> Tensor:
    """[..., 3] tokens -> their place among all."""
    return said @ torch.tensor([36, 6, 1])


# Of drawn drafts, which branch far more, one method's chain: tests/test_verify.py has their trees.
@each([case for case in CASES if not case[2] or case[:2] == ("draft", "chain")])
@torch.no_grad()
def test_every_text_has_the_targets_probability(method: str, shape: str, drawn: bool) -> None:
    decoder, found, accepted = decoder_of(method, shape, drawn), torch.zeros(V**3, dtype=torch.float64), 0

    def run(sampler: Sampler) -> int:
        nonlocal accepted
        generation = decoder.generate([PROMPT], 3, sampler=sampler)
        accepted += generation.report.num_accepted_tokens
        return int(index(torch.tensor(generation.tokens[0])))

    for said, chance in outcomes(run, LIKE[drawn]):
        found[said] += chance
    assert float((found - truth(decoder.target, LIKE[drawn])).abs().max()) < 1e-5
    assert accepted, "no draft was ever accepted: nothing was shown"


@each(CASES)
@torch.no_grad()
def test_four_thousand_texts_fit_the_target(method: str, shape: str, drawn: bool) -> None:
    decoder = decoder_of(method, shape, drawn)
    said = torch.tensor(decoder.generate([PROMPT] * ROWS, 3, sampler=LIKE[drawn]).tokens)
    assert (
        chi_square(torch.bincount(index(said), minlength=V**3).double(), ROWS * truth(decoder.target, LIKE[drawn]))
        > 1e-3
    )
