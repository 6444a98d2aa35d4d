"""medusa-llm: Medusa, both directions, by its own loader and on its own target."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from asked import main, shaken
from medusa.model.medusa_model import MedusaConfig, MedusaModel


def readable(target: str, to: Path) -> Path:
    """A copy of the target that transformers 4.46 reads."""
    shutil.copytree(target, to)
    for name, change in (
        ("config.json", {}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        about = json.loads((to / name).read_text())
        rope = about.pop("rope_parameters", {})
        theta = {"rope_theta": rope["rope_theta"]} if rope else {}
        (to / name).write_text(json.dumps(about | theta | change))
    return to


def opened(asked: Any, folder: Path) -> MedusaModel:
    about = json.loads((folder / "config.json").read_text())
    about["base_model_name_or_path"] = str(readable(asked.target, asked.place / "target"))
    (folder / "config.json").write_text(json.dumps(about))
    return MedusaModel.from_pretrained(str(folder), torch_dtype=torch.float32).eval()


def read(asked: Any) -> Any:
    copy = asked.place / "copy"
    shutil.copytree(asked.drafter, copy)
    return logits(opened(asked, copy), asked)


def logits(model: MedusaModel, asked: Any) -> Any:
    return list(model(asked.ids[None])[:, 0].clone()), [-1]


def write(asked: Any) -> Any:
    folder = Path(asked.drafter)
    MedusaConfig(medusa_num_heads=asked.depths, medusa_num_layers=1).save_pretrained(folder)
    torch.save({}, folder / "medusa_lm_head.pt")
    model = opened(asked, folder)
    shaken(model.medusa_head)
    torch.save(model.medusa_head.state_dict(), folder / "medusa_lm_head.pt")
    return logits(model, asked)


main("medusa-llm", read, write)
