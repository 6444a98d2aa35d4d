"""Trainers, this one and others': a process for each, which takes optimiser steps, and what all of them are given.

Others run in an environment of their own (scripts/venvs.py). Knows processes, texts and the tensors that training
begins with; what a step is, the adapters know (scripts/adapters/step_*.py).

    Legend: C conversations, L tokens of the longest, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.errors import Refusal
from paceline.scripts import conformance
from paceline.scripts.venvs import python_of

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.data.rows import Example

ADAPTERS = Path(__file__).parent / "adapters"
# name on PyPI: its environment, by the name of its adapter, and the methods that it trains
PEERS = {
    "nvidia-modelopt": ("modelopt", ("eagle3", "medusa")),
    "specforge": ("specforge", ("eagle3",)),
    "speculators": ("speculators", ("eagle3", "mtp")),
    "economize": ("economize", ("eagle3", "medusa")),
    "medusa-llm": ("medusa_llm", ("medusa",)),
}
RECIPES = {peer.name: peer.recipe for peer in conformance.PEERS}


class Trainer:
    """A trainer's process, which takes a step when it is told to. failed: in one line, why it no longer does."""

    def __init__(self, name: str, case: Path, log: Path, venvs: Path):
        """name: paceline, or one of PEERS. case: the file of what it begins with, as torch.save writes it."""
        self.failed: str | None = None
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        adapter, _ = PEERS.get(name, (name, ()))
        try:
            python = python_of(RECIPES[adapter], venvs) if name in PEERS else sys.executable
        except Refusal as refusal:
            self.failed = str(refusal)
            return
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-P", ADAPTERS / "steps.py", ADAPTERS / f"step_{adapter}.py", case],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._heard()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()

    def step(self, batch: Path, rate: float | None = None) -> dict[str, float] | None:
        """What scripts/adapters/steps.py says of a step on the batch in a file; None where it failed.

        rate: of learning; None: the package's own.
        """
        return self._asked(batch=str(batch), rate=rate)

    def save(self, folder: Path) -> None:
        """Have it write its drafter as it is by now."""
        self._asked(save=str(folder))

    def _asked(self, **question: Any) -> dict[str, Any] | None:
        if self.failed is not None or self._process is None or self._process.stdin is None:
            return None
        with suppress(BrokenPipeError):  # it has ended, and its log says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        self.failed = f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
        return None


class Texts:
    """Conversations of `data=self`, and what the target says of them. data: its training texts."""

    def __init__(self, options: Any):
        from paceline.data.conversations import known_ids, load, load_tokenizer, stop_ids
        from paceline.models.embedded import folder
        from paceline.models.target import Target

        where = folder(options.name, options.path)
        tokenizer = load_tokenizer(where, options.trust_remote_code)
        self.stops = stop_ids(tokenizer)
        self.data = load(tokenizer, "self", max_length=512).train
        self.target = Target.load(where, "bfloat16", "cpu", known_ids(tokenizer), "none", options.trust_remote_code)
        family = self.target.config.model_type
        if family != "llama":
            raise Refusal(f"target: others are built here with Llama's layers, not {family}'s; nearest: target=smollm2")

    def case(self, method: str, depths: int, vocab_map: Tensor | None) -> dict[str, Any]:
        """What every trainer begins with, in plain types.

        head [V, H], the target's tied tables; norm [H]; vocab_map [D] or None; taps_at: the hidden states that are
        given; config: of the target, by transformers' names. masters: float32 weights also where a package would hold
        16 bits; compile, loss: of paceline; seed: of the first weights.
        """
        from paceline.models.eagle import default_taps

        target, config = self.target, self.target.config
        return {
            "method": method,
            "depths": depths,
            "vocab_map": vocab_map,
            "config": {
                "vocab_size": config.vocab_size,
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
            "taps_at": list(default_taps(target.layers)),
            "head": target.head.weight.detach().clone(),
            "norm": target.final_norm(),
            "masters": False,
            "compile": False,
            "loss": "kl",
            "seed": 0,
        }

    def batch(self, ids: Tensor, real: Tensor, supervised: Tensor) -> dict[str, Tensor]:
        """What a step reads: ids, real, supervised [C, L]; taps [C, L, 3 H], trunk and last [C, L, H].

        These are the target's hidden states, the last of them before and behind the final norm.
        """
        import torch

        from paceline.models.eagle import default_taps

        with torch.no_grad():
            hidden, last = self.target(ids, (*default_taps(self.target.layers), self.target.layers))
        taps, trunk = hidden.split([3 * self.target.hidden, self.target.hidden], -1)
        states = {"taps": taps.clone(), "trunk": trunk.clone(), "last": last.clone()}
        return {"ids": ids, "real": real, "supervised": supervised} | states

    def ragged(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """The batch of conversations, each a row, padded behind its end."""
        import torch

        ids = torch.zeros(len(examples), max(map(len, examples)), dtype=torch.long)
        real, supervised = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row, example in enumerate(examples):
            here = slice(len(example))
            ids[row, here], real[row, here], supervised[row, here] = example.ids.long(), True, example.supervised
        return self.batch(ids, real, supervised)

    def steps(self, tokens: int, batch_tokens: int) -> Iterator[list[Example]]:
        """The conversations of each step, as our loader deals them out, until `tokens` are read."""
        from paceline.data.batch import Loader

        loader = Loader(self.data, batch_tokens)
        dealt = (batch.members for epoch in count() for (batch,) in loader.batches(epoch))
        for members in dealt:
            examples = [self.data[number] for number in members]
            yield examples
            tokens -= sum(map(len, examples))
            if tokens <= 0:
                return
