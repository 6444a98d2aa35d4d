"""medusa-llm: Medusa heads by its own trainer's loss, bfloat16 weights."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from learner import Learner, save_heads
from torch import Tensor, nn

# of this program's environment, and built for a newer numpy: transformers imports them where it finds them
sys.modules.update(dict.fromkeys(("datasets", "pandas", "pyarrow", "sklearn", "peft")))
for name in ("fastchat", "fastchat.conversation", "fastchat.model", "fastchat.model.model_adapter"):
    sys.modules[name] = MagicMock(__spec__=None, __path__=[])  # formats conversations, of which there are none here

import medusa.model.medusa_model as medusa  # noqa: E402
from medusa.train.train import CustomizedTrainer  # noqa: E402


def build(case: dict[str, Any]) -> Learner:
    medusa.AutoTokenizer = MagicMock()
    target = Target(case)
    model = medusa.MedusaModel(target, case["depths"], 1)
    optimizer = torch.optim.AdamW(model.medusa_head.parameters(), lr=1e-3)  # its `optim`, adamw_torch
    trainer = SimpleNamespace(log=lambda figures: None)

    def given(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        target.last = batch["last"]
        labels = batch["ids"].masked_fill(~batch["supervised"], -100)
        return {"input_ids": batch["ids"], "attention_mask": batch["real"], "labels": labels}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return CustomizedTrainer.compute_loss(trainer, model, given)

    def save(folder: Path) -> None:
        save_heads(folder, case["depths"], model.medusa_head.state_dict())

    return Learner(given, loss, optimizer, save=save)


class Target(nn.Module):
    """In the place of the target: its output head, and the states its layers would compute."""

    dtype, device = torch.bfloat16, torch.device("cpu")
    last: Tensor

    def __init__(self, case: dict[str, Any]):
        super().__init__()
        self.config = None
        self.lm_head = nn.Linear(*case["head"].T.shape, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(case["head"], requires_grad=False)
        self.model = lambda **inputs: (self.last,)
