"""economize: EAGLE-3 and Medusa, by its own readers. It writes neither of these formats."""

from pathlib import Path
from typing import Any

import economize
import torch
from asked import main
from transformers import AutoModelForCausalLM


def read(asked: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(asked.target, dtype=torch.float32)
    model = economize.attach(base, economize.read_checkpoint(Path(asked.drafter)))
    technique = model.techniques[asked.method]
    if asked.method == "medusa":
        logits = technique.head_logits(asked.states[-1])  # it applies the final norm itself
        return list(logits.unbind(-2)), [-1]
    taps = list(technique.aux_layers)
    hidden = {layer: asked.states[layer][None] for layer in {0, *taps}}
    states = technique.rollout(hidden, asked.depths)
    return [technique.head_logits(state)[0] for state in states], taps


main("economize", read)
