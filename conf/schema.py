"""Which options there are and what they may be: one pydantic model per section, one per entry.

Owns names, types, ranges and what contradicts what. Values lie in the yaml files, so nothing has a default here.
Does not know Hydra, nor what an option does; a method's own options are its drafter class's.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.models.errors import Refusal

Dtype = Literal["bfloat16", "float16", "float32"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy and torch can both be seeded with
TopP = Annotated[float, Field(gt=0, le=1)]


def nearest(wrong: Any, valid: Iterable[str]) -> str:
    """The valid name that looks most like `wrong`; the last part of a dotted name counts as much as the whole."""

    def likeness(name: str) -> float:
        last, part = name.rsplit(".", 1)[-1], str(wrong).rsplit(".", 1)[-1]
        whole = difflib.SequenceMatcher(None, str(wrong).lower(), name.lower()).ratio()
        return whole + difflib.SequenceMatcher(None, part.lower(), last.lower()).ratio()

    return max(sorted(valid), key=likeness, default="none")


def absolute(path: str, info: ValidationInfo) -> str:
    """`path` as seen from the folder the command was given in (`context["cwd"]`), whatever Hydra changes to later."""
    start = (info.context or {}).get("cwd") or os.getcwd()
    return os.path.normpath(os.path.join(start, os.path.expanduser(path)))


def existing(option: str, path: str, words: Iterable[str] = ()) -> str:
    """The absolute `path`, or a Refusal that names it and what is there instead: a file, or one of the `words`."""
    if not os.path.exists(path):
        parent = next(p for p in Path(path).parents if p.is_dir())
        names = {p.name: str(p) for p in parent.iterdir()} | {word: word for word in words}
        alike = difflib.get_close_matches(Path(path).relative_to(parent).parts[0], names, n=1)
        raise Refusal(f"{option}: no such file or folder: {path}; nearest: {names[alike[0]] if alike else parent}")
    return path


def word_or_file(option: str, value: str, words: Iterable[str], info: ValidationInfo) -> str:
    """One of the `words` as it is, else the absolute path of a file there is."""
    return value if value in words else existing(option, absolute(value, info), words)


Place = Annotated[str, AfterValidator(absolute)]


class Section(BaseModel):
    """A group of options: unknown names are refused, values are taken as they are, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers."""
        return self.model_dump(mode="json")

    def yaml(self) -> str:
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True)


def folder_or_hub_id(option: str, path: str, info: ValidationInfo) -> str:
    """The absolute path of a folder there is, or what may be a hub id as it is."""
    local = absolute(path, info)
    if os.path.exists(local) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        return existing(option, local)
    return path


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


class Part(Section):
    """One source of a mixture, in `data.parts`. An item of a list has no yaml: what it leaves out is said here."""

    source: Literal["self", "jsonl", "parquet", "text", "hub"] = "jsonl"
    path: str | None = Field(None, validate_default=True)
    split: str | None = None
    streaming: bool = False
    weight: Rate = 1.0

    _where = field_validator("path")(lambda path, info: source_path("data.parts", info.data.get("source"), path, info))


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


class CacheConfig(TrainConfig):
    """All of scripts/cache_features.py: the options of the training that will read the states, so that both are given
    the same words."""

    processes: Positive


class _Drafted(Section):
    """What every script that decodes has."""

    drafter: Place
    target: Target
    decode: Decode
    dtype: Dtype
    out: Place | None

    @model_validator(mode="before")
    @classmethod
    def _target_of_no_drafter(cls, data: Any) -> Any:
        # An export names its target. No drafter and n-grams go with any: the embedded one, unless another is asked for.
        target = data["target"]
        if data.get("drafter") in ("none", "ngram") and target["name"] == "export":
            return data | {"target": target | {"name": "smollm2", "quantize": target["quantize"] or "none"}}
        return data

    @model_validator(mode="after")
    def _exact(self) -> "_Drafted":
        exact_in(self.dtype, self.decode, ("bfloat16",))
        if self.decode.lookup and self.drafter in ("none", "ngram"):
            raise Refusal(
                f"decode.lookup: it goes before a trained drafter, not with drafter={self.drafter}; nearest: 0"
            )
        return self

    @field_validator("drafter", mode="wrap")
    @classmethod
    def _word_or_export(cls, drafter: Any, place: Any, info: ValidationInfo) -> str:
        words = ("none", "ngram")
        return drafter if drafter in words else existing("drafter", place(drafter), words)


class _Beside(_Drafted):
    """What writes beside an export unless told otherwise. `out` is never None here."""

    @model_validator(mode="before")
    @classmethod
    def _beside_the_export(cls, data: Any, info: ValidationInfo) -> Any:
        # RUN of an export RUN/export; an export that lies elsewhere holds its own report.
        if data["out"] is not None:
            return data
        drafter = str(data["drafter"])
        export = Path(absolute(drafter, info))
        beside = str(export.parent if export.name == "export" else export)
        return data | {"out": f"outputs/{drafter}" if drafter in ("none", "ngram") else beside}


class EvaluateConfig(_Beside):
    """All of scripts/evaluate.py. `out` is never None here."""

    seed: Seed
    plain_file: Place | None = Field(alias="plain")  # Section.plain is a method
    plain_prompts: Positive | None
    hf_baseline: bool
    hf_prompts: Positive | None
    traces: Count
    eval: Prompts
    ngram: Any

    @model_validator(mode="after")
    def _otherwise_all(self) -> Self:
        if self.plain_prompts is not None and self.plain_file is None:
            raise Refusal("plain_prompts: without plain=FILE plain decoding answers every prompt; nearest: null")
        return self

    _options = field_validator("ngram", mode="before")(method_options)


class TuneConfig(_Beside):
    """All of scripts/tune.py."""

    batches: Annotated[list[Positive], Field(min_length=1)]
    eval: Prompts
    repeats: Positive
    grid: bool
    ngram: Any

    @model_validator(mode="after")
    def _kept_in_an_export(self) -> Self:
        if self.drafter in ("none", "ngram"):
            raise Refusal(f"drafter: {self.drafter} is no folder that could keep what is found; give an export")
        if self.decode.tree == "tuned":
            raise Refusal("decode.tree: tuned is what scripts/tune.py looks for; nearest: static")
        if self.decode.drafts != "likeliest":
            raise Refusal(f"decode.drafts: {self.decode.drafts} drafts are not judged by text; nearest: likeliest")
        return self

    _options = field_validator("ngram", mode="before")(method_options)


class GenerateConfig(_Drafted):
    """All of scripts/generate.py."""

    prompt: str | None
    system: str | None
    max_new_tokens: Positive
    stop: list[Annotated[str, Field(min_length=1)]]
    ngram: Any

    _options = field_validator("ngram", mode="before")(method_options)


class WatchConfig(_Drafted):
    """All of scripts/watch.py. `out` is never None here."""

    prompt: Annotated[str, Field(min_length=1)]
    system: str | None
    max_new_tokens: Annotated[int, Field(ge=1, le=512)]  # a page of more rounds would be too large to send about
    ngram: Any

    _options = field_validator("ngram", mode="before")(method_options)


class Mixed(Section):
    """How the turns of many conversations are sampled: each takes one of the temperatures and one of the lengths."""

    temperature: Weight | Annotated[list[Weight], Field(min_length=1)]
    top_p: TopP
    max_tokens: Positive | Annotated[list[Positive], Field(min_length=1)]


class Given(Section):
    """Where user's turns come from, in scripts/synthesize.py."""

    source: Literal["none", "self", "jsonl", "parquet", "text", "hub"]
    path: Annotated[str | None, Field(validate_default=True)]
    split: str
    streaming: bool
    strict: bool

    @field_validator("path")
    @classmethod
    def _where(cls, path: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("source")
        if kind != "none":
            return source_path("given.path", kind, path, info)
        if path is not None:
            raise Refusal("given.path: not read by given.source=none; nearest: given.source=jsonl")
        return None


class Filter(Section):
    near: Annotated[float, Field(ge=0.5, le=1)] | None
    repetition: Annotated[float, Field(gt=0, le=1)]
    shortest: Positive


class Served(Section):
    """The server of engine=server."""

    url: Annotated[str, Field(pattern=r"^https?://")] | None
    model: str | None
    key_env: str | None
    concurrency: Positive
    per_second: Rate | None
    timeout: Rate
    retries: Count
    backoff: Weight


class SynthesizeConfig(Section):
    """All of scripts/synthesize.py."""

    count: Positive | None
    turns: Positive | None
    begin: str
    engine: Literal["local", "server"]
    batch: Positive
    dtype: Dtype
    seed: Seed
    max_length: Positive
    out: Place
    shard: Positive
    held_out: Share
    language: bool
    target: Target
    given: Given
    prompt: Mixed
    answer: Mixed
    filter: Filter
    server: Served

    @field_validator("begin")
    @classmethod
    def _known_or_file(cls, begin: str, info: ValidationInfo) -> str:
        return word_or_file("begin", begin, ("varied", "free"), info)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.count is None and self.given.source == "none":
            raise Refusal("count: null stands for all that are given, and given.source=none gives none; nearest: 512")
        for name in ("url", "model"):
            if self.engine == "server" and getattr(self.server, name) is None:
                raise Refusal(f"server.{name}: must be given with engine=server")
            if self.engine == "local" and getattr(self.server, name) is not None:
                raise Refusal(f"server.{name}: read only by engine=server, not by engine=local")
        return self


def entry_that_trains(cls: type[Section], entry: str) -> str:
    """The name of a file of train/ that is started with conf/NAME.yaml."""
    entries = sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))
    entries = [name for name in entries if (Path(__file__).parents[1] / "train" / f"{name}.py").exists()]
    if entry not in entries:
        raise Refusal(f"entry: no such entry {entry!r}; nearest: {nearest(entry, entries)}")
    return entry


