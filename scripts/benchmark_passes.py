"""What a pass of the target costs, by how its products are computed: scripts/benchmark.py passes.

Owns which ways are compared and what a row says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.target import Target

NODES = (1, 8, 16, 32, 64)
BEHIND, REPEATS = 200, 100  # tokens of text before the nodes; passes of each width and way, in turn


def passes(cfg: Any) -> Iterator[dict[str, Any]]:
    """A row for each way the target can be computed here: `tiles` (passes.cpp) and `onednn`.

    milliseconds: of a pass over so many nodes and its output head, the median, all ways in turn. kl: the mean
    Kullback-Leibler divergence, in nats, of the next token's distribution from that of the model in float32, over
    the prompts of `eval` and its answers to them; the row `transformers` has it of that library's own pass.
    """
    import torch

    from paceline.data.conversations import known_ids, load_tokenizer, prompt_ids
    from paceline.data.prompts import prompts
    from paceline.models.embedded import folder
    from paceline.models.kernels import kernels, without_tiles
    from paceline.models.target import Target
    from paceline.scripts.benchmark_decode import stock
    from paceline.scripts.decoding import promised

    where = folder(cfg.target.name, cfg.target.path)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    remote = cfg.target.trust_remote_code

    def load(dtype: str) -> Target:
        return Target.load(where, dtype, "cpu", known_ids(tokenizer), trust_remote_code=remote)

    functions = kernels()
    ways: dict[str, Target] = {}
    for name, there in (("tiles", functions is not None and functions.tiled), ("onednn", functions is not None)):
        if there:
            with nullcontext() if name == "tiles" else without_tiles():
                ways[name] = load(cfg.dtype)
                promised(ways[name], cfg.decode.exact)
    exact = load("float32")
    theirs = stock(cfg, exact)
    asked = prompts(cfg.eval.prompts, cfg.eval.limit)
    with torch.inference_mode():
        texts = [_answered(exact, prompt_ids(tokenizer, p.messages), cfg.eval.max_new_tokens) for p in asked]
        wanted = [_logits(exact, text).log_softmax(-1) for text in texts]
        spent = _in_turn(ways)
        for name in (*ways, "transformers"):
            said = [_logits(ways[name], text) if name in ways else theirs(text).logits[0].float() for text in texts]
            apart = [_apart(logits, truth) for logits, truth in zip(said, wanted, strict=True)]
            times = {nodes: round(1e3 * statistics.median(spent[name][nodes]), 2) for nodes in spent.get(name, {})}
            yield {"part": "passes", "name": name, "milliseconds": times, "kl": float(torch.cat(apart).mean())}


def _in_turn(ways: dict[str, Target]) -> dict[str, dict[int, list[float]]]:
    """Seconds of every pass, by way and number of nodes."""
    import torch

    spent: dict[str, dict[int, list[float]]] = {name: {} for name in ways}
    for nodes in NODES:
        caches = {}
        for name, target in ways.items():
            caches[name] = target.new_cache(1, BEHIND + nodes)
            target(torch.arange(BEHIND)[None] % target.vocab, cache=caches[name])
            target.keep(caches[name], torch.zeros(1, 0, dtype=torch.long), torch.tensor([BEHIND]))
        for _ in range(REPEATS):
            for name, target in ways.items():
                words = torch.arange(nodes)[None] % target.vocab
                begin = time.perf_counter()
                target.head(target(words, cache=caches[name])[1])
                spent[name].setdefault(nodes, []).append(time.perf_counter() - begin)
    return spent


def _answered(target: Target, ids: list[int], more: int) -> Tensor:
    """[1, T], a prompt and the target's answer."""
    import torch

    from paceline.decode import Decoder

    return torch.tensor([ids + Decoder(target).generate([ids], more).tokens[0]])


def _logits(target: Target, text: Tensor) -> Tensor:
    """[T, V] float32, through a cache where the target's passes are compiled for one."""
    cache = target.new_cache(1, text.shape[1])
    return target.head(target(text, cache=cache)[1])[0].float()


def _apart(logits: Tensor, truth: Tensor) -> Tensor:
    """[T] nats; truth: log-probabilities."""
    from torch.nn import functional as F

    return F.kl_div(logits.log_softmax(-1), truth, log_target=True, reduction="none").sum(-1)
