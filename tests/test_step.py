"""The teacher-forced step: its loss, its gradients, its masks, and that its metric is what the decoder plays.

The reference walks over positions and depths one by one, in float64, with masks of its own.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from fakes import slow_greedy, target_of
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.data.batch import Batch, pack
from paceline.data.conversations import Example
from paceline.decode import Decoder, chain
from paceline.models import drafter as drafters
from paceline.models.drafter import Borrowed, Context, Drafter, Options, Shape, build
from paceline.models.medusa import MedusaOptions
from paceline.models.target import Head, Target
from paceline.train import objective
from paceline.train.step import BEYOND, TrainStep, ranks

WIDTH, HIDDEN, VOCAB, HEADS, BLOCKS = 26, 16, 40, 3, 2
KNOWN = 37  # ids in use; the tables may have more rows
DRAFTED = torch.arange(1, 40, 2)  # a draft vocabulary: the odd ids
MIXES = {"ce": {"ce": 1.0}, "kl": {"kl": 1.0}, "mix": {"ce": 0.3, "kl": 0.7}}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def texts() -> Batch:
    """Two documents and padding in one row, one that fills the other; masks with holes, but never at the ends."""
    draw = torch.Generator().manual_seed(1)
    lengths = [[9, 11], [WIDTH]]
    ids, document = torch.zeros(2, WIDTH, dtype=torch.long), torch.full((2, WIDTH), -1)
    positions, supervised = torch.zeros_like(ids), torch.zeros(2, WIDTH, dtype=torch.bool)
    which = 0
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            here = slice(start, start + size)
            ids[row, here] = torch.randint(KNOWN, (size,), generator=draw)
            document[row, here], positions[row, here] = which, torch.arange(size)
            supervised[row, here] = torch.rand(size, generator=draw) < 0.6
            supervised[row, start] = supervised[row, start + size - 1] = True
            start, which = start + size, which + 1
    return Batch(ids, positions, document, supervised)


def head_of_target() -> Head:
    return Head(noise(VOCAB, HIDDEN, seed=2), noise(VOCAB, seed=3), scale=0.5, softcap=3.0)


def medusa(vocab_map: Tensor | None = None, output: str = "own", weights: dict[str, float] | None = None) -> Drafter:
    """Heads with random weights everywhere."""
    options = MedusaOptions(
        name="medusa",
        heads=HEADS,
        blocks=BLOCKS,
        output=output,
        draft_vocab=None if vocab_map is None else len(vocab_map),
        objective=weights or {"kl": 1.0},
    )
    drafter = build(options, Shape(HIDDEN, 3, VOCAB), vocab_map)
    for i, parameter in enumerate(drafter.parameters()):
        parameter.data = 0.4 * noise(*parameter.shape, seed=10 + i)
    if output == "shared":
        drafter.borrowed = Borrowed(head=head_of_target().rows(vocab_map))
    return drafter


# ---------------------------------------------------------------- loss and gradients


def reference(
    drafter: Any, batch: Batch, hidden: Tensor, last: Tensor, vocab: int
) -> tuple[Tensor, list[int], list[int]]:
    """Loss [K] (float64, differentiable), rows it is the sum of, and right predictions; one position after another."""
    weights = drafter.options.objective
    vocab_map = drafter.vocab_map if drafter.vocab_map is not None else torch.arange(vocab)
    draft_id = {int(token): i for i, token in enumerate(vocab_map)}
    theirs = head_of_target()

    def logits_of_target(state: Tensor) -> Tensor:
        whole = (theirs.weight.double() @ state + theirs.bias.double()) * theirs.scale
        return (torch.tanh(whole / theirs.softcap) * theirs.softcap)[vocab_map]

    losses, counts, right = [], [0] * HEADS, [0] * HEADS
    for k in range(HEADS):
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch.ids)):
            for t in range(batch.ids.shape[1]):
                goal = t + 2 + k
                if goal >= batch.ids.shape[1] or batch.document[row, t] < 0:
                    continue
                if batch.document[row, goal] != batch.document[row, t] or not batch.supervised[row, goal]:
                    continue
                if int(batch.ids[row, goal]) not in draft_id:
                    continue
                label = draft_id[int(batch.ids[row, goal])]
                state = hidden[row, t].double()
                for layer in drafter.blocks[k].layers:
                    state = state + F.silu(layer.weight @ state + layer.bias)
                logits = (
                    drafter.lm_heads[k].weight[: len(vocab_map)] @ state
                    if len(drafter.lm_heads)
                    else logits_of_target(state)
                )
                draft = logits.softmax(0)
                p = logits_of_target(last[row, goal - 1].double()).softmax(0)
                loss = -weights.get("ce", 0.0) * draft[label].log()
                total = total + loss + weights.get("kl", 0.0) * (p * (p.log() - draft.log())).sum()
                counts[k] += 1
                right[k] += int(logits.argmax()) == label
        losses.append(total)
    return torch.stack(losses), counts, right


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize(
    "vocab_map, vocab", [(None, VOCAB), (None, KNOWN), (DRAFTED, VOCAB)], ids=["whole", "padded", "drafted"]
)
@pytest.mark.parametrize("weights", MIXES.values(), ids=MIXES)
def test_loss_and_every_gradient_are_those_of_a_slow_float64_reference(
    weights: dict[str, float], vocab_map: Tensor | None, vocab: int, output: str
) -> None:
    batch, hidden, last = texts(), noise(2, WIDTH, HIDDEN, seed=4), noise(2, WIDTH, HIDDEN, seed=5)
    exact = medusa(vocab_map, output, weights).double()
    loss, counts, right = reference(exact, batch, hidden, last, vocab)
    weight = torch.tensor([0.8**k / count for k, count in enumerate(counts)])
    (loss * weight).sum().backward()

    for chunk in (1, 7, 512):  # up to 7 in several chunks, whose logits are computed again in the backward pass
        drafter = medusa(vocab_map, output, weights)
        step = TrainStep(drafter, chunk, vocab)
        assert step.counts(batch).learnt.tolist() == counts
        sums = step(batch, hidden, last, head_of_target().rows(vocab_map), weight)
        sums.total.backward()
        torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=0.0)
        assert sums.right.tolist() == right
        for (name, ours), theirs in zip(drafter.named_parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None, name
            apart = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
            assert apart < 1e-5, f"{name}: {apart:.1e} with chunk={chunk}"


def test_only_the_states_before_a_supervised_token_learn_from_it() -> None:
    ids = torch.arange(12)[None]
    supervised = torch.zeros(1, 12, dtype=torch.bool)
    supervised[0, 7] = True
    batch = Batch(ids, ids.clone(), torch.zeros_like(ids), supervised)
    hidden = noise(1, 12, HIDDEN).requires_grad_()
    for k, one in enumerate(torch.eye(HEADS)):
        (gradient,) = torch.autograd.grad(
            TrainStep(medusa())(batch, hidden, hidden.detach(), head_of_target(), one).total, hidden
        )
        assert gradient[0].abs().sum(1).nonzero().flatten().tolist() == [7 - 2 - k]


class Oracle(Drafter):
    """Knows what follows in the text 0, 1, 2, ...: at depth k, from what it reads there, x[t + 2 + k]."""

    def __init__(self, reads: str, first_row: int) -> None:
        super().__init__(Options(name="oracle", unroll=4, objective={"ce": 1.0}), Shape(1, 3, VOCAB))
        self.reads, self.first_row = reads, first_row

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """[x0 x1 x2 x3]: at t = 0 and depth 1, feature' of x0, token x2, position 1; to be drafted is x3."""
        following = {"feature": feature[..., 0] + 2, "token": tokens + 1, "position": ctx.positions + 2}[self.reads]
        return feature + 1, following[..., None].float()

    def head(self, state: Tensor, depth: int) -> Tensor:
        return 1e4 * F.one_hot(state[..., 0].long() % VOCAB, VOCAB).float()


