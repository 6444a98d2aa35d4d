"""The options of each program of scripts/: one pydantic model each, made of the sections of schema.py."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from paceline.conf.schema import (
    NEUTRAL,
    Data,
    Decode,
    Prompts,
    Target,
    TrainConfig,
    exact_in,
    method_options,
    of_hub,
    source_path,
)
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
    one_line,
    word_or_file,
)
from paceline.models.errors import Refusal


class CacheConfig(TrainConfig):
    """All of scripts/cache_features.py: the options of the training that will read the states, so that both are given
    the same words."""

    processes: Positive

    @model_validator(mode="after")
    def _of_a_target_that_stays(self) -> Self:
        if self.trunk.kind != "frozen":
            raise Refusal(f"trunk: {self.trunk.kind} soon says something else than what is kept; nearest: frozen")
        return self


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

    _hub = field_validator("split", "streaming")(lambda value, info: of_hub("given", "given.source", value, info))


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

    part: Literal["data", "decode", "exact", "passes", "synthesize", "train"]
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
    medusa: Place | None
    eagle3: Place | None
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


class SideBySideConfig(Section):
    """All of scripts/side_by_side.py."""

    target: Target
    kind: Literal["eagle3", "medusa"]
    trainers: Annotated[
        list[Literal["paceline", "economize", "speculators", "nvidia-modelopt", "medusa-llm"]], Field(min_length=1)
    ]
    rates: Annotated[list[Rate], Field(min_length=1)]
    seeds: Positive
    tokens: Positive
    batch_tokens: Positive
    depths: Positive
    draft_vocab: Positive
    warmup: Share
    minutes: Rate
    dtype: Dtype
    eval: Prompts
    out: Place
    venvs: Place


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
    options: list[str] = Field(default_factory=list)  # of its training
    processes: Positive | None = None  # of its training; as the others' where it is left out
    evaluate: list[str] = Field(default_factory=list)  # of its evaluation

    _trains = field_validator("entry")(entry_that_trains)

    @field_validator("export")
    @classmethod
    def _word_or_export(cls, export: str | None, info: ValidationInfo) -> str | None:
        return export if export is None else word_or_file("export", export, ("none", "ngram"), info)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.entry is None) == (self.export is None):
            raise Refusal("give it an entry, which trains it, or an export, not both")
        if self.export is not None and (self.options or self.processes):
            name = "options" if self.options else "processes"
            raise Refusal(f"{name} are of a training, and an export is not trained; nearest: evaluate")
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
                raise Refusal(f"drafters.{name}: {one_line(error, list(Row.model_fields))}") from None
        return rows

    @model_validator(mode="after")
    def _there(self) -> Self:
        for name in self.only or []:
            if name not in self.drafters:
                raise Refusal(f"only: no such drafter {name!r}; nearest: {nearest(name, self.drafters)}")
        if self.only == []:
            raise Refusal("only: [] leaves nothing to compare; null: all drafters")
        return self
