"""Loss terms: each maps what was drafted to one number per row. Knows no drafter or batch.

Sums and counts stay apart until the trainer divides them, once, over all processes and accumulated parts.

    Legend: R supervised rows, K depths, D draft vocabulary, H hidden.
    Everything here is float32: p_draft - p_target cancels in bf16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.kernels import Library, kernels


class Taught(NamedTuple):
    """What the target says of R rows, once for all depths: p and log p [R, D] over the draft vocabulary, and
    sum p log p [R]."""

    p: Tensor
    logp: Tensor
    plogp: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Taught":
        logp = F.log_softmax(logits, -1, dtype=torch.float32)
        p = logp.exp()
        return cls(p, logp, (p * logp).sum(-1))


class Drafted(NamedTuple):
    """What a drafter says of R rows, float32 [R, D]: log q, and q. spare [R, D] is for a term to compute in."""

    logq: Tensor
    q: Tensor
    spare: Tensor


# A term returns its value for each row [R] and adds `weight` times its gradient in the logits to `gradient` [R, D]:
# in closed form, which spares the passes over memory that autograd would make.
Term = Callable[[Drafted, Tensor, Taught | None, float, Tensor], Tensor]
FeatureTerm = Callable[[Tensor, Tensor], Tensor]


def ce(drafted: Drafted, labels: Tensor, teacher: Taught | None, weight: float, gradient: Tensor) -> Tensor:
    """Cross-entropy to the text's own next token (labels [R] draft ids), nats; the gradient is q - onehot."""
    at = labels[:, None]
    gradient.add_(drafted.q, alpha=weight).scatter_add_(1, at, gradient.new_full(at.shape, -weight))
    return -drafted.logq.gather(1, at)[:, 0]


def kl(drafted: Drafted, labels: Tensor, teacher: Taught | None, weight: float, gradient: Tensor) -> Tensor:
    """KL(target || draft), nats; the gradient is q - p."""
    assert teacher is not None
    gradient.add_(drafted.q, alpha=weight).sub_(teacher.p, alpha=weight)
    return teacher.plogp - torch.mul(teacher.p, drafted.logq, out=drafted.spare).sum(-1)


def reverse_kl(drafted: Drafted, labels: Tensor, teacher: Taught | None, weight: float, gradient: Tensor) -> Tensor:
    """KL(draft || target), nats: the draft leaves out what the target would hardly say; the gradient is
    q (log q/p - its mean under q).

    Source: Zhou et al. 2024 (DistillSpec), section 4.
    """
    assert teacher is not None
    apart = drafted.logq - teacher.logp
    mean = (drafted.q * apart).sum(-1, keepdim=True)
    gradient.addcmul_(drafted.q, apart - mean, value=weight)
    return mean[:, 0]


def tv(drafted: Drafted, labels: Tensor, teacher: Taught | None, weight: float, gradient: Tensor) -> Tensor:
    """Total variation of target and draft, 0 to 1: one minus the chance that a draft drawn from q is accepted,
    sum min(p, q). Its gradient is small where they hardly overlap: start from something trained, or mix it with kl.

    Source: Leviathan et al. 2023, corollary 3.6; as a loss Zhou et al. 2024 (DistillSpec).
    """
    assert teacher is not None
    least, less = _least(drafted, teacher)
    _add_gradient(drafted, least.exp() * less, weight, gradient)
    return -torch.expm1(least.logsumexp(-1))


def lk(drafted: Drafted, labels: Tensor, teacher: Taught | None, weight: float, gradient: Tensor) -> Tensor:
    """-log of that chance, nats: the gradient of `tv`, the larger the smaller the chance.

    Source: Samarin et al. 2026 (LK losses), the likelihood variant.
    """
    assert teacher is not None
    least, less = _least(drafted, teacher)
    chance = least.logsumexp(-1, keepdim=True)  # its log: it may be too small for itself
    _add_gradient(drafted, (least - chance).exp() * less, weight, gradient)
    return -chance[:, 0]


def _least(drafted: Drafted, teacher: Taught) -> tuple[Tensor, Tensor]:
    """[R, D]: log of min(p, q), and whether q is the lesser by more than rounding."""
    logq = drafted.logq
    return torch.minimum(teacher.logp, logq), logq < teacher.logp - 1e-6


def _add_gradient(drafted: Drafted, share: Tensor, weight: float, gradient: Tensor) -> None:
    """Of a value that falls by `share` [R, D] where log q rises by one."""
    gradient.sub_(share, alpha=weight).addcmul_(drafted.q, share.sum(-1, keepdim=True), value=weight)


def smooth_l1(state: Tensor, goal: Tensor) -> Tensor:
    """Huber loss (beta 1) to the target's own state there, mean over H. state, goal [R, H] -> [R].

    Source: Li et al. 2024 (EAGLE), section 4.2.
    """
    return F.smooth_l1_loss(state, goal, reduction="none").mean(-1)


TERMS: dict[str, Term] = {"ce": ce, "kl": kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}
FEATURE_TERMS: dict[str, FeatureTerm] = {"smooth_l1": smooth_l1}
NEEDS_TEACHER = TERMS.keys() - {"ce"}


def mixed_features(weights: dict[str, float], state: Tensor, goal: Tensor) -> Tensor:
    """The weighted sum of the terms on states, [R]; state, goal [R, H]."""
    total = torch.zeros(len(state), dtype=torch.float32, device=state.device)
    for name, weight in weights.items():
        if name in FEATURE_TERMS:
            total = total + weight * FEATURE_TERMS[name](state.float(), goal.float())
    return total


