"""What every drafter is: `read`, `step`, `head`, and the few facts its callers need. And `build`, by name.

Does not know who calls: training unrolls `step` over all positions of a text, decoding over the nodes of a draft tree.
Tokens, positions and the attention mask are the caller's, and reach `step` through `Context`.

    depth 0   reads feature_t  and x[t+1]       predicts x[t+2]
    depth k   reads feature'_t and x[t+1+k]     predicts x[t+2+k]

    Legend: B batch, N rows of this call, T sequence, H hidden, F carried width, D draft vocabulary.
"""

import hashlib
import importlib
import importlib.util
import math
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator
from torch import Tensor, nn

from paceline.models.errors import Refusal
from paceline.models.kernels import topmost
from paceline.models.target import Head, Target

# What a drafter may be trained to minimise; train/objective.py computes each.
LOSS_TERMS = {"kl", "reverse_kl", "tv", "lk", "ce", "smooth_l1"}

MOST = 64  # heads, blocks or modules of a drafter
Count = Annotated[int, Field(ge=1, le=MOST)]


class Options(BaseModel):
    """The options every trained method has; a method adds its own. Refuses unknown names.

    taps: hidden states read, None for the method's `usual_taps`.
    init_from: an export whose weights and draft vocabulary are trained on. It says where a run began, not what a
    drafter is, so no export carries it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    # options that say how a drafter is trained, not what it is made of
    TRAINING: ClassVar[frozenset[str]] = frozenset({"unroll", "objective", "decay", "init_from"})
    # options that foreign checkpoints do not state: where one is set, it is taken instead of the format's usual
    CONVENTIONS: ClassVar[frozenset[str]] = frozenset()

    name: str
    unroll: PositiveInt | None = None
    draft_vocab: PositiveInt | None = None
    taps: tuple[int, ...] | None = (-1,)
    objective: dict[str, float] = {"kl": 1.0}
    decay: float = Field(default=0.8, gt=0, le=1)
    init_from: str | None = None

    @field_validator("objective")
    @classmethod
    def _something_to_minimise(cls, objective: dict[str, float]) -> dict[str, float]:
        """The terms that count."""
        for name, weight in objective.items():
            if name not in LOSS_TERMS:
                raise Refusal(f"method.objective.{name}: no such loss term; one of {', '.join(sorted(LOSS_TERMS))}")
            if not 0 <= weight < math.inf:
                raise Refusal(f"method.objective.{name}: {weight} is refused, a weight is 0 or more; nearest: 0")
        if not any(objective.values()):
            raise Refusal(
                "method.objective: every weight is 0, nothing would be learnt; nearest: method.objective.kl=1"
            )
        return {name: weight for name, weight in objective.items() if weight}

    def made_of(self) -> dict[str, Any]:
        """What such a drafter is made of: options by their dotted names, without those that say how it is trained."""
        made: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json", exclude=set(self.TRAINING)).items():
            inside = isinstance(getattr(self, name), BaseModel)
            made |= {f"{name}.{part}": v for part, v in value.items()} if inside else {name: value}
        return made

    def depth_limit(self) -> int | None:
        """Draft tokens that this method can put in a row; None for as many as asked."""
        return None

    def trained(self) -> bool:
        """Whether there is anything to train."""
        return True

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        """Hidden states that are read of a target of so many layers where none are asked for."""
        return (-1,)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises Refusal where the method brings a model that reads text by another tokenizer than the target's."""

    def fitted(self, target: Target) -> Self:
        """These options with everything settled that follows the target unless set. Refusal: what it cannot follow."""
        taps = self.taps if self.taps is not None else self.usual_taps(target.layers)
        return self.model_copy(update={"taps": taps})

    def settled(self) -> dict[str, Any]:
        """By name, what a drafter needs and `fitted` fills in."""
        return {"taps": self.taps}

    def check_settled(self) -> None:
        """Raises Refusal where something would still have to follow a target: no drafter can be built of that."""
        for name, value in self.settled().items():
            if value is None:
                raise Refusal(f"method.{name}: null follows a target in training; a trained drafter has a value there")


