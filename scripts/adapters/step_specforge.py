"""specforge: EAGLE-3 from stored hidden states with its compact teacher, bfloat16 weights and float32 masters.

Its loss is a Triton kernel, so the reference implementation beside it takes its place where there is no GPU.
"""

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # inductor stumbles over what stands in for Triton

import torch
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


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
    config = LlamaConfig(**case["config"], draft_vocab_size=len(case["vocab_map"]))
    config.pad_token_id, config.norm_output = None, True
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(torch.bfloat16)
    drafter.embed_tokens.weight.data.copy_(case["head"])
    drafter.embed_tokens.weight.requires_grad_(False)
    drafter.lm_head.weight.data.copy_(case["head"][case["vocab_map"]])
    drafter.d2t.copy_(case["vocab_map"] - torch.arange(len(case["vocab_map"])))
    drafter.t2d.zero_()[case["vocab_map"]] = True
    model = eagle3.OnlineEagle3Model(drafter, length=case["depths"]).train()
    optimizer = BF16Optimizer(model, lr=1e-4)
    # what predicts is the row before: the states of t with the token at t + 1, as its own data loader shifts them
    shifted = [torch.cat([part[:, 1:], torch.zeros_like(part[:, :1])], 1) for part in (case["ids"], case["last"])]
    counted = torch.cat([case["supervised"][:, 1:], torch.zeros_like(case["supervised"][:, :1])], 1)

    def step() -> Tensor:
        losses, *_ = model(
            input_ids=shifted[0],
            attention_mask=case["real"],
            loss_mask=counted[..., None].int(),
            target=None,
            hidden_states=case["taps"],
            target_hidden_for_compact=shifted[1],
            target_head_weight=case["head"],
        )
        loss = sum(0.8**k * part for k, part in enumerate(losses))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
