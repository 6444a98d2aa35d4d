"""Writing conversations from nothing: scripts/synthesize.py beside transformers' generate, in one process, in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


def synthesize(cfg: Any) -> Iterator[Row]:
    """Rows `paceline` and `hf-generate`: new tokens a second, at the same batch size and sampling settings.

    `paceline` makes cfg.count conversations, from the first token to the last; its `full_` figures are of the second
    quarter of them, when every row is at work, as in a long run. `hf-generate` writes what makes it look
    best: one full batch of user's turns and one full batch of answers (to questions of the run before), no batch that
    is not full, no turn that has to be written again; its figure weighs both by their tokens in the run before. Tokens
    are counted up to the end of each text, as they are trained on. The clock counts, and, for where others
    compute as well, processor seconds: `tokens_per_core_second`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.conf.entry import load
    from paceline.data.conversations import known_ids, load_tokenizer, prompt_ids, stop_ids
    from paceline.data.synthesis import Synthesis, beginnings, from_nothing, opening
    from paceline.decode.writer import Writer
    from paceline.models.embedded import folder, quiet_transformers
    from paceline.models.target import DTYPES, Target, device_of
    from paceline.scripts.synthesize import local, mix_of

    path = [f"target.path={cfg.target.path}"] if cfg.target.path else []
    asked = load("synthesize", f"target={cfg.target.name}", *path)
    where, device = folder(cfg.target.name, cfg.target.path), device_of(cfg.target.device)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    stops = sorted(stop_ids(tokenizer))
    begin = beginnings(asked.begin)
    mixes = {"prompt": mix_of(asked.prompt), "answer": mix_of(asked.answer)}

    target = Target.load(where, cfg.dtype, device, known_ids(tokenizer), "none", cfg.target.trust_remote_code)
    writer = Writer(target, cfg.batch, stops, asked.seed)
    run = Synthesis(tokenizer, from_nothing(begin, 1), mixes["prompt"], mixes["answer"], cfg.count, asked.seed)
    records, marks = [], []
    with Clock() as clock:
        for _, record, _ in run.run(local(writer, tokenizer)):
            if record is not None:
                records.append(record)
                marks.append((writer.tokens, time.perf_counter(), time.process_time()))
    (first, *begun), (last, *ended) = marks[len(marks) // 4], marks[len(marks) // 2]
    full = Clock(*(end - begin for begin, end in zip(begun, ended, strict=True))).rates(last - first)
    answers = sum(len(tokenizer.encode(r["messages"][1]["content"], add_special_tokens=False)) for r in records)
    shares = {"prompt": 1 - answers / writer.tokens, "answer": answers / writer.tokens}
    common = {"part": "synthesize", "batch": cfg.batch, "threads": torch.get_num_threads(), "dtype": cfg.dtype}
    about = {
        "conversations": len(records),
        "tokens": writer.tokens,
        "passes": writer.passes,
        "answer_share": shares["answer"],
    }
    about |= {f"full_{name}": rate for name, rate in full.items()}
    yield common | {"name": "paceline"} | about | clock.rates(writer.tokens)
    del writer, target

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[cfg.dtype]).to(device).eval()
    start = opening(tokenizer)
    texts = {
        "prompt": [tokenizer.encode(start + begin[i % len(begin)], add_special_tokens=False) for i in range(cfg.batch)],
        "answer": [prompt_ids(tokenizer, records[i % len(records)]["messages"][:1]) for i in range(cfg.batch)],
    }
    wall = cores = 0.0
    detail: dict[str, float] = {}
    for kind, prompts in texts.items():
        with Clock() as clock:
            tokens = hf(model, prompts, mixes[kind].of("0", asked.seed), stops, asked.seed)
        detail |= {f"{kind}_{name}": rate for name, rate in clock.rates(tokens).items()}
        wall += shares[kind] * clock.wall / tokens
        cores += shares[kind] * clock.cores / tokens
    rates = {"tokens_per_second": round(1 / wall, 1), "tokens_per_core_second": round(1 / cores, 1)}
    yield common | {"name": "hf-generate"} | rates | detail


def hf(model: Any, prompts: list[list[int]], sampling: Any, stops: list[int], seed: int) -> int:
    """One call of `generate`; how many tokens it wrote, none of the padding behind a text's end."""
    import torch

    torch.manual_seed(seed)
    wide = max(map(len, prompts))
    ids = torch.tensor([[0] * (wide - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (wide - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    greedy = sampling.temperature == 0
    how = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    new = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=not greedy,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0],
        **how,
    )[:, wide:]
    return sum(next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in new.tolist())


@dataclass
class Clock:
    """Seconds by the clock and by the processors while it is entered."""

    wall: float = 0.0
    cores: float = 0.0

    def __enter__(self) -> Clock:
        self.wall, self.cores = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.cores += time.process_time()

    def rates(self, tokens: int) -> dict[str, float]:
        return {
            "tokens_per_second": round(tokens / max(self.wall, 1e-9), 1),
            "tokens_per_core_second": round(tokens / max(self.cores, 1e-9), 1),
        }
