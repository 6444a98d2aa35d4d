"""Draft models: a causal LM of its own, small beside the target, that reads tokens and nothing of the target's states.

Any Hugging Face causal LM with the target's tokenizer, or one cut from the target: some of its layers, in order, with
its embedding and output matrix. Run like the target itself (`models/target.py`): a chain of true text is one pass over
it, since depth k of the chain that begins at t is depth 0 of the one that begins at t + k.

Its tensors bear the names of its own checkpoint: the export of one with tables of its own is an ordinary causal LM.
Knows no tree, mask or loss: `Context.memory` says what is seen.
"""

import json
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from transformers import AutoConfig

from paceline.models.drafter import Borrowed, Context, Drafter, Options, Shape, method
from paceline.models.embedded import folder, quiet_transformers
from paceline.models.errors import Refusal
from paceline.models.streams import TreeKeys
from paceline.models.target import Target, head_of, trunk_of, trunk_pass, window_of

MOST_LAYERS = 1024
EMBEDDED = ("smollm2", "tiny")  # targets that need no path


class DraftOptions(Options):
    """model: the LM that training begins with, an embedded target or a folder or hub id; or target_layers: the target's
    layers that it is cut from, None for `default_layers`.

    tables: embedding and output matrix: the target's, `shared` and frozen, as is usual where it is cut from it; or its
    `own`. config: transformers' configuration, which follows the model.
    """

    TRAINING = Options.TRAINING | {"model", "target_layers"}

    taps: tuple[int, ...] | None = ()
    model: str | None = None
    target_layers: tuple[int, ...] | None = None
    tables: Literal["own", "shared"] | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        begun = [name for name in ("model", "target_layers", "init_from") if getattr(self, name) is not None]
        if len(begun) > 1:
            first, second = begun[-2:]
            raise Refusal(f"method.{first}: method.{second} says already where it begins; nearest: method.{first}=null")
        if self.target_layers is not None and (
            not self.target_layers or len(set(self.target_layers)) < len(self.target_layers)
        ):
            raise Refusal(f"method.target_layers: {list(self.target_layers)} must be distinct layers, at least one")
        if self.model is not None and self.tables == "shared":
            raise Refusal("method.tables: shared are the target's, which only layers of the target fit; nearest: own")
        if self.unroll not in (None, 1):
            raise Refusal(f"method.unroll: {self.unroll}, but a pass over a text teaches every depth alike; nearest: 1")
        if self.draft_vocab is not None:
            raise Refusal("method.draft_vocab: a draft model drafts every token that it knows; nearest: null")
        layers = (self.config or {}).get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:  # it would be built before it is noticed
            raise Refusal(f"method.config: {layers} layers; nearest: {MOST_LAYERS}")
        if self.taps:
            raise Refusal(f"method.taps: {list(self.taps)}, but a draft model reads tokens only; nearest: []")
        if self.objective.get("smooth_l1"):
            raise Refusal("method.objective.smooth_l1: a draft model has no features of the target's; nearest: 0")
        return self

    def usual_taps(self, layers: int) -> tuple[int, ...]:
        return ()

    def settled(self) -> dict[str, Any]:
        return super().settled() | {"tables": self.tables, "config": self.config}

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Its ids must mean what the target's mean; ids that only its own tokenizer knows are never drafted."""
        if self.model is None:
            return
        others = "take a model of the target's family, or method.target_layers"
        check_same_tokens(_folder(self.model), tokenizer, f"method.model={self.model}", others)

    def fitted(self, target: Target) -> Self:
        if self.model is not None:
            config, rows = _config(self.model)
            if rows < target.vocab:
                raise Refusal(
                    f"method.model={self.model}: its embedding has {rows} rows, fewer than the target's tokenizer has "
                    f"ids ({target.vocab})"
                )
            settled: dict[str, Any] = {"config": config, "tables": "own"}
        else:
            layers = default_layers(target.layers) if self.target_layers is None else self.target_layers
            for k in layers:
                if not -target.layers <= k < target.layers:
                    raise Refusal(
                        f"method.target_layers: this target has layers 0 to {target.layers - 1} (-1: the last), not {k}"
                    )
            layers, tables = tuple(k % target.layers for k in layers), self.tables or "shared"
            settled = {"target_layers": layers, "tables": tables, "config": target.cut(layers, tables == "own")}
        settled["config"] = {k: v for k, v in settled["config"].items() if k not in ("dtype", "torch_dtype")}
        return super().fitted(target).model_copy(update=settled)


def default_layers(layers: int) -> tuple[int, ...]:
    """The first two and the last two; of four and fewer, the first and the last."""
    return (0, 1, -2, -1) if layers > 4 else (0, -1) if layers > 1 else (0,)


def check_same_tokens(folder: str, tokenizer: Any, where: str, advice: str) -> None:
    """Raises Refusal, of `where` and with `advice`, for the first id of the target's `tokenizer` that is another token,
    or none, to the one in `folder`. No Python code of that is run."""
    from transformers import AutoTokenizer

    try:
        known = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare ones for a file that it cannot read
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Refusal(f"{where}: its tokenizer cannot be read ({reason})") from error
    theirs, ours = ({i: token for token, i in one.get_vocab().items()} for one in (known, tokenizer))
    for i, token in sorted(ours.items()):
        if theirs.get(i) != token:
            there = f"{theirs[i]!r}" if i in theirs else "not there"
            raise Refusal(
                f"{where}: another tokenizer than the target's: id {i} is {there}, the target's is {token!r}; {advice}"
            )


def _folder(model: str) -> str:
    return folder(model) if model in EMBEDDED else model


