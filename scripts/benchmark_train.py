"""scripts/benchmark.py train: an optimiser step of this trainer beside those of others, in turn, on the same batch.

Each framework runs in a process of its own, others in an environment of their own (scripts/venvs.py), and takes a step
when it is told to; the tensors that all of them begin with are in one file. Knows what they are asked, processes and
figures. What a step is, the adapters know (scripts/adapters/step_*.py).

    Legend: C conversations, L tokens of the longest, H hidden, V vocabulary, D draft vocabulary, K depths.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.errors import Refusal
from paceline.scripts import conformance
from paceline.scripts.venvs import python_of

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
ADAPTERS = Path(__file__).parent / "adapters"
ROWS, LENGTH = 8, 256  # of a dense batch; a ragged one has as many conversations, and about as many tokens
WARMUP = 2  # steps that are not measured


# name on PyPI: its environment, by the name of its adapter, and what it trains of what is measured here
PEERS = {
    "nvidia-modelopt": ("modelopt", ("eagle3", "medusa")),
    "specforge": ("specforge", ("eagle3",)),
    "speculators": ("speculators", ("eagle3", "mtp")),
    "economize": ("economize", ("eagle3", "medusa")),
    "medusa-llm": ("medusa_llm", ("medusa",)),
}
RECIPES = {peer.name: peer.recipe for peer in conformance.PEERS}
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
        case = texts.case(method, layout) | {"compile": cfg.compile}
        with tempfile.TemporaryDirectory() as folder:
            yield from _in_turn(cfg, [name for name in known if name in (cfg.frameworks or known)], case, Path(folder))


def _in_turn(cfg: Any, names: list[str], case: dict[str, Any], folder: Path) -> Iterator[Row]:
    """Every framework takes a step, then every one the next: what else the machine does, befalls all alike."""
    import torch

    torch.save(case, folder / "case.pt")
    running: dict[str, Steps] = {}
    try:
        for name in names:
            running[name] = Steps(cfg, name, folder)
        for _ in range(WARMUP + cfg.steps):
            for steps in running.values():
                steps.take()
    finally:
        for steps in running.values():
            steps.end()
    work = useful_flops(case)
    for name, steps in running.items():
        about = {"framework": name, "method": case["method"], "layout": case["layout"]}
        row = {"part": "train", "name": f"{case['method']}-{case['layout']} {name}", **about}
        yield row | (steps.figures(int(case["real"].sum()), work) if steps.failed is None else {"failed": steps.failed})


class Steps:
    """A framework's process, that takes a step when it is told to. failed: in one line, why it no longer does."""

    def __init__(self, cfg: Any, name: str, folder: Path):
        self.failed: str | None = None
        self._taken: list[dict[str, float]] = []
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        adapter, _ = PEERS.get(name, (name, ()))
        try:
            python = python_of(RECIPES[adapter], Path(cfg.venvs)) if name in PEERS else sys.executable
        except Refusal as refusal:
            self.failed = str(refusal)
            return
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-P", ADAPTERS / "steps.py", ADAPTERS / f"step_{adapter}.py", folder / "case.pt"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._heard()

    def take(self) -> None:
        if self.failed is None and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            if (said := self._heard()) is not None:
                self._taken.append(said)

    def _heard(self) -> dict[str, float] | None:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        self.failed = f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
        return None

    def end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def figures(self, tokens: int, work: float) -> Row:
        """Of the steps measured, the one in the middle; memory beyond what the process had before it built anything."""
        measured = self._taken[WARMUP:]
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


