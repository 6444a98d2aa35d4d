"""Loss terms: each maps what was drafted to one number per row. Knows no drafter, batch or depth.

Sums and counts stay apart until the trainer divides them, once, over all processes and accumulated parts.

    Legend: R supervised rows, D draft vocabulary, H hidden.
    Everything here is float32: p_draft - p_target cancels in bf16.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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


Term = Callable[[Tensor, Tensor, Taught | None], Tensor]
FeatureTerm = Callable[[Tensor, Tensor], Tensor]


def ce(logits: Tensor, labels: Tensor, teacher: Taught | None) -> Tensor:
    """Cross-entropy to the text's own next token. logits [R, D], labels [R] draft ids -> [R] nats."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def kl(logits: Tensor, labels: Tensor, teacher: Taught | None) -> Tensor:
    """KL(target || draft), [R] nats; the gradient is q - p."""
    assert teacher is not None
    return teacher.plogp - (teacher.p * F.log_softmax(logits, -1, dtype=torch.float32)).sum(-1)


def reverse_kl(logits: Tensor, labels: Tensor, teacher: Taught | None) -> Tensor:
    """KL(draft || target), [R] nats: the draft leaves out what the target would hardly say.

    Source: Zhou et al. 2024 (DistillSpec), section 4.
    """
    assert teacher is not None
    logq = F.log_softmax(logits, -1, dtype=torch.float32)
    return (logq.exp() * (logq - teacher.logp)).sum(-1)


def tv(logits: Tensor, labels: Tensor, teacher: Taught | None) -> Tensor:
    """Total variation of target and draft, [R], 0 to 1: one minus the chance that a draft drawn from q is accepted,
    sum min(p, q). Its gradient is small where they hardly overlap: start from something trained, or mix it with kl.

    Source: Leviathan et al. 2023, corollary 3.6; as a loss Zhou et al. 2024 (DistillSpec).
    """
    return -torch.expm1(-lk(logits, labels, teacher))


def lk(logits: Tensor, labels: Tensor, teacher: Taught | None) -> Tensor:
    """-log of that chance, [R] nats: the gradient of `tv`, the larger the smaller the chance.

    Source: Samarin et al. 2026 (LK losses), the likelihood variant.
    """
    assert teacher is not None
    logq = F.log_softmax(logits, -1, dtype=torch.float32)
    return -torch.minimum(teacher.logp, logq).logsumexp(-1)


def smooth_l1(state: Tensor, goal: Tensor) -> Tensor:
    """Huber loss (beta 1) to the target's own state there, mean over H. state, goal [R, H] -> [R].

    Source: Li et al. 2024 (EAGLE), section 4.2.
    """
    return F.smooth_l1_loss(state, goal, reduction="none").mean(-1)


TERMS: dict[str, Term] = {"ce": ce, "kl": kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}
FEATURE_TERMS: dict[str, FeatureTerm] = {"smooth_l1": smooth_l1}
NEEDS_TEACHER = TERMS.keys() - {"ce"}


def mixed(
    weights: dict[str, float], logits: Tensor, labels: Tensor, teacher: Taught | None, state: Tensor, goal: Tensor
) -> Tensor:
    """The weighted sum of terms, [R]. weights: the method's `objective`. state, goal [R, H]: for FEATURE_TERMS."""
    total = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    for name, weight in weights.items():
        if name in FEATURE_TERMS:
            total = total + weight * FEATURE_TERMS[name](state.float(), goal.float())
        else:
            total = total + weight * TERMS[name](logits, labels, teacher)
    return total
