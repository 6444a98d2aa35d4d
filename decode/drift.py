"""How far a trained trunk has moved from what it was: two targets, asked the same. Knows token ids only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from paceline.models.target import Target

DRIFT = {
    "mean_kl": "KL(original || trained trunk) in nats, mean over all tokens of the trained trunk's own answers",
    "greedy_agreement_rate": "tokens of these answers before which both find the same one likeliest / all of them",
}


@dataclass(frozen=True)
class Drift:
    """Sums over tokens of a text: KL(original || trunk) in nats, and where both would greedily say the same."""

    kl: float = 0.0
    agree: int = 0
    tokens: int = 0

    def __add__(self, other: "Drift") -> "Drift":
        return Drift(self.kl + other.kl, self.agree + other.agree, self.tokens + other.tokens)

    def as_dict(self) -> dict[str, Any]:
        """The means of `DRIFT`, None where there was no token, and the `tokens` they are over."""
        n = self.tokens
        return {
            "mean_kl": self.kl / n if n else None,
            "greedy_agreement_rate": self.agree / n if n else None,
            "tokens": n,
        }


@torch.no_grad()
def drift(original: Target, trunk: Target, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Drift:
    """Over the answers of (prompt, answer) texts, each read as a whole, one after another."""
    found = Drift()
    for prompt, answer in texts:
        if not answer:
            continue
        ids = torch.tensor([[*prompt, *answer]], device=trunk.device)
        # [p0 p1 | a0 a1]: before a0 stands p1
        before = slice(len(prompt) - 1, ids.shape[1] - 1)
        ours, theirs = (model.head(model(ids)[1][0, before])[:, : trunk.vocab].float() for model in (trunk, original))
        logq, logp = F.log_softmax(ours, -1), F.log_softmax(theirs, -1)
        kl = F.kl_div(logq, logp, reduction="sum", log_target=True)
        found += Drift(float(kl), int((ours.argmax(-1) == theirs.argmax(-1)).sum()), len(answer))
    return found