class Texts:
    """Conversations of `data=self`, and what the target says of them."""

    def __init__(self, options: Any):
        from paceline.data.conversations import known_ids, load, load_tokenizer
        from paceline.models.embedded import folder
        from paceline.models.target import Target

        where = folder(options.name, options.path)
        tokenizer = load_tokenizer(where, options.trust_remote_code)
        self._data = load(tokenizer, "self", max_length=512).train
        self._target = Target.load(where, "bfloat16", "cpu", known_ids(tokenizer), "none", options.trust_remote_code)
        family = self._target.config.model_type
        if family != "llama":
            raise Refusal(f"target: others are built here with Llama's layers, not {family}'s; nearest: target=smollm2")

    def case(self, method: str, layout: str) -> dict[str, Any]:
        """What every framework begins with, in plain types.

        ids, real, supervised [C, L]; taps [C, L, 3 H], trunk and last [C, L, H]: the hidden states, the last of them
        before and behind the final norm; head [V, H], the target's tied tables; norm [H]; vocab_map [D] or None.
        config: of the target, by transformers' names.
        """
        import torch

        from paceline.models.eagle import default_taps

        ids, real, supervised = self._dense() if layout == "dense" else self._ragged()
        target, config = self._target, self._target.config
        taps = default_taps(target.layers)
        with torch.no_grad():
            hidden, last = target(ids, (*taps, target.layers))
        depths, size = DRAFTERS[method]
        vocab = config.vocab_size
        ids_first = torch.cat([ids.unique(), torch.arange(vocab)])  # so that every token of the batch can be drafted
        chosen = torch.tensor(list(dict.fromkeys(ids_first.tolist()))[: min(size or 0, vocab)])
        width = 3 * target.hidden
        return {
            "method": method,
            "layout": layout,
            "depths": depths,
            "vocab_map": chosen.sort().values if size else None,
            "config": {
                "vocab_size": vocab,
                "hidden_size": target.hidden,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": target.layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "head_dim": target.hidden // config.num_attention_heads,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": float(config.rope_parameters["rope_theta"]),
                "max_position_embeddings": config.max_position_embeddings,
                "tie_word_embeddings": True,
            },
            "taps_at": list(taps),
            "ids": ids,
            "real": real,
            "supervised": supervised,
            "taps": hidden[..., :width].clone(),
            "trunk": hidden[..., width:].clone(),
            "last": last.clone(),
            "head": target.head.weight.detach().clone(),
            "norm": target.final_norm(),
        }

    def _dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows cut out of the conversations one behind the other, every token supervised."""
        import torch

        whole: list[Tensor] = []
        for number in range(len(self._data)):
            whole.append(self._data[number].ids.long())
            if sum(map(len, whole)) >= ROWS * LENGTH:
                break
        ids = torch.cat(whole)[: ROWS * LENGTH].view(ROWS, LENGTH)
        return ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool)

    def _ragged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Conversations that follow each other and come nearest to as many tokens; the assistant's are supervised."""
        import torch

        sizes = [len(self._data[number]) for number in range(min(200, len(self._data)))]
        apart = [abs(sum(sizes[first : first + ROWS]) - ROWS * LENGTH) for first in range(len(sizes) - ROWS + 1)]
        first = apart.index(min(apart))
        examples = [self._data[number] for number in range(first, first + ROWS)]
        ids = torch.zeros(ROWS, max(map(len, examples)), dtype=torch.long)
        real, supervised = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row, example in enumerate(examples):
            here = slice(len(example))
            ids[row, here], real[row, here], supervised[row, here] = example.ids.long(), True, example.supervised
        return ids, real, supervised


def useful_flops(case: dict[str, Any]) -> float:
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
    tokens = int(case["real"].sum())
    # rows of logits at each depth: supervised tokens with 2 + k others before them
    looked = [int(case["supervised"][:, 2 + k :].sum()) for k in range(depths)]
    if case["method"] == "medusa":
        return 2 * 3 * (sum(looked) * hidden * hidden + sum(looked) * hidden * vocab)
    inputs = 2 * hidden if case["method"] == "eagle3" else hidden
    layer = inputs * (queries + 2 * keys) + queries * hidden + 3 * hidden * width
    # the row at t takes its step at depth k > 0 where an x[t + 2 + j], j >= k, is supervised, and sees t + 1 + k
    supervised, length = case["supervised"], case["real"].shape[1]
    learns, place, steps, scores = supervised & False, supervised.new_ones(length).cumsum(0) - 1, 0, 0
    for k in reversed(range(depths)):
        learns = learns | (supervised.roll(-2 - k, 1) & (place + 2 + k < length))
        rows = learns if k else case["real"]
        steps, scores = steps + int(rows.sum()), scores + int((rows * (place + 1 + k)).sum())
    body = 2 * 3 * steps * layer + 2 * 2 * 3 * scores * queries
    if case["method"] == "mtp":  # the head is the target's
        return body + 2 * 3 * steps * 2 * hidden * hidden + 2 * 2 * sum(looked) * hidden * vocab
    teacher = 2 * looked[0] * hidden * vocab
    return body + 2 * 3 * tokens * 3 * hidden * hidden + 2 * 3 * sum(looked) * hidden * vocab + teacher
