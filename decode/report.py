"""Acceptance as integer counts, every rate derived from them. Knows no decoder: rounds are added, reports are summed.

Names and definitions follow vLLM's; the prefill pass and the token it yields are no round.
"""

from dataclasses import dataclass, field

# Printed beside the numbers wherever they are shown.
DEFINITIONS = {
    "mean_acceptance_length": "tokens emitted per target pass, the bonus token included (1.0: drafts never helped)",
    "draft_acceptance_rate": "accepted draft tokens / proposed draft tokens (a tree proposes all its nodes)",
    "per_position_acceptance_rate": "rounds that accepted at least i draft tokens / all rounds (unconditional)",
    "conditional_acceptance_rate": "rounds that accepted >= i / rounds that accepted >= i-1 and were offered an i-th",
}


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass
class AcceptanceReport:
    """Additive counts over rounds.

    accepted[i]: rounds that accepted at least i draft tokens (accepted[0] = rounds).
    offered[i]: rounds that accepted at least i-1 and offered an i-th draft after those.
    nodes: draft tokens proposed. rounds: target passes that verified (or merely decoded). emitted: tokens they gave.
    """

    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    nodes: int = 0
    rounds: int = 0
    emitted: int = 0

    def add(self, accepted: int, offered: int, nodes: int, emitted: int, depth: int = 0) -> None:
        """Count one round: drafts accepted, offered along the accepted path, proposed in all; tokens emitted.

        depth: of the deepest draft, accepted or not: how many positions are told apart.

        A round ended by EOS, a stop string or the limit hands in only what lies at or before the cut.
        """
        self.rounds += 1
        self.nodes += nodes
        self.emitted += emitted
        self._widen(max(accepted, offered, depth) + 1)
        for i in range(accepted + 1):
            self.accepted[i] += 1
        for i in range(1, min(offered, accepted + 1) + 1):
            self.offered[i] += 1

    def __add__(self, other: "AcceptanceReport") -> "AcceptanceReport":
        total = AcceptanceReport(list(self.accepted), list(self.offered), self.nodes, self.rounds, self.emitted)
        total._widen(max(len(other.accepted), len(other.offered)))
        for mine, theirs in ((total.accepted, other.accepted), (total.offered, other.offered)):
            for i, count in enumerate(theirs):
                mine[i] += count
        total.nodes += other.nodes
        total.rounds += other.rounds
        total.emitted += other.emitted
        return total

    def _widen(self, width: int) -> None:
        for counts in (self.accepted, self.offered):
            counts.extend([0] * (width - len(counts)))

    # vLLM's counters

    @property
    def num_drafts(self) -> int:
        return self.rounds

    @property
    def num_draft_tokens(self) -> int:
        return self.nodes

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        return self.accepted[1:]

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted[1:])

    # rates

    @property
    def mean_acceptance_length(self) -> float | None:
        return _rate(self.emitted, self.rounds)

    @property
    def draft_acceptance_rate(self) -> float | None:
        return _rate(self.num_accepted_tokens, self.nodes)

    @property
    def per_position_acceptance_rate(self) -> list[float | None]:
        return [_rate(count, self.rounds) for count in self.accepted[1:]]

    @property
    def conditional_acceptance_rate(self) -> list[float | None]:
        return [_rate(count, offered) for count, offered in zip(self.accepted[1:], self.offered[1:], strict=True)]

    def as_dict(self) -> dict:
        """The `acceptance` part of report.json."""
        names = (
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_accepted_tokens_per_pos",
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "per_position_acceptance_rate",
            "conditional_acceptance_rate",
        )
        return {name: getattr(self, name) for name in names}
