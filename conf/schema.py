"""Which options there are and what they may be: one pydantic model per section, and all of a training.

Owns names, types, ranges and what contradicts what. Values lie in the yaml files, so nothing has a default here.
Does not know Hydra, nor what an option does; a method's own options are its drafter class's. The scripts' own options
are in schema_scripts.py.
"""

import importlib.util
import os
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from paceline.conf.section import (
    Count,
    Dtype,
    Place,
    Positive,
    Rate,
    Section,
    Seed,
    Share,
    TopP,
    Weight,
    absolute,
    existing,
    folder_or_hub_id,
    nearest,
    word_or_file,
)
from paceline.models.errors import Refusal


class Target(Section):
    name: Literal["smollm2", "tiny", "tiny_pretrain", "hf", "export"]
    path: str | None
    quantize: Literal["none", "4bit", "8bit"] | None
    trust_remote_code: bool
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]

    @field_validator("path")
    @classmethod
    def _folder_or_hub_id(cls, path: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("name") == "hf":
            if path is None:
                raise Refusal("target.path: must be given with target=hf: a folder or a hub id")
            return folder_or_hub_id("target.path", path, info)
        if path is not None:
            raise Refusal(f"target.path: read only by target=hf, not by target={info.data.get('name')}")
        return path

    @field_validator("quantize")
    @classmethod
    def _said_or_exported(cls, quantize: str | None, info: ValidationInfo) -> str | None:
        if quantize is None and info.data.get("name") != "export":
            raise Refusal("target.quantize: null stands for what an export says, with target=export; nearest: none")
        return quantize

    @field_validator("device")
    @classmethod
    def _one_each(cls, device: str) -> str:
        world = int(os.environ.get("WORLD_SIZE", 1))
        if ":" in device and world > 1:
            raise Refusal(f"target.device: {device} is one GPU, each of {world} processes has its own; nearest: cuda")
        return device


class Frozen(Section):
    """`trunk` where only the drafter is trained."""

    kind: Literal["frozen"]


class Full(Section):
    """`trunk` where all of the target's weights are trained with the drafter."""

    kind: Literal["full"]
    lr: Rate
    after: Share
    depth_weight: Weight
    depth_ramp: Annotated[float, Field(ge=0, le=1)]
    next_weight: Weight
    distil_weight: Weight

    @model_validator(mode="after")
    def _held(self) -> Self:
        if not self.next_weight and not self.distil_weight:
            raise Refusal(
                "trunk.next_weight, trunk.distil_weight: both are 0, and nothing would hold the trunk to its words; "
                "nearest: trunk.distil_weight=1"
            )
        return self


class Lora(Full):
    """`trunk` where adapters on its linear layers are trained with the drafter."""

    kind: Literal["lora"]  # type: ignore[assignment]
    rank: Positive
    alpha: Rate
    dropout: Share
    modules: list[str] | None

    @field_validator("modules")
    @classmethod
    def _some(cls, modules: list[str] | None) -> list[str] | None:
        if modules is not None and not modules:
            raise Refusal("trunk.modules: [] adapts nothing; null: every linear layer of the decoder layers")
        return modules


TRUNKS: dict[str, type[Section]] = {"frozen": Frozen, "lora": Lora, "full": Full}


FILES = ("jsonl", "parquet", "text")  # kinds of sources that are files, or folders of them


def source_path(option: str, kind: Any, path: str | None, info: ValidationInfo) -> str | None:
    """`path` as a source of this kind reads it: absolute if it is a file or folder, a hub id as it is."""
    if kind in ("self", "mixture"):
        if path is not None:
            raise Refusal(f"{option}: not read by data={kind}, only by data=jsonl, parquet, text and hub")
        return None
    if path is None:
        raise Refusal(f"{option}: must be given with data={kind}")
    return (
        path if kind == "hub" and not os.path.exists(absolute(path, info)) else existing(option, absolute(path, info))
    )


def of_hub(section: str, source: str, value: Any, info: ValidationInfo) -> Any:
    """The `value` of a section's split or streaming, which a hub alone reads. source: how its kind is typed."""
    kind = info.data.get("source")
    if kind != "hub" and value not in (None, "train", False):  # what stands in the yaml
        raise Refusal(f"{section}.{info.field_name}: read only by {source}=hub, not by {source}={kind}")
    return value


class Part(Section):
    """One source of a mixture, in `data.parts`. An item of a list has no yaml: what it leaves out is said here."""

    source: Literal["self", "jsonl", "parquet", "text", "hub"] = "jsonl"
    path: str | None = Field(None, validate_default=True)
    split: str | None = None
    streaming: bool = False
    weight: Rate = 1.0

    _where = field_validator("path")(lambda path, info: source_path("data.parts", info.data.get("source"), path, info))
    _hub = field_validator("split", "streaming")(lambda value, info: of_hub("data.parts", "source", value, info))


class Data(Section):
    source: Literal["self", "jsonl", "parquet", "text", "hub", "mixture"]
    path: str | None
    split: str
    streaming: bool
    parts: list[Part]
    max_length: Annotated[int, Field(ge=2)]
    limit: Positive | None
    held_out: Share
    template: str | None
    cache: Place | None
    features: Literal["online", "memory", "cached", "hybrid"]
    features_in: Place
    strict: bool

    @field_validator("path")
    @classmethod
    def _where(cls, path: str | None, info: ValidationInfo) -> str | None:
        return source_path("data.path", info.data.get("source"), path, info)

    _hub = field_validator("split", "streaming")(lambda value, info: of_hub("data", "data", value, info))

    @field_validator("parts")
    @classmethod
    def _of_a_mixture(cls, parts: list[Part], info: ValidationInfo) -> list[Part]:
        mixture = info.data.get("source") == "mixture"
        if mixture and not parts:
            raise Refusal(
                "data.parts: must be given with data=mixture: data.parts=[{path: FILE.jsonl, weight: 2}, ...]"
            )
        if parts and not mixture:
            raise Refusal(f"data.parts: read only by data=mixture, not by data={info.data.get('source')}")
        return parts

    @field_validator("template")
    @classmethod
    def _there(cls, template: str | None, info: ValidationInfo) -> str | None:
        return template and existing("data.template", absolute(template, info))

    def keywords(self) -> dict[str, Any]:
        """What `data.conversations.load` is called with."""
        given = self.plain()
        del given["features"], given["features_in"]
        return given | {"split": self.split if self.source == "hub" else None}


class Train(Section):
    steps: Positive | None
    epochs: Rate | None
    tokens: Positive | None
    minutes: Rate | None
    lr: Rate
    batch_tokens: Positive
    accumulate: Positive
    warmup: Share
    schedule: Literal["cosine", "linear", "constant"]
    clip: Rate
    weight_decay: Weight
    betas: Annotated[tuple[Share, Share], Field(strict=False)]
    save_every: Positive
    keep: Positive
    log_every: Positive
    chunk: Positive
    compile: Literal[True, False, "auto", "loss"]

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if sum(length is not None for length in (self.steps, self.epochs, self.tokens)) != 1:
            raise Refusal(
                "train.steps, train.epochs, train.tokens: exactly one must be set, the others null (train.steps=null)"
            )
        return self


class Decode(Section):
    tree: Literal["chain", "static", "dynamic", "tuned"]
    depth: Positive | None
    nodes: Positive
    width: Positive
    node_cost: Share
    depth_cost: Weight
    lookup: Count
    drafts: Literal["likeliest", "sampled"]
    verify: Literal["walk", "reject", "typical"]
    temperature: Weight
    top_k: Count
    top_p: TopP
    min_p: Share
    repetition_penalty: Rate
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)]
    min_new_tokens: Count
    seed: Seed
    exact: bool | None

    @model_validator(mode="before")
    @classmethod
    def _follow_each_other(cls, given: Any) -> Any:
        """Of drafts and verify, what is null follows the other: `reject` makes most of drafts that were drawn."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        hot = isinstance(given.get("temperature"), (int, float)) and given["temperature"] > 0
        drawn = given.get("verify") == "reject" and hot and given.get("tree") != "dynamic"
        if "drafts" in given and given["drafts"] is None:
            given["drafts"] = "sampled" if drawn else "likeliest"
        if "verify" in given and given["verify"] is None:
            given["verify"] = "reject" if given.get("drafts") == "sampled" else "walk"
        return given

    @model_validator(mode="after")
    def _drawable(self) -> "Decode":
        if self.drafts == "likeliest":
            return self
        if self.temperature == 0:
            raise Refusal("decode.drafts: sampled needs decode.temperature above 0; nearest: decode.drafts=likeliest")
        if self.tree == "dynamic":
            raise Refusal(
                "decode.drafts: sampled is not available with decode.tree=dynamic, which keeps nodes by what was "
                "drawn: that is another distribution; nearest: decode.tree=static"
            )
        if self.verify != "reject":
            raise Refusal(f"decode.verify: {self.verify} is not for decode.drafts=sampled; nearest: reject")
        return self


# The `decode` options that change what is greedily chosen, where they change nothing.
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_new_tokens": 0}


def exact_in(dtype: str, decode: Decode, known: tuple[str, ...]) -> None:
    """Raises Refusal where decode.exact asks for what there is not. known: beside float32, which is exact as it is."""
    if decode.exact and dtype not in ("float32", *known):
        raise Refusal(f"decode.exact: not available with dtype={dtype} here; nearest: dtype=float32, which is exact")


class HeldOut(Section):
    """`eval` of training."""

    every: Count
    held_out_prompts: Positive
    max_new_tokens: Positive


class Prompts(Section):
    """`eval` of scripts/evaluate.py."""

    prompts: str
    max_new_tokens: Positive
    batch: Positive
    limit: Positive | None

    @field_validator("prompts")
    @classmethod
    def _bundled_or_file(cls, prompts: str, info: ValidationInfo) -> str:
        return word_or_file("eval.prompts", prompts, ("bench", "demo"), info)


class Tracker(Section):
    name: Literal["none", "wandb"]
    project: str
    mode: Literal["offline", "online"]

    @field_validator("name")
    @classmethod
    def _installed(cls, name: str) -> str:
        # looked for, not imported: only the process that tracks needs it, once the run begins
        if name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise Refusal("tracker=wandb needs wandb: pip install wandb, or tracker=none")
        return name


class Export(Section):
    dtype: Dtype


def method_options(cls: type[Section], options: Any, info: ValidationInfo) -> Any:
    """A method's options, judged by its own class. That needs torch, so it comes last, when all else is right."""
    names = list(cls.model_fields)
    if not info.data.keys() >= set(names[: names.index(str(info.field_name))]) or isinstance(options, BaseModel):
        return options
    from paceline.models.drafter import methods
    from paceline.models.drafter import options as options_of
    from paceline.models.warm import check_start

    name = options.get("name")
    if name not in methods():
        raise Refusal(f"{info.field_name}.name: no such method {name!r}; nearest: {nearest(name, methods())}")
    if options.get("init_from"):
        options = options | {"init_from": existing("method.init_from", absolute(options["init_from"], info))}
    if options.get("model"):
        options = options | {"model": folder_or_hub_id("method.model", str(options["model"]), info)}
    asked = options_of(name).model_validate(options)
    check_start(asked)
    return asked


