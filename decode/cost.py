"""What a round costs here: the target's pass against its nodes, its text and the rows decoded together, and drafting.

Measured with the real decoder and a verifier that accepts nothing, so that whatever a round does is in it. Does not
know acceptance, nor which tree is worth its cost (decode/pays.py).

    Legend: B rows decoded together, N nodes of a pass in each row, C committed tokens of a row, n nodes of one level.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.decode.decoder import Decoder
from paceline.decode.progress import progress
from paceline.decode.sampler import Place, Sampler
from paceline.decode.tree import DraftTree, DynamicShape, Shape, StaticShape
from paceline.decode.verify import Verdict, walk
from paceline.models.drafter import Context, Drafter, Options
from paceline.models.drafter import Shape as Sizes
from paceline.models.target import Target

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8, 16)
CONTEXTS = (32, 288)
WIDEST = 256  # rows times nodes of the widest pass that is measured; larger ones lie on the line through the last two
ROUNDS, REPEATS = 4, 3  # rounds a setting is run for, and how often in turn; the median counts


@dataclass(frozen=True)
class Cost:
    """Seconds, measured.

    made: where and how: machine, device, dtype, threads. passes: [B, C, N, seconds] of one pass of the target and its
    head. first: [B, seconds] of drafting one depth, the newly verified rows included. levels: [B, n, seconds] of one
    depth more, whose n nodes are unfolded. rest: [B, seconds] of all else in a round.
    """

    made: dict[str, Any]
    passes: list[tuple[int, int, int, float]]
    first: list[tuple[int, float]]
    levels: list[tuple[int, int, float]]
    rest: list[tuple[int, float]]

    def target(self, rows: int, context: Tensor, nodes: Tensor) -> Tensor:
        """Seconds of passes over `nodes` in each of `rows` rows with `context` committed tokens, elementwise."""
        known = self._known(rows)
        short, *longer = sorted({c for b, c, _, _ in self.passes if b == known})
        curve = [(n, s) for b, c, n, s in self.passes if (b, c) == (known, short)]
        seconds = _on_line(nodes, curve)
        if longer:  # what a token of context adds, in passes of a few widths
            again = [(n, s) for b, c, n, s in self.passes if (b, c) == (known, longer[-1])]
            more = [(n, (s - dict(curve)[n]) / (longer[-1] - short)) for n, s in again]
            seconds = seconds + (context - short) * _on_line(nodes, more).clamp(min=0)
        return seconds

    def drafting(self, rows: int, unfolded: Tensor) -> Tensor:
        """[R] seconds of drafting, for [R, D] nodes unfolded at each depth below the root; 0 where none are."""
        known = self._known(rows)
        curve = [(n, s) for b, n, s in self.levels if b == known]
        seconds = torch.full((len(unfolded),), dict(self.first)[known], dtype=torch.float64)
        return seconds + (_on_line(unfolded, curve) * (unfolded > 0)).sum(1) if curve else seconds

    def others(self, rows: int) -> float:
        """Seconds of a round outside target and drafter."""
        return dict(self.rest)[self._known(rows)]

    def of_node(self, rows: int) -> float:
        """Seconds that one node more adds to the pass for each row that has it: the slope of the least squares line."""
        known = self._known(rows)
        short = min(c for b, c, _, _ in self.passes if b == known)
        points = [(n, s) for b, c, n, s in self.passes if (b, c) == (known, short)]
        slope, _ = statistics.linear_regression(*zip(*points, strict=True))
        return max(slope, 0.0) / rows

    def of_depth(self, rows: int, width: int) -> float:
        """Seconds that drafting one depth more adds for each row."""
        return float(self.drafting(rows, torch.tensor([[width]])) - dict(self.first)[self._known(rows)]) / rows

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _known(self, rows: int) -> int:
        """The measured number of rows that is nearest."""
        return min((b for b, _ in self.first), key=lambda b: abs(b - rows))


def measure(target: Target, drafter: Drafter, rows: Iterable[int] = (1,), made: dict[str, Any] | None = None) -> Cost:
    """Run every kind of round in turn, REPEATS times. made: kept with the figures.

    A minute for rows=(1, 4, 16) on two cores and a target of 135M.
    """
    blank = _Blank(drafter.taps, Sizes.of(target))
    deep = min(drafter.max_depth or 4, 4)
    cost = Cost(made or {}, [], [], [], [])
    for b in rows:
        nodes = [n for n in NODES if b * n <= WIDEST] or [1, 2]
        settings: dict[tuple, tuple[Drafter, Shape, int]] = {
            ("pass", c, n): (blank, _star(n), c)
            for c in CONTEXTS
            for n in (nodes if c == min(CONTEXTS) else (nodes[0], nodes[-1]))
        }
        settings |= {("draft", d, w): (drafter, _grown(d, w), min(CONTEXTS)) for d in {1, deep} for w in WIDTHS}
        found: dict[tuple, list[dict[str, float]]] = {name: [] for name in settings}
        with progress(f"costs, batch {b}", REPEATS * len(settings)) as bar:
            for _ in range(REPEATS):
                for name, (who, shape, context) in bar.over(settings.items()):
                    found[name] += _rounds(Decoder(target, who, shape, _nothing, timed=True), b, context)
        seconds = {name: _medians(rounds) for name, rounds in found.items()}
        first = statistics.median(seconds["draft", 1, w]["draft"] for w in WIDTHS)
        cost.passes.extend((b, c, n, seconds["pass", c, n]["target"]) for kind, c, n in settings if kind == "pass")
        cost.first.append((b, first))
        if deep > 1:
            cost.levels.extend(
                (b, w, max(seconds["draft", deep, w]["draft"] - first, 0.0) / (deep - 1)) for w in WIDTHS
            )
        cost.rest.append((b, statistics.median(seconds["draft", deep, w]["rest"] for w in WIDTHS)))
    return cost


class _Blank(Drafter):
    """Drafts whatever, for next to nothing, so that passes of any width can be had. Reads the taps of another."""

    reads_tokens = False

    def __init__(self, taps: tuple[int, ...], sizes: Sizes):
        super().__init__(Options(name="blank", taps=taps), sizes)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        state = tokens[..., None].float()
        return state, state

    def head(self, state: Tensor, depth: int) -> Tensor:
        return state.new_zeros(*state.shape[:-1], self.shape.vocab)


def _star(nodes: int) -> StaticShape:
    """The root and its likeliest children."""
    return StaticShape(tuple((rank,) for rank in range(nodes - 1)))


def _grown(depth: int, width: int) -> DynamicShape:
    """`width` nodes unfolded at every depth, few of them checked."""
    return DynamicShape(4, depth, width)


def _nothing(tree: DraftTree, logits: Tensor, sampler: Sampler, places: Sequence[Place]) -> Verdict:
    """Does what `walk` does, and accepts none: the text grows by one token a round."""
    walk(tree, logits, sampler, places)
    return Verdict([[0] for _ in places], [0] * len(places))


def _rounds(decoder: Decoder, rows: int, context: int) -> list[dict[str, float]]:
    """Seconds of each of ROUNDS rounds: `draft`, `target`, and the `rest`."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(decoder.target.vocab, (rows, context), generator=draw).tolist()
    stream = decoder.stream(prompts, ROUNDS + 64)  # none is cut: no round is so deep
    out = []
    for number in range(ROUNDS + 2):
        before, start = dict(stream.generation.seconds), time.perf_counter()
        for _ in prompts:
            next(stream)
        whole = time.perf_counter() - start
        if number > 1:  # the prompt's pass is no round, and the first is slow
            draft, target = (stream.generation.seconds[part] - before[part] for part in ("draft", "target"))
            out.append({"draft": draft, "target": target, "rest": whole - draft - target})
    return out


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}


def _on_line(x: Tensor, curve: Sequence[tuple[int, float]]) -> Tensor:
    """Piecewise linear through the points (x, y) of `curve`, in float64, and on along its first and last piece."""
    xs, ys = (torch.tensor(part, dtype=torch.float64) for part in zip(*sorted(curve), strict=True))
    if len(xs) == 1:
        return ys.expand(x.shape)
    x = x.double()
    piece = (torch.searchsorted(xs, x.contiguous(), right=True) - 1).clamp(0, len(xs) - 2)
    slope = (ys[1:] - ys[:-1]) / (xs[1:] - xs[:-1])
    return ys[piece] + (x - xs[piece]) * slope[piece]
