"""speculators: EAGLE-3 over packed documents and MTP over rows, float32 weights under bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import torch
from speculators import SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.core import compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config


def build(case: dict[str, Any]) -> Callable[[], Tensor]:
    model, inputs = (eagle3 if case["method"] == "eagle3" else mtp)(case)
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-4)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(**inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eagle3(case: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    layer = LlamaConfig(**case["config"] | {"num_hidden_layers": 1})
    layer._attn_implementation = "sdpa"  # flex attention, the usual one, has no backward pass on a CPU
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(case["vocab_map"]),
        eagle_aux_hidden_state_layer_ids=case["taps_at"],
        speculators_config=described("eagle3", case["depths"]),
    )
    model, ids = Eagle3DraftModel(config), case["vocab_map"]
    known = torch.zeros(case["config"]["vocab_size"], dtype=torch.bool)
    known[ids] = True
    model.load_vocab_mappings(known, ids - torch.arange(len(ids)))
    model.embed_tokens.weight.data.copy_(case["head"])
    model.verifier_norm.weight.data.copy_(case["norm"])
    for head in (model.lm_head, model.verifier_lm_head):
        head.weight.data.copy_(case["head"][ids])
    # its data loader shifts each document by one, and lays one behind the other
    lengths = case["real"].sum(1).tolist()
    whole = {"input_ids": (case["ids"], 1), "hidden_states": (case["taps"], 0), "loss_mask": (case["supervised"], 1)}
    whole["verifier_last_hidden_states"] = (case["trunk"], 1)
    inputs = {
        name: torch.cat([row[first : first + length - 1] for row, length in zip(part, lengths, strict=True)])[None]
        for name, (part, first) in whole.items()
    }
    inputs["hidden_states"] = inputs["hidden_states"].float()
    inputs["verifier_last_hidden_states"] = inputs["verifier_last_hidden_states"].float()
    inputs["document_ids"] = torch.cat([torch.full((length - 1,), d) for d, length in enumerate(lengths)])[None]
    inputs["position_ids"] = torch.cat([torch.arange(1, length) for length in lengths])[None]
    # Triton's `fused`, the usual one, is for GPUs
    inputs |= {"ttt_steps": case["depths"], "loss_config": resolve_loss_config("kl_div", "eager")}
    return model, inputs


def mtp(case: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Its only layers are Qwen3's: one of the same size, with the norms over q and k that ours has here too."""
    layer = Qwen3Config(**case["config"] | {"num_hidden_layers": 1})
    layer._attn_implementation = "sdpa"
    described_ = described("mtp", case["depths"])
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=described_))
    model.embed_tokens.weight.data.copy_(case["head"])
    model.lm_head.weight.data.copy_(case["head"])
    del model.verifier_lm_head  # as its loading does
    inputs = {"input_ids": case["ids"], "hidden_states": case["last"].float(), "loss_mask": case["supervised"].long()}
    if not bool(case["real"].all()):
        inputs["attention_mask"] = case["real"].long()
    return model, inputs | {"step_weights": compute_step_weights(beta=0.6, num_steps=case["depths"])}


def described(algorithm: str, depths: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depths)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
