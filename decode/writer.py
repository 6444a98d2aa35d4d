"""Many texts continued by the target alone, in a batch that is kept full: a finished row is replaced at once.

Made for throughput, where `Decoder` is made for the wait of one reader: no drafter, one token a row and pass, the keys
in slots that are allotted once and taken again. Token ids only; which texts come next is asked of the caller.

    step      every row reads its next known token; those that have read all they know choose one more
    slots     [ live rows ... | free ]     the last live row moves into a hole nothing comes to fill

    Legend: R rows of a pass, N tokens of each, S slots, V ids.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.decode.draw import drawn
from paceline.decode.sampler import Sampler
from paceline.models.cache import Cache
from paceline.models.target import Target

AHEAD = 8  # unread tokens that a row takes one a pass; more of them are read in a pass of their own
AT_ONCE = 8192  # tokens of such a pass, with the padding of its shorter rows
GROWN = 256  # tokens a row that the slots grow by


@dataclass(frozen=True)
class Job:
    """A text to be continued: its `ids`, at least one, by at most `limit` tokens.

    key: its noise depends on (seed, key, position) alone, whatever else is in the batch.
    """

    key: int
    ids: Sequence[int]
    limit: int
    temperature: float = 0.0
    top_p: float = 1.0


class Writer:
    """Continues jobs, at most `rows` at a time, up to and including a token of `eos`.

    `passes` and `tokens` count what was done, over all calls of `write`.
    """

    def __init__(self, target: Target, rows: int, eos: Sequence[int] = (), seed: int = 0):
        self.target, self.rows, self.eos = target, rows, frozenset(eos)
        self.passes = self.tokens = 0
        self._noise = Sampler(seed=seed)

    @torch.no_grad()
    def write(self, more: Callable[[], Job | None]) -> Iterator[tuple[Job, list[int]]]:
        """Each job with its new tokens, as they are finished.

        more: the next job; None where there is none as yet. Asked again whenever a row is free and after each job that
        was handed out; once it has none and no row is live, all is written.

        Raises:
            Refusal: a job is longer than the target's window.
        """
        slots = _Slots(self.rows, self.target)
        live: list[_Row] = []
        free: list[int] = []  # places among the live rows whose job is done
        while True:
            while (free or len(live) < self.rows) and (job := more()) is not None:
                place = max(free, key=lambda place: slots.shared(place, job)) if free else len(live)
                live[place : place + 1] = [_Row(job, list(job.ids), slots.room(place, job))]
                free = [other for other in free if other != place]
            for place in sorted(free, reverse=True):
                slots.move(len(live) - 1, place)
                live[place] = live[-1]
                live.pop()
            free = []
            if not live:
                return
            self._catch_up(slots, live)
            self._step(slots, live)
            for place, row in enumerate(live):
                new = row.text[len(row.job.ids) :]
                if new and (new[-1] in self.eos or len(new) >= row.job.limit):
                    slots.held[place] = row.text[: row.read]
                    free.append(place)
                    yield row.job, new

    def _catch_up(self, slots: "_Slots", live: list["_Row"]) -> None:
        """Rows that know many tokens they have not read, new ones above all, read all but the last of them."""
        behind = [place for place, row in enumerate(live) if row.unread > AHEAD]
        behind.sort(key=lambda place: live[place].unread)  # rows of like lengths pad each other least
        while behind:
            wide = live[behind[-1]].unread - 1
            some = sorted(behind[-max(1, AT_ONCE // wide) :])
            del behind[-len(some) :]
            rows = [live[place] for place in some]
            ids = torch.zeros(len(some), wide, dtype=torch.long)
            for index, row in enumerate(rows):
                ids[index, : row.unread - 1] = torch.tensor(row.text[row.read : -1])
            self._pass(slots, None if some == list(range(len(some))) else some, rows, ids)
            for row in rows:
                row.read = len(row.text) - 1

    def _step(self, slots: "_Slots", live: list["_Row"]) -> None:
        last = self._pass(slots, None, live, torch.tensor([[row.text[row.read]] for row in live]))
        for row in live:
            row.read += 1
        ready = [place for place, row in enumerate(live) if not row.unread]
        if not ready:
            return
        jobs = [live[place].job for place in ready]
        logits = self.target.head(last[ready, 0])[:, : self.target.vocab]
        tokens = drawn(
            logits,
            self._numbers(logits, [job.temperature for job in jobs]),
            self._numbers(logits, [job.top_p for job in jobs]),
            self._numbers(logits, [self._noise.uniform((live[p].job.key, live[p].read)) for p in ready], torch.double),
        )
        for place, token in zip(ready, tokens.tolist(), strict=True):
            live[place].text.append(token)
        self.tokens += len(ready)

    def _pass(self, slots: "_Slots", some: list[int] | None, rows: list["_Row"], ids: Tensor) -> Tensor:
        """Read ids [R, N] behind what each row has read -> the target's last states [R, N, H]."""
        slots.take(some, [row.read for row in rows], ids.shape[1])
        self.passes += 1
        return self.target(ids.to(self.target.device), cache=slots)[1]

    @staticmethod
    def _numbers(like: Tensor, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=like.device)


