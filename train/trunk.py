"""The target under a drafter that learns: left as it is, or trained with it. One interface for the loop, two kinds.

    frozen    `FrozenTrunk`: no part of the step; its states come from `Features`
    lora      `TrainedTrunk` with adapters on the target's own weights, which stay
    full      `TrainedTrunk` on a float32 copy of all of them

Whatever it is, the target as it was loaded stays there, untouched: it is what an export names, what self-distillation
asks, and what a run ends with in memory. For `full` that is a second copy. The alternative, its logits kept for
every token, would take a vocabulary's worth of numbers a token: more than the weights from a few thousand tokens on.
Knows the step and its loss terms. Does not know methods, files or the loop.

    Legend: B rows, T sequence, K depths trained, H hidden, F = len(taps) * H, E own terms of the trunk.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Dataset
from paceline.data.features import Features
from paceline.models.drafter import Drafter
from paceline.models.target import Target
from paceline.models.trunk import Learnt
from paceline.train.chunks import Found, summed
from paceline.train.features import features_of
from paceline.train.objective import learn
from paceline.train.step import Counts, Sums, TrainStep, predicted

OWN = {"next": {"ce": 1.0}, "distil": {"kl": 1.0}}  # what the trunk's own terms are made of


class FrozenTrunk:
    """The target as it is. `live`: what the drafter borrows from. terms: names of the trunk's own loss terms."""

    terms: tuple[str, ...] = ()

    def __init__(self, original: Target, features: Features):
        self.original = self.live = original
        self._features = features

    def learners(self, drafter: Drafter) -> nn.Module:
        """What is trained, as one module: what is optimised, clipped and checkpointed."""
        return drafter

    def groups(self, drafter: Drafter) -> list[dict[str, Any]]:
        """For the optimiser: parameters, the multiple of the learning rate they take, the share of steps they wait."""
        return [_group(drafter)]

    def step(self, drafter: Drafter, chunk: int, vocab: int) -> TrainStep:
        """What accelerate prepares, once the drafter has its weights and its vocabulary."""
        self._teacher = self.original.head.rows(drafter.vocab_map)
        return TrainStep(drafter, chunk, vocab)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """What the step is given beside a batch."""
        return (*self._features.of(batch), self._teacher)

    def turn(self, number: float, total: int) -> None:
        """A step begins that stands at place `number` (from 1) of `total` in the schedule."""

    def weights(self, depths: Sequence[float]) -> list[float]:
        """Weights of the depths' losses, and of the own terms behind them, in this step."""
        return list(depths)

    def learnt(self, dtype: str) -> Learnt | None:
        """What differs from the original, as exported; None for nothing."""
        return None

    def as_exported(self, dtype: str) -> Target:
        """The target that an export of this step would decode with."""
        return self.original


