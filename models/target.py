"""The target: alone knows Hugging Face model internals. Loads a checkpoint, taps it, runs tree passes on our cache.

Does not know drafters, trees (an ancestor matrix stands for one), tokenizers or how tokens are chosen.

    Legend: B batch, T sequence, N tree nodes, H hidden, V rows of the output table, P pass width (T or N).
"""

import copy
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from paceline.models.cache import SLICE, Cache
from paceline.models.embedded import quiet_transformers
from paceline.models.errors import Refusal
from paceline.models.packed import Packed, PackedTrunk, pack_weights, unpack_weights

FEW = 32  # rows of one product where bits must not depend on how many there are: one step of oneDNN's kernels
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def device_of(name: str) -> str:
    """The device that `target.device` names; `auto` is the GPU where there is one. Raises Refusal for a missing one."""
    kind, _, index = name.partition(":")
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise Refusal(f"target.device={name}: there is no such GPU here; nearest: auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Refusal("target.device=mps: there is no such GPU here; nearest: auto")
    return name


# ---------------------------------------------------------------- the output head


@dataclass
class Head:
    """An output head with everything the model does after it: softcap · tanh(scale · (W h + b) / softcap).

    weight [V, H], bias [V] or None: a frozen target's, which no gradient reaches, or those of one that is trained.
    packed: the same weight and bias, quicker where no gradient is asked for.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    packed: Packed | None = None

    def __call__(self, state: Tensor) -> Tensor:
        """[..., H] -> logits [..., V]."""
        return self.finished(self.packed(state) if self.packed is not None else F.linear(state, self.weight, self.bias))

    def learning(self) -> list[Tensor]:
        """What of it a gradient is wanted in."""
        return [part for part in (self.weight, self.bias) if part is not None and part.requires_grad]

    def finished(self, logits: Tensor) -> Tensor:
        """What the model makes of its output matrix's own answer."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def rows(self, ids: Tensor | None) -> "Head":
        """The same head over these ids only ([D] int64); None for all of them."""
        if ids is None:
            return self
        weight, bias = self.weight[ids], None if self.bias is None else self.bias[ids]
        packed = None if self.packed is None else Packed(weight, bias)
        return Head(weight, bias, self.scale, self.softcap, packed)


def head_of(model: Any) -> Head:
    """The output head of a Hugging Face causal LM: of the output of its trunk, its logits."""
    table, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = 1.0 / _number(config, "logits_scaling", 1.0) * _number(config, "logit_scale", 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    packed = table.forward if isinstance(table.forward, Packed) else None
    return Head(table.weight, getattr(table, "bias", None), scale, softcap, packed)


# ---------------------------------------------------------------- the trunk


def trunk_of(model: Any) -> nn.Module:
    """A Hugging Face causal LM without its output head, ready for `trunk_pass`.

    Raises Refusal, by name, for one that cannot forget drafts or is not told where a token stands.
    """
    config = model.config.get_text_config()
    body = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    if body is None:
        raise Refusal(f"target: {type(model).__name__} has no trunk that paceline can find")
    _refuse_what_cannot_roll_back(model, body, config)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the only one that applies the soft-cap under a mask of our own
    return body


def trunk_pass(
    body: nn.Module, visible: Tensor, positions: Tensor, cache: Cache | None, dtype: torch.dtype, **inputs: Tensor
) -> Tensor:
    """The output of the final norm, [B, P, H].

    Args:
        visible: [B, P, R] bool, which of R keys each row sees: those that `cache` shows, or without one the rows' own.
        positions: [B, P] in the text. dtype: of the model. inputs: `input_ids` [B, P], or `inputs_embeds` [B, P, H].
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return body(
        attention_mask=mask[:, None], position_ids=positions, cache=cache, use_cache=cache is not None, **inputs
    ).last_hidden_state


# ---------------------------------------------------------------- the target


class Target(nn.Module):
    """A frozen Hugging Face causal LM behind one door. `Target.load(folder)` makes one; `adapted` and `unfrozen` make
    those whose weights training may change, `changed_by` the frozen one that results.

    Attributes:
        hidden: H. layers: L. vocab: ids the tokenizer knows (rows beyond are padding and never chosen).
        window: longest text, where attention is windowed or rotary angles depend on the length; None without limit.
        fingerprint: identifies the weights whatever dtype they were loaded in.
    """

    model: Any  # transformers types its models too loosely to help

    def __init__(self, model: Any, vocab: int | None = None, source: str = ""):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        config = model.config.get_text_config()
        self.config, self.source = config, source
        self.known_as: str | None = None  # the fingerprint of a trained trunk
        self.body = trunk_of(model)
        self._table = (model.get_input_embeddings(),)  # not as a second child
        self.hidden: int = config.hidden_size
        self.layers: int = config.num_hidden_layers
        self.vocab: int = min(vocab or config.vocab_size, config.vocab_size)
        self.window: int | None = window_of(config)
        self.blocks: nn.ModuleList = next(
            m for m in self.body.modules() if isinstance(m, nn.ModuleList) and len(m) == self.layers
        )
        self._check_tables()

    @classmethod
    def load(
        cls,
        folder: str,
        dtype: str = "bfloat16",
        device: str = "cpu",
        vocab: int | None = None,
        quantize: str = "none",
        trust_remote_code: bool = False,
    ) -> "Target":
        """Load a checkpoint folder or hub id.

        Args:
            vocab: number of ids the tokenizer knows, where the tables are padded beyond it.
            quantize: `none`, `4bit` or `8bit` (bitsandbytes).

        Raises:
            Refusal: what cannot be loaded, is not whole, or cannot be rolled back, by name.
        """
        from transformers import AutoModelForCausalLM  # takes seconds and accelerate along: only where a model loads

        if torch.device(device).type == "cpu":
            # else transformers copies each key head for all query heads that share it, in every pass
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
            # torch then lays large weights on huge pages, and a pass that streams them looks up fewer addresses
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        extra: dict = {}
        if quantize != "none":
            extra["quantization_config"] = _bitsandbytes(quantize, DTYPES[dtype])
            extra["device_map"] = {"": device}
        with quiet_transformers():
            try:
                config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
                model, found = AutoModelForCausalLM.from_pretrained(
                    folder,
                    config=config,
                    dtype=DTYPES[dtype],
                    trust_remote_code=trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    **extra,
                )
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise Refusal(f"target.path={folder}: {reason}") from error
        _check_whole(type(model).__name__, found, folder)
        target = cls(model if extra else model.to(device), vocab, str(folder))
        pack_weights(target.model)
        return target

    # -- passes

    def forward(
        self,
        ids: Tensor,
        taps: Sequence[int] = (),
        tree: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass of the trunk; of a chain over a cache, as many as it has slices. It has a graph only where something
        of it is trained.

        Args:
            ids: [B, P] tokens.
            taps: which hidden states to return: k is the input of layer k, L of the final norm, -1 the norm's output.
            tree: [B, N, N] bool, (i, j) true where node j is i or an ancestor of i; None for a chain. Needs `cache`.
            cache: keys of the committed tokens; the pass writes behind them. Nothing is committed until `keep`.
            documents: [B, T] int64, for packed rows without a cache: a token sees only its own document.
            positions: [B, T], with `documents`; otherwise counted from the cache.

        Returns:
            hidden [B, P, len(taps) * H], the taps side by side, and last [B, P, H], the output of the final norm.
        """
        if cache is not None and tree is None and ids.shape[1] > SLICE:
            return self._in_slices(ids, taps, cache)
        quick = self.body.__dict__.get("forward")
        if isinstance(quick, PackedTrunk) and cache is not None and quick.ready(cache):
            self._check_taps(taps)
            tapped = quick.run(ids, tree, cache, taps)
            return (torch.cat([tapped[k] for k in taps], -1) if taps else tapped[-1][..., :0]), tapped[-1]
        device = ids.device
        if cache is not None:
            cache.place(ids.shape[1])
            if tree is None:
                tree = (
                    torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device)
                    .tril()
                    .expand(len(ids), -1, -1)
                )
            visible = cache.visible(tree)
            positions = cache.length[:, None] + tree.sum(-1) - 1
        else:
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).tril()
            visible = causal[None] if documents is None else causal & (documents[:, :, None] == documents[:, None, :])
            visible = visible.expand(len(ids), -1, -1)
            if positions is None:
                positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
            if self.window is not None:
                self._within_window(int(positions.max()) + 1, "the longest text's tokens", "lower data.max_length")
        with self._tapped(taps) as tapped:
            last = trunk_pass(self.body, visible, positions, cache, self.dtype, input_ids=ids)
        tapped[-1] = last
        hidden = torch.cat([tapped[k] for k in taps], -1) if taps else last[..., :0]
        return hidden, last

    def _in_slices(self, ids: Tensor, taps: Sequence[int], cache: Cache) -> tuple[Tensor, Tensor]:
        """What one pass over the chain `ids` would return and leave behind, of several, each behind those before it."""
        committed, parts = cache.length, []
        try:
            for some in ids.split(SLICE, 1):
                parts.append(self(some, taps, cache=cache))
                cache.length = cache.length + some.shape[1]
        finally:
            cache.length = committed  # which of it stays, `keep` says
        hidden, last = (torch.cat(side, 1) for side in zip(*parts, strict=True))
        return hidden, last

    @torch.no_grad()
    def exact(self) -> None:
        """From now on, in bfloat16, a token's logits and keys are the same bits in every pass over a cache: whatever
        its width, the rows beside it and the shape of the tree. Plain decoding, drafted decoding and reading a prompt
        then agree. It takes kernels.cpp, whose sums know no slots, and products of few rows at a time, as this machine
        is shown to round them alike.

        In float32 nothing is done: passes of other widths may still differ in the last bits, far finer than those of
        bfloat16, so that only tokens which tie to these bits could be chosen otherwise.

        Raises:
            Refusal: this target, machine or dtype has no such passes.
        """
        quick, head = self.body.__dict__.get("forward"), self.head.packed
        if self.dtype == torch.float32:
            return
        if not isinstance(quick, PackedTrunk) or head is None or not quick.by_few(FEW):
            raise Refusal(
                f"decode.exact: {self.dtype} passes of {type(self.model).__name__} on {self.device.type} round by "
                "their width (it takes a CPU with bfloat16, a C++ compiler and a Llama, Mistral, Qwen2 or Qwen3); "
                "nearest: dtype=float32"
            )
        head.rows = FEW
        ids = torch.arange(min(2 * FEW, self.window or 2 * FEW), device=self.device)[None] * 7919 % self.vocab
        widest: tuple[Tensor, Tensor] | None = None
        for width in (2 * FEW, FEW + 1, FEW, FEW - 1, FEW // 2, 3, 2, 1):
            cache = self.new_cache(1, ids.shape[1])
            logits = self.head(self(ids[:, :width], cache=cache)[1])[0]
            keys = torch.stack(cache.keys)[:, 0, :, :width]
            widest = widest or (logits, keys)
            if not (torch.equal(logits, widest[0][:width]) and torch.equal(keys, widest[1][..., :width, :])):
                head.rows = None
                quick.by_few(None)
                raise Refusal(
                    "decode.exact: this machine's bfloat16 products round by their width; nearest: dtype=float32"
                )

    def keep(self, cache: Cache, nodes: Tensor, count: Tensor) -> None:
        """Commit the accepted nodes of the last pass: nodes [B, J] ascending, count [B] of them meant per row."""
        cache.keep(nodes, count)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache; refused where the model's attention window is smaller than what may have to be seen."""
        self._within_window(capacity, "prompt + new tokens + tree", "shorten the prompt or lower max_new_tokens")
        return Cache(batch, capacity, self.device)

    def check_ids(self, ids: Sequence[int], whose: str) -> None:
        """Raises Refusal for the first of `whose` ids that has no row here: a pass would fail inside a kernel."""
        rows = self.config.vocab_size
        wrong = next((i for i in ids if not 0 <= i < rows), None)
        if wrong is not None:
            raise Refusal(
                f"target={self.source}: {whose} id {wrong}, its table has {rows} rows: that is another tokenizer's, or "
                "of a token that was added and given no row"
            )

    def check_texts(self, longest: int, highest: int) -> None:
        """Raises Refusal for training text that holds so many tokens, or such an id, and cannot be read: that would be
        met only in the pass that holds it. -1: none."""
        if highest >= 0:
            self.check_ids([highest], "data.path: the text has")
        if self.window is not None and longest > self.window:
            raise Refusal(
                f"data.max_length: the longest text has {longest} tokens, this target's window is {self.window}; "
                f"nearest: {self.window}"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """[...] ids -> [..., H], what layer 0 reads, the model's own multiplier included."""
        out = self._table[0](ids)
        return out * self._embed_scale if self._embed_scale != 1.0 else out

    @property
    def table(self) -> Tensor | None:
        """[V, H], if `embed` only looks up its rows."""
        plain = type(self._table[0]) is nn.Embedding and self._embed_scale == 1.0
        return self._table[0].weight if plain else None

    @property
    def head(self) -> Head:
        """The model's own output head: head(last) == its logits."""
        return head_of(self.model)

    # -- trained with its drafter

    def adapted(self, rank: int, alpha: float, dropout: float, modules: Sequence[str] | None) -> "Target":
        """A target on these very weights with LoRA adapters, float32 and alone trainable; it says what this one says.

        Args:
            modules: last names of the linear layers that get one; None for all inside the decoder layers.

        Raises:
            Refusal: peft is not installed, or a name belongs to no linear layer of the decoder layers.
        """
        if importlib.util.find_spec("peft") is None:
            raise Refusal("trunk=lora needs peft: pip install peft, or trunk=frozen")
        from peft import LoraConfig, inject_adapter_in_model

        inside = {id(part) for part in self.blocks.modules() if isinstance(part, nn.Linear)}
        paths = [name for name, part in self.model.named_modules() if id(part) in inside]
        known = sorted({path.rsplit(".", 1)[-1] for path in paths})
        for name in known if modules is None else modules:
            if name not in known:
                raise Refusal(f"trunk.modules: no linear layer in this target's layers is called {name}; of {known}")
        chosen = [path for path in paths if modules is None or path.rsplit(".", 1)[-1] in modules]
        live = Target(_sharing(self.model), self.vocab, self.source)
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen, bias="none"), live.model
        )
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return live.train()

    def unfrozen(self) -> "Target":
        """A float32 copy whose every weight is trained."""
        model = copy.deepcopy(self.model)
        unpack_weights(model)
        live = Target(model, self.vocab, self.source)
        live.model.float().requires_grad_(True)
        return live.train()

    def changed(self) -> dict[str, Tensor]:
        """What training changes of this target, in float32: adapters as `PATH.lora_A.weight`, or weights by name."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {name.replace(".default.", "."): parameter.detach().float() for name, parameter in trained.items()}

    @torch.no_grad()
    def changed_by(self, tensors: dict[str, Tensor], scale: float = 1.0) -> "Target":
        """A frozen target like this one with `tensors` (what `changed` says) in place; all else is shared.

        Adapters are merged, W + scale * B A in float32 and cast: no pass pays for them. Raises KeyError for a name that
        is none of this target's, ValueError for a shape.
        """
        mine = dict(self.model.named_parameters())
        weights = {}
        for name, tensor in tensors.items():
            path, adapter, _ = name.partition(".lora_A.")
            if adapter:
                delta = tensors[f"{path}.lora_B.weight"].float() @ tensor.float()
                weights[f"{path}.weight"] = mine[f"{path}.weight"].float() + scale * delta.to(self.device)
            elif ".lora_B." not in name:
                weights[name] = tensor
        model = _sharing(self.model)
        places = [(part, key) for part in model.modules() for key in part._parameters]
        for name, weight in weights.items():
            old = mine[name]
            if old.shape != weight.shape:
                raise ValueError(f"{name} has shape {list(weight.shape)}, expected {list(old.shape)}")
            new = nn.Parameter(weight.detach().to(old.device, old.dtype, copy=True), requires_grad=False)
            for part, key in places:
                if part._parameters[key] is old:  # in both places of a tied table
                    part._parameters[key] = new
        changed = Target(model, self.vocab, self.source)
        pack_weights(changed.model)
        return changed

    # -- what a drafter can be made like, or started from

    def layer_form(self) -> dict[str, Any]:
        """What this target's layers are made of, in the words of `LayerOptions`."""
        config, names = self.config, dict(self.blocks[-1].named_parameters())
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or self.hidden // heads
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_theta" not in rope:  # one set for each kind of layer: that of full attention
            rope = rope.get("full_attention") or next((v for v in rope.values() if isinstance(v, dict)), {})
        limits = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
        norm = names.get("self_attn.q_norm.weight")
        return {
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": size,
            "intermediate": getattr(config, "intermediate_size", None) or 4 * self.hidden,
            "activation": getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu",
            "eps": _number(config, "rms_norm_eps", 1e-6),
            "rope": {"rope_type": "default", "rope_theta": 10000.0} | {k: v for k, v in limits.items() if v} | rope,
            "qk_norm": norm is not None and norm.shape == (size,),
            "qkv_bias": any(name in names for name in ("self_attn.q_proj.bias", "self_attn.qkv_proj.bias")),
            "out_bias": "self_attn.o_proj.bias" in names,
            "mlp_bias": "mlp.down_proj.bias" in names,
        }

    def cut(self, layers: Sequence[int], tables: bool) -> dict[str, Any]:
        """transformers' configuration of this model with only these layers.

        tables: whether its embedding is to be its own; else it is handed what `embed` gives.
        """
        form = json.loads(self.config.to_json_string(use_diff=False))
        for name, value in form.items():
            if isinstance(value, list) and len(value) == self.layers:  # an entry for each layer
                form[name] = [value[k] for k in layers]
        if not tables and "embedding_multiplier" in form:
            form["embedding_multiplier"] = 1.0
        return form | {"num_hidden_layers": len(layers), "architectures": [type(self.model).__name__]}

    def cut_tensors(self, layers: Sequence[int]) -> dict[str, Tensor]:
        """The weights of `cut`, under the model's own names. Raises Refusal for a quantised target."""
        inside = next(name for name, module in self.model.named_modules() if module is self.blocks) + "."
        out = {}
        for name, tensor in self.model.state_dict().items():
            if name.startswith(inside):
                layer, _, rest = name.removeprefix(inside).partition(".")
                if int(layer) not in layers:
                    continue
                if not tensor.is_floating_point():
                    raise Refusal("method.target_layers: this target is quantised; nearest: target.quantize=none")
                name = f"{inside}{list(layers).index(int(layer))}.{rest}"
            out[name] = tensor
        return out

    def layer_tensors(self, layer: int) -> dict[str, Tensor]:
        """Float32 copies of one layer's weights under Llama's names; norms as what they multiply by.

        Raises:
            Refusal: the layer is not made of Llama's parts (mixtures of experts, latent attention, other norms).
        """
        if not -self.layers <= layer < self.layers:
            raise Refusal(
                f"method.start_layer: this target has layers 0 to {self.layers - 1} (-1: the last), not {layer}"
            )
        block = self.blocks[layer]
        names = {name: parameter.detach() for name, parameter in block.named_parameters()}
        form = self.layer_form()
        wide, narrow = form["heads"] * form["head_dim"], form["kv_heads"] * form["head_dim"]
        for kind in ("weight", "bias"):
            if f"self_attn.qkv_proj.{kind}" in names:
                parts = names[f"self_attn.qkv_proj.{kind}"].split([wide, narrow, narrow])
                names |= {f"self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", parts, strict=True)}
            if f"mlp.gate_up_proj.{kind}" in names:
                parts = names[f"mlp.gate_up_proj.{kind}"].chunk(2)
                names |= {f"mlp.{x}_proj.{kind}": part for x, part in zip(("gate", "up"), parts, strict=True)}
        before_mlp = "pre_feedforward_layernorm"
        if not hasattr(block, before_mlp):
            before_mlp = "post_attention_layernorm"
        wanted = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        out: dict[str, Tensor] = {}
        for name in wanted:
            if f"{name}.weight" not in names or names[f"{name}.weight"].ndim != 2:
                raise _unlike_llama(self, f"{name}.weight")
            if not names[f"{name}.weight"].is_floating_point():
                raise Refusal("method.start=target: this target is quantised; nearest: method.start=random")
            both = (f"{name}.weight", f"{name}.bias")
            out |= {part: names[part] for part in both if part in names}
        for name, theirs, width in (
            ("input_layernorm", "input_layernorm", self.hidden),
            ("post_attention_layernorm", before_mlp, self.hidden),
            *((f"self_attn.{x}_norm", f"self_attn.{x}_norm", form["head_dim"]) for x in "qk" if form["qk_norm"]),
        ):
            try:
                norm = block.get_submodule(theirs)
            except AttributeError:
                raise _unlike_llama(self, theirs) from None
            out[f"{name}.weight"] = self._multiplier(norm, width)
        return {name: tensor.float().clone() for name, tensor in out.items()}

    def final_norm(self) -> Tensor:
        """[H] float32, what the last norm multiplies by. Raises Refusal where there is none."""
        norms = [m for name, m in self.body.named_children() if "norm" in name.lower()]
        if len(norms) != 1:
            raise _unlike_llama(self, "final norm")
        return self._multiplier(norms[0], self.hidden)

    @torch.no_grad()
    def _multiplier(self, norm: nn.Module, width: int) -> Tensor:
        """[width] float32, what an RMSNorm multiplies by (Gemma's by 1 + weight). Refusal: it is another kind of norm.

        That is its answer to numbers of one size, which it takes to 1; they are so large that its eps is lost.
        """
        ones = torch.ones(width, device=self.device)
        signs = 1 - 2 * (torch.arange(width, device=self.device) % 2)
        same, mixed = (norm(1024 * x[None, None])[0, 0] for x in (ones, ones * signs))
        if not torch.equal(same, mixed * signs):  # where the mean is taken off, or something added
            raise _unlike_llama(self, "RMSNorm")
        return same.float()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def _embed_scale(self) -> float:
        return _number(self.config, "embedding_multiplier", 1.0)

    @property
    def fingerprint(self) -> str:
        """`tables-layers`: hashes of the signs of a strided sample of the weights, which no dtype changes.

        Rounding to a coarser dtype would not do: bf16 by way of fp16 is not always bf16. A few steps of training flip
        some of these signs, another layer about half of them.
        Layers that were loaded in 4 or 8 bits cannot be compared: their half is `quantised`.
        A trunk that came with a drafter is `known_as` its original's and what was trained.
        """
        if self.known_as is not None:
            return self.known_as
        shape = [self.hidden, self.layers, self.config.vocab_size, self.config.num_attention_heads]
        tables, layers = hashlib.sha256(repr(shape).encode()), hashlib.sha256()
        quantised = False
        for name, weight in self.model.named_parameters():
            if not weight.is_floating_point():
                quantised = True
                continue
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)].signbit().cpu()
            digest = layers if weight.ndim > 1 and ".layers." in name else tables
            digest.update(name.encode() + sample.numpy().tobytes())
        return f"{tables.hexdigest()[:16]}-{'quantised' if quantised else layers.hexdigest()[:16]}"

    @torch.no_grad()
    def hf_generate(self, ids: Tensor, max_new_tokens: int, eos: Sequence[int] = ()) -> Tensor:
        """transformers' own greedy `generate` on [1, T] ids, the outside baseline of speed. Returns the new ids."""
        with quiet_transformers():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=list(eos) or None,
                pad_token_id=next(iter(eos), 0),
            )
        return out[0, ids.shape[1] :]

    # -- inside

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Hooks on the named layers only, so that no pass keeps all hidden states."""
        captured: dict[int, Tensor] = {}
        handles = []

        def hook(k: int) -> Callable:
            def read(_, args, kwargs):
                captured[k] = args[0] if args else kwargs["hidden_states"]

            return read

        def after_all(_, args, out):
            captured[self.layers] = out if isinstance(out, Tensor) else out[0]

        self._check_taps(taps)
        for k in taps:
            if k == self.layers:
                handles.append(self.blocks[-1].register_forward_hook(after_all))
            elif k >= 0:
                handles.append(self.blocks[k].register_forward_pre_hook(hook(k), with_kwargs=True))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def _check_taps(self, taps: Sequence[int]) -> None:
        for k in taps:
            if not -1 <= k <= self.layers:
                raise Refusal(
                    f"method.taps: this target has layers 0 to {self.layers - 1} "
                    f"({self.layers}: before the final norm, -1: after it), not {k}"
                )

    def _within_window(self, tokens: int, what: str, advice: str) -> None:
        if self.window is not None and tokens > self.window:
            raise Refusal(f"this target's window is {self.window} tokens, and {what} need {tokens}: {advice}")

    def _check_tables(self) -> None:
        """`embed` and `head` must be the model's own arithmetic: tried once on four tokens, refused if they are not."""
        ids = torch.arange(min(4, self.vocab), device=self.device)[None]
        hidden, last = self(ids, taps=(0,))
        logits = self.model(ids, use_cache=False).logits.float()
        near = 1e-2 * float(logits.abs().max()) + 1e-6
        name = type(self.model).__name__
        if not torch.allclose(self.head(last).float(), logits, atol=near, rtol=0):
            raise Refusal(f"target: {name} does something to its logits that paceline does not know")
        if not torch.allclose(self.embed(ids).float(), hidden.float(), atol=1e-2 * float(hidden.abs().max()), rtol=0):
            raise Refusal(f"target: {name} does something to its embeddings that paceline does not know")


