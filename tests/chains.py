"""What the tests of drafters that go from depth to depth share: texts, a decoder told what to accept, a text learnt.

Knows the drafter's interface, not its methods. Imported as `chains` (pytest's `pythonpath`).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from fakes import VOCAB, slow_greedy, target_of
from torch import Tensor

from paceline.data.batch import Batch
from paceline.decode import Decoder, DraftTree, DynamicShape, Sampler, StaticShape, chain
from paceline.decode.tree import _deeper_streams
from paceline.decode.verify import Verdict
from paceline.models.drafter import Borrowed, Context, Drafter
from paceline.models.streams import StreamKeys, TreeKeys
from paceline.models.target import Head, Target
from paceline.train.step import BEYOND, TrainStep, ranks, unrolled

DEPTHS = 4
TREE = StaticShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 1, 0)))
END = VOCAB - 1
Logits = dict[tuple[int, int], Tensor]  # by (position, depth)


def texts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in lengths]


def states_of(target: Target, drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a training step is handed."""
    return target(batch.ids, drafter.taps, documents=batch.document, positions=batch.positions)


def packed() -> tuple[Batch, dict[tuple[int, int], list[int]]]:
    """Two documents and padding in one row, one that fills the other; the documents by (row, first place)."""
    first, second, third = texts([6, 5, 13])
    rows = torch.tensor([[*first, *second, 0, 0], third])
    document = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 2, [2] * 13])
    positions = torch.tensor([[*range(6), *range(5), 0, 0], [*range(13)]])
    return Batch(rows, positions, document, document >= 0), {(0, 0): first, (0, 6): second, (1, 0): third}


def alone(words: Sequence[int]) -> Batch:
    """One document, all of it supervised."""
    ids = torch.tensor([list(words)])
    return Batch(ids, torch.arange(len(words))[None], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def apart(ours: Logits, theirs: Logits) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours)


# ---------------------------------------------------------------- what is trained, what is served


@torch.no_grad()
def trained(drafter: Drafter, batch: Batch, hidden: Tensor, documents: dict) -> dict[tuple[int, int], Logits]:
    """The logits of a training pass, document by document."""
    states = unrolled(drafter, batch, hidden, DEPTHS)
    assert all(state.isfinite().all() for state in states), "padding too"
    return {
        (line, start): {
            (t, k): drafter.head(states[k][line, start + t], k)
            for t in range(len(words) - 1)
            for k in range(min(DEPTHS, len(words) - 1 - t))
        }
        for (line, start), words in documents.items()
    }


