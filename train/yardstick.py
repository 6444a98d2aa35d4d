"""What a drafter under training is worth: the real decoder on held-out prompts, with the weights as exported.

Knows prompts, the target's own greedy answers to them and the decoder. Does not know how a drafter is trained or kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import pack
from paceline.data.conversations import Dataset, Example, opening, prompt_ids, stop_ids
from paceline.data.prompts import prompts as bundled_prompts
from paceline.decode import VERIFIERS, AcceptanceReport, Decoder, Sampler, best_static, shape_of, usual_depth
from paceline.models.drafter import Drafter, build
from paceline.models.packed import pack_weights
from paceline.models.target import DTYPES, Target
from paceline.train.step import BEYOND, ranks

GROWING = 3  # prompts whose answers the tree is grown from, for each that is decoded
LARGEST_TREE = 64  # nodes of the static tree that is kept; smaller ones are its beginning


@dataclass
class Measurement:
    """acceptance: of the decoded prompts. accuracy: per depth, top-1 on the target's own text. paths: a static tree."""

    acceptance: AcceptanceReport
    accuracy: list[float | None]
    paths: list[list[int]]


class Yardstick:
    """Held-out prompts and what the target answers them greedily, computed once.

    The first `eval.held_out_prompts` are decoded; the tree they are decoded with is grown from the answers to others,
    so that it is not judged on what it was fitted to (unless too few are held out).
    """

    def __init__(self, cfg: Any, target: Target, tokenizer: Any, data: Dataset):
        self.cfg, self.target = cfg, target
        self.eos = stop_ids(tokenizer)
        chats = [opening(chat) for chat in data.held_out_conversations]
        asked = [ids for ids in (prompt_ids(tokenizer, chat) for chat in chats) if len(ids) <= cfg.data.max_length]
        asked = asked or [prompt_ids(tokenizer, prompt.messages) for prompt in bundled_prompts("bench")]
        count = cfg.eval.held_out_prompts
        self.prompts = asked[:count]
        others = asked[count : count * (1 + GROWING)] or self.prompts
        answers = Decoder(target).generate(others, cfg.eval.max_new_tokens, eos=self.eos).tokens
        self.batch = pack([_written(*pair) for pair in zip(others, answers, strict=True)]).to(target.device)
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def measure(self, drafter: Drafter) -> Measurement:
        """Decode the held-out prompts; the static tree is grown anew from where this drafter is right."""
        exported = as_exported(drafter, self.target, self.cfg.export.dtype)
        decode = self.cfg.decode
        depth = decode.depth or usual_depth(exported)
        there = ranks(exported, self.batch, self._read(exported.taps), depth, self.target.vocab)
        paths = best_static(there, LARGEST_TREE, depth).paths
        shape = shape_of(decode.tree, decode.nodes, decode.depth, decode.width, exported, paths)
        sampler = Sampler(decode.temperature, decode.top_k, decode.top_p, decode.seed)
        decoder = Decoder(self.target, exported, shape, VERIFIERS[decode.verify], sampled=decode.drafts == "sampled")
        generation = decoder.generate(self.prompts, self.cfg.eval.max_new_tokens, sampler=sampler, eos=self.eos)
        right, asked = (there == 0).sum(0).tolist(), (there < BEYOND).sum(0).tolist()
        accuracy = [r / n if n else None for r, n in zip(right, asked, strict=True)]
        return Measurement(generation.report, accuracy, [list(path) for path in paths])

    def _read(self, taps: tuple[int, ...]) -> Tensor:
        if taps not in self._hidden:
            batch = self.batch
            self._hidden[taps] = self.target(batch.ids, taps, documents=batch.document, positions=batch.positions)[0]
        return self._hidden[taps]


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