class TrainedTrunk(nn.Module):
    """Adapters or all weights of a target, learning from the depths' losses and from terms of their own.

    next: cross-entropy to the text's next token. distil: KL(original || trunk), so that it goes on saying what it said.
    Both look where that next token is supervised, and are divided by how many those are.
    """

    def __init__(self, original: Target, options: Any):
        """options: `Lora` or `Full` of conf/schema.py."""
        super().__init__()
        self._original, self.options = (original,), options  # a tuple: what is frozen is no submodule
        if options.kind == "lora":
            self.live = original.adapted(options.rank, options.alpha, options.dropout, options.modules)
        else:
            self.live = original.unfrozen()
        own = {"next": options.next_weight, "distil": options.distil_weight}
        self.own = {name: weight for name, weight in own.items() if weight}
        self.terms = tuple(self.own)
        self.moving, self._depth_weight = True, options.depth_weight

    @property
    def original(self) -> Target:
        return self._original[0]

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    # -- for the loop, as FrozenTrunk has it

    def learners(self, drafter: Drafter) -> nn.Module:
        return Learners(drafter, self)

    def groups(self, drafter: Drafter) -> list[dict[str, Any]]:
        return [_group(drafter), _group(self, self.options.lr, self.options.after)]

    def step(self, drafter: Drafter, chunk: int, vocab: int) -> TrainStep:
        return JointStep(drafter, self, chunk, vocab)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        return ()

    def turn(self, number: float, total: int) -> None:
        waited = waits(self.options.after, total)
        self.moving = number > waited
        rises = self.options.depth_ramp * (total - waited)
        risen = min(1.0, (number - waited) / rises) if self.moving and rises else 1.0
        self._depth_weight = self.options.depth_weight * math.sin(math.pi / 2 * risen)

    def weights(self, depths: Sequence[float]) -> list[float]:
        return [*(self._depth_weight * weight for weight in depths), *self.own.values()]

    def learnt(self, dtype: str) -> Learnt:
        options = self.options
        rank, alpha = (options.rank, options.alpha) if options.kind == "lora" else (0, 1.0)
        return Learnt.by(self.live, options.kind, rank, alpha, dtype)

    def as_exported(self, dtype: str) -> Target:
        return self.learnt(dtype).applied(self.original)

    # -- for the step

    def counts(self, batch: Batch) -> Tensor:
        """[E] int64, what the own terms' sums are divided by: 0 as long as the trunk waits."""
        return predicted(batch, -1).sum().expand(len(self.terms)) * self.moving

    def forward(
        self, batch: Batch, taps: Sequence[int], vocab: int | None, chunk: int, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [B, T, F] and last [B, T, H] as a target says them, with their graph; its own losses summed, [E], and
        their sum weighted by weight [E], which alone has a gradient.

        While it waits there is no graph, and no own loss.
        """
        own = torch.zeros(len(self.terms), device=batch.ids.device)
        if not self.moving:
            # every parameter gets a gradient, if one of zeros: DDP waits for it
            return *self._before(batch, taps), own, 0.0 * torch.stack([p.sum() for p in self.trained().values()]).sum()
        hidden, last = self.live(batch.ids, taps, documents=batch.document, positions=batch.positions)
        before = self._before(batch)[1] if "distil" in self.own else last
        tokens = predicted(batch, -1).flatten().nonzero()[:, 0]  # flat index of x[t+1], which stands at t's right
        chunks = tokens.split(chunk)

        def work(number: int, states: list[Tensor]) -> Iterator[Found]:
            rows = chunks[number]
            labels, there = batch.ids.flatten()[rows], torch.ones_like(rows, dtype=torch.bool)[None]
            for place, name in enumerate(self.terms):
                logits = self.live.head(states[0])
                with torch.no_grad():
                    taught = self.original.head(before.flatten(0, 1)[rows - 1]) if name == "distil" else None
                gradient = logits.detach()
                if vocab is not None:
                    gradient[:, vocab:] = 0.0
                theirs = None if taught is None else taught[:, :vocab]
                value, _ = learn(OWN[name], gradient[None, :, :vocab], labels, there, theirs, weight[place, None])
                own[place] += value[0]
                yield logits, gradient, value[0] * weight[place]
                del logits, gradient, taught, theirs

        head = [
            part for part in (self.live.head.weight, self.live.head.bias) if part is not None and part.requires_grad
        ]
        total = summed(work, [[rows - 1] for rows in chunks], [last.flatten(0, 1)], head)
        return hidden, last, own, total

    def _before(self, batch: Batch, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """What the target says that was not trained."""
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self.original(batch.ids, taps, documents=batch.document, positions=batch.positions)


Trunk = FrozenTrunk | TrainedTrunk


def trunk_of(
    cfg: Any, original: Target, drafter: Drafter, loader: Loader, data: Dataset, tell: Callable[[str], None]
) -> Trunk:
    """The trunk that `cfg.trunk` asks for; of a frozen one's states `tell` is given a line."""
    if cfg.trunk.kind == "frozen":
        return FrozenTrunk(original, features_of(cfg, original, drafter.taps, loader, data, tell))
    return TrainedTrunk(original, cfg.trunk)


def waits(after: float, total: int) -> int:
    """Steps of `total` in which what begins after a share of them does not move yet."""
    return round(after * total)


def _group(module: nn.Module, multiple: float = 1.0, after: float = 0.0) -> dict[str, Any]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {"params": trained, "multiple": multiple, "after": after}


class JointStep(TrainStep):
    """The unroll over what the trunk says here and now, so that it learns from every depth; and its own terms."""

    def __init__(self, drafter: Drafter, trunk: TrainedTrunk, chunk: int = 512, vocab: int | None = None):
        super().__init__(drafter, chunk, vocab)
        self.trunk, self.vocab = trunk, vocab

    def counts(self, batch: Batch) -> Counts:
        counts = super().counts(batch)
        return Counts(torch.cat([counts.learnt, self.trunk.counts(batch)]), counts.asked)

    def forward(self, batch: Batch, weight: Tensor | None = None) -> Sums:  # type: ignore[override]
        """weight: [K + E], of the depths' losses and of the own terms' behind them; None: one."""
        weight = torch.ones(self.depths + len(self.trunk.terms), device=batch.ids.device) if weight is None else weight
        depths, terms = weight.split([self.depths, len(self.trunk.terms)])
        hidden, last, own, total = self.trunk(batch, self.drafter.taps, self.vocab, self.chunk, terms)
        speaker = self.trunk.live if self.trunk.moving else self.trunk.original
        self.drafter.borrow(speaker)  # anew each time: some rows of a head are a copy
        teacher = speaker.head.rows(self.drafter.vocab_map)
        # the drafter comes near what the trunk says now, not the trunk to the drafter
        sums = super().forward(batch, hidden, last.detach(), teacher, depths)
        return Sums(sums.total + total, torch.cat([sums.loss, own]), sums.right)


class Learners(nn.Module):
    """A drafter and its trunk as one module whose state is the drafter's, and what is trained of the trunk."""

    def __init__(self, drafter: Drafter, trunk: TrainedTrunk):
        super().__init__()
        self.drafter, self.trunk = drafter, trunk

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        whole = super().state_dict(*args, **options)
        trained = {f"trunk.{name}" for name in self.trunk.trained()}
        return {name: tensor for name, tensor in whole.items() if name.startswith("drafter.") or name in trained}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**super().state_dict(), **state_dict}, strict, assign)
