"""The decoder: draft a tree, let the target check it in one pass, keep what it would have written. Token ids only.

Knows no tokenizer, prompt format, config or training. Plain decoding is the same loop without a drafter.

    round     tree = grow(...)          node 0 is the root: the token the target chose last, not yet in the cache
              logits = target(tree)     one pass over all nodes
              path, bonus = verify(...)  accepted nodes; the target's own next token
              keep(path)                the rest of the tree is forgotten; bonus is the next root
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.decode import hf
from paceline.decode.live import Live, Verified
from paceline.decode.report import AcceptanceReport
from paceline.decode.sampler import Place, Sampler
from paceline.decode.trace import Round, rounds
from paceline.decode.tree import DraftTree, Shape, chain, check_drawable, grow
from paceline.decode.verify import Verdict, walk
from paceline.models.cache import Cache
from paceline.models.drafter import Context, Drafter, check_depth
from paceline.models.errors import Refusal
from paceline.models.target import Target

Stop = Callable[[list[int]], bool]  # all new tokens of a row -> whether the last of them ends it
Verify = Callable[[DraftTree, Tensor, Sampler, Sequence[tuple[int, int]]], Verdict]


@dataclass
class Emitted:
    """What one row gained in one round: new tokens, and how many of them (the first ones) were accepted drafts."""

    row: int
    tokens: list[int]
    drafted: int
    finished: bool


@dataclass
class Generation:
    """New tokens of each row, the acceptance of each row, and the seconds spent by phase.

    seconds: prefill, draft, target (passes over trees and their head), verify, keep. passes: of the target, no prefill.
    reused: tokens of the prompt that were held from earlier calls. gained: of each row, the tokens each round gave.
    trace: of each row, its rounds in full, where that was asked.
    """

    tokens: list[list[int]]
    reports: list[AcceptanceReport]
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    reused: int = 0
    gained: list[list[int]] = field(default_factory=list)
    trace: list[list[Round]] = field(default_factory=list)

    @property
    def report(self) -> AcceptanceReport:
        return sum(self.reports, AcceptanceReport())


@dataclass
class Held:
    """The text of one conversation with one decoder, kept from call to call: what of it comes again is not read again.

    ids: tokens whose keys `cache` holds. hidden: [1, len(ids), taps * H] the target's states there, which the drafter
    reads anew (it is small beside the target, and keeps no state that could be turned back). least: tokens that there
    is room for from the start, so that a few turns fit.
    """

    ids: list[int] = field(default_factory=list)
    cache: Cache | None = None
    hidden: Tensor | None = None
    least: int = 1024

    def begun(self, target: Target, prompt: list[int], room: int) -> Cache:
        """A cache of at least `room` slots that holds what `prompt` begins with; its last token is always left to read.

        It is made anew, twice as large, where the conversation has outgrown it.
        """
        same = 0
        while same < min(len(self.ids), len(prompt) - 1) and self.ids[same] == prompt[same]:
            same += 1
        if self.cache is None or self.cache.capacity < room:
            wide = max(2 * room, self.least)
            wide = wide if target.window is None else max(room, min(wide, target.window))
            self.cache, same = target.new_cache(1, wide), 0
        self.cache.length = torch.full_like(self.cache.length, same)
        self.ids = self.ids[:same]
        self.hidden = None if self.hidden is None else self.hidden[:, :same]
        return self.cache

    def add(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Note that the cache holds these too; returns the states of all, [1, n, taps * H]."""
        # states first: where an interrupt leaves more of them than ids, `begun` cuts them
        whole = self.hidden = hidden if self.hidden is None else torch.cat([self.hidden, hidden], 1)
        self.ids = self.ids + ids
        return whole


