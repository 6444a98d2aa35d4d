"""What several formats share: a checkpoint in memory, config.json and the layer it describes, the target's tables."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from paceline.models.drafter import Drafter
from paceline.models.errors import Refusal
from paceline.models.layers import LayerOptions, Size
from paceline.models.stored import INDEX, Spec, read_json, read_tensors, save_tensors, tensor_files
from paceline.models.target import Target

USUAL_THETA = 10_000.0  # what official code computes with where config.json has none
SAFE, PICKLES = "model.safetensors", (".bin", ".pt")


@dataclass
class Checkpoint:
    """A foreign checkpoint. file: what its tensors lie in.

    onto: the target's own checkpoint where the drafter lies inside it: `config` and `tensors` come on top of that.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = SAFE
    onto: Path | None = None

    def save(self, folder: Path) -> None:
        """Write it into a folder there is. A pickle holds nothing but tensors by name."""
        if self.onto is not None:
            where = f"target.path={self.onto}"
            files = tensor_files(self.onto, where) | dict.fromkeys(self.tensors, self.file)
            for file in self.onto.iterdir():
                if file.is_file() and file.name not in ("config.json", "README.md", INDEX):
                    shutil.copy(file, folder)
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        if self.file.endswith(PICKLES):
            torch.save(self.tensors, folder / self.file)
        else:
            save_tensors(self.tensors, folder / self.file)


def opened(folder: Path, files: tuple[str, ...], where: str) -> Checkpoint:
    """config.json, and the tensors of the first of `files` that is there. Raises Refusal."""
    file = next((name for name in files if (folder / name).is_file()), None)
    if file is None:
        raise Refusal(f"{where}: none of {', '.join(files)} is there")
    return Checkpoint(read_json(folder / "config.json", where), read_tensors(folder / file, where), file)


def base_config(drafter: Drafter, dtype: str | None = None) -> dict[str, Any]:
    """config.json as an export of this drafter has it. dtype: of its tensors; None: as they are."""
    return {
        "hidden_size": drafter.shape.hidden,
        "vocab_size": drafter.shape.vocab,
        "torch_dtype": dtype or str(drafter.dtype).removeprefix("torch."),
        **drafter.engine_config(),
    }


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}


# ---------------------------------------------------------------- what config.json says


class _Layer(BaseModel):
    """A decoder layer under transformers' names, of before version 5 too."""

    model_config = ConfigDict(strict=True)

    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    max_position_embeddings: Size | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None


def read_config(schema: type[BaseModel], config: dict[str, Any], where: str) -> Any:
    """What `schema` knows of a config.json. Raises Refusal for the first thing that is missing or wrong."""
    try:
        return schema.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = ".".join(map(str, first["loc"])), str(first["input"])[:40]
        if first["type"] == "missing":
            raise Refusal(f"{where}: config.json has no {name}") from None
        raise Refusal(f"{where}: config.json: {name}: {value} is refused, {first['msg']}") from None


