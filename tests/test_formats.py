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

from paceline.data.batch import Batch
from paceline.models.drafter import Context, Drafter, Shape, build
from paceline.models.eagle import EagleOptions
from paceline.models.errors import Refusal
from paceline.models.export import save_export
from paceline.models.formats import eagle, mtp
from paceline.models.mtp_sequential import SequentialMtp, SequentialOptions
from paceline.models.streams import TreeKeys
from paceline.models.target import Target
from paceline.models.warm import warm_start
from paceline.train.loop import fit
from paceline.train.step import unrolled

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
    "absolute ids as offsets": (
        changed(lambda t: t["d2t"].copy_(VOCABULARY)),
        "d2t holds ids, engines add",
    ),
    "no layer": (
        changed(lambda t: [t.pop(n) for n in list(t) if "q_proj" in n]),
        "midlayer.self_attn.q_proj.weight is missing",
    ),
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


# ---------------------------------------------------------------- MTP modules


def modules_of(target: Target, mimo: bool = False, **more: Any) -> SequentialMtp:
    """Two modules with random weights, read as the family's engines read them."""
    options = SequentialOptions(
        name="mtp_sequential",
        modules=2,
        taps=(target.layers if mimo else -1,),
        zero_first=True,
        layer={"rope": {"rope_type": "default", "rope_theta": 10_000.0}},
        **more,
    )
    drafter = build(options.fitted(target), Shape.of(target)).eval()
    drafter.borrow(target)
    assert isinstance(drafter, SequentialMtp)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return drafter