@dataclass
class _Row:
    """A job on its way: `text` is its prompt and what was written so far, `read` tokens of it have their keys."""

    job: Job
    text: list[int]
    read: int

    @property
    def unread(self) -> int:
        return len(self.text) - self.read


class _Slots(Cache):
    """The keys of many rows, of which each pass takes some: the first ones where they lie, or any.

    held: tokens whose keys a free or new row still has: a text that begins as the last one there does not read that
    beginning again, be it the template's opening, or all of the question that is now to be answered.
    """

    def __init__(self, rows: int, target: Target):
        super().__init__(rows, 0, target.device)
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self._target, self._many = target, rows
        self._taken: Tensor | None = None

    def room(self, place: int, job: Job) -> int:
        """Make room for the job at `place`; how many of its tokens are there already. All but the last, at most."""
        self._target.new_cache(1, len(job.ids) + job.limit)  # refuses what is longer than the window
        self._reach_to(len(job.ids) + job.limit)
        same = self.shared(place, job)
        self.held[place] = []  # what is written there now is no longer it
        return same

    def _reach_to(self, longest: int) -> None:
        if longest <= self.capacity:
            return
        more = -(-longest // GROWN) * GROWN - self.capacity
        self.capacity += more
        if self._stacks:
            across, along = self._stacks
            self._stack(F.pad(across, (0, more)), F.pad(along, (0, 0, 0, more)))
        else:
            self.keys, self.values = (
                [F.pad(old, (0, 0, 0, more)) for old in part] for part in (self.keys, self.values)
            )

    def shared(self, place: int, job: Job) -> int:
        """How many tokens `held` there are the first of the job's, at most all but its last."""
        pairs = enumerate(zip(self.held[place], job.ids[:-1], strict=False))
        return next(
            (i for i, (known, wanted) in pairs if known != wanted), min(len(self.held[place]), len(job.ids) - 1)
        )

    def move(self, source: int, place: int) -> None:
        """The keys of one row to the place of another."""
        if source != place:
            self.held[place] = self.held[source]
            for buffer in (*self.keys, *self.values):
                buffer[place] = buffer[source]

    def take(self, some: list[int] | None, read: list[int], nodes: int) -> None:
        """The next pass is of these rows (None: of the first ones), of which so many tokens are read, and so many more
        of each are to be."""
        device = self.length.device
        self.length = torch.tensor(read, device=device)
        self._taken = None if some is None else torch.tensor(some, device=device)
        self._reach_to(max(read) + nodes)  # a short row that is read beside a long one is padded

    def stacked(
        self, layers: int, heads: int, size: int, dtype: torch.dtype, tiled: bool = False
    ) -> tuple[Tensor, ...]:
        """As any cache's, where the pass is of the first rows; none where it is of others."""
        taken, self.length = self.length, self.length.new_zeros(self._many)
        stacks = super().stacked(layers, heads, size, dtype, tiled)
        self.length = taken
        return () if self._taken is not None else stacks

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        while len(self.keys) <= layer_idx:
            for buffers, new in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(new.new_zeros(self._many, new.shape[1], self.capacity, new.shape[-1]))
        rows = torch.arange(len(key_states), device=key_states.device) if self._taken is None else self._taken
        out = []
        for buffer, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            buffer[rows[:, None], :, self.slots] = new.transpose(1, 2)  # [R, N, heads, dim]
            out.append((buffer[: len(rows)] if self._taken is None else buffer[rows])[:, :, : self._reach])
        return out[0], out[1]
