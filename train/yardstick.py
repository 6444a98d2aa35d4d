"""What a drafter under training is worth: the real decoder on held-out prompts, with the weights as exported.

Knows prompts, the target's own greedy answers to them and the decoder. Does not know how a drafter is trained or kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import Batch, pack
from paceline.data.conversations import Dataset, Example, opening, prompt_ids, stop_ids
from paceline.data.prompts import prompts as bundled_prompts
from paceline.decode import (
    VERIFIERS,
    AcceptanceReport,
    Decoder,
    Drift,
    Sampler,
    best_static,
    drift,
    shape_of,
    usual_depth,
)
from paceline.models.drafter import Drafter, build
from paceline.models.errors import Refusal
from paceline.models.packed import pack_weights
from paceline.models.target import DTYPES, Target
from paceline.train.step import BEYOND, ranks
from paceline.train.trunk import Trunk

GROWING = 3  # prompts whose answers the tree is grown from, for each that is decoded
LARGEST_TREE = 64  # nodes of the static tree that is kept; smaller ones are its beginning
AT_ONCE = 1 << 16  # tokens that are read or decoded together, padding included: 8 GB of an 8B target's cache


@dataclass
class Measurement:
    """acceptance: of the prompts that were decoded. accuracy: per depth, top-1 on the target's own text.

    decoded: how many prompts, and which, in words. text_accuracy: per depth, top-1 on what the held-out conversations
    say. paths: a static tree. drift: where the trunk is trained.
    """

    decoded: str
    acceptance: AcceptanceReport
    accuracy: list[float | None]
    text_accuracy: list[float | None]
    paths: list[list[int]]
    drift: Drift | None = None


class Yardstick:
    """Held-out prompts and what the target answers them greedily, computed once for each target that is met.

    The first `eval.held_out_prompts` are decoded; the tree they are decoded with is grown from the answers to others,
    so that it is not judged on what it was fitted to (unless too few are held out). What is longer than
    data.max_length, or with its answer and a tree longer than the window, is left out; where that is
    everything, the bundled prompts stand in.
    """

    def __init__(self, cfg: Any, tokenizer: Any, data: Dataset, window: int | None = None):
        """window: longest text with its tree. Raises Refusal where not even a bundled prompt fits into it."""
        self.cfg = cfg
        self.eos = stop_ids(tokenizer)
        room = math.inf if window is None else window - cfg.eval.max_new_tokens - cfg.decode.nodes
        chats = [(opening(chat.messages), chat.tools) for chat in data.held_out_conversations]
        known = [ids for ids in (prompt_ids(tokenizer, *chat) for chat in chats) if len(ids) <= cfg.data.max_length]
        asked = [ids for ids in known if len(ids) <= room]
        kind = "held-out {}" if asked else "bundled {}, for want of held-out ones"
        if not asked:
            known += [prompt_ids(tokenizer, prompt.messages) for prompt in bundled_prompts("bench")]
            asked = [ids for ids in known if len(ids) <= room]
        if not asked:
            most = cfg.eval.max_new_tokens + room - min(map(len, known))
            raise Refusal(
                f"eval.max_new_tokens: {cfg.eval.max_new_tokens}, beside a tree of decode.nodes={cfg.decode.nodes}, "
                f"leaves no prompt room in a window of {window}; "
                f"{f'nearest: {most}' if most > 0 else 'lower decode.nodes'}"
            )
        count = cfg.eval.held_out_prompts
        self.prompts = asked[:count]
        self.decoded = f"{len(self.prompts)} {kind.format('prompts' if len(self.prompts) > 1 else 'prompt')}"
        self.others = asked[count : count * (1 + GROWING)] or self.prompts
        self.text = _packed(data.held_out[: count * (1 + GROWING)])
        self._answers: tuple[Target, list[tuple[list[int], list[int]]]] | None = None

    def measure(self, drafter: Drafter, trunk: Trunk) -> Measurement:
        """Decode the held-out prompts; the static tree is grown anew from where this drafter is right."""
        target = trunk.as_exported(self.cfg.export.dtype)
        answered = self._answered(target)
        exported = as_exported(drafter, target, self.cfg.export.dtype)
        decode = self.cfg.decode
        depth = decode.depth or usual_depth(exported)
        there = _ranks(exported, target, _packed([_written(*pair) for pair in answered]), depth)
        paths = best_static(there, LARGEST_TREE, depth).paths
        costs = decode.node_cost, decode.depth_cost
        shape = shape_of(decode.tree, decode.nodes, decode.depth, decode.width, exported, paths, *costs)
        sampler = Sampler.of(decode)
        decoder = Decoder(target, exported, shape, VERIFIERS[decode.verify], sampled=decode.drafts == "sampled")
        _, report = self._decoded(decoder, self.prompts, sampler=sampler)
        text = _ranks(exported, target, self.text, depth)
        moved = None if target is trunk.original else drift(trunk.original, target, answered)
        return Measurement(self.decoded, report, _accuracy(there), _accuracy(text), [list(p) for p in paths], moved)

    def _answered(self, target: Target) -> list[tuple[list[int], list[int]]]:
        """(prompt, answer) of the other prompts, as `target` answers them; remembered for the last one asked."""
        if self._answers is None or self._answers[0] is not target:
            answers, _ = self._decoded(Decoder(target), self.others)
            self._answers = target, list(zip(self.others, answers, strict=True))
        return self._answers[1]

    def _decoded(
        self, decoder: Decoder, prompts: Sequence[list[int]], **options: Any
    ) -> tuple[list[list[int]], AcceptanceReport]:
        """The answers, in the order of the prompts, and the acceptance of all of them."""
        new = self.cfg.eval.max_new_tokens
        answers: list[list[int]] = [[] for _ in prompts]
        report = AcceptanceReport()
        for group in _groups([len(prompt) + new + decoder.shape.nodes for prompt in prompts]):
            given = [prompts[i] for i in group]
            generation = decoder.generate(given, new, rows=group, eos=self.eos, **options)
            for i, answer in zip(group, generation.tokens, strict=True):
                answers[i] = answer
            report += generation.report
        return answers, report


def decodable(target: Target, drafter: Drafter, decode: Any) -> int | None:
    """The longest text with its tree that both have room for, as `decode` drafts; None without limit."""
    windows = [] if target.window is None else [target.window]
    if drafter.window is not None:  # that of a draft model holds the nodes it unfolds besides
        shape = shape_of(decode.tree, decode.nodes, decode.depth, decode.width, drafter)
        windows.append(drafter.window - max(shape.unfolded, decode.nodes))  # a static tree is still to be grown
    return min(windows, default=None)


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of texts of these sizes, like beside like: several, padded to the longest, are AT_ONCE tokens at most."""
    groups: list[list[int]] = [[]]
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i]):  # the last is the longest
        if groups[-1] and (len(groups[-1]) + 1) * sizes[i] > AT_ONCE:
            groups.append([])
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def _packed(examples: Sequence[Example]) -> list[Batch]:
    return [pack([examples[i] for i in group]) for group in _groups([len(example) for example in examples])]