def _check_whole(name: str, found: dict[str, Any], folder: str) -> None:
    """Raises Refusal where transformers `found` a tensor missing or of another shape: it made it up at random.

    A table that is tied to another is not missing.
    """
    for key, shape, expected in sorted(found["mismatched_keys"]):
        raise Refusal(
            f"target.path={folder}: tensor {key} has shape {list(shape)}, {name} of its config.json {list(expected)}"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise Refusal(
            f"target.path={folder}: tensor {missing[0]}{more} is missing: no whole {name}; "
            "nearest: the folder of the whole causal LM"
        )


def _sharing(model: Any) -> Any:
    """A copy of a model's modules around the very same parameters and buffers, none of them packed: what is packed
    looks at no adapter and no new weight."""
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    unpack_weights(shared)
    return shared


def _unlike_llama(target: Target, part: str) -> Refusal:
    name = type(target.model).__name__
    return Refusal(f"method.start: {name}'s layers have no {part} to start from; nearest: method.start=random")


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """[D / 2] float32 rotary frequencies and what cos and sin are multiplied by, as transformers computes them.

    rope: transformers' `rope_parameters` and `max_position_embeddings`. Refusal: a kind that depends on the length.
    """
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", "default")
    if kind != "default" and (kind in ("dynamic", "longrope") or kind not in ROPE_INIT_FUNCTIONS):
        raise Refusal(f"method.layer.rope: {kind} is not available in a drafter; nearest: rope_type: default")
    theta = rope.get("rope_theta")
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        fault = f"{theta!r} is no positive number" if "rope_theta" in rope else "is missing"
        raise Refusal(f"method.layer.rope: rope_theta {fault}; nearest: {{rope_type: default, rope_theta: 10000.0}}")
    parameters = {key: value for key, value in rope.items() if key != "max_position_embeddings"}
    config = PretrainedConfig(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1)
    config.max_position_embeddings = rope.get("max_position_embeddings", 2048)
    config.rope_parameters = parameters
    try:
        with torch.device("cpu"):  # also where a module is only sketched, on the device `meta`
            if kind == "default":
                width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
                return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float) / width), 1.0
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except KeyError as error:
        raise Refusal(f"method.layer.rope: rope_type {kind} needs {error.args[0]}") from None
    except (TypeError, ValueError) as error:  # another value that is no number
        raise Refusal(f"method.layer.rope: {parameters} gives no angles ({error})") from None
    return frequencies.float(), float(scaling)