class ConvertConfig(Section):
    """All of scripts/convert.py."""

    source: str = Field(alias="from")
    to: Place
    format: str
    dtype: Dtype | None
    push: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None
    private: bool
    dry_run: bool
    target: Target

    @field_validator("source")
    @classmethod
    def _folder_or_hub_id(cls, source: str, info: ValidationInfo) -> str:
        return folder_or_hub_id("from", source, info)

    @field_validator("format")
    @classmethod
    def _known(cls, format: str) -> str:
        from paceline.models.formats import names  # takes torch along, as the target will

        known = ["native", *names()]
        if format not in known:
            hint = f"nearest: {nearest(format, known)} (of {', '.join(known)})"
            raise Refusal(f"format: no such format {format!r}; {hint}")
        return format


class ConformanceConfig(Section):
    """All of scripts/conformance.py."""

    peers: Annotated[list[str], Field(min_length=1)]
    out: Place
    venvs: Place
    target: Target


class JointConfig(Section):
    """All of scripts/joint.py."""

    seeds: Positive
    out: Place
    entry: str
    common: list[str]
    together: list[str]
    alone: list[str]
    after: list[str]

    _trains = field_validator("entry")(entry_that_trains)


BenchmarkRow = Literal[
    "hf-generate",
    "hf-prompt-lookup",
    "paceline-plain",
    "paceline-ngram",
    "paceline-medusa",
    "paceline-eagle3",
    "paceline-hybrid",
    "economize-medusa",
    "economize-eagle3",
]