def _ranks(drafter: Drafter, target: Target, batches: Sequence[Batch], depth: int) -> Tensor:
    """`step.ranks`, of batches that the target has still to read."""
    found = []
    for batch in batches:
        batch = batch.to(target.device)
        hidden, _ = target(batch.ids, drafter.taps, documents=batch.document, positions=batch.positions)
        found.append(ranks(drafter, batch, hidden, depth, target.vocab))
    return torch.cat(found)


def _accuracy(there: Tensor) -> list[float | None]:
    """Per depth, how often the likeliest draft token is the text's; None where no text was."""
    right, asked = (there == 0).sum(0).tolist(), (there < BEYOND).sum(0).tolist()
    return [r / n if n else None for r, n in zip(right, asked, strict=True)]


def as_exported(drafter: Drafter, target: Target, dtype: str) -> Drafter:
    """A copy with the weights cast as an export casts them."""
    copy = build(drafter.options, drafter.shape, drafter.vocab_map).to(target.device, DTYPES[dtype])
    copy.load_state_dict(drafter.state_dict())
    copy.eval().requires_grad_(False).borrow(target)
    pack_weights(copy)
    return copy


def _written(prompt: list[int], answer: list[int]) -> Example:
    supervised = torch.tensor([False] * len(prompt) + [True] * len(answer))
    return Example(torch.tensor(prompt + answer), supervised)
