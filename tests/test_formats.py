"""Checkpoints of others: what the official layouts hold, and what is refused of them, by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import target_of
from runs import checkpoint_of_target, config
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.drafter import Context, Drafter, Shape, build
from paceline.models.eagle import EagleOptions
from paceline.models.errors import Refusal
from paceline.models.export import save_export
from paceline.models.formats import eagle
from paceline.models.streams import TreeKeys
from paceline.models.target import Target
from paceline.models.warm import warm_start

VOCABULARY = torch.tensor([0, 2, 3, 7, 11, 30, 31, 63])


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama", num_hidden_layers=8)


def drafter_of(target: Target, wide: bool, more: dict[str, Any] | None = None) -> Drafter:
    """One of ours with random weights, with the official convention of rope."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | (more or {})
    kind: dict[str, Any] = {"join": "attention"} if wide else {"join": "fc", "output": "shared", "fc_bias": True}
    ids = VOCABULARY if wide else None
    options = EagleOptions(name="eagle", draft_vocab=None if ids is None else 8, layer={"rope": rope}, **kind)
    drafter = build(options.fitted(target), Shape.of(target), ids).eval()
    drafter.borrow(target)
    return drafter


def checkpoint(folder: Path, target: Target, drafter: Drafter, suffix: str = "safetensors", **more: Any) -> Path:
    """The drafter as an official checkpoint, which holds a copy of the embedding too."""
    layer = drafter.options.layer
    folder.mkdir(exist_ok=True)
    about = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "intermediate_size": layer.intermediate,
        "rms_norm_eps": layer.eps,
        "hidden_act": "silu",
        **more,
    }
    (folder / "config.json").write_text(json.dumps(about))
    tensors = dict(drafter.state_dict()) | {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach()}
    if suffix == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


@torch.no_grad()
def logits(drafter: Drafter, target: Target) -> Tensor:
    ids = torch.arange(12)[None]
    hidden, _ = target(ids, drafter.taps)
    ctx = Context(ids, torch.tensor([12]), TreeKeys(1, 12))
    return drafter.head(drafter.step(drafter.read(hidden), ids.roll(-1, 1), 0, ctx)[1], 0)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("wide", [True, False], ids=["eagle3", "eagle"])
def test_an_official_checkpoint_drafts_what_it_did(target: Target, wide: bool, suffix: str, tmp_path: Path) -> None:
    ours = drafter_of(target, wide)
    read = eagle.load(checkpoint(tmp_path / "official", target, ours, suffix), target)
    assert torch.equal(logits(read, target), logits(ours, target))
    assert read.taps == ours.taps == ((2, 4, 5) if wide else (-1,))


def test_other_names_of_the_same_things_are_read(target: Target, tmp_path: Path) -> None:
    ours = drafter_of(target, True)
    folder = checkpoint(tmp_path / "official", target, ours, rope_parameters={"rope_theta": 500.0})
    tensors = load_file(folder / "model.safetensors")
    del tensors["t2d"]  # only the official code has it
    save_file({name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}, folder / "model.safetensors")
    read = eagle.load(folder, target)
    assert read.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert read.options.layer.rope == {"rope_type": "default", "rope_theta": 500.0}
    # vLLM counts layers passed, SGLang names the last of them
    for key in (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
    ):
        assert eagle.load(checkpoint(tmp_path / "official", target, ours, **key), target).taps == (1, 3, 6)


@pytest.mark.parametrize("wide", [True, False], ids=["eagle3", "eagle"])
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0}], ids=["default", "linear"])
def test_an_export_of_ours_is_such_a_checkpoint(
    target: Target, wide: bool, rope: dict[str, Any], tmp_path: Path
) -> None:
    ours = drafter_of(target, wide, rope)
    folder = save_export(ours, tmp_path / "export", "float32", {"name": "hf", "path": None, "fingerprint": "-"})
    (folder / "drafter.json").unlink()
    read = eagle.load(folder, target)
    assert torch.equal(logits(read, target), logits(ours, target)) and read.taps == ours.taps


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (changed(lambda t: t.pop("norm.weight")), "tensor norm.weight is missing"),
    "a tensor is left over": (changed(lambda t: t.update(extra=torch.zeros(1))), "tensor extra belongs to no part"),
    "another embedding": (
        changed(lambda t: t["embed_tokens.weight"].add_(1)),
        "embed_tokens.weight .* is not the target",
    ),
    "absolute ids as offsets": (changed(lambda t: t["d2t"].copy_(VOCABULARY)), "d2t and t2d do not name the same ids"),
    "no layer": (changed(lambda t: [t.pop(n) for n in list(t) if "q_proj" in n]), "neither EAGLE nor EAGLE-3"),
    "no tensors": (lambda f: (f / "model.safetensors").write_bytes(b"no"), "model.safetensors cannot be read"),
    "config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_refused_by_name(target: Target, fault: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "official", target, drafter_of(target, True))
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(Refusal, match=f"method.init_from={folder}: .*{message}"):
        eagle.load(folder, target, "method.init_from")


@pytest.mark.parametrize(
    "more, message", [({"hidden_size": 64}, "width 64, this one has 32"), ({"norm_output": True}, "norm_output is set")]
)
def test_what_it_does_otherwise_is_refused(target: Target, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=message):
        eagle.load(checkpoint(tmp_path / "official", target, drafter_of(target, True), **more), target)


def test_training_goes_on_from_an_official_checkpoint(target: Target, tmp_path: Path) -> None:
    ours = drafter_of(target, True)
    folder = checkpoint(tmp_path / "official", target, ours)
    asked = EagleOptions(name="eagle", draft_vocab=8, decay=0.5, unroll=3, init_from=str(folder))
    begun, coverage = warm_start(asked, target)
    begun.borrow(target)
    assert torch.equal(logits(begun, target), logits(ours, target)) and coverage is None
    assert begun.unroll == 3 and begun.options.decay == 0.5 and begun.options.layer == ours.options.layer
    with pytest.raises(
        Refusal, match=r"method.draft_vocab: 9, but method.init_from=.* has 8; nearest: method.draft_vocab=8"
    ):
        warm_start(asked.model_copy(update={"draft_vocab": 9}), target)


def test_the_entry_takes_one(tmp_path: Path) -> None:
    checkpoint_of_target(tmp_path / "target")
    served = Target.load(str(tmp_path / "target"))
    folder = checkpoint(tmp_path / "official", served, drafter_of(served, False))
    words = ["method=hass", "method.draft_vocab=null", "method.fc_bias=true", f"method.init_from={folder}"]
    assert config(tmp_path, tmp_path / "target", *words, program="eagle").method.init_from == str(folder)