class Decoder:
    """Speculative decoding of a target with a drafter.

    drafter None is plain decoding. shape: who gets children (default: a chain as deep as the drafter was trained).
    verify: `walk` (exact), `reject` (exact) or `typical` (lossy). timed: wait for a GPU at each phase, so that
    `seconds` tells them apart; slower, and not needed on a CPU. sampled: unless the sampler is greedy, drafts are drawn
    from the drafter's own distribution, which `reject` makes most of; else they are its likeliest.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        shape: Shape | None = None,
        verify: Verify = walk,
        timed: bool = False,
        sampled: bool = False,
    ):
        self.target, self.drafter, self.verify, self.timed, self.sampled = target, drafter, verify, timed, sampled
        self.shape: Shape = chain(0) if drafter is None else shape or chain(drafter.unroll)
        if drafter is not None:
            check_depth(self.shape.depth, drafter.max_depth)
        if sampled:
            check_drawable(self.shape)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options) -> Generation:
        """Decode to the end; takes what `stream` takes."""
        stream = Stream(self, prompts, max_new_tokens, **options)
        for _ in stream:
            pass
        return stream.generation

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_inputs: Any,
    ) -> Tensor:
        """What transformers calls where `model.generate(ids, custom_generate=decoder)` is: see decode/hf.py."""
        # the mask is no parameter: transformers would take it for one that only we know
        given = logits_processor, stopping_criteria, generation_config, model_inputs.get("attention_mask")
        return hf.generate(self, model, input_ids, *given)

    def stream(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options) -> "Stream":
        """Iterate over `Emitted`, round by round; `.generation` holds the whole so far.

        Args:
            prompts: token ids of each row, at least one token each; lengths may differ.
            max_new_tokens: of every row; 0 gives nothing.
            sampler: how the target chooses; greedy by default.
            eos: ids that end a row (and are kept as its last token).
            stop: further condition, judged after every single token.
            rows: key of each row's noise, by default its place in the batch.
            together: prompts that are decoded at once; each of the others takes the place of one that is finished. All
                of them by default.
            traced: keep every round in full (`Generation.trace`), which takes time.
            held: of a single prompt: what earlier calls with it have read, and then this one too.
        """
        return Stream(self, prompts, max_new_tokens, **options)


class Stream(Iterator[Emitted]):
    """One run of a decoder. All its state lives here: dropping it at any point leaves the decoder as good as new."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampler: Sampler | None = None,
        eos: Sequence[int] = (),
        stop: Stop | None = None,
        rows: Sequence[int] | None = None,
        traced: bool = False,
        held: Held | None = None,
        together: int | None = None,
    ):
        empty = [row for row, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise Refusal(f"prompt {empty[0]} is empty: the target needs at least one token to start from")
        for row, prompt in enumerate(prompts):
            decoder.target.check_ids(prompt, f"prompt {row} has")
        if held is not None and len(prompts) != 1:
            raise ValueError(f"held is of one conversation, not of {len(prompts)}")
        if together is not None and together < 1:
            raise ValueError(f"together: {together} texts cannot be decoded; nearest: 1")
        self.held = held
        self.decoder, self.target, self.drafter = decoder, decoder.target, decoder.drafter
        self.sampler, self.eos, self.stop = sampler or Sampler(), frozenset(eos), stop
        self.limit, self.traced = max_new_tokens, traced
        self.keys = list(rows) if rows is not None else list(range(len(prompts)))
        self.generation = Generation(
            [[] for _ in prompts],
            [AcceptanceReport() for _ in prompts],
            gained=[[] for _ in prompts],
            trace=[[] for _ in prompts],
        )
        self._prompts = [list(prompt) for prompt in prompts]
        self._head = self.target.head
        self._taps = () if self.drafter is None else self.drafter.taps
        self._together = len(prompts) if together is None else min(together, len(prompts))
        self._waiting = deque(range(self._together, len(prompts)))
        self._finished: set[int] = set()
        self._events = self._run()

    def __next__(self) -> Emitted:
        return next(self._events)

    # -- the loop

    @torch.no_grad()
    def _run(self) -> Iterator[Emitted]:
        if self.limit <= 0 or not self._prompts:
            return
        shape = self.decoder.shape
        room = max(map(len, self._prompts)) + self.limit + shape.nodes
        self._live = live = self._begun(list(range(self._together)), room) if not self._waiting else self._filled(room)
        yield from self._emit(live.prompts, [[token] for token in live.verified.roots.tolist()])
        yield from self._replaced(live)

        drawing = self.sampler if self.decoder.sampled and not self.sampler.greedy else None
        while live.prompts:
            cache, verified = live.cache, live.verified
            lengths = cache.length.tolist()  # the root stands right behind
            places = [(self.keys[row], length + 1) for row, length in zip(live.prompts, lengths, strict=True)]
            with self._timed("draft"):
                if self.drafter is None:
                    tree = DraftTree.root(verified.roots)
                else:
                    # the last token a row may still say is a bonus token, never worth a draft
                    allowed = [self.limit - len(self.generation.tokens[row]) - 1 for row in live.prompts]
                    tree = self._grown(verified, live.memory, allowed, drawing, places)
            with self._timed("target"):
                hidden, last = self.target(tree.tokens, self._taps, tree=tree.ancestors, cache=cache)
                logits = self._adjusted(self._logits(last), tree)
            self.generation.passes += 1
            with self._timed("verify"):
                verdict = self.decoder.verify(tree, logits, self.sampler, places)
            with self._timed("keep"):
                nodes, count = _padded(verdict.paths, self.target.device)
                self.target.keep(cache, nodes, count)
                hidden = hidden.gather(1, nodes[..., None].expand(-1, -1, hidden.shape[-1]))
                words = [[of[node] for node in path] for (of, _), path in zip(tree.lists, verdict.paths, strict=True)]
                fresh = [[*row[1:], bonus] for row, bonus in zip(words, verdict.bonus, strict=True)]
                positions = (cache.length - count)[:, None] + torch.arange(nodes.shape[1], device=nodes.device)
                if self.held is not None:
                    self.held.add(words[0], hidden)
                live.verified = Verified(hidden, _padded(fresh, nodes.device)[0], positions, count)
            seen = rounds(tree, logits, verdict, self.sampler) if self.traced else []
            for index, emitted in enumerate(self._emit(live.prompts, fresh, tree, verdict.paths)):
                if seen:
                    whole = seen[index].emitted(emitted.tokens, emitted.drafted)
                    self.generation.trace[emitted.row].append(whole)
                yield emitted
            yield from self._replaced(live)

    def _begun(self, rows: list[int], room: int) -> Live:
        """Read these prompts, each to its end, and choose the first token of each."""
        prompts = [self._prompts[row] for row in rows]
        held, known = self.held, 0
        if held is None:
            cache = self.target.new_cache(len(rows), room)
        else:
            cache = held.begun(self.target, prompts[0], room)
            known = self.generation.reused = len(held.ids)
        with self._timed("prefill"):
            ids, count = _padded(prompts, self.target.device)
            hidden, last = self.target(ids[:, known:], self._taps, cache=cache)
            self.target.keep(cache, ids[:, :0], count - known)
            ends = last[torch.arange(len(ids), device=ids.device), count - known - 1]
            if held is not None:
                hidden = held.add(ids[0, known:].tolist(), hidden)
            first = self.sampler.choose(
                self._adjusted(self._logits(ends)[:, None], rows=rows)[:, 0],
                [(self.keys[row], len(self._prompts[row])) for row in rows],
            )
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        behind = [[*prompt[1:], token] for prompt, token in zip(prompts, first, strict=True)]
        verified = Verified(hidden, _padded(behind, ids.device)[0], positions, count)
        memory = None
        if self.drafter is not None:
            memory = self.drafter.memory(len(ids), room + self.decoder.shape.unfolded)
            if self.drafter.first_row < 0:
                verified = verified.preceded(ids[:, :1])
        return Live(list(rows), cache, verified, memory)

    # -- prompts that wait for a place

    def _joining(self, row: int) -> Live:
        """A prompt, which the drafter has read too, but for its last row: beside others no row is read but newly
        verified ones, which are few."""
        one = self._begun([row], len(self._prompts[row]) + 1)
        many = one.verified.followers.shape[1] - 1
        if self.drafter is not None and many:
            with self._timed("prefill"):
                self._grown(one.verified.columns(slice(many), one.verified.count - 1), one.memory)
        one.verified = one.verified.columns(slice(many, None), torch.ones_like(one.verified.count))
        return one

    def _filled(self, room: int) -> Live:
        """As many prompts as are decoded at once, each read by itself, as those behind them will be."""
        many = self._together
        ones = [self._joining(row) for row in range(many)]
        parts = (
            torch.cat([getattr(one.verified, part) for one in ones])
            for part in ("hidden", "followers", "positions", "count")
        )
        memory = None if self.drafter is None else self.drafter.memory(many, room + self.decoder.shape.unfolded)
        live = Live(list(range(many)), self.target.new_cache(many, room), Verified(*parts), memory)
        for place, one in enumerate(ones):
            live.put(place, one)
        return live

    def _replaced(self, live: Live) -> Iterator[Emitted]:
        """Finished texts leave the batch; where prompts wait, they take the places, and say their first token."""
        free = [place for place, row in enumerate(live.prompts) if row in self._finished]
        while free and self._waiting:
            place, one = free[0], self._joining(self._waiting.popleft())
            live.put(place, one)
            yield from self._emit(one.prompts, [one.verified.roots.tolist()])
            if one.prompts[0] not in self._finished:
                del free[0]
        if len(free) == len(live.prompts):
            live.prompts = []
        elif free:
            live.select([place for place in range(len(live.prompts)) if place not in free])

    # -- parts of a round

    def _grown(
        self,
        verified: Verified,
        memory: Any,
        allowed: list[int] | None = None,
        drawing: Sampler | None = None,
        places: Sequence[Place] = (),
    ) -> DraftTree:
        assert self.drafter is not None
        ctx, feature = Context(verified.positions, verified.count, memory), self.drafter.read(verified.hidden)
        how = allowed, self.target.vocab, drawing, places
        return grow(self.drafter, self.decoder.shape, feature, verified.followers, ctx, *how)

    def _logits(self, last: Tensor) -> Tensor:
        """[..., H] -> logits over the ids the tokenizer knows: rows that only pad the table are never chosen."""
        return self._head(last)[..., : self.target.vocab]

    def _adjusted(self, logits: Tensor, tree: DraftTree | None = None, rows: list[int] | None = None) -> Tensor:
        """Where the sampler looks back, at the text and the path to each node. [B, N, V]."""
        if not self.sampler.looks_back:
            return logits
        texts = [(self._prompts[row], self.generation.tokens[row]) for row in rows or self._live.prompts]
        path = () if tree is None else (tree.tokens, tree.ancestors)
        return self.sampler.adjusted(logits, texts, self.eos, *path)

    def _emit(
        self,
        rows: list[int],
        fresh: list[list[int]],
        tree: DraftTree | None = None,
        paths: list[list[int]] | None = None,
    ) -> Iterator[Emitted]:
        """Append each row's new tokens one by one, up to and including the one that ends it, and count the round.

        The prompt's pass, which has no tree, is no round.
        """
        for index, row in enumerate(rows):
            tokens = self.generation.tokens[row]
            taken: list[int] = []
            for token in fresh[index]:
                tokens.append(token)
                taken.append(token)
                if token in self.eos or len(tokens) >= self.limit or (self.stop is not None and self.stop(tokens)):
                    self._finished.add(row)
                    break
            used = 0
            if tree is not None and paths is not None:
                path, parents = paths[index], tree.lists[index][1]
                depth = [0]
                for above in parents[1:]:
                    depth.append(depth[above] + 1)
                used = min(len(path) - 1, len(taken))
                # a round cut short was offered only what lies at or before the cut
                cut = len(taken) if row in self._finished else len(depth)
                proposed = sum(0 < d <= cut for d in depth)
                deepest = min(max(depth), cut)
                offered = min(len(path) - 1 + (path[-1] in parents), cut)
                self.generation.reports[row].add(used, offered, proposed, len(taken), deepest)
                self.generation.gained[row].append(len(taken))
            yield Emitted(row, taken, used, row in self._finished)

    def _timed(self, phase: str) -> "_Timer":
        return _Timer(self.generation.seconds, phase, self.target.device if self.decoder.timed else None)


class _Timer:
    """Adds the seconds of a block to `seconds[phase]`; waits for `device`, a GPU, whose work would count elsewhere."""

    def __init__(self, seconds: dict[str, float], phase: str, device: torch.device | None):
        self.seconds, self.phase, self.device = seconds, phase, device

    def _now(self) -> float:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self):
        self.start = self._now()

    def __exit__(self, *_):
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + self._now() - self.start


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of ints -> ([B, longest] int64, zero behind each row's end, and their lengths [B])."""
    width = max(map(len, rows))
    out = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device)
    return out, torch.tensor([len(row) for row in rows], dtype=torch.long, device=device)
