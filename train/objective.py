"""Loss terms: each maps draft logits to one number per row. Knows no drafter, batch or depth.

Sums and counts stay apart until the trainer divides them, once, over all processes and accumulated parts.

    Legend: R supervised rows, D draft vocabulary. Everything here is float32: p_draft - p_target cancels in bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Term = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def ce(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """Cross-entropy to the text's own next token. logits [R, D], labels [R] draft ids -> [R] nats."""
    return F.cross_entropy(logits, labels, reduction="none")


def kl(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """KL(target || draft), [R] nats. teacher [R, D]: the target's log-probabilities over the draft vocabulary."""
    assert teacher is not None
    return F.kl_div(F.log_softmax(logits, -1), teacher, reduction="none", log_target=True).sum(-1)


TERMS: dict[str, Term] = {"ce": ce, "kl": kl}
NEEDS_TEACHER = frozenset({"kl"})


def mixed(weights: dict[str, float], logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """The weighted sum of terms, [R]. `weights` is the method's `objective`."""
    logits = logits.float()
    total = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    for name, weight in weights.items():
        total = total + weight * TERMS[name](logits, labels, teacher)
    return total
