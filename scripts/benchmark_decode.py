"""How fast text is decoded here, beside what else there is: scripts/benchmark.py decode. And how exactly: ... exact.

Owns which decoders are compared and what a row says. Each is a `Way` of scripts/evaluate.py, which decodes prompt by
prompt, in turn. What others run is a checkpoint as transformers loads it, with nothing of ours in it.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.models.errors import Refusal

if TYPE_CHECKING:
    from paceline.decode import Decoder, Generation
    from paceline.models.target import Target
    from paceline.scripts.evaluate import Batch, Way

KEPT = 5  # prompts after which rows of what was measured so far are given, so that a stopped run is not lost
GENERATE, LOOKUP, PLAIN = "hf-generate", "hf-prompt-lookup", "paceline-plain"


def decode(cfg: Any) -> Iterator[dict[str, Any]]:
    """One row a decoder, all greedy, one prompt at a time, the prompts in turn.

    tokens_per_second: new tokens / wall-clock seconds, reading the prompt included. mean_acceptance_length: tokens a
    pass of the target, without the pass that reads the prompt and the token it yields. identical of compared: answers
    that are, token for token, those of plain decoding in the same framework; the two plain rows are compared with each
    other. so_far: prompts, in rows that are given before the last one.
    """
    from paceline.decode.progress import progress
    from paceline.scripts.evaluate import measured

    names = _wanted(cfg)
    target, stops, ids = _asked(cfg)
    ways = {name: _WAYS[name](cfg, target, stops) for name in names}
    alone = PLAIN if PLAIN in ways else names[0]
    with progress("prompts", len(ids)) as bar:
        batches = []
        for batch in measured(ways, ids, cfg.eval.max_new_tokens, 1, plain=alone):
            batches.append(batch)
            bar.advance()
            if len(batches) % KEPT == 0 and len(batches) < len(ids):
                yield from (row | {"so_far": len(batches)} for row in _rows(names, batches))
    yield from _rows(names, batches)


TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "tree of 16": {"tree": "static", "nodes": 16},
    "tree of 64": {"tree": "static", "nodes": 64},
}


def exact(cfg: Any) -> Iterator[dict[str, Any]]:
    """A row for each drafter, tree and batch: how many of its answers are plain decoding's at batch 1, token for token.

    All greedy, with decode.lookup as it is asked for. The other figures are as in `decode`.
    """
    from paceline.decode import AcceptanceReport, Decoder
    from paceline.decode.progress import progress

    drafters = [option for option in DRAFTERS if getattr(cfg, option) is not None]
    for option in drafters:
        _there(cfg, option, f"part=exact decodes with the {option}")
    target, stops, ids = _asked(cfg)
    limit, batches = cfg.eval.max_new_tokens, (1, 4)
    cells = [(option, tree, rows) for option in drafters for tree in TREES for rows in batches]
    with progress("prompts", (1 + len(cells)) * len(ids)) as bar:
        plain, right = Decoder(target), []
        for prompt in ids:
            right += plain.generate([prompt], limit, eos=stops).tokens
            bar.advance()
        for option, tree, rows in cells:
            decoder = _drafting(cfg, target, option, cfg.decode.model_copy(update=TREES[tree]), rows)
            answers: list[list[int]] = []
            report, begun = AcceptanceReport(), time.perf_counter()
            for first in range(0, len(ids), rows):
                out = decoder.generate(ids[first : first + rows], limit, eos=stops)
                answers, report = answers + out.tokens, report + out.report
                bar.advance(by=len(out.tokens))
            yield {
                "part": "exact",
                "name": f"{option}, {tree}, batch {rows}",
                "tokens_per_second": round(sum(map(len, answers)) / (time.perf_counter() - begun), 2),
                "mean_acceptance_length": report.mean_acceptance_length,
                "identical": sum(one == other for one, other in zip(answers, right, strict=True)),
                "compared": len(ids),
            }


def _asked(cfg: Any) -> tuple[Target, list[int], list[list[int]]]:
    """Target, ids that end an answer, and the ids of each prompt."""
    from paceline.data.conversations import known_ids, load_tokenizer, prompt_ids, stop_ids
    from paceline.data.prompts import prompts
    from paceline.models.embedded import folder
    from paceline.models.target import Target, device_of
    from paceline.scripts.decoding import promised

    where, device = folder(cfg.target.name, cfg.target.path), device_of(cfg.target.device)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    target = Target.load(where, cfg.dtype, device, known_ids(tokenizer), trust_remote_code=cfg.target.trust_remote_code)
    promised(target, cfg.decode.exact)
    ids = [prompt_ids(tokenizer, prompt.messages) for prompt in prompts(cfg.eval.prompts, cfg.eval.limit)]
    return target, stop_ids(tokenizer), ids


def _rows(names: list[str], batches: list[Batch]) -> Iterator[dict[str, Any]]:
    for name in names:
        outs = [batch.out[name] for batch in batches]
        reference = _reference(name)
        same = [batch.out[name].tokens == batch.out[reference].tokens for batch in batches if reference in names]
        tokens, seconds = sum(batch.tokens(name) for batch in batches), sum(batch.seconds[name] for batch in batches)
        report = sum((out.report for out in outs[1:]), outs[0].report)
        yield {
            "part": "decode",
            "name": name,
            "tokens_per_second": round(tokens / seconds, 2),
            "mean_acceptance_length": report.mean_acceptance_length,
            "identical": sum(same),
            "compared": len(same),
        }


DRAFTERS = "medusa", "eagle3"  # options that say where a drafter of ours lies
# The option that says where a row's drafter lies.
_DRAFTERS = {
    "paceline-medusa": "medusa",
    "paceline-eagle3": "eagle3",
    "paceline-hybrid": "eagle3",
    "economize-medusa": "economize_medusa",
    "economize-eagle3": "economize_eagle3",
}


def _wanted(cfg: Any) -> list[str]:
    """Rows to measure, in order. Refusal: a drafter that is not there, or a row that needs what is not installed."""
    there = importlib.util.find_spec("economize") is not None
    usual = [name for name in _WAYS if not name.startswith("economize") or (there and getattr(cfg, _DRAFTERS[name]))]
    names = usual if cfg.only is None else [name for name in _WAYS if name in cfg.only]
    for name in names:
        if name.startswith("economize") and not there:
            raise Refusal(f"only: {name} needs economize: pip install economize==0.3.2, or leave it out")
        if option := _DRAFTERS.get(name):
            _there(cfg, option, f"{name} decodes with the", "; or leave it out")
    return names


def _there(cfg: Any, option: str, who: str, else_: str = "") -> None:
    place = getattr(cfg, option)
    if not (place and os.path.isdir(place)):
        raise Refusal(f"{option}: {who} drafter at {place}, which is not there{else_}")


def _reference(row: str) -> str:
    """The plain decoding whose output a row should have; of one of them, the other."""
    plains = {GENERATE: PLAIN, PLAIN: GENERATE}
    return plains.get(row, PLAIN if row.startswith("paceline-") else GENERATE)


# ---------------------------------------------------------------------------------------------------------------------
# Ours


def _ours(decoder: Decoder, stops: list[int]) -> Way:
    return lambda rows, ids, limit: decoder.generate(ids, limit, eos=stops, rows=rows)


def _plain(cfg: Any, target: Target, stops: list[int]) -> Way:
    from paceline.decode import Decoder

    return _ours(Decoder(target), stops)


def _ngram(cfg: Any, target: Target, stops: list[int]) -> Way:
    from paceline.decode import Decoder, shape_of
    from paceline.models.drafter import Shape, build

    drafter = build(cfg.ngram, Shape.of(target))
    return _ours(Decoder(target, drafter, shape_of("chain", cfg.decode.nodes, None, 1, drafter)), stops)


def _trained(option: str, hybrid: bool = False) -> Callable[[Any, Target, list[int]], Way]:
    def way(cfg: Any, target: Target, stops: list[int]) -> Way:
        asked = cfg.decode.model_copy(update={"lookup": cfg.lookup if hybrid else 0})
        return _ours(_drafting(cfg, target, option, asked, 1), stops)

    return way


def _drafting(cfg: Any, target: Target, option: str, asked: Any, rows: int) -> Decoder:
    """With the export that `option` names; asked: options of decoding; rows: that are decoded together."""
    from paceline.decode import Decoder
    from paceline.models.export import load_export
    from paceline.scripts.decoding import settled, shape_for, tuned_as, with_lookup

    place = getattr(cfg, option)
    drafter, about = load_export(place, target, cfg.dtype, option)
    if asked.tree == "tuned" and tuned_as(asked) not in about:
        asked = asked.model_copy(update={"tree": "static"})
    drafter = with_lookup(drafter, asked)
    shape = shape_for(settled(asked, about, rows, place), drafter, about)
    return Decoder(target, drafter if shape.depth else None, shape)


# ---------------------------------------------------------------------------------------------------------------------
# Theirs


def stock(cfg: Any, target: Target) -> Any:
    """A model of its own as transformers loads it: none of our packed weights, nothing shared."""
    from transformers import AutoModelForCausalLM

    from paceline.models.embedded import quiet_transformers
    from paceline.models.target import DTYPES

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(target.source, dtype=DTYPES[cfg.dtype])
    return model.to(target.device).eval()


@contextmanager
def _passes(model: Any) -> Iterator[list[int]]:
    """Collects an entry for each pass of a model."""
    seen: list[int] = []
    hook = model.register_forward_hook(lambda *_: seen.append(1))
    try:
        yield seen
    finally:
        hook.remove()


def _generation(tokens: list[int], passes: int) -> Generation:
    """What one prompt gave; passes: without the one that read it and gave the first token."""
    from paceline.decode import AcceptanceReport, Generation

    emitted = max(len(tokens) - 1, 0)
    return Generation([tokens], [AcceptanceReport([passes], [], 0, passes, emitted)], passes=passes)


def _hf(lookup: bool) -> Callable[[Any, Target, list[int]], Way]:
    def way(cfg: Any, target: Target, stops: list[int]) -> Way:
        import torch

        from paceline.models.embedded import quiet_transformers

        model = stock(cfg, target)
        options = {"prompt_lookup_num_tokens": cfg.prompt_lookup} if lookup else {}

        def generate(rows: list[int], ids: list[list[int]], limit: int) -> Generation:
            prompt = torch.tensor(ids, device=target.device)
            with quiet_transformers(), _passes(model) as passes:
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=limit,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    eos_token_id=stops or None,
                    pad_token_id=next(iter(stops), 0),
                    **options,
                )
            return _generation(out[0, prompt.shape[1] :].tolist(), len(passes) - 1)

        return generate

    return way


def _economize(option: str) -> Callable[[Any, Target, list[int]], Way]:
    def way(cfg: Any, target: Target, stops: list[int]) -> Way:
        import economize  # type: ignore[import-not-found]
        import torch

        model = economize.load(stock(cfg, target), getattr(cfg, option))

        def generate(rows: list[int], ids: list[list[int]], limit: int) -> Generation:
            out = model.decode(torch.tensor(ids, device=target.device), limit, stop=stops or None)
            return _generation(out.tokens.tolist(), len(out.acceptance))

        return generate

    return way


_WAYS: dict[str, Callable[[Any, Target, list[int]], Way]] = {
    GENERATE: _hf(lookup=False),
    LOOKUP: _hf(lookup=True),
    PLAIN: _plain,
    "paceline-ngram": _ngram,
    "paceline-medusa": _trained("medusa"),
    "paceline-eagle3": _trained("eagle3"),
    "paceline-hybrid": _trained("eagle3", hybrid=True),
    "economize-medusa": _economize("economize_medusa"),
    "economize-eagle3": _economize("economize_eagle3"),
}
