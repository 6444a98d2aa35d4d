"""Toys the tests share: tiny random targets of every family, and a drafter whose every guess is dictated.

Knows transformers' configurations and paceline's public names. Imported as `fakes` (pytest's `pythonpath`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from paceline.models.cache import Cache
from paceline.models.drafter import Context, Drafter, Options, Shape
from paceline.models.ngram import Texts
from paceline.models.target import Target

VOCAB = 64

# What each family needs beside `_COMMON`: every option that changes arithmetic is set away from its neutral value.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 64,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.25},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},  # its output head has a bias
    "gpt_neox": {},
    "deepseek_v3": {  # keys and values of different widths
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """A seeded random fp32 model, its weights and biases large enough that its text varies and every term shows."""
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def target_of(family: str = "llama", **options: Any) -> Target:
    """`model_of` as a target."""
    return Target(model_of(family, **options))


@torch.no_grad()
def slow_greedy(target: Target, prompt: Sequence[int], new: int) -> list[int]:
    """The oracle of greedy decoding: the whole text through transformers' model for every token. The new tokens."""
    text = list(prompt)
    for _ in range(new):
        logits = target.model(torch.tensor([text]), use_cache=False).logits[0, -1]
        text.append(int(logits[: target.vocab].argmax()))
    return text[len(prompt) :]


def assert_holds(cache: Cache, target: Target, rows: list[list[int]]) -> None:
    """Row by row, the committed slots are what transformers caches for the text alone."""
    assert cache.length.tolist() == [len(row) for row in rows]
    for index, row in enumerate(rows):
        theirs = DynamicCache(config=target.config)
        target.model(torch.tensor([row]), cache=theirs)
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            for ours, oracle in ((keys, theirs.layers[layer].keys), (values, theirs.layers[layer].values)):
                torch.testing.assert_close(ours[index, :, : len(row)], oracle[0], atol=1e-5, rtol=0)


class Dictated(Drafter):
    """Drafts from texts known in advance, the true token at any rank wanted.

    texts: prompts with what the target says after them, one for each prompt in use.
    rank: text position -> rank of the true token among the drafts there: 0 is right, a high one a miss, None silence.
    """

    first_row = -1

    def memory(self, rows: int, room: int) -> Texts:
        return Texts([] for _ in range(rows))

    def __init__(self, texts: Sequence[Sequence[int]], rank: Callable[[int], int | None] = lambda place: 0):
        super().__init__(Options(name="dictated", taps=(), unroll=4), Shape(32, 3, VOCAB))
        self.texts, self.rank = [list(text) for text in texts], rank

    def read(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], 2)

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """The feature, and the state, is (row of `texts`, text position to be drafted)."""
        if depth == 0:
            feature = feature.clone()
            for row, (words, count) in enumerate(zip(tokens.tolist(), ctx.count.tolist(), strict=True)):
                known = ctx.memory[row]
                known.extend(words[:count])
                which = [i for i, text in enumerate(self.texts) if text[: len(known)] == known]
                assert which, f"row {row} says {known}, which is none of the texts"
                feature[row] = torch.tensor([which[0], len(known)])
        else:
            feature = torch.stack([feature[..., 0], feature[..., 1] + 1], -1)
        return feature, feature

    def head(self, state: Tensor, depth: int) -> Tensor:
        logits = torch.full((*state.shape[:-1], VOCAB), -torch.inf)
        for index in torch.cartesian_prod(*map(torch.arange, state.shape[:-1])).reshape(-1, state.dim() - 1).tolist():
            which, place = map(int, state[tuple(index)].tolist())
            text, rank = self.texts[which], self.rank(place)
            if rank is not None and place < len(text):
                # [true+1, true+2, .. (decoys), true, the rest]: scores fall by one from rank to rank
                order = [(text[place] + 1 + i) % VOCAB for i in range(VOCAB - 1)]
                order.insert(rank, text[place])
                logits[(*index, order)] = -torch.arange(VOCAB).float()
        return logits


def counts(scripted: Sequence[int], first: int, wrong: int = VOCAB // 2) -> Callable[[int], int]:
    """The `rank` that makes a chain of four, rooted at text position `first`, accept these counts."""
    misses, root = set(), first
    for accepted in scripted:
        misses.add(root + accepted + 1)  # four right ones need no miss: the bonus stands there
        root += accepted + 1
    return lambda place: wrong if place in misses or place > root else 0