def layer_of(config: dict[str, Any], names: set[str], hidden: int, where: str) -> LayerOptions:
    """The decoder layer that config.json describes. names: of its tensors, under Llama's names. hidden: the target's.

    Raises Refusal: no such layer, or one of another width.
    """
    said = read_config(_Layer, config, where)
    if said.hidden_size != hidden:
        raise Refusal(f"{where}: made for a target of width {said.hidden_size}, this one has {hidden}")
    known = {"partial_rotary_factor", "max_position_embeddings"}
    rope = {name: getattr(said, name) for name in known if getattr(said, name) is not None}
    theta = said.rope_theta if said.rope_theta is not None else USUAL_THETA
    rope = {"rope_type": "default", "rope_theta": theta} | rope
    rope |= _scaling(said.rope_scaling) | (said.rope_parameters or {})
    layer = {
        "heads": said.num_attention_heads,
        "kv_heads": said.num_key_value_heads or said.num_attention_heads,
        "head_dim": said.head_dim or max(1, hidden // said.num_attention_heads),
        "intermediate": said.intermediate_size,
        "activation": said.hidden_act,
        "eps": said.rms_norm_eps,
        "rope": rope,
        "qk_norm": "self_attn.q_norm.weight" in names,
        "qkv_bias": "self_attn.q_proj.bias" in names,
        "out_bias": "self_attn.o_proj.bias" in names,
        "mlp_bias": "mlp.down_proj.bias" in names,
    }
    try:
        return LayerOptions.model_validate(layer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refusal(f"{where}: config.json: {first.get('ctx', {}).get('error', first['msg'])}") from None


def _scaling(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Before transformers 5 the kind was called `type`, too."""
    if not scaling:
        return {}
    return {"rope_type": scaling.get("rope_type") or scaling.get("type")} | {
        key: value for key, value in scaling.items() if key not in ("type", "rope_type")
    }


def layer_manifest(layer: LayerOptions, hidden: int, inputs: int) -> dict[str, Spec]:
    """The attention and MLP of such a layer, under Llama's names. inputs: width of what q, k and v read."""
    heads, kv_heads, size, inner = (getattr(layer, name) for name in ("heads", "kv_heads", "head_dim", "intermediate"))
    linear = {
        "self_attn.q_proj": (heads * size, inputs, layer.qkv_bias),
        "self_attn.k_proj": (kv_heads * size, inputs, layer.qkv_bias),
        "self_attn.v_proj": (kv_heads * size, inputs, layer.qkv_bias),
        "self_attn.o_proj": (hidden, heads * size, layer.out_bias),
        "mlp.gate_proj": (inner, hidden, layer.mlp_bias),
        "mlp.up_proj": (inner, hidden, layer.mlp_bias),
        "mlp.down_proj": (hidden, inner, layer.mlp_bias),
    }
    found = {f"{name}.weight": Spec((out, into)) for name, (out, into, _) in linear.items()}
    found |= {f"{name}.bias": Spec((out,)) for name, (out, _, bias) in linear.items() if bias}
    found |= {f"self_attn.{x}_norm.weight": Spec((size,)) for x in "qk" if layer.qk_norm}
    return found | {"post_attention_layernorm.weight": Spec((hidden,))}


def biases(layer: LayerOptions) -> list[str]:
    """Names of the tensors that most engines' layers have no place for."""
    names = {
        "self_attn.q_proj.bias": layer.qkv_bias,
        "self_attn.o_proj.bias": layer.out_bias,
        "mlp.down_proj.bias": layer.mlp_bias,
        "self_attn.q_norm.weight": layer.qk_norm,
    }
    return [name for name, there in names.items() if there]


# ---------------------------------------------------------------- the target's tables


def without_copy(tensors: dict[str, Tensor], name: str, own: Tensor, where: str) -> None:
    """A table is borrowed from the target: a copy of it is left out, another one could not be."""
    theirs = tensors.pop(name, None)
    if theirs is None:
        return
    same = theirs.shape == own.shape and theirs.is_floating_point()
    if not same or not torch.allclose(theirs.to(own), own, atol=1e-2):
        raise Refusal(f"{where}: {name} {list(theirs.shape)} is not the target's: a drafter for another one")


def embedding(target: Target) -> Tensor:
    return target.model.get_input_embeddings().weight


def vllm(target: str, drafter: Drafter, **how: Any) -> str:
    """The command that serves a target with the drafter in FOLDER."""
    how |= {"num_speculative_tokens": draft_tokens(drafter)}
    return f"vllm serve {target} --speculative-config '{json.dumps(how)}'"


def draft_tokens(drafter: Drafter) -> int:
    """Draft tokens a round that an engine is told to ask for."""
    return drafter.max_depth or max(drafter.unroll, 3)


def same(drafter: Drafter, again: Drafter) -> str | None:
    """What of a drafter another one, read back from its file, does not have: an option or a tensor. None: nothing."""
    made, back = drafter.options.made_of(), again.options.made_of()
    for name, value in made.items():
        if back.get(name) != value:
            return f"method.{name}={json.dumps(value)}"
    theirs = again.state_dict()
    for name, tensor in drafter.state_dict().items():
        if name not in theirs or not torch.equal(theirs[name], tensor.cpu()):
            return f"tensor {name}"
    return None