def learn(
    weights: dict[str, float],
    logits: Tensor,
    labels: Tensor,
    there: Tensor,
    teacher: Tensor | None,
    factors: Tensor,
    grade: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted terms on the logits of each depth, summed over rows, and how often the likeliest token was right.

    Args:
        weights: the method's `objective`.
        logits: [K, R, D]. In their place is left the gradient of `sum factors loss` in them, in their own dtype.
        labels: [R] draft ids. there: [K, R] bool, the rows that count.
        teacher: [R, D] the target's logits, for NEEDS_TEACHER.
        factors: [K].
        grade: `graded` compiled; None: as it is.

    Returns:
        loss [K] float32, without the factors; right [K] int64.
    """
    quick = _kernels(weights, logits, teacher)
    if quick is not None:
        return _learnt_by(quick, weights, logits, labels, there, teacher, factors)
    depths, rows, vocab = logits.shape
    # one block of rows after the other, so that what is float32 stays small, on a CPU in a core's cache
    size = min(rows, max(1, BLOCK // vocab)) if labels.device.type == "cpu" else rows
    grade = grade or partial(graded, room=_room(size, vocab, labels.device))
    loss = torch.zeros(depths, dtype=torch.float32, device=labels.device)
    right = torch.zeros_like(loss, dtype=torch.long)
    for start in range(0, rows, max(1, size)):
        block = slice(start, start + size)
        label, taught = labels[block], None if teacher is None else Taught.of(teacher[block])
        for k in range(depths):
            part, mask = logits[k, block], there[k, block]
            right[k] += _right(part, label, mask)
            loss[k] += (grade(weights, part, label, taught, mask * factors[k]) * mask).sum()
    return loss, right


def _kernels(weights: dict[str, float], logits: Tensor, teacher: Tensor | None) -> Library | None:
    """What can take the terms in one pass over a row while it lies in a core's cache; None: torch's operators."""
    there = [logits] if teacher is None else [logits, teacher]
    possible = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in there)
    rows_follow = logits.stride(0) == logits.shape[1] * logits.stride(1) or len(logits) == 1
    return kernels() if possible and rows_follow and weights.keys() & TERMS.keys() <= {"kl", "ce"} else None


def _learnt_by(
    functions: Library,
    weights: dict[str, float],
    logits: Tensor,
    labels: Tensor,
    there: Tensor,
    teacher: Tensor | None,
    factors: Tensor,
) -> tuple[Tensor, Tensor]:
    """`learn` by kernels.cpp."""
    depths, rows, vocab = logits.shape
    value, right = torch.empty(depths, rows), torch.empty(depths, rows, dtype=torch.bool)
    kl, ce = (weights.get(name, 0.0) for name in ("kl", "ce"))
    labels, there, factors = labels.contiguous(), there.contiguous(), factors.float().contiguous()
    taught = (0, 0) if teacher is None or not kl else (teacher.data_ptr(), teacher.stride(0))
    places = [part.data_ptr() for part in (labels, there, factors)]
    sizes = depths, rows, vocab, logits.stride(1), taught[1], torch.get_num_threads()
    functions.learn(value.data_ptr(), right.data_ptr(), logits.data_ptr(), taught[0], *places, *sizes, kl, ce)
    return value.sum(1), right.sum(1)


BLOCK = 1 << 18  # elements: a megabyte of float32


def _room(rows: int, vocab: int, device: torch.device) -> list[Tensor]:
    """Four times [rows, vocab]: memory that is new in every block costs more than what is computed in it."""
    return [torch.empty(rows, vocab, dtype=torch.float32, device=device) for _ in range(4)]


def scored(
    weights: dict[str, float],
    logits: Tensor,
    labels: Tensor,
    teacher: Taught | None,
    room: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the terms on logits [R, D], for each row [R], and its gradient in them [R, D]; float32.

    room: what `_room` gives, to compute in; the gradient lies there too.
    """
    logq, q, spare, gradient = (
        part[: len(logits)] for part in room or _room(len(logits), logits.shape[1], logits.device)
    )
    torch.log_softmax(spare.copy_(logits), -1, out=logq)
    drafted = Drafted(logq, torch.exp(logq, out=q), spare)
    gradient.zero_()
    value = torch.zeros_like(logq[:, 0])
    for name, weight in weights.items():  # in their order: sums in another have other bits
        if name in TERMS:
            value += weight * TERMS[name](drafted, labels, teacher, weight, gradient)
    return value, gradient


def graded(
    weights: dict[str, float],
    logits: Tensor,
    labels: Tensor,
    teacher: Taught | None,
    counted: Tensor,
    room: Sequence[Tensor] | None = None,
) -> Tensor:
    """`scored`, but the gradient, times counted [R], takes the place of the logits."""
    value, gradient = scored(weights, logits, labels, teacher, room)
    logits.copy_(gradient.mul_(counted[:, None]))
    return value


def _right(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """How many rows of the mask have their label as argmax; of equal logits the first id is drafted."""
    # most labels are not the highest, which is found much sooner than where it stands
    maybe = ((logits.gather(1, labels[:, None]) == logits.amax(-1, keepdim=True))[:, 0] & mask).nonzero()[:, 0]
    return (logits[maybe].max(-1).indices == labels[maybe]).sum()
