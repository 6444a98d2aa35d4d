"""eagle-llm: EAGLE-1, both directions. Its loader wants a GPU's half precision and the target beside it; its module is
loaded as that does it, strictly, with a copy of the target's embedding."""

import json
from pathlib import Path
from typing import Any

import torch
from asked import config_of, main, shaken
from eagle.model.cnets import Model
from eagle.model.configs import EConfig
from safetensors.torch import load_file


def read(asked: Any) -> Any:
    about = config_of(asked)
    model = Model(EConfig.from_pretrained(str(Path(asked.drafter) / "config.json")), bias=about["bias"])
    tensors = load_file(Path(asked.drafter) / "model.safetensors") | {"embed_tokens.weight": asked.embed}
    model.load_state_dict(tensors)
    return logits(model, asked)


def logits(model: Any, asked: Any) -> Any:
    found: list[list[torch.Tensor]] = [[] for _ in range(asked.depths)]
    for place in range(len(asked.ids) - asked.depths):  # as its `generate` drafts without a cache
        hidden, end = asked.last[None, : place + 1], place + 2
        for depth in range(asked.depths):
            out = model(hidden, asked.ids[None, 1 : end + depth])[:, -1:]
            found[depth].append(out[0, 0] @ asked.head.T)
            hidden = torch.cat([hidden, out], 1)
    return [torch.stack(rows) for rows in found], [-1]


def write(asked: Any) -> Any:
    sizes = {name: value for name, value in asked.sizes.items() if name != "rope_theta"}  # 10,000, whatever is said
    about = EConfig(num_hidden_layers=1, **sizes)
    model = Model(about, bias=True)
    shaken(model)
    model.embed_tokens.weight.data.copy_(asked.embed)
    folder = Path(asked.drafter)
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(about.to_dict() | {"bias": True}))
    return logits(model, asked)


main("eagle-llm", read, write)
