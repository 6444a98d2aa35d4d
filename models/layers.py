"""Layers that several drafters are made of. Knows no method."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """L residual layers x + SiLU(W x + b), each with its own weights and the identity at the start (W = 0, b = 0).

    Source: Medusa (Cai et al. 2024), section 2.1; there the bias starts random, so a fresh head is not the identity.
    """

    def __init__(self, hidden: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def checked_map(vocab_map: Tensor, vocab: int) -> Tensor:
    """A draft vocabulary as every drafter stores it: [D] int64, ascending, each id once and below `vocab`."""
    ids = torch.as_tensor(vocab_map, dtype=torch.long)
    if ids.ndim != 1 or len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise ValueError(f"a draft vocabulary is an ascending list of distinct ids below {vocab}")
    return ids.clone()
