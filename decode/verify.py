"""Verification: which drafts the target would have written. `walk` and `reject` are exact, `typical` is lossy.

Knows a tree and the target's logits at its nodes. Writes none of its inputs. Draws with the sampler alone.

    Legend: B rows, N nodes, V target ids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decode.sampler import Place, Sampler, likeliest
from paceline.decode.tree import DraftTree


@dataclass
class Verdict:
    """What the target made of B trees.

    paths: per row the accepted nodes in order, the root first. bonus: [B] what the target adds after the last of them.
    """

    paths: list[list[int]]
    bonus: list[int]


def walk(tree: DraftTree, logits: Tensor, sampler: Sampler, places: Sequence[Place]) -> Verdict:
    """Exact: let the target choose at each node, follow the child that has its choice, stop where none has.

    Args:
        logits: [B, N, V] of the target at the nodes.
        places: per row (row key, absolute position of the root's successor).
    """
    chosen_everywhere = likeliest(logits).tolist() if sampler.greedy else None
    children = _children(tree)
    paths: list[list[int]] = [[0] for _ in places]
    bonus = [0] * len(places)
    live = list(range(len(places)))
    while live:
        nodes = [paths[row][-1] for row in live]
        if chosen_everywhere is not None:
            chosen = [chosen_everywhere[row][node] for row, node in zip(live, nodes, strict=True)]
        else:
            here = [(places[row][0], places[row][1] + len(paths[row]) - 1) for row in live]
            chosen = sampler.choose(logits[live, nodes], here)
        still = []
        for row, node, token in zip(live, nodes, chosen, strict=True):
            child = next((c for c, t in children[row].get(node, ()) if t == token), None)
            if child is None:
                bonus[row] = token
            else:
                paths[row].append(child)
                still.append(row)
        live = still
    return Verdict(paths, bonus)


def reject(tree: DraftTree, logits: Tensor, sampler: Sampler, places: Sequence[Place]) -> Verdict:
    """Exact: recursive rejection sampling (Leviathan et al. 2023; siblings as in SpecInfer and EAGLE).

    At each node the children are tried in drawing order: child x stays with min(1, p(x) / q(x)), else p becomes the
    normalised max(0, p - q) and q loses x and is renormalised. Where the tree was chosen deterministically (`q` None)
    each child has q = 1 for itself: it stays with p(x), else p loses x and is renormalised. What is left of p gives the
    bonus token.
    """
    children = _children(tree)
    paths: list[list[int]] = [[0] for _ in places]
    bonus = [0] * len(places)
    live = list(range(len(places)))
    while live:
        nodes = [paths[row][-1] for row in live]
        here = [(places[row][0], places[row][1] + len(paths[row]) - 1) for row in live]
        left = sampler.probs(logits[live, nodes])  # [R, V], what is left of p
        q = None if tree.q is None else tree.q[live, nodes].to(left.dtype)
        siblings = [children[row].get(node, []) for row, node in zip(live, nodes, strict=True)]
        stays: dict[int, int] = {}  # index into live -> the child that stays
        for draw in range(max(map(len, siblings))):
            asked = [i for i, family in enumerate(siblings) if draw < len(family) and i not in stays]
            tokens = [siblings[i][draw][1] for i in asked]
            chances = left[asked, tokens] if q is None else left[asked, tokens] / q[asked, tokens]
            for i, chance in zip(asked, chances.clamp(max=1.0).tolist(), strict=True):
                if sampler.accepts(chance, here[i], 1 + draw):
                    stays[i] = siblings[i][draw][0]
            gone = [i for i in asked if i not in stays]
            tokens = [siblings[i][draw][1] for i in gone]
            left[gone] = _residual(left[gone], None if q is None else q[gone], tokens)
            if q is not None:
                q[gone, tokens] = 0.0
                q[gone] /= q[gone].sum(-1, keepdim=True)
        for i, child in stays.items():
            paths[live[i]].append(child)
        ends = [i for i in range(len(live)) if i not in stays]
        for i, token in zip(ends, sampler.pick(left[ends], [here[i] for i in ends]), strict=True):
            bonus[live[i]] = token
        live = [live[i] for i in sorted(stays)]
    return Verdict(paths, bonus)


def _residual(p: Tensor, q: Tensor | None, tokens: list[int]) -> Tensor:
    """What is left of p [R, V] after `tokens`, drawn from q (or chosen outright), were turned down. A new tensor."""
    if q is None:
        left = p.clone()
        left[range(len(tokens)), tokens] = 0.0
    else:
        left = (p - q).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def typical(
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    places: Sequence[Place],
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """LOSSY, not the target's distribution: a draft stays if it is typical, p > min(epsilon, delta · exp(-entropy)).

    The longest typical path wins, then the likeliest. Source: Medusa (Cai et al. 2024), section 2.3.1.
    """
    children = _children(tree)
    paths: list[list[int]] = []
    bonus: list[int] = []
    for row, (key, position) in enumerate(places):
        best: tuple[int, float, list[int]] = (1, 0.0, [0])
        open_paths: list[tuple[float, list[int]]] = [(0.0, [0])]
        while open_paths:
            score, path = open_paths.pop()
            best = max(best, (len(path), score, path), key=lambda found: found[:2])
            p = sampler.probs(logits[row, path[-1]])
            entropy = float(-(p * p.clamp(min=1e-20).log()).sum())
            least = min(epsilon, delta * math.exp(-entropy))
            for child, token in children[row].get(path[-1], ()):
                if float(p[token]) > least:
                    open_paths.append((score + math.log(float(p[token])), [*path, child]))
        path = best[2]
        paths.append(path)
        bonus += sampler.choose(logits[row, path[-1]][None], [(key, position + len(path) - 1)])
    return Verdict(paths, bonus)


def _children(tree: DraftTree) -> list[dict[int, list[tuple[int, int]]]]:
    """Per row: node -> its (child, token) in drawing order."""
    out = []
    for tokens, parents in tree.lists:
        under: dict[int, list[tuple[int, int]]] = {}
        for node in range(1, len(tokens)):
            under.setdefault(parents[node], []).append((node, tokens[node]))
        out.append(under)
    return out


VERIFIERS = {"walk": walk, "reject": reject, "typical": typical}
