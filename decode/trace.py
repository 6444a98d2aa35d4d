"""What a round drafted, what the target thought of each node, what was kept. Knows trees and logits, not their makers.

Legend: B rows, N tree nodes, V target ids.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.decode.sampler import Sampler
from paceline.decode.tree import DraftTree
from paceline.decode.verify import Verdict


@dataclass(frozen=True)
class Round:
    """One row's round, in plain types; node 0 is the root, a token the target had already chosen.

    tokens, parents: of each node, as in DraftTree. draft: the drafter's probability of each node's token after its
    parent, target: the target's own there, both None for the root. path: the accepted nodes that were emitted, root
    first. new: the tokens emitted, first the accepted drafts; where the text went on, last the target's own.
    own: the target's probability of that last token; None where the text was cut before it. corrected: it stands where
    drafts were refused, not behind the last of them. left_out: nodes that are not listed.
    """

    tokens: list[int]
    parents: list[int]
    draft: list[float | None]
    target: list[float | None]
    path: list[int]
    new: list[int]
    own: float | None
    corrected: bool
    left_out: int = 0

    def emitted(self, tokens: list[int], drafted: int) -> "Round":
        """The same, of which only `tokens` were emitted, the first `drafted` of them drafts."""
        own = self.own if len(tokens) > drafted else None
        return replace(self, path=self.path[: drafted + 1], new=tokens, own=own)

    def likeliest(self, most: int) -> "Round":
        """The same with at most so many nodes: the accepted path and those the drafter thought likeliest."""
        joint: list[float] = []
        for parent, own in zip(self.parents, self.draft, strict=True):
            joint.append(1.0 if own is None else joint[parent] * own)
        # a node is never likelier than its parent, and stands behind it: whoever stays has its parent there
        order = sorted(range(len(joint)), key=lambda node: (node not in self.path, -joint[node], node))
        stay = sorted(order[: max(most, len(self.path))])
        place = {node: new for new, node in enumerate(stay)} | {-1: -1}
        return replace(
            self,
            tokens=[self.tokens[node] for node in stay],
            parents=[place[self.parents[node]] for node in stay],
            draft=[self.draft[node] for node in stay],
            target=[self.target[node] for node in stay],
            path=[place[node] for node in self.path],
            left_out=self.left_out + len(joint) - len(stay),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rounds(tree: DraftTree, logits: Tensor, verdict: Verdict, sampler: Sampler) -> list[Round]:
    """A Round for each row. logits: [B, N, V] of the target at the nodes.

    The target's probabilities are those it samples from; where it is greedy, those of its logits as they are.
    """
    p = logits.float().softmax(-1) if sampler.greedy else sampler.probs(logits)
    parents = tree.parents.clamp(min=0)
    target = p[torch.arange(len(p), device=p.device)[:, None], parents, tree.tokens]
    draft = (tree.logp - tree.logp.gather(1, parents)).exp()
    out = []
    for row, (path, bonus) in enumerate(zip(verdict.paths, verdict.bonus, strict=True)):
        size = int(tree.size[row])
        tokens, above = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
        out.append(
            Round(
                tokens,
                above,
                draft=[None, *_rounded(draft[row, 1:size])],
                target=[None, *_rounded(target[row, 1:size])],
                path=path,
                new=[*(tokens[node] for node in path[1:]), bonus],
                own=round(float(p[row, path[-1], bonus]), 4),
                corrected=path[-1] in above,
            )
        )
    return out


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
