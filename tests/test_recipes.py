"""The recipes for large targets compose, train on a small one, and cost what they say."""

import math
from pathlib import Path

import pytest
import torch
from runs import checkpoint_of_target, config, metrics

from paceline.conf.entry import load
from paceline.data.features import bytes_a_token
from paceline.models.drafter import Shape, build
from paceline.models.layers import LayerOptions
from paceline.train.loop import fit

CONF = Path(__file__).parent.parent / "conf"
# hidden, layers, vocabulary; heads, key heads, intermediate; head_dim is 128 in all
SIZES = {
    "llama31_8b": ((4096, 32, 128256), (32, 8, 14336)),
    "qwen3_8b": ((4096, 36, 151936), (32, 8, 12288)),
    "llama33_70b": ((8192, 80, 128256), (64, 8, 28672)),
}
LLAMA3 = {"activation": "silu", "eps": 1e-5, "rope": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_says_what_it_costs_and_trains_on_a_small_target(
    name: str, tmp_path: Path, target_folder: Path
) -> None:
    recipe = load("eagle", f"experiment={name}", f"data.path={target_folder}/data.jsonl")
    hidden, layers, vocabulary = SIZES[name][0]
    heads, kv_heads, intermediate = SIZES[name][1]
    parts = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "intermediate": intermediate, **LLAMA3}
    parts |= dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False) | {"qk_norm": name == "qwen3_8b"}
    method = recipe.method.model_copy(update={"layer": LayerOptions(**parts), "draft_vocab": None})
    assert recipe.method.draft_vocab < vocabulary
    with torch.device("meta"):  # with a vocabulary that is as large as the draft's
        drafter = build(method, Shape(hidden, layers, recipe.method.draft_vocab))
    millions = round(sum(p.numel() for p in drafter.parameters()) / 1e6)
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert f"{millions} M parameters" in text
    kilobytes = math.ceil(bytes_a_token(method.taps, hidden, 2) / 1000)
    assert f"{kilobytes} kB a token" in text
    assert all(0 <= tap < layers for tap in method.taps)

    small = [
        f"experiment={name}",
        "target.quantize=none",
        "method.taps=[0,1,2]",
        "train.steps=null",
        "train.tokens=300",
    ]
    small += ["train.compile=false", "data.max_length=64", "data.features=memory"]
    fit(config(tmp_path, target_folder, *small, program="eagle"))
    assert metrics(tmp_path / "run")[-1]["step"] == 2
