"""What the adapters step_*.py build, and the optimiser step that all of them take. Knows torch; no package."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Learner:
    """A drafter, as a package trains it.

    given: of a batch, what the package's own loader hands to `loss`. loss: a scalar, in the precision it trains in.
    optimizer: as the package makes it, of what learns. clip: largest norm of the gradient.
    save: writes the drafter into a folder that scripts/convert.py reads; None where that is asked of nobody yet.
    """

    given: Callable[[dict[str, Tensor]], Any]
    loss: Callable[[Any], Tensor]
    optimizer: Any
    clip: float = 1.0
    save: Callable[[Path], object] | None = None

    def step(self, given: Any) -> Tensor:
        loss = self.loss(given)
        loss.backward()
        learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(learning, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def save_heads(folder: Path, heads: int, tensors: Mapping[str, Tensor]) -> None:
    """Medusa heads of one block, as the official code saves them: {head}.0.linear.{weight,bias}, {head}.1.weight."""
    folder.mkdir(parents=True)
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
