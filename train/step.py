"""The teacher-forced unroll: what `accelerator.prepare` wraps. One chain per position, all positions at once.

Holds the drafter, and the trunk only where that is trained; a frozen target is never its submodule. Knows no optimiser,
schedule or process group.

    Legend: B rows, T sequence, K depths trained, H hidden, D draft vocabulary, R supervised rows of a chunk.

    position       t        t+1      t+2+k
    depth k reads  feature  token at t+1+k (the true text), predicts the token at t+2+k
    the loss looks where the PREDICTED token is supervised and stands in the document of t
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.batch import Batch
from paceline.models.drafter import Context, Drafter
from paceline.models.errors import Refusal
from paceline.models.streams import ChainKeys
from paceline.train.chunks import Found, summed
from paceline.train.objective import FEATURE_TERMS, NEEDS_TEACHER, graded, learn, mixed_features

# [R, H] post-norm states of the target -> its logits [R, D] over the draft vocabulary
Teacher = Callable[[Tensor], Tensor]
BEYOND = 1 << 30  # the rank of a token behind the end of its document
# Rows are taken in multiples of this: for every number of rows that is new to it, oneDNN compiles a product's code,
# which takes longer than the product.
GRAIN = 64


@dataclass
class Sums:
    """Over one batch: the weighted sum of all losses, a scalar, whose gradient can be taken once; and per depth [K], to
    be looked at, the loss summed and the predictions that were right.

    Behind the depths' stands the loss of each of the trunk's own terms, where it is trained.
    """

    total: Tensor
    loss: Tensor
    right: Tensor


@dataclass
class Counts:
    """Over one batch, per depth [K] int64 (and own term of the trunk): rows the loss looks at; rows of the accuracy.

    A token outside the draft vocabulary can be neither drafted nor learnt: it is no loss row, but in every accuracy it
    is a miss.
    """

    learnt: Tensor
    asked: Tensor


class TrainStep(nn.Module):
    """Unrolls a drafter over a packed batch and sums its loss."""

    def __init__(self, drafter: Drafter, chunk: int = 2048, vocab: int | None = None):
        """chunk: rows of a head's logits that exist at once. vocab: ids from here on only pad the head."""
        super().__init__()
        self.drafter, self.chunk = drafter, chunk
        self.known = draftable(drafter, vocab)
        self.objective = drafter.options.objective
        self.depths = drafter.unroll
        self._unrolled = unrolled
        self._graded: Callable[..., Tensor] | None = None

    def fuse(self, loss_alone: bool = False) -> None:
        """Compile the loss, in seconds, and the unroll, in minutes of the first steps: fewer passes over memory in all
        others."""
        self._graded = torch.compile(graded, dynamic=True)
        if not loss_alone:
            # the unroll is one graph: cutting it where gradients are exchanged gains little, and torch 2.13 fails at it
            torch._dynamo.config.optimize_ddp = False
            self._unrolled = torch.compile(unrolled, dynamic=True)

    def counts(self, batch: Batch) -> Counts:
        """What the sums of this batch have to be divided by, before any forward."""
        _, covered = draft_labels(self.drafter, batch.ids)
        asked = torch.stack([predicted(batch, k, self.drafter.first_row) for k in range(self.depths)])  # [K, B, T]
        return Counts((asked & covered).flatten(1).sum(1), asked.flatten(1).sum(1))

    def forward(
        self, batch: Batch, hidden: Tensor, last: Tensor, teacher: Teacher, weight: Tensor | None = None
    ) -> Sums:
        """hidden [B, T, taps * H] and last [B, T, H] come from the target and carry no gradient.

        weight: [K] what each depth's loss counts in the total; None: one.
        """
        weight = hidden.new_ones(self.depths, dtype=torch.float32) if weight is None else weight
        largest = weight.max().clamp(min=torch.finfo(torch.float32).tiny)  # float16 would lose what is divided early
        factors = weight / largest
        labels, covered = (part.flatten() for part in draft_labels(self.drafter, batch.ids))
        # [K, B * T], at the predicted token
        first = self.drafter.first_row
        there = torch.stack([predicted(batch, k, first) for k in range(self.depths)]).flatten(1) & covered
        back = 2 + first  # from a token to the row that predicts it at depth 0
        chains = wanted(self.drafter, batch, there, back) if self.drafter.row_by_row else None
        every = self._unrolled(self.drafter, batch, hidden, self.depths, chains)
        states = [state.flatten(0, 1) for state in every]
        groups = self._groups()
        # at least one chunk, if of no rows: then too every parameter gets a gradient, as DDP wants
        chunks = _places(there.any(0)).split(max(1, self.chunk // max(map(len, groups))))
        loss = torch.zeros_like(factors)
        right = torch.zeros_like(there[:, 0], dtype=torch.long)

        def work(number: int, drafted: list[Tensor]) -> Iterator[Found]:
            rows = chunks[number]
            goal, taught = last.flatten(0, 1)[rows - 1], None
            if NEEDS_TEACHER & self.objective.keys():
                with torch.no_grad():  # the target at t+1+k has the distribution of the token at t+2+k
                    taught = teacher(goal)[:, : self.known]
            for depths in groups:
                logits = self.drafter.head(torch.stack([drafted[k] for k in depths]), depths[0])  # [k, R, D]
                gradient = logits.detach()  # the same memory: what is known of the logits makes place for it
                if self.known is not None:
                    gradient[..., self.known :] = 0.0
                found = gradient[..., : self.known], labels[rows], there[depths][:, rows], taught, factors[depths]
                value, correct = learn(self.objective, *found, self._graded)
                loss[depths] += value
                right[depths] += correct
                yield logits, gradient, (value * factors[depths]).sum()
                del logits, gradient, found  # before the next head's are made
            # the state that stands for the target's own at t+1+k, as the teacher's logits are read there
            for k, state in enumerate(drafted):
                if FEATURE_TERMS.keys() & self.objective.keys():
                    apart = (mixed_features(self.objective, state, goal) * there[k, rows]).sum()
                    loss[k] += apart.detach()
                    yield apart, factors[k], apart * factors[k]

        everywhere = torch.arange(len(labels), device=labels.device)
        at = [everywhere if chains is None else chains.at(k) for k in range(self.depths)]
        # which of a depth's rows predicts a token; any, where none does
        places = [
            [torch.searchsorted(taken, rows - back - k).clamp(max=len(taken) - 1) for k, taken in enumerate(at)]
            for rows in chunks
        ]
        total = summed(work, places, states, self._learning()) * largest
        return Sums(total, loss, right)

    def _groups(self) -> list[list[int]]:
        """The depths that each of the drafter's heads reads."""
        groups: dict[int, list[int]] = {}
        for k in range(self.depths):
            groups.setdefault(self.drafter.output(k), []).append(k)
        return list(groups.values())

    def _learning(self) -> list[Tensor]:
        """What a head may be made of, and learns: the drafter's own, and a borrowed head where that is trained."""
        head = self.drafter.borrowed.head
        own: list[Tensor] = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        return own if head is None else own + head.learning()


@dataclass(frozen=True)
class Chains:
    """The rows of a flattened batch that take each step: all that are text until every stream of keys has begun, from
    then on those whose chain has something to learn, for nobody else looks at them; and a few others, see GRAIN.
    """

    rows: Tensor  # int64 [N], ascending
    kept: Tensor  # int64 [R], which of the N go on
    onward: Tensor  # int64 [R], these rows
    begun: int  # depths that all N take

    def at(self, depth: int) -> Tensor:
        """Where the rows of a depth stand in the flattened batch."""
        return self.rows if depth < self.begun else self.onward


def wanted(drafter: Drafter, batch: Batch, there: Tensor, back: int) -> Chains:
    """At least one row at every depth: then every parameter gets a gradient, as DDP wants.

    there: [K, B * T], at the predicted token, whether its loss counts. back: from it to the row that predicts it at
    depth 0.
    """
    streams = [drafter.stream(k) for k in range(len(there))]
    begun = 1 + max(map(streams.index, streams))
    learns = torch.zeros_like(there[0])
    for k in range(begun, len(there)):
        learns |= there[k].roll(-back - k)
    rows = _places(batch.document.flatten() >= 0)
    kept = _places(learns[rows])
    return Chains(rows, kept, rows[kept], begun)


def _places(mask: Tensor) -> Tensor:
    """Where a mask [N] holds, and the first other places, up to the next multiple of GRAIN or all."""
    many = int(mask.sum())
    missing = max(-(-many // GRAIN), 1) * GRAIN - many
    others = (~mask).nonzero()[:missing, 0]
    return mask.index_fill(0, others, True).nonzero()[:, 0]


def unrolled(drafter: Drafter, batch: Batch, hidden: Tensor, depths: int, chains: Chains | None = None) -> list[Tensor]:
    """The states [B, T, H] of depths 0..K-1, every position a chain of its own fed with the true text; with `chains`,
    [1, N, H] of their rows alone.

    Row j stands for t = j + first_row: with row -1, all rows lie one place further, and a document's first has no
    feature. What lies beyond its end predicts nothing.
    """
    first = drafter.first_row
    if first:
        hidden = hidden.roll(1, 1).masked_fill((batch.positions == 0)[..., None], 0.0)
    keys = ChainKeys(batch.document, drafter.stream, drafter.reads_tokens)
    feature = drafter.read(hidden if chains is None else _of(hidden, chains.rows))
    states = []
    for k in range(depths):
        if k and drafter.detach:
            feature = feature.detach()
        # [x0 x1 x2 x3] -> k=0: [x1 x2 x3 x0], k=1: [x2 x3 x0 x1]; what wraps around predicts nothing that is supervised
        tokens, positions, at = batch.ids.roll(-1 - first - k, 1), batch.positions, None
        if chains is not None:
            at = chains.at(k)
            tokens, positions = _of(tokens, at), _of(positions, at)
            if k == chains.begun:
                feature = feature[:, chains.kept]
        everything = torch.full_like(tokens[:, 0], tokens.shape[1])
        feature, state = drafter.step(feature, tokens, k, Context(positions + first + k, everything, keys, places=at))
        states.append(state)
    return states


def _of(whole: Tensor, places: Tensor) -> Tensor:
    """[B, T, ...] -> [1, N, ...], at these places of the flattened rows."""
    return whole.flatten(0, 1)[places][None]


def predicted(batch: Batch, depth: int, first_row: int = 0) -> Tensor:
    """[B, T] bool, at the predicted token: supervised, and row t = index - 2 - depth is one of the same document's."""
    reach = 2 + depth + first_row
    same = batch.document == batch.document.roll(reach, 1)
    same[:, :reach] = False
    return batch.supervised & same & (batch.document >= 0)


def draft_labels(drafter: Drafter, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Target ids of any shape -> their draft ids (0 where there is none), and whether there is one."""
    if drafter.vocab_map is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    place = torch.searchsorted(drafter.vocab_map, ids).clamp(max=len(drafter.vocab_map) - 1)
    covered = drafter.vocab_map[place] == ids
    return place * covered, covered


def draftable(drafter: Drafter, vocab: int | None) -> int | None:
    """The first so many draft ids are below `vocab` and can be drafted; None for all."""
    if vocab is None or drafter.vocab_map is None:
        return vocab
    return int((drafter.vocab_map < vocab).sum())


@torch.no_grad()
def ranks(
    drafter: Drafter, batch: Batch, hidden: Tensor, depths: int, vocab: int | None = None, chunk: int = 512
) -> Tensor:
    """Rank of the true token at each depth, for every position whose successor the target wrote.

    Returns [P, K] int64, positions in row-major order of t: 0 where the likeliest draft token is the text's, the draft
    vocabulary's size where the token cannot be drafted, BEYOND where the document has ended. The chain of greedy drafts
    from t is accepted as far as the row's leading zeros go, when the text is what the target writes greedily.
    """
    labels, covered = draft_labels(drafter, batch.ids)
    labels = labels.flatten()
    root = predicted(batch, -1).flatten().nonzero()[:, 0]  # flat index of x[t+1], the token the target chose at t
    known = draftable(drafter, vocab)
    columns = []
    for k, state in enumerate(unrolled(drafter, batch, hidden, depths)):
        there = F.pad(predicted(batch, k).flatten(), (0, depths))[root + 1 + k]
        goal = torch.where(there, root + 1 + k, 0)
        column = []
        for part, token in zip((root - 1 - drafter.first_row).split(chunk), goal.split(chunk), strict=True):
            logits = drafter.head(state.flatten(0, 1)[part], k)[:, :known].float()
            if not (logits < torch.inf).all():  # what is no number would rank as right
                raise Refusal(f"export.dtype: this drafter's logits overflow in {drafter.dtype}; nearest: float32")
            label = labels[token][:, None]
            score = logits.gather(1, label)
            # ties go to the lower draft id, as with argmax
            earlier = torch.arange(logits.shape[1], device=logits.device) < label
            rank = ((logits > score) | ((logits == score) & earlier)).sum(1)
            column.append(torch.where(covered.flatten()[token], rank, logits.shape[1]))
        columns.append(torch.where(there, torch.cat(column), BEYOND))
    return torch.stack(columns, 1)