class TrainConfig(Section):
    """All of a training entry: `fit(cfg)`. `method` is the Options of the drafter class it names."""

    seed: Seed
    dtype: Dtype
    out: Place | None
    resume: bool | Place
    export: Export
    target: Target
    trunk: Any
    data: Data
    train: Train
    decode: Decode
    eval: HeldOut
    tracker: Tracker
    method: Any

    _options = field_validator("method", mode="before")(method_options)

    @field_validator("trunk", mode="before")
    @classmethod
    def _of_its_kind(cls, trunk: Any) -> Any:
        if isinstance(trunk, Section):
            return trunk
        kind = trunk.get("kind")
        if kind not in TRUNKS:
            raise Refusal(f"trunk.kind: no such kind {kind!r}; nearest: {nearest(kind, TRUNKS)}")
        return TRUNKS[kind].model_validate(trunk)

    @field_validator("resume")
    @classmethod
    def _checkpoint(cls, resume: bool | str) -> bool | str:
        return resume if isinstance(resume, bool) else existing("resume", resume)

    @model_validator(mode="after")
    def _agree(self) -> "TrainConfig":
        from paceline.models.drafter import check_depth  # takes torch along, as the method has by now

        name, vocab = self.method.name, self.method.draft_vocab
        exact_in(self.dtype, self.decode, ())
        if not self.method.trained():
            raise Refusal(f"method: {name} has nothing to train; use it as drafter={name} in scripts/evaluate.py")
        if self.target.name == "export":
            raise Refusal("target: export names a drafter's target, there is no drafter yet; nearest: smollm2")
        if self.decode.tree == "tuned":
            raise Refusal("decode.tree: tuned is for an export that scripts/tune.py has tuned; nearest: static")
        if self.decode.lookup:
            raise Refusal("decode.lookup: training measures the drafter alone; nearest: 0")
        if self.decode.nodes == 1:
            raise Refusal(
                "decode.nodes: 1 is the root alone, and what training keeps is chosen by its drafts; nearest: 2"
            )
        check_depth(self.decode.depth, self.method.depth_limit())
        self._check_trunk()
        if vocab is not None and vocab < self.decode.width:
            raise Refusal(
                f"decode.width: {self.decode.width} is more than method.draft_vocab={vocab}; nearest: {vocab}"
            )
        return self

    def _check_trunk(self) -> None:
        kind, quantize = self.trunk.kind, self.target.quantize
        if kind == "frozen":
            if self.target.name == "tiny_pretrain":
                raise Refusal(
                    "trunk: frozen, but target=tiny_pretrain knows nothing until it is trained; nearest: pretrain"
                )
            return
        if self.data.features != "online":
            kept = self.data.features
            raise Refusal(f"data.features: {kept} holds what a trunk={kind} soon no longer says; nearest: online")
        if self.train.compile:
            raise Refusal(f"train.compile: {self.train.compile} is for a frozen trunk, not for {kind}; nearest: false")
        if quantize != "none":
            raise Refusal(f"target.quantize: {quantize} can be drafted for, not trained: trunk={kind}; nearest: none")
        if self.method.taps == ():
            raise Refusal(f"trunk: {kind}, but {self.method.name} reads none of the target's states; nearest: frozen")