def _config(model: str) -> tuple[dict[str, Any], int]:
    """transformers' configuration of a checkpoint, and the rows of its embedding."""
    try:
        config = AutoConfig.from_pretrained(_folder(model))
    except (OSError, ValueError) as error:
        raise Refusal(f"method.model={model}: {str(error).strip().splitlines()[0]}") from error
    return json.loads(config.to_json_string(use_diff=False)), config.get_text_config().vocab_size


def _causal_lm(config: dict[str, Any], tables: bool) -> Any:
    """A float32 model with weights at random. tables: False makes none that matter: they are handed over in `step`."""
    from transformers import AutoModelForCausalLM

    if not tables:
        config = config | {"vocab_size": 1, "pad_token_id": None}
    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(f"method.config: transformers makes no model of it ({error})") from error


@method("draft")
class DraftModel(Drafter):
    """Reads x[0] at row -1, so that its first row stands at text position 0. As deep as asked."""

    Options = DraftOptions
    row_by_row = False  # its body reads whole texts
    first_row = -1
    position_offset = 1

    def __init__(self, options: DraftOptions, shape: Shape, vocab_map: Tensor | None = None):
        super().__init__(options, shape)
        own = options.tables == "own"
        lm = _causal_lm(options.config or {}, own)
        body, head = trunk_of(lm), lm.get_output_embeddings()
        self.window = window_of(lm.config.get_text_config())
        self._lm, self._body = (lm,), (body,)  # its parts are children under its own names, not it as a whole
        self._tied: dict[str, str] = {}  # name of a tensor that is not stored -> that of the one it is
        if not own:
            lm.set_input_embeddings(None)
        elif head.weight is lm.get_input_embeddings().weight:
            names = {module: f"{name}.weight" for name, module in lm.named_modules()}
            self._tied = {names[head]: names[lm.get_input_embeddings()]}
        for name, part in lm.named_children():
            if own or part is not head:
                self.add_module(name, part)
        self.register_state_dict_post_hook(_without_tied)
        self.register_load_state_dict_pre_hook(_with_tied)

    @property
    def rows(self) -> int:
        """Ids that its own embedding knows."""
        return len(self._lm[0].get_input_embeddings().weight)

    def memory(self, rows: int, room: int) -> TreeKeys:
        if self.window is not None and room > self.window:
            raise Refusal(
                f"this draft model's window is {self.window} tokens, and prompt + new tokens + tree need {room}: "
                "shorten the prompt or lower max_new_tokens"
            )
        return TreeKeys(rows, room)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """The feature' is the state, which only training reads."""
        if depth and ctx.parents is None:  # training: the chain goes on in the text, where the next row has read it
            state = feature.roll(-1, 1)
            return state, state
        inputs = {"input_ids": tokens}
        if self.options.tables == "shared":
            if self.borrowed.embed is None:
                raise RuntimeError("this draft model shares the target's embedding: call borrow(target) first")
            inputs = {"inputs_embeds": self.borrowed.embed(tokens).to(self.dtype)}
        cache, visible = ctx.memory.open(ctx, tokens.shape[1])
        positions = (ctx.positions + self.position_offset).clamp(min=0)
        state = trunk_pass(self._body[0], visible, positions, cache, self.dtype, **inputs)
        return state, state

    def head(self, state: Tensor, depth: int) -> Tensor:
        """Over the ids of the target's table: one with more rows has only padding there."""
        if self.options.tables == "shared":
            return self.head_of_target(state)
        lm = self._lm[0]
        return head_of(lm).finished(lm.get_output_embeddings()(state))[..., : self.shape.vocab]

    @torch.no_grad()
    def start(self, target: Target) -> None:
        """The weights of method.model, or of the target's layers."""
        asked, theirs = self.options, {}
        if asked.model is not None:
            try:
                theirs = Target.load(_folder(asked.model), "float32").model.state_dict()
            except Refusal as refusal:
                reason = str(refusal).partition(": ")[2]  # it speaks of a target
                raise Refusal(f"method.model={asked.model}: {reason}") from refusal
        else:
            theirs = target.cut_tensors(asked.target_layers)
        for name, own in self.state_dict().items():
            if name not in theirs or theirs[name].shape != own.shape:
                given = f"method.target_layers: {list(asked.target_layers)}" if asked.model is None else "method.model"
                raise Refusal(f"{given} cannot be taken over, {name} does not fit; nearest: other layers, as [0,-1]")
        self.load_state_dict({name: theirs[name] for name in self.state_dict()})

    def borrow(self, target: Target) -> None:
        if self.options.tables == "shared":
            self.borrowed = Borrowed(target.embed, target.head)

    def engine_config(self) -> dict[str, Any]:
        """transformers' own, where it is a whole model."""
        if self.options.tables == "shared":
            return {}
        return dict(self.options.config)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What is computed and not stored, as rotary frequencies, moves with the weights but keeps its precision."""
        before = {id(module): dict(module.named_buffers(recurse=False)) for module in self.modules()}
        super()._apply(fn, recurse)
        for module in self.modules():
            for name in module._non_persistent_buffers_set:
                moved, exact = module._buffers[name], before[id(module)].get(name)
                if moved is not None and exact is not None:
                    module._buffers[name] = exact.to(moved.device)
        return self


def _without_tied(module: nn.Module, tensors: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in module._tied:  # type: ignore[union-attr]
        del tensors[prefix + name]


def _with_tied(module: nn.Module, tensors: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, stored in module._tied.items():  # type: ignore[union-attr, operator]
        if prefix + stored in tensors:
            tensors[prefix + name] = tensors[prefix + stored]