@pytest.mark.parametrize(
    ("reads", "first_row"), [("feature", 0), ("token", 0), ("position", 0), ("token", -1), ("position", -1)]
)
def test_an_oracle_loses_nothing_at_any_depth_and_much_where_the_text_is_shifted(reads: str, first_row: int) -> None:
    text = torch.arange(10)[None]
    where = text.clone(), torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool)
    step = TrainStep(Oracle(reads, first_row))
    counts = step.counts(Batch(text, *where))
    rows = [8 - first_row - k for k in range(4)]  # of 10 tokens: from t = first_row on, t + 2 + k is there
    assert counts.learnt.tolist() == counts.asked.tolist() == rows
    for shift in (0, 1, -1):
        # who reads tokens is not fooled by the text, but by labels that are not the token after
        ids = text.roll(shift, 1) if reads != "token" else text * (1 + abs(shift))
        hidden = text[..., None].float()
        sums = step(Batch(ids, *where), hidden, hidden, head_of_target())
        mean = sums.loss / counts.learnt
        assert (mean == 0).all() if shift == 0 else (mean > 1).all()
        assert sums.right.tolist() == (rows if shift == 0 else [0] * 4)


@pytest.mark.parametrize("vocab_map", [None, DRAFTED], ids=["whole", "drafted"])
def test_a_loss_of_one_a_token_is_reported_as_one_at_every_depth(
    vocab_map: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "LOSS_TERMS", {"one"})
    monkeypatch.setitem(objective.TERMS, "one", lambda drafted, labels, *_: torch.ones(len(labels)))
    batch, hidden = texts(), noise(2, WIDTH, HIDDEN)
    step = TrainStep(medusa(vocab_map, weights={"one": 1.0}), chunk=5)
    counts = step.counts(batch)
    assert len(set(counts.learnt.tolist())) > 1 and (counts.learnt <= counts.asked).all()
    assert (step(batch, hidden, hidden, head_of_target().rows(vocab_map)).loss / counts.learnt).tolist() == [
        1.0
    ] * HEADS


