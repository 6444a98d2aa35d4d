"""speculators: EAGLE-3 over packed documents and MTP over rows, float32 weights under bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import torch
from learner import Learner
from speculators import SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.core import compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

Given = Callable[[dict[str, Tensor]], dict[str, Any]]


def build(case: dict[str, Any]) -> Learner:
    model, given = (eagle3 if case["method"] == "eagle3" else mtp)(case)
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss(given: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**given)[1]

    return Learner(given, loss, torch.optim.AdamW(learning, lr=1e-4), save=model.save_pretrained)


def eagle3(case: dict[str, Any]) -> tuple[nn.Module, Given]:
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
    # Triton's `fused`, the usual one, is for GPUs
    always = {"ttt_steps": case["depths"], "loss_config": resolve_loss_config("kl_div", "eager")}

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        """Its data loader shifts each document by one, and lays one behind the other."""
        lengths = batch["real"].sum(1).tolist()

        def laid(rows: Tensor, first: int) -> Tensor:
            return torch.cat([row[first : first + n - 1] for row, n in zip(rows, lengths, strict=True)])[None]

        return always | {
            "input_ids": laid(batch["ids"], 1),
            "hidden_states": laid(batch["taps"], 0).float(),
            "loss_mask": laid(batch["supervised"], 1),
            "verifier_last_hidden_states": laid(batch["trunk"], 1).float(),
            "document_ids": torch.cat([torch.full((n - 1,), d) for d, n in enumerate(lengths)])[None],
            "position_ids": torch.cat([torch.arange(1, n) for n in lengths])[None],
        }

    return model, given


def mtp(case: dict[str, Any]) -> tuple[nn.Module, Given]:
    """Its only layers are Qwen3's: one of the same size, with the norms over q and k that ours has here too."""
    layer = Qwen3Config(**case["config"] | {"num_hidden_layers": 1})
    layer._attn_implementation = "sdpa"
    described_ = described("mtp", case["depths"])
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=described_))
    model.embed_tokens.weight.data.copy_(case["head"])
    model.lm_head.weight.data.copy_(case["head"])
    del model.verifier_lm_head  # as its loading does
    weights = compute_step_weights(beta=0.6, num_steps=case["depths"])

    def given(batch: dict[str, Tensor]) -> dict[str, Any]:
        rows = {"input_ids": batch["ids"], "hidden_states": batch["last"].float(), "step_weights": weights}
        rows["loss_mask"] = batch["supervised"].long()
        return rows if bool(batch["real"].all()) else rows | {"attention_mask": batch["real"].long()}

    return model, given


def described(algorithm: str, depths: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depths)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
