"""specforge: EAGLE-3 from stored hidden states with its compact teacher, bfloat16 weights and float32 masters.

Its loss is a Triton kernel, so the reference implementation beside it takes its place where there is no GPU.
"""

import os
import sys
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # inductor stumbles over what stands in for Triton

import torch
from learner import Learner
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel  # noqa: F401, what of transformers asks for Triton has to come first

for name in ("triton", "triton.language"):
    sys.modules[name] = MagicMock(__spec__=None, __path__=[])

import specforge.algorithms.eagle3.model as eagle3  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from specforge.optimizer import BF16Optimizer  # noqa: E402


class Reference:
    apply = staticmethod(_compute_loss)


eagle3.LogSoftmaxLoss = Reference


SHIFTED = ("ids", "supervised", "last")


def build(case: dict[str, Any]) -> Learner:
    config = LlamaConfig(**case["config"], draft_vocab_size=len(case["vocab_map"]))
    config.pad_token_id, config.norm_output = None, True
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(torch.bfloat16)
    drafter.embed_tokens.weight.data.copy_(case["head"])
    drafter.embed_tokens.weight.requires_grad_(False)
    drafter.lm_head.weight.data.copy_(case["head"][case["vocab_map"]])
    drafter.d2t.copy_(case["vocab_map"] - torch.arange(len(case["vocab_map"])))
    drafter.t2d.zero_()[case["vocab_map"]] = True
    model = eagle3.OnlineEagle3Model(drafter, length=case["depths"]).train()

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        # what predicts is the row before: the states of t with the token at t + 1, as its own data loader shifts them
        shifted = {name: torch.cat([batch[name][:, 1:], torch.zeros_like(batch[name][:, :1])], 1) for name in SHIFTED}
        return {
            "input_ids": shifted["ids"],
            "attention_mask": batch["real"],
            "loss_mask": shifted["supervised"][..., None].int(),
            "target": None,
            "hidden_states": batch["taps"],
            "target_hidden_for_compact": shifted["last"],
            "target_head_weight": case["head"],
        }

    def loss(given: dict[str, Any]) -> Tensor:
        losses, *_ = model(**given)
        return sum(0.8**k * part for k, part in enumerate(losses))

    return Learner(given, loss, Optimizer(model, lr=1e-4))


class Optimizer(BF16Optimizer):
    """Its own, whose step clips the gradients, and forgets them, by itself."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # of the float32 masters

    def zero_grad(self) -> None:
        pass