def test_a_batch_with_nothing_supervised_gives_zeros_and_no_nan() -> None:
    batch = texts()
    blank = Batch(batch.ids, batch.positions, batch.document, torch.zeros_like(batch.supervised))
    for nothing in (blank, pack([])):
        drafter, there = medusa(weights=MIXES["mix"]), noise(*nothing.ids.shape, HIDDEN)
        sums = TrainStep(drafter)(nothing, there, there, head_of_target())
        sums.total.backward()
        assert sums.loss.tolist() == [0.0] * HEADS and sums.right.tolist() == [0] * HEADS
        # a gradient everywhere: a process of several that has nothing to learn still takes part in the sum
        assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made under it has had, in the backward pass too."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    length, vocab, chunk = 512, 1000, 64
    ids = torch.arange(length)[None] % vocab
    batch = Batch(ids, torch.arange(length)[None], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    drafter = build(MedusaOptions(name="medusa", heads=2), Shape(HIDDEN, 3, vocab))
    hidden = noise(1, length, HIDDEN)
    with Largest() as seen:
        TrainStep(drafter, chunk)(batch, hidden, hidden, Head(noise(vocab, HIDDEN))).total.backward()
    assert seen.elements == chunk * vocab  # while [B, T, V] has 512,000 elements


# ---------------------------------------------------------------- the training metric is the decoding metric

PROMPTS = [[5, 17, 3, 42, 8, 11, 60, 2, 33], [21, 9, 9, 14, 50, 7, 28, 1, 63]]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


def written(target: Target, prompts: Sequence[list[int]], new: int) -> tuple[Batch, list[list[int]], Tensor]:
    """What the target says to `prompts`: packed in one row, as token lists, and its hidden states."""
    answers = [slow_greedy(target, prompt, new) for prompt in prompts]
    assert all(len(set(answer)) > new // 3 for answer in answers), "a text that repeats itself shows nothing"
    examples = [
        Example(torch.tensor(p + a), torch.tensor([False] * len(p) + [True] * len(a)))
        for p, a in zip(prompts, answers, strict=True)
    ]
    batch = pack(examples, width=sum(map(len, examples)))
    return batch, answers, target(batch.ids, (-1,), documents=batch.document, positions=batch.positions)[0]


def heads_trained_on(
    target: Target, batch: Batch, hidden: Tensor, steps: int, vocab_map: Tensor | None = None
) -> Iterator[Drafter]:
    """Medusa heads after each of `steps` steps on one batch."""
    draft_vocab = None if vocab_map is None else len(vocab_map)
    options = MedusaOptions(name="medusa", heads=4, draft_vocab=draft_vocab, objective={"ce": 0.5, "kl": 0.5})
    drafter = build(options, Shape.of(target), vocab_map)
    drafter.start(target)
    step, optimizer = TrainStep(drafter), torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    counts = step.counts(batch).learnt
    for _ in range(steps):
        step(batch, hidden, hidden, target.head.rows(vocab_map), 1 / counts).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield drafter


def of_each_document(batch: Batch, found: Tensor) -> dict[int, Tensor]:
    """The rows of `ranks` by document: one for every token that has a predecessor and was the target's own."""
    document = batch.document[0]
    roots = [i for i in range(1, len(document)) if batch.supervised[0, i] and document[i] == document[i - 1]]
    assert len(roots) == len(found)
    return {d: found[[document[i] == d for i in roots]] for d in set(document[roots].tolist())}


@pytest.mark.parametrize("vocab_map", [None, torch.arange(0, 64, 2)], ids=["whole", "drafted"])
def test_ranks_foretell_what_every_round_of_a_greedy_chain_accepts(target: Target, vocab_map: Tensor | None) -> None:
    batch, answers, hidden = written(target, PROMPTS, 40)
    played = set()
    # untrained, a little trained, well trained
    for i, drafter in enumerate(heads_trained_on(target, batch, hidden, 60, vocab_map)):
        if i not in (0, 12, 25, 59):
            continue
        found = of_each_document(batch, ranks(drafter, batch, hidden, 4, chunk=7))
        for which, prompt in enumerate(PROMPTS):
            foretold = (found[which] == 0).long().cumprod(1).sum(1).tolist()
            said: list[int] = []
            for emitted in Decoder(target, drafter, chain(4)).stream([prompt], 40):
                if said:  # the prefill is no round; in this one the last token said is the root
                    worth = 40 - len(said) - 1  # drafts in a row before the limit: the last token is a bonus
                    assert emitted.drafted == min(foretold[len(said) - 1], worth)
                    played.add(emitted.drafted)
                said += emitted.tokens
            assert said == answers[which]
    assert {0, 1, 2} <= played if vocab_map is not None else {0, 1, 2, 3, 4} <= played


@pytest.mark.parametrize("documents", [1, 2])
def test_heads_that_learnt_a_text_by_heart_are_accepted_when_it_is_decoded(target: Target, documents: int) -> None:
    prompts = PROMPTS[:documents]
    batch, answers, hidden = written(target, prompts, 31)  # 40 tokens; one, and six rounds of four drafts and a bonus
    for drafter in heads_trained_on(target, batch, hidden, 400):
        found = ranks(drafter, batch, hidden, 4)
        accuracy = (found == 0).sum(0) / (found < BEYOND).sum(0)
        if (accuracy >= 0.99).all():
            break
    assert (accuracy >= 0.99).all()
    for prompt, answer in zip(prompts, answers, strict=True):
        generation = Decoder(target, drafter, chain(4)).generate([prompt], 31)
        assert generation.tokens == [answer]
        accepted = generation.report.num_accepted_tokens / generation.report.num_drafts
        assert accepted >= 3.8, f"{accepted:.2f} of 4 accepted"


def test_a_rank_counts_the_likelier_tokens_and_a_text_that_ended_has_none(target: Target) -> None:
    batch, _, hidden = written(target, PROMPTS[:1], 10)
    vocab_map = torch.arange(0, 64, 2)
    drafter = next(heads_trained_on(target, batch, hidden, 1, vocab_map))
    found = ranks(drafter, batch, hidden, 4)
    start, end = len(PROMPTS[0]), len(PROMPTS[0]) + 10
    assert found.shape == (10, 4)
    for (row, root), k in product(enumerate(range(start, end)), range(4)):
        goal = root + 1 + k
        if goal >= end:
            assert found[row, k] == BEYOND
        elif batch.ids[0, goal] % 2:
            assert found[row, k] == len(vocab_map)  # cannot be drafted
        else:
            state = drafter.step(hidden[:, root - 1 : root], batch.ids[:, root : root + 1], k, Context(None, None))[1]
            order = drafter.head(state, k)[0, 0].sort(descending=True, stable=True).indices
            assert vocab_map[order[found[row, k]]] == batch.ids[0, goal]