Workload = Literal["eagle3-dense", "eagle3-ragged", "medusa-dense", "mtp-dense"]
Framework = Literal["paceline", "nvidia-modelopt", "specforge", "speculators", "economize", "medusa-llm"]


class BenchmarkConfig(Section):
    """All of scripts/benchmark.py."""

    part: Literal["data", "decode", "synthesize", "train"]
    out: Place
    target: Target
    conversations: Annotated[int, Field(ge=10)]
    batch_tokens: Positive
    count: Positive
    batch: Positive
    workloads: Annotated[list[Workload], Field(min_length=1)]
    frameworks: Annotated[list[Framework], Field(min_length=1)] | None
    steps: Positive
    compile: Literal[True, False, "loss"]
    venvs: Place
    only: list[BenchmarkRow] | None
    dtype: Dtype
    decode: Decode
    eval: Prompts
    prompt_lookup: Positive
    lookup: Positive
    medusa: Place
    eagle3: Place
    economize_medusa: Place | None
    economize_eagle3: Place | None
    ngram: Any

    @model_validator(mode="after")
    def _greedy(self) -> Self:
        exact_in(self.dtype, self.decode, ("bfloat16",))
        for name, value in (*NEUTRAL.items(), ("temperature", 0.0), ("verify", "walk")):
            if getattr(self.decode, name) != value:
                raise Refusal(f"decode.{name}: every row decodes greedily, as the others can; nearest: {value}")
        return self

    _options = field_validator("ngram", mode="before")(method_options)


class InspectConfig(Section):
    """All of scripts/inspect_data.py."""

    target: Target
    data: Data
    out: Place
    examples: Positive
    width: Positive


