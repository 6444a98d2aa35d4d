"""scripts/benchmark.py train: an optimiser step of this trainer beside those of others, in turn, on the same batch.

Knows batches and figures. How trainers run, and what all of them begin with, is in scripts/trainers.py; what a step is,
the adapters know (scripts/adapters/step_*.py).

    Legend: C conversations, L tokens of the longest, H hidden, V vocabulary, D draft vocabulary, K depths.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.errors import Refusal
from paceline.scripts.trainers import PEERS, Texts, Trainer

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
ROWS, LENGTH = 8, 256  # of a dense batch; a ragged one has as many conversations, and about as many tokens
WARMUP = 2  # steps that are not measured
# The drafter of each method: depths, and ids that it can draft, of V where that is fewer; None for all.
DRAFTERS: dict[str, tuple[int, int | None]] = {"eagle3": (7, 8192), "medusa": (4, None), "mtp": (3, None)}


def train(cfg: Any) -> Iterator[Row]:
    """A row for every workload and every framework that knows its method; one that does not run says why."""
    if cfg.dtype != "bfloat16":
        raise Refusal(f"dtype: {cfg.dtype} is not what others train in by themselves; nearest: bfloat16")
    texts = Texts(cfg.target)
    for workload in cfg.workloads:
        method, _, layout = workload.partition("-")
        known = ["paceline", *(name for name, (_, methods) in PEERS.items() if method in methods)]
        depths, size = DRAFTERS[method]
        batch = LAYOUTS[layout](texts)
        vocab_map = draftable(batch["ids"], size, texts.target.config.vocab_size) if size else None
        # of heads, others learn the text's tokens
        case = texts.case(method, depths, vocab_map) | {"compile": cfg.compile, "loss": "kl" if size else "ce"}
        names = [name for name in known if name in (cfg.frameworks or known)]
        work, tokens = useful_flops(case, batch), int(batch["real"].sum())
        for name, taken, failed in _in_turn(cfg, names, case, batch):
            row = {"part": "train", "name": f"{workload} {name}", "framework": name, "method": method, "layout": layout}
            yield row | ({"failed": failed} if failed is not None else figures(taken, tokens, work))


def _in_turn(
    cfg: Any, names: list[str], case: dict[str, Any], batch: dict[str, Tensor]
) -> Iterator[tuple[str, list[dict[str, float]], str | None]]:
    """Every framework takes a step, then every one the next: what else the machine does, befalls all alike."""
    import torch

    with tempfile.TemporaryDirectory() as work, ExitStack() as running:
        folder = Path(work)
        torch.save(case, folder / "case.pt")
        torch.save(batch, folder / "batch.pt")
        trainers: dict[str, Trainer] = {}
        taken: dict[str, list[dict[str, float]]] = {}
        for name in names:
            one = Trainer(name, folder / "case.pt", folder / f"{name}.log", Path(cfg.venvs))
            trainers[name], taken[name] = running.enter_context(one), []
        for _ in range(WARMUP + cfg.steps):
            for name, trainer in trainers.items():
                if (said := trainer.step(folder / "batch.pt")) is not None:
                    taken[name].append(said)
    for name, trainer in trainers.items():
        yield name, taken[name], trainer.failed


def figures(taken: list[dict[str, float]], tokens: int, work: float) -> Row:
    """Of the steps measured, the one in the middle; memory beyond what the process had before it built anything."""
    measured = taken[WARMUP:]
    seconds = statistics.median(step["seconds"] for step in measured)
    last = measured[-1]
    return {
        "tokens_per_second": round(tokens / seconds),
        "gflops": round(work / seconds / 1e9),
        "peak_rss_gb": round((last["peak"] - last["idle"]) / 1e9, 2),
        "idle_rss_gb": round(last["idle"] / 1e9, 2),
        "seconds": round(seconds, 3),
        "processor_seconds": round(statistics.median(step["processor_seconds"] for step in measured), 3),
    }


def dense(texts: Texts) -> dict[str, Tensor]:
    """Rows cut out of the conversations one behind the other, every token supervised."""
    import torch

    whole: list[Tensor] = []
    for number in range(len(texts.data)):
        whole.append(texts.data[number].ids.long())
        if sum(map(len, whole)) >= ROWS * LENGTH:
            break
    ids = torch.cat(whole)[: ROWS * LENGTH].view(ROWS, LENGTH)
    every = torch.ones_like(ids, dtype=torch.bool)
    return texts.batch(ids, every, every)


def ragged(texts: Texts) -> dict[str, Tensor]:
    """Conversations that follow each other and come nearest to as many tokens; the assistant's are supervised."""
    sizes = [len(texts.data[number]) for number in range(min(200, len(texts.data)))]
    apart = [abs(sum(sizes[first : first + ROWS]) - ROWS * LENGTH) for first in range(len(sizes) - ROWS + 1)]
    first = apart.index(min(apart))
    return texts.ragged([texts.data[number] for number in range(first, first + ROWS)])


def draftable(ids: Tensor, size: int, vocab: int) -> Tensor:
    """[D] ids, sorted, at most `size`: first those of the batch, so that every token of it can be drafted."""
    import torch

    ids_first = torch.cat([ids.unique(), torch.arange(vocab)])
    return torch.tensor(list(dict.fromkeys(ids_first.tolist()))[: min(size, vocab)]).sort().values


LAYOUTS = {"dense": dense, "ragged": ragged}


def useful_flops(case: dict[str, Any], batch: dict[str, Tensor]) -> float:
    """What one step has to compute, whoever takes it: no padding, no masked score, no logits that no loss looks at, and
    no step of a chain that nothing is learnt from any more.

    A multiplication and an addition are two; a product with trained weights counts three times, with frozen ones that
    a gradient passes through twice, without a gradient once.
    """
    config, depths = case["config"], case["depths"]
    hidden, width = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    vocab = config["vocab_size"] if case["vocab_map"] is None else len(case["vocab_map"])
    tokens = int(batch["real"].sum())
    # rows of logits at each depth: supervised tokens with 2 + k others before them
    looked = [int(batch["supervised"][:, 2 + k :].sum()) for k in range(depths)]
    if case["method"] == "medusa":
        return 2 * 3 * (sum(looked) * hidden * hidden + sum(looked) * hidden * vocab)
    inputs = 2 * hidden if case["method"] == "eagle3" else hidden
    layer = inputs * (queries + 2 * keys) + queries * hidden + 3 * hidden * width
    # the row at t takes its step at depth k > 0 where an x[t + 2 + j], j >= k, is supervised, and sees t + 1 + k
    supervised, length = batch["supervised"], batch["real"].shape[1]
    learns, place, steps, scores = supervised & False, supervised.new_ones(length).cumsum(0) - 1, 0, 0
    for k in reversed(range(depths)):
        learns = learns | (supervised.roll(-2 - k, 1) & (place + 2 + k < length))
        rows = learns if k else batch["real"]
        steps, scores = steps + int(rows.sum()), scores + int((rows * (place + 1 + k)).sum())
    body = 2 * 3 * steps * layer + 2 * 2 * 3 * scores * queries
    if case["method"] == "mtp":  # the head is the target's
        return body + 2 * 3 * steps * 2 * hidden * hidden + 2 * 2 * sum(looked) * hidden * vocab
    teacher = 2 * looked[0] * hidden * vocab
    return body + 2 * 3 * tokens * 3 * hidden * hidden + 2 * 3 * sum(looked) * hidden * vocab + teacher