def released(folder: Path, target: Target, drafter: SequentialMtp, mimo: bool = False, shards: bool = True) -> Path:
    """The modules as a released checkpoint has them: with its trunk, and in shards, or beside nothing in one file."""
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        _, number, rest = name.split(".", 2)
        if mimo:
            for theirs, ours in (
                ("token_layernorm", "enorm"),
                ("hidden_layernorm", "hnorm"),
                ("input_proj", "eh_proj"),
                ("final_layernorm", "shared_head.norm"),
            ):
                rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
            if rest == "input_proj.weight":  # [state, embedding]
                tensor = torch.cat([tensor[:, target.hidden :], tensor[:, : target.hidden]], 1)
            tensors[f"model.mtp_layers.{int(number) - target.layers}.{rest}"] = tensor
        else:
            tensors[f"model.layers.{number}.{rest}"] = tensor
            tensors[f"model.layers.{number}.embed_tokens.weight"] = target.model.get_input_embeddings().weight
            tensors[f"model.layers.{number}.shared_head.head.weight"] = target.head.weight
    layer = drafter.options.layer
    about = {
        "model_type": "mimo" if mimo else "glm4_moe",
        "num_hidden_layers": target.layers,
        "num_nextn_predict_layers": 2,
        "hidden_size": target.hidden,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "intermediate_size": layer.intermediate,
        "rms_norm_eps": layer.eps,
        "hidden_act": "silu",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    tensors |= {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    files = {name: f"model-{index % 2 + 1}-of-2.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def chain_logits(drafter: Drafter, target: Target) -> list[Tensor]:
    ids = torch.arange(12)[None]
    batch = Batch(ids, ids, torch.zeros_like(ids), ids >= 0)
    with torch.no_grad():
        states = unrolled(drafter, batch, target(ids, drafter.taps)[0], 3)
        return [drafter.head(state, k) for k, state in enumerate(states)]


@pytest.mark.parametrize("shards", [True, False], ids=["in shards", "alone"])
@pytest.mark.parametrize("mimo", [False, True], ids=["deepseek", "mimo"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # as they come; MiMo's biases; GLM's normed q and k
def test_released_modules_draft_what_they_did(family: str, mimo: bool, shards: bool, tmp_path: Path) -> None:
    target = target_of(family)
    ours = modules_of(target, mimo)
    folder = released(tmp_path / "released", target, ours, mimo, shards)
    assert mtp.recognised(folder) and not mtp.recognised(tmp_path)
    read = mtp.load(folder, target)
    assert read.options == ours.options
    for theirs, mine in zip(chain_logits(read, target), chain_logits(ours, target), strict=True):
        assert theirs.equal(mine)


def test_modules_under_qwens_names_draft_what_they_did(tmp_path: Path) -> None:
    target = target_of("qwen3")
    options = SequentialOptions(name="mtp_sequential", modules=1, taps=(-1,), hand_on="normed")
    ours = build(options.fitted(target), Shape.of(target)).eval()
    ours.borrow(target)
    for parameter in ours.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    tensors = {name: tensor.clone() for name, tensor in target.model.state_dict().items() if name != "lm_head.weight"}
    for name, tensor in ours.state_dict().items():
        head, _, kind = name.split(".", 2)[2].rpartition(".")
        tensors[f"mtp.{names.get(head, f'layers.0.{head}')}.{kind}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    about = target.config.to_dict() | {"rope_parameters": ours.options.layer.rope}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert mtp.recognised(tmp_path)
    read = mtp.load(tmp_path, target)
    assert (read.taps, read.options.hand_on, read.options.layer) == ((-1,), "normed", ours.options.layer)
    for theirs, mine in zip(chain_logits(read, target), chain_logits(ours, target), strict=True):
        assert theirs.equal(mine)
    gated = tensors["mtp.layers.0.self_attn.q_proj.weight"].repeat(2, 1)
    for change, says in (
        ({"mtp.layers.0.self_attn.q_proj.weight": gated}, "attention has a gate"),
        ({"mtp.layers.0.mlp.experts.0.up_proj.weight": gated}, "is part of a mixture of experts"),
        ({"mtp.layers.1.input_layernorm.weight": gated}, "mtp.layers.1.input_layernorm.weight belongs to no part"),
    ):
        save_file(tensors | change, tmp_path / "model.safetensors")
        with pytest.raises(Refusal, match=says):
            mtp.load(tmp_path, target)


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("model.layers.4.hnorm.weight"), "tensor model.layers.4.hnorm.weight is missing"),
    "extra": (
        lambda t: t.update({"model.layers.3.gain": torch.ones(1)}),
        "model.layers.3.gain belongs to no part",
    ),
    "misshapen": (
        lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(32, 32)}),
        "tensor model.layers.3.eh_proj.weight has shape [32, 32], expected [32, 64]",
    ),
    "latent": (
        lambda t: t.update({"model.layers.3.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight is part of latent attention (MLA)",
    ),
    "experts": (
        lambda t: t.update({"model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}),
        "model.layers.4.mlp.experts.0.up_proj.weight is part of a mixture of experts",
    ),
    "other embedding": (
        lambda t: t["model.layers.3.embed_tokens.weight"].add_(1),
        "embed_tokens.weight [64, 32] is not the target's",
    ),
    "a module left out": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.3.")],
        "module 0 is missing, it has 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_modules_that_cannot_be_read_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    target = target_of("llama")
    folder = released(tmp_path / "released", target, modules_of(target), shards=False)
    tensors = load_file(folder / "model.safetensors")
    change, says = DAMAGES[damage]
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal) as refusal:
        mtp.load(folder, target, "method.init_from")
    assert str(refusal.value).startswith(f"method.init_from={folder}: ") and says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_released_modules_are_trained_on_and_a_convention_that_is_set_is_theirs(tmp_path: Path) -> None:
    where = checkpoint_of_target(tmp_path / "target")
    target = Target.load(str(where), "float32", vocab=259)
    folder = released(tmp_path / "released", target, modules_of(target))

    def begun(*more: str) -> Drafter:
        words = ("method=mtp_sequential", f"method.init_from={folder}", "method.draft_vocab=null", *more)
        return warm_start(config(tmp_path, where, *words, program="mtp").method, target)[0]

    usual, said = begun(), begun("method.hand_on=normed", "method.position_offset=1", "method.taps=[2]")
    assert (usual.options.hand_on, usual.options.position_offset, usual.taps, usual.unroll) == ("raw", 0, (-1,), 3)
    assert (said.options.hand_on, said.options.position_offset, said.taps) == ("normed", 1, (2,))
    assert all(parameter.requires_grad for parameter in usual.parameters())
    with pytest.raises(Refusal, match=r"method\.unroll: 1 leaves modules untrained, .* nearest: method\.unroll=2"):
        begun("method.unroll=1")
    with pytest.raises(Refusal, match=r"method\.modules: 1, but .*nearest: method\.modules=2"):
        begun("method.modules=1")
    with pytest.raises(Refusal, match=r"method\.name: eagle, but .*nearest: method=mtp_sequential"):
        words = f"method.init_from={folder}", "method.draft_vocab=null"
        warm_start(config(tmp_path, where, *words, program="eagle").method, target)
    words = "method=mtp_sequential", f"method.init_from={folder}", "method.draft_vocab=null", "train.lr=1e-3"
    fit(config(tmp_path, where, *words, program="mtp"))
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == usual.state_dict().keys()
    assert not any(exported[name].equal(tensor) for name, tensor in usual.state_dict().items())