def _number(config, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)


def window_of(config) -> int | None:
    """Tokens beyond which a pass would not see, or not turn, its keys as the passes before it did."""
    types = getattr(config, "layer_types", None)
    windowed = types is None or any(kind != "full_attention" for kind in types)
    size = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    limits = [int(size)] if windowed and size and getattr(config, "use_sliding_window", True) is not False else []
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # these turn every key anew once a text is longer than the model was trained for: old keys no longer fit
        if kind.get("rope_type") in ("dynamic", "longrope"):
            limits.append(int(kind.get("original_max_position_embeddings") or config.max_position_embeddings))
    return min(limits, default=None)


def _refuse_what_cannot_roll_back(model: Any, body: nn.Module, config) -> None:
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if getattr(model, "_is_stateful", False) or kinds:
        detail = ", ".join(sorted(kinds)) or "a recurrent state"
        raise Refusal(
            f"target: {name} keeps {detail}, which cannot forget rejected draft tokens; use an attention-only model"
        )
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise Refusal(f"target: {name} takes no position ids, which tree verification needs")


def _bitsandbytes(quantize: str, dtype: torch.dtype):
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refusal(
            f"target.quantize={quantize} needs bitsandbytes: pip install bitsandbytes, or target.quantize=none"
        )
    from transformers import BitsAndBytesConfig

    if quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