@torch.no_grad()
def served(drafter: Drafter, words: list[int], hidden: Tensor) -> Logits:
    """One row at a time, as in decoding: a verified row in every stream, then its own chain of true tokens."""
    memory, out = drafter.memory(1, len(words) + DEPTHS), {}
    one, only = torch.ones(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    for t in range(len(words) - 1):
        ctx, token = Context(torch.tensor([[t]]), one, memory), torch.tensor([[words[t + 1]]])
        feature, state = drafter.step(drafter.read(hidden[None, t : t + 1]), token, 0, ctx)
        deeper = _deeper_streams(drafter, DEPTHS, feature, token, ctx)
        for k in range(min(DEPTHS, len(words) - 1 - t)):
            if k in deeper:
                feature, state = deeper[k]
            elif k:
                at = Context(torch.tensor([[t + k]]), one, memory, only)
                feature, state = drafter.step(feature, torch.tensor([[words[t + 1 + k]]]), k, at)
            out[t, k] = drafter.head(state, k)[0, 0]
    return out


class Listed:
    """The keys of one text, row by row. seen: (t, depth) -> the rows (t, depth) that it looks at, itself among them."""

    def __init__(self, seen: Callable[[int, int], list[tuple[int, int]]]):
        self.seen = seen
        self.rows: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.at = -1

    def attend(self, ctx: Context, depth: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.rows[self.at, depth, layer] = keys[0, :, 0], values[0, :, 0]  # [S, D]
        there = [self.rows[t, k, layer] for t, k in self.seen(self.at, depth)]
        share = queries.shape[1] // keys.shape[1]
        k, v = (torch.stack(part, 1).repeat_interleave(share, 0) for part in zip(*there, strict=True))  # [Q, rows, D]
        weights = (k @ queries[0, :, 0, :, None] * k.shape[-1] ** -0.5).softmax(1)
        return (weights * v).sum(1)[None, :, None]


def listed_states(
    drafter: Drafter,
    words: list[int],
    hidden: Tensor,
    seen: Callable[[int, int], list[tuple[int, int]]],
    depths: int = DEPTHS,
) -> Logits:
    """The states where every row looks at the rows it is told to. Row (i, k) is made when position i is."""
    memory, out = Listed(seen), {}
    for t in range(len(words) - 1):
        memory.at, feature = t, drafter.read(hidden[None, t : t + 1])
        for k in range(min(depths, len(words) - 1 - t)):
            ctx = Context(torch.tensor([[t + k]]), torch.ones(1, dtype=torch.long), memory)
            if k and drafter.detach:
                feature = feature.detach()
            feature, state = drafter.step(feature, torch.tensor([[words[t + 1 + k]]]), k, ctx)
            out[t, k] = state[0, 0]
    return out


@torch.no_grad()
def listed(
    drafter: Drafter, words: list[int], hidden: Tensor, seen: Callable[[int, int], list[tuple[int, int]]]
) -> Logits:
    """The logits of `listed_states`."""
    return {(t, k): drafter.head(state, k) for (t, k), state in listed_states(drafter, words, hidden, seen).items()}


# ---------------------------------------------------------------- what is learnt


TERMS = {"ce": 0.3, "kl": 0.5, "reverse_kl": 0.2, "tv": 0.7, "lk": 0.4}


def by_definition(name: str, draft: Tensor, target: Tensor, label: int) -> Tensor:
    """A term on two distributions [D]."""
    if name == "ce":
        return -draft[label].log()
    if name in ("kl", "reverse_kl"):
        p, q = (target, draft) if name == "kl" else (draft, target)
        return (p * (p / q).log()).sum()
    overlap = torch.minimum(draft, target).sum()
    return 1 - overlap if name == "tv" else -overlap.log()


def assert_learns_as_defined(
    target: Target,
    drafter: Drafter,
    states: Callable[..., Logits],
    within: float = 1e-5,
) -> None:
    """Loss and every gradient of a packed, masked step in float32 are those of a naive pass in float64.

    The naive pass takes document after document, row after row, all logits of each; states(drafter, words, hidden,
    depths) are its drafter's, by (position, depth).
    """
    batch, documents = packed()
    holes = torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(2)) < 0.7
    batch = Batch(batch.ids, batch.positions, batch.document, batch.supervised & holes)
    hidden, last = states_of(target, drafter, batch)
    ids, depths = drafter.vocab_map, drafter.unroll
    known = torch.arange(VOCAB) if ids is None else ids
    wide = Head(target.head.weight.double()).rows(ids)
    table = target.model.get_input_embeddings().weight.double()
    exact = copy.deepcopy(drafter).double()
    exact.borrowed = Borrowed(lambda tokens: table[tokens], wide)
    loss, weight = torch.zeros(depths, dtype=torch.float64), torch.tensor([0.8**k for k in range(depths)])
    for (line, start), words in documents.items():
        here = slice(start, start + len(words))
        mask, theirs = batch.supervised[line, here], last[line, here].double()
        found = states(exact, words, hidden[line, here].double(), depths=depths)
        for (t, k), state in found.items():
            goal = t + 2 + k
            if goal >= len(words) or not mask[goal] or words[goal] not in known.tolist():
                continue
            draft, taught = exact.head(state, k).softmax(0), wide(theirs[goal - 1]).softmax(0)
            label = known.tolist().index(words[goal])
            place = torch.eye(depths, dtype=torch.float64)[k]
            for name, share in drafter.options.objective.items():
                if name == "smooth_l1":
                    away = (state - theirs[goal - 1]).abs()
                    value = torch.where(away < 1, away**2 / 2, away - 0.5).mean()
                else:
                    value = by_definition(name, draft, taught, label)
                loss = loss + share * value * place
    (loss * weight).sum().backward()
    sums = TrainStep(drafter, chunk=7)(batch, hidden, last, target.head.rows(ids), weight)
    sums.total.backward()
    torch.testing.assert_close(sums.loss.double(), loss.detach(), rtol=within, atol=0.0)
    for (name, ours), theirs in zip(drafter.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and theirs.grad.any(), name
        assert (ours.grad.double() - theirs.grad).norm() < within * theirs.grad.norm(), name


# ---------------------------------------------------------------- rounds as they are told


class Scripted:
    """A verifier that accepts as many drafts of each row as it is told, down the last branch that is so deep.

    The bonus is of no consequence, but in round `ends` row 1 gets END. trees: those it was shown.
    """

    def __init__(self, script: Sequence[Sequence[int]], ends: int = 0):
        self.script, self.ends, self.rounds = script, ends, 0
        self.trees: list[DraftTree] = []

    def __call__(self, tree: DraftTree, logits: Tensor, sampler: Sampler, places: Any) -> Verdict:
        paths = []
        for row, accepted in enumerate(self.script[self.rounds]):
            node = int((tree.depth[row] == accepted).nonzero().max())
            path = [node]
            while path[0]:
                path.insert(0, int(tree.parents[row, path[0]]))
            paths.append(path)
        self.trees.append(tree)
        self.rounds += 1
        bonus = [(7 * self.rounds + 3 * row + 1) % END for row in range(len(paths))]
        if self.rounds == self.ends:
            bonus[1] = END
        return Verdict(paths, bonus)


def remembering(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The memories that the drafter hands out from now on."""
    made: list[Any] = []
    memory = drafter.memory

    def remembered(rows: int, room: int) -> Any:
        made.append(memory(rows, room))
        return made[-1]

    monkeypatch.setattr(drafter, "memory", remembered)
    return made


def streams_of(memory: TreeKeys | StreamKeys) -> dict[int, TreeKeys]:
    return memory._keys if isinstance(memory, StreamKeys) else {0: memory}


@torch.no_grad()
def assert_a_prefill(
    memory: TreeKeys | StreamKeys, target: Target, drafter: Drafter, rows: list[list[int]], depths: int
) -> None:
    """Row by row and stream by stream, what is kept is what the verified text alone leaves.

    That is a key for each token that has a successor, or in the stream of depth k, that has k more where they are read.
    """
    memory.select(list(range(len(rows))))
    for index, row in enumerate(rows):
        ids = torch.tensor([row])
        fresh, count = type(drafter).memory(drafter, 1, len(row) + 1), torch.tensor([len(row) - 1])
        ctx = Context(torch.arange(len(row) - 1)[None], count, fresh)
        feature, _ = drafter.step(drafter.read(target(ids, drafter.taps)[0][:, :-1]), ids[:, 1:], 0, ctx)
        _deeper_streams(drafter, depths, feature, ids[:, 1:], ctx)
        fresh.select([0])
        assert streams_of(memory).keys() == streams_of(fresh).keys()
        for stream, theirs in streams_of(fresh).items():
            ours = streams_of(memory)[stream]._cache
            assert ours is not None and theirs._cache is not None
            length = max(len(row) - 1 - stream * drafter.reads_tokens, 0)
            assert ours.length[index] == theirs._cache.length[0] == length
            for mine, oracle in ((ours.keys[0], theirs._cache.keys[0]), (ours.values[0], theirs._cache.values[0])):
                torch.testing.assert_close(mine[index, :, :length], oracle[0, :, :length], atol=1e-5, rtol=0)


@torch.no_grad()
def assert_trained_so(drafter: Drafter, target: Target, tree: DraftTree, rows: Sequence[list[int]]) -> None:
    """Every node's probability is what training makes of its path, on the row's text (which ends with the root)."""
    for row, text in enumerate(rows):
        inner = set(tree.parents[row].tolist())
        for leaf in set(range(1, int(tree.size[row]))) - inner:
            nodes = tree.ancestors[row, leaf].nonzero()[1:, 0]
            path = tree.tokens[row, nodes].tolist()
            batch = alone([*text, *path])
            states = unrolled(drafter, batch, states_of(target, drafter, batch)[0], len(path))
            joint = 0.0
            for k, (node, token) in enumerate(zip(nodes.tolist(), path, strict=True)):
                joint += float(drafter.head(states[k][0, len(text) - 2], k).log_softmax(-1)[token])
                assert abs(float(tree.logp[row, node]) - joint) < 1e-4, (row, node)


# ---------------------------------------------------------------- a text learnt by heart


NEW = 31  # a text of 40 tokens: the one the target chose at the prompt's end, and six rounds of four drafts and a bonus
PROMPTS = texts([9, 3, 17], seed=4)
SHAPES: dict[str, StaticShape | DynamicShape] = {
    "chain": chain(4),
    "static": TREE,
    "dynamic": DynamicShape(12, 4, 3),
}


@dataclass
class Lesson:
    """A drafter that learns what the target says to PROMPTS[0] by heart.

    stages: its weights on the way, and at the end.
    """

    target: Target
    drafter: Drafter
    batch: Batch
    answer: list[int]
    stages: list[dict[str, Tensor]]

    def at(self, stage: int) -> Drafter:
        self.drafter.load_state_dict(self.stages[stage])
        return self.drafter.eval()

    def ranks(self, depths: int) -> Tensor:
        return ranks(self.drafter, self.batch, states_of(self.target, self.drafter, self.batch)[0], depths, chunk=7)


def learnt(target: Target, drafter: Drafter, depths: int = 4, rate: float = 1e-2) -> Lesson:
    """It learns until `depths` depths are right, or for 400 steps."""
    answer, vocab_map = slow_greedy(target, PROMPTS[0], NEW), drafter.vocab_map
    assert len(set(answer)) > NEW // 3, "a text that repeats itself shows nothing"
    ids = torch.tensor([PROMPTS[0] + answer])
    places = torch.arange(ids.shape[1])[None]
    batch = Batch(ids, places, torch.zeros_like(ids), places >= len(PROMPTS[0]))
    hidden, last = states_of(target, drafter, batch)
    known = Lesson(target, drafter, batch, answer, [])
    step = TrainStep(drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    counts = step.counts(batch).learnt
    for number in range(400):
        optimizer.param_groups[0]["lr"] = rate * (1 - number / 400)
        if number in (0, 30, 60):
            known.stages.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        step(batch, hidden, last, target.head.rows(vocab_map), 1 / counts).total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number > 60 and number % 10 == 0:
            found = known.ranks(depths)
            there = found < (BEYOND if vocab_map is None else len(vocab_map))  # not what cannot be drafted
            if ((found == 0).sum(0) >= 0.99 * there.sum(0)).all():
                break
    known.stages.append(drafter.state_dict())
    return known


def assert_accepted(known: Lesson) -> Drafter:
    """What was learnt by heart is accepted when it is decoded: 3.8 of 4 drafts a round at least."""
    drafter = known.at(-1)
    generation = Decoder(known.target, drafter, chain(4)).generate(PROMPTS[:1], NEW)
    assert generation.tokens == [known.answer]
    accepted = generation.report.num_accepted_tokens / generation.report.num_drafts
    assert accepted >= 3.8, f"{accepted:.2f} of 4 accepted"
    return drafter


def assert_foretold(known: Lesson, depths: int) -> set[int]:
    """At every stage the ranks foretell what each round of a greedy chain accepts; returns the counts that occurred."""
    played = set()
    for stage in range(len(known.stages)):
        drafter = known.at(stage)
        found = known.ranks(depths)
        assert found.shape == (NEW, depths)
        foretold = (found == 0).long().cumprod(1).sum(1).tolist()
        said: list[int] = []
        for emitted in Decoder(known.target, drafter, chain(depths)).stream(PROMPTS[:1], NEW):
            if said:
                worth = NEW - len(said) - 1  # drafts in a row before the limit: the last token is a bonus
                assert emitted.drafted == min(foretold[len(said) - 1], worth)
                played.add(emitted.drafted)
            said += emitted.tokens
        assert said == known.answer
    return played


@cache
def plain(temperature: float) -> list[list[int]]:
    """What the llama target says alone: greedily as the slow oracle has it."""
    target = target_of("llama")
    if temperature:
        return Decoder(target).generate(PROMPTS, NEW, sampler=Sampler(temperature, seed=3)).tokens
    return [slow_greedy(target, prompt, NEW) for prompt in PROMPTS]


def assert_the_targets(known: Lesson, shape: StaticShape | DynamicShape, temperature: float) -> None:
    """The output is what the llama target says alone, in a ragged batch and row by row, with drafts accepted."""
    wanted, sampler = plain(temperature), Sampler(temperature, seed=3)
    decoder = Decoder(known.target, known.at(2), shape)
    together = decoder.generate(PROMPTS, NEW, sampler=sampler)
    assert together.tokens == wanted
    alone = [decoder.generate([prompt], NEW, sampler=sampler, rows=[row]) for row, prompt in enumerate(PROMPTS)]
    assert [generation.tokens[0] for generation in alone] == wanted
    assert [generation.reports[0] for generation in alone] == together.reports, "nor does a neighbour change a draft"
    accepted = together.report.num_accepted_tokens_per_pos
    assert sum(accepted) > 0 and (temperature or len(accepted) > 1), "the toy must accept drafts"
