"""speculators: EAGLE-3 and MTP, both directions. What its training forward has of `lm_head` is recorded."""

from typing import Any

import torch
from asked import main, recorded, shaken
from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config


def read(asked: Any) -> Any:
    config = SpeculatorModelConfig.from_pretrained(asked.drafter)
    config.transformer_layer_config._attn_implementation = "eager"  # its default runs on a GPU only
    return logits(SpeculatorModel.from_pretrained(asked.drafter, config=config).float(), asked)


def logits(model: Any, asked: Any) -> Any:
    taps = list(model.target_layer_ids)
    found = recorded(model.lm_head)
    hidden = torch.cat([asked.states[tap] for tap in taps], -1)[None]
    if asked.method == "mtp":
        model(input_ids=asked.ids[None], hidden_states=hidden)
        return found, taps
    ids = asked.ids[None, 1:]  # its collator pairs a state with the id that follows
    model(hidden[:, :-1], ids, torch.zeros_like(ids), ttt_steps=asked.depths)
    return found, taps


def write(asked: Any) -> Any:
    kind = Qwen3Config if asked.method == "mtp" else LlamaConfig
    # MTP takes from it the number of the layer whose state it reads
    layer = kind(num_hidden_layers=asked.layers if asked.method == "mtp" else 1, **asked.sizes)
    if asked.method == "mtp":
        proposal = GreedyTokenProposalConfig(speculative_tokens=asked.depths)
        about = SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(asked.target),
        )
        layer._attn_implementation = "eager"
        model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=about))
        model.load_verifier_weights()
        shaken(model.mtp_layers)
    else:
        ids = torch.tensor(asked.vocabulary)
        known = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        model = Eagle3DraftModel.from_training_args(
            layer,
            t2d=known,
            d2t=ids - torch.arange(len(ids)),
            draft_vocab_size=len(ids),
            norm_before_residual=False,
            ttt_steps=asked.depths,
            target_layer_ids=asked.taps,
            verifier_name_or_path=asked.target,
            draft_attn_impl="eager",
        )
        for part in (model.fc, model.layers, model.norm, model.lm_head):
            shaken(part)
    model.float().save_pretrained(asked.drafter)
    return logits(model.eval(), asked)


main("speculators", read, write)