class HeadOptions(Options):
    """The options of methods with a head for each depth. heads: depths."""

    heads: Count = 4

    @model_validator(mode="after")
    def _every_head_trained(self) -> Self:
        if self.unroll not in (None, self.heads):
            raise Refusal(f"method.unroll: {self.unroll} leaves heads untrained; nearest: method.heads={self.unroll}")
        if self.taps is not None and len(self.taps) != 1:
            raise Refusal(f"method.taps: {list(self.taps)}, but heads read one hidden state; nearest: [-1]")
        return self

    def depth_limit(self) -> int | None:
        return self.heads


@dataclass(frozen=True)
class Shape:
    """What a drafter must know of its target to be built: an export carries it."""

    hidden: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, target: Target) -> "Shape":
        return cls(target.hidden, target.layers, target.config.vocab_size)


@dataclass
class Context:
    """What the caller of `step` owns.

    positions: [B, N] of the rows in the text, t + depth for a chain that starts at feature t.
    count: [B] rows that are real; the rest of N is padding.
    memory: what the drafter may look back at. Decoding: what it keeps of each row's text (`Drafter.memory`). Training:
        `ChainKeys`.
    parents: [B, N], which row of the call before each row goes on from; None where the rows are verified text, and in
        training, where row t goes on from row t.
    places: [N], in training, ascending: which rows of the flattened batch these are; None for all, in its own shape.
    """

    positions: Tensor
    count: Tensor
    memory: Any = None
    parents: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True)
class Borrowed:
    """What a drafter uses of the target by reference: the embedding of its ids, its output head. Copies share it.

    table: [V, H], if the embedding is no more than its rows.
    """

    embed: Callable[[Tensor], Tensor] | None = None
    head: Head | None = None
    table: Tensor | None = None

    def __deepcopy__(self, memo: dict) -> "Borrowed":
        return self  # a bound method is copied with all it belongs to: the whole target


class DraftStep(NamedTuple):
    """A step that is one decoder layer and what stands before and behind it, as compiled code can take it.

    The layer reads the embedding beside the feature; or, with `fuse`, what that makes of [embedding, feature], each
    normed where there is a norm. norm: of what the layer returns, which is then the state; `normed`: and is handed on.
    rotary: of the layer's angles, at `position_offset`.
    """

    layer: nn.Module
    rotary: Any
    embedding_norm: nn.Module | None = None
    feature_norm: nn.Module | None = None
    fuse: nn.Linear | None = None
    norm: nn.Module | None = None
    normed: bool = False


class Levels(NamedTuple):
    """A static tree as numbers, `plan` int64, level by level: how many nodes, among how many children of one they are,
    how many of them have children; of each node its place in the children of all nodes above that have some; of those
    that have children which they are, and which of those above is the parent.

    nodes: of the tree, the root included. depth: levels below it.
    """

    plan: Tensor
    nodes: int
    depth: int


class Limits(NamedTuple):
    """A dynamic tree's, as DynamicShape in decode/tree.py has them."""

    nodes: int
    depth: int
    width: int
    node_cost: float
    depth_cost: float


