"""medusa-llm: Medusa heads by its own trainer's loss, bfloat16 weights."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

# of this program's environment, and built for a newer numpy: transformers imports them where it finds them
sys.modules.update(dict.fromkeys(("datasets", "pandas", "pyarrow", "sklearn", "peft")))
for name in ("fastchat", "fastchat.conversation", "fastchat.model", "fastchat.model.model_adapter"):
    sys.modules[name] = MagicMock(__spec__=None, __path__=[])  # formats conversations, of which there are none here

import medusa.model.medusa_model as medusa  # noqa: E402
from medusa.train.train import CustomizedTrainer  # noqa: E402


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
    medusa.AutoTokenizer = MagicMock()
    model = medusa.MedusaModel(Given(case), case["depths"], 1)
    learning = list(model.medusa_head.parameters())
    optimizer = torch.optim.AdamW(learning, lr=1e-3)  # its `optim`, adamw_torch
    labels = case["ids"].masked_fill(~case["supervised"], -100)
    inputs = {"input_ids": case["ids"], "attention_mask": case["real"], "labels": labels}
    trainer = SimpleNamespace(log=lambda figures: None)

    def step() -> Tensor:
        loss = CustomizedTrainer.compute_loss(trainer, model, inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Given(nn.Module):
    """In the place of the target: its output head, and the states its layers would compute."""

    dtype, device = torch.bfloat16, torch.device("cpu")

    def __init__(self, case: dict[str, Any]):
        super().__init__()
        self.config = None
        self.lm_head = nn.Linear(*case["head"].T.shape, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(case["head"], requires_grad=False)
        self.model = lambda **inputs: (case["last"],)