class Row(Section):
    """A drafter of scripts/compare.py: trained by an entry, or an export. Here alone what is left out has a default."""

    entry: str | None = None  # train/ENTRY.py
    export: str | None = None  # a folder, ngram, or none
    options: list[str] = []  # of its training
    evaluate: list[str] = []  # of its evaluation

    _trains = field_validator("entry")(entry_that_trains)

    @field_validator("export")
    @classmethod
    def _word_or_export(cls, export: str | None, info: ValidationInfo) -> str | None:
        return export if export is None else word_or_file("export", export, ("none", "ngram"), info)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.entry is None) == (self.export is None):
            raise Refusal("give it an entry, which trains it, or an export, not both")
        if self.export is not None and self.options:
            raise Refusal("options are of a training, and an export is not trained; nearest: evaluate")
        return self


class CompareConfig(Section):
    """All of scripts/compare.py."""

    open: ClassVar = "drafters"  # under this name a command line may add what no yaml names

    title: str
    target: Target
    data: Data
    eval: Prompts
    seeds: Positive
    tokens: Positive | None
    minutes: Rate | None
    processes: Positive
    options: list[str]
    temperatures: list[Weight]
    plain_prompts: Positive | None
    evaluate: list[str]
    drafters: dict[str, Row]
    only: list[str] | None
    out: Place

    @field_validator("target")
    @classmethod
    def _said(cls, target: Target) -> Target:
        if target.name == "export":
            raise Refusal("target: whom all drafters are for has to be said; nearest: smollm2")
        return target

    @field_validator("drafters", mode="before")
    @classmethod
    def _by_name(cls, drafters: Any, info: ValidationInfo) -> Any:
        """Each row on its own, so that what is wrong with one is said with its name."""
        if not isinstance(drafters, dict) or not drafters:
            raise Refusal("drafters: none are given; name a file of conf/comparison/, as comparison=family")
        rows = {}
        for name, row in drafters.items():
            try:
                rows[name] = Row.model_validate(row, context=info.context)
            except ValidationError as error:
                raise Refusal(f"drafters.{name}: {_one_line(error, list(Row.model_fields))}") from None
        return rows

    @model_validator(mode="after")
    def _there(self) -> Self:
        for name in self.only or []:
            if name not in self.drafters:
                raise Refusal(f"only: no such drafter {name!r}; nearest: {nearest(name, self.drafters)}")
        if self.only == []:
            raise Refusal("only: [] leaves nothing to compare; null: all drafters")
        return self


def option_names(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all options and sections of a config of plain types."""
    names = []
    for key, value in tree.items():
        names.append(prefix + key)
        if isinstance(value, dict):
            names += option_names(value, f"{prefix}{key}.")
    return names


def validated(schema: type[Section], tree: dict[str, Any], cwd: str) -> Section:
    """The config that `tree` (plain types) describes, relative paths taken from `cwd`. Raises Refusal: one line."""
    names = option_names(tree)
    for name in names:
        value: Any = tree
        for key in name.split("."):
            value = value[key]
        if value == "???":
            raise Refusal(f"{name}: must be given, as {name}=VALUE")
    try:
        return schema.model_validate(tree, context={"cwd": cwd})
    except ValidationError as error:
        raise Refusal(_one_line(error, names)) from None


def _one_line(error: ValidationError, names: list[str]) -> str:
    """The first thing pydantic has to say, in the words of a command line."""
    first = error.errors(include_url=False)[0]
    name, kind, value = ".".join(map(str, first["loc"])), first["type"], first["input"]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, Refusal):
        return str(reason)
    if kind == "extra_forbidden":
        return f"{name}: no such option; nearest: {nearest(name, set(names) - {name})}"
    if kind == "missing":
        return f"{name}: must be given"
    wanted = first["msg"].replace("Input should be", "must be")
    if kind == "literal_error":
        wanted += "; nearest: " + nearest(value, re.findall("'([^']*)'", first["ctx"]["expected"]))
    section, _, last = name.rpartition(".")
    beside = [n.rpartition(".")[2] for n in names if n.rpartition(".")[0] == section and n != name]
    for other in difflib.get_close_matches(last, beside, n=1, cutoff=0.85):  # method.head=3
        wanted += f"; or is {section}.{other} meant?"
    return f"{name}: {value!r} is refused, {wanted}"