class Drafter(nn.Module):
    """Base of all drafters.

    Attributes:
        max_depth: depths that exist (only this refuses a tree), None for as deep as asked.
        unroll: depths trained. taps: hidden states read, in `Target.forward`'s numbering.
        reads_tokens: False where all nodes of one depth share their logits (Medusa).
        row_by_row: whether, in training, `step` makes each row of that row and `ctx.memory` alone. Then it is handed
            only rows that are wanted, all in one line; otherwise whole texts.
        first_row: 0, or -1 for drafters of tokens only: row -1 reads x[0], without a feature.
        position_offset: added to a row's position for rotary embeddings.
        window: longest text with its drafts, where a model of its own cannot look back further; None without limit.
        detach: whether, in training, no gradient flows from a depth back into the feature' of the one before.
        vocab_map: [D] int64 target id of each draft id, ascending; None where D == V.
    """

    Options: ClassVar[type[Options]]
    max_depth: int | None = None
    reads_tokens: bool = True
    row_by_row: bool = True
    first_row: int = 0
    position_offset: int = 0
    window: int | None = None
    detach: bool = False

    def __init__(self, options: Any, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__()
        self.options, self.shape = options, shape
        self.taps: tuple[int, ...] = options.taps or ()
        self.borrowed = Borrowed()
        self._below: tuple[tuple[int, int, int], int] | None = None

    @property
    def unroll(self) -> int:
        return self.options.unroll or self.max_depth or 1

    @property
    def vocab_map(self) -> Tensor | None:
        return None

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.float32)

    def stream(self, depth: int) -> int:
        """The key stream that `depth` writes into: 0 for one module applied again, `depth` for a module per depth."""
        return 0

    def output(self, depth: int) -> int:
        """Which head reads this depth: `head` may be given the states of all depths of one number together."""
        return 0

    def read(self, hidden: Tensor) -> Tensor:
        """[B, T, len(taps) * H] target states -> [B, T, F], cast to the drafter's own dtype."""
        return hidden.to(self.dtype)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """[B, N, F] features, [B, N] tokens that follow -> feature' [B, N, F'] for the children, state [B, N, H]."""
        raise NotImplementedError

    def memory(self, rows: int, room: int) -> Any:
        """What this drafter keeps between rounds of decoding `rows` texts, empty.

        `select(rows)` of it keeps some texts and returns what then is the memory; `put(place, other)` has the only text
        of another memory take a place.
        `step` fills it at depth 0, whose rows are newly verified text: of a long one in several calls, in each of which
        some texts may have no rows. Nothing drafted may outlast its round.
        room: slots that the longest text and the nodes unfolded in one round need together.
        Raises Refusal where that is more than its `window`.
        """
        return None

    def head(self, state: Tensor, depth: int) -> Tensor:
        """[..., H] -> draft logits [..., D]."""
        raise NotImplementedError

    def likeliest(self, state: Tensor, depth: int, many: int, known: int | None = None) -> tuple[Tensor, Tensor]:
        """[..., H] -> log-probabilities, descending, and target ids [..., many] of the likeliest next tokens.

        Fewer where there are not so many. known: the first so many draft ids may be drafted, None for all.
        Raises Refusal where logits are not finite.
        """
        mass, top, ids = topmost(self.head(state, depth), many, known)
        check_mass(self, mass)
        return torch.where(top == -torch.inf, top, top - mass), target_ids(self, ids)

    def as_step(self) -> DraftStep | None:
        """What `step` is at every depth, if it is no more than that."""
        return None

    def unfold(
        self, feature: Tensor, tokens: Tensor, ctx: Context, levels: Levels, known: int | None
    ) -> tuple[Tensor, Tensor] | None:
        """A static tree's tokens and joint log-probabilities [B, nodes] in one call; None: take its steps one by one.

        feature, tokens, ctx: verified rows, the last real one the root's. known: as in `likeliest`.
        """
        return None

    def unfold_dynamic(
        self, feature: Tensor, tokens: Tensor, ctx: Context, limits: Limits, known: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """As `unfold`, of a dynamic tree: tokens, parents [B, N], size [B] and joint log-probabilities [B, N]."""
        return None

    def ids_below(self, vocab: int) -> int:
        """How many draft ids stand for target ids below `vocab`."""
        ids = self.vocab_map
        if ids is None:
            return vocab
        now = vocab, ids.data_ptr(), ids._version
        if self._below is None or self._below[0] != now:  # asked for every round
            self._below = now, int((ids < vocab).sum())
        return self._below[1]

    def output_head(self, depth: int) -> tuple[nn.Module | None, nn.Module | Head | None]:
        """The norm and the matrix that `head` is, if it is no more than these; or neither."""
        return None, None

    def start(self, target: Target) -> None:
        """Initialise what is trained from the target, once, before training."""

    def borrow(self, target: Target) -> None:
        """Take, by reference, what stays the target's own and is not exported: fills `borrowed`."""

    def head_of_target(self, state: Tensor) -> Tensor:
        """[..., H] -> logits [..., D] of the borrowed output head."""
        if self.borrowed.head is None:
            raise RuntimeError("this drafter shares the target's output matrix: call borrow(target) first")
        return self.borrowed.head(state.to(self.borrowed.head.weight.dtype))

    def check_vocabulary(self) -> None:
        """Raises ValueError where tensors that were read from a file contradict the draft vocabulary."""

    def engine_config(self) -> dict[str, Any]:
        """What other engines look for in this method's `config.json`."""
        return {}


def check_depth(depth: int | None, deepest: int | None) -> None:
    """Raises Refusal where more draft tokens in a row are asked for (None: the usual) than can be had (None: any)."""
    if depth is not None and deepest is not None and depth > deepest:
        raise Refusal(f"decode.depth: {depth} is deeper than the drafter's {deepest} heads; nearest: {deepest}")


def check_mass(drafter: Drafter, mass: Tensor) -> None:
    """mass: log-sum-exp of logits. Raises Refusal where one is not finite, or nan; -inf is silence."""
    if mass.numel() and not float(mass.max()) < torch.inf:  # nor is nan
        raise no_numbers(drafter)


def no_numbers(drafter: Drafter) -> Refusal:
    """What is said where a drafter's logits are not finite."""
    return Refusal(f"the drafter's logits are not finite in {drafter.dtype}: decode with dtype=float32 or bfloat16")


def target_ids(drafter: Drafter, draft_ids: Tensor) -> Tensor:
    """Draft ids of any shape -> target ids."""
    return draft_ids if drafter.vocab_map is None else drafter.vocab_map[draft_ids]


_METHODS: dict[str, type[Drafter]] = {}


def method(name: str):
    """Class decorator: makes a drafter known under `method.name`."""

    def add(cls: type[Drafter]) -> type[Drafter]:
        _METHODS[name] = cls
        return cls

    return add


OUTSIDE = "PACELINE_METHODS"  # environment variable: Python files with methods of one's own, parted as PATH is


def methods() -> list[str]:
    """Names of all methods: every module of `paceline.models` is looked at, and the files named in PACELINE_METHODS.

    Such a file runs as any program of the user's does; nothing in an export or a config can name one. Raises Refusal.
    """
    package = importlib.import_module("paceline.models")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"paceline.models.{module.name}")
    for path in filter(None, os.environ.get(OUTSIDE, "").split(os.pathsep)):
        _load_file(os.path.abspath(path))
    return sorted(_METHODS)


def _load_file(path: str) -> None:
    """Run a Python file once in this process, so that its methods are known."""
    name = f"paceline_methods_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return
    if not os.path.isfile(path):
        raise Refusal(f"{OUTSIDE}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: classes look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def options(name: str) -> type[Options]:
    """The option schema of a method. Raises KeyError for an unknown name."""
    methods()
    return _METHODS[name].Options


def build(options_: Options, shape: Shape, vocab_map: Tensor | None = None) -> Drafter:
    """A drafter with untrained weights.

    Args:
        vocab_map: [D] int64, which target ids it may draft; given if, and only if, `options.draft_vocab` is D.
    """
    if options_.name not in methods():
        raise Refusal(f"method.name={options_.name}: no such method; one of {', '.join(methods())}")
    size = None if vocab_map is None else len(vocab_map)
    if options_.draft_vocab != size:
        raise Refusal(f"method.draft_vocab={options_.draft_vocab} needs a map of as many ids, not of {size}")
    cls = _METHODS[options_.name]
    return cls(options_, shape, vocab_map)
