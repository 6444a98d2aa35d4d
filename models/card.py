"""The model card of a drafter: what it is, what was measured of it, and how each engine is told to use it.

Knows what drafter.json says and which formats hold such a drafter. Says nothing that was not measured or tried here.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from paceline.models import formats
from paceline.models.drafter import Drafter

MEANINGS = {
    "mean_acceptance_length": "tokens per pass of the target (1.0: drafts never helped)",
    "draft_acceptance_rate": "accepted draft tokens / proposed ones",
    "per_position_acceptance_rate": "share of all passes that accepted at least 1, 2, .. draft tokens",
}


def card(drafter: Drafter, about: dict[str, Any], format: str = "native") -> str:
    """README.md of a folder that holds this drafter. about: drafter.json. format: what the folder is written in."""
    method, target = drafter.options.name, _target(about["target"])
    lines = ["---", "library_name: paceline", "tags:", "- speculative-decoding", f"- {method}"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        lines += [f"base_model: {target}"]
    lines += ["---", "", f"# A {method} drafter for {target}", ""]
    lines += [f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} million parameters, {about['dtype']}, trained"]
    lines[-1] += (
        " with [paceline](https://pypi.org/project/paceline) to guess what this target says next. The output of"
    )
    lines += ["speculative decoding is the target's own, whatever the drafter guesses.", "", *_measured(about)]
    lines += ["## How to use it", "", *_launches(drafter, target, format), ""]
    lines += ["Made of:", "", "```json", json.dumps(drafter.options.made_of(), indent=2), "```", ""]
    return "\n".join(lines)


def _target(target: dict[str, Any]) -> str:
    """A hub id as it is, of a folder its name: where it lay is nobody's business."""
    path = target.get("path") or target.get("name") or "its target"
    return Path(path).name if os.path.isabs(path) else path


def _measured(about: dict[str, Any]) -> list[str]:
    """A table of the figures that there are."""
    found = about.get("acceptance") or {}
    rows = [(name, found[name]) for name in MEANINGS if found.get(name) is not None]
    if not rows:
        return ["Nothing was measured of it.", ""]
    rounds, step = found.get("num_drafts"), (about.get("provenance") or {}).get("step")
    how = f", over {rounds} passes" if rounds else ""
    when = f", after {step} optimiser steps" if step else ""
    lines = [
        f"Decoded on held-out prompts during training{when}{how}:",
        "",
        "| figure | value | meaning |",
        "|---|---|---|",
    ]
    return [*lines, *(f"| {name} | {_number(value)} | {MEANINGS[name]} |" for name, value in rows), ""]


def _number(value: Any) -> str:
    return " ".join("-" if one is None else f"{one:.3f}" for one in (value if isinstance(value, list) else [value]))


def _launches(drafter: Drafter, target: str, format: str) -> list[str]:
    """A line for each engine that reads this folder, or what another format is written with."""
    lines = []
    if format == "native":
        lines += ["Here:", "", "```", "python scripts/evaluate.py drafter=FOLDER", "```", ""]
    for other in formats.formats_of(drafter.options.name):
        layout = formats.layout_of(drafter.options.name, other)
        fault = next(layout.faults(drafter, other), None)
        here = other == format or (format == "native" and fault is None and formats.unchanged(drafter, other))
        if format != "native" and not here:
            continue
        if fault is not None:
            lines += [f"`format={other}` cannot hold it: {fault}.", ""]
            continue
        engine, command = launch(drafter, other, target)
        lines += [f"{engine}{' (not run here)' if command else ''}:", "", "```"]
        if not here:
            lines += [f"python scripts/convert.py from=FOLDER to=OTHER format={other}"]
        lines += [*([command.replace("FOLDER", "FOLDER" if here else "OTHER")] if command else []), "```", ""]
    return lines


def launch(drafter: Drafter, format: str, target: str) -> tuple[str, str]:
    """An engine, and how it is started with a drafter in FOLDER, written in `format`; empty where it is Python code."""
    tokens, options = drafter.max_depth or max(drafter.unroll, 3), drafter.options
    wide = getattr(options, "join", None) == "attention"

    def vllm(**how: Any) -> str:
        return f"vllm serve {target} --speculative-config '{json.dumps(how | {'num_speculative_tokens': tokens})}'"

    match options.name, format:
        case "eagle", "eagle":
            return "The official EAGLE code (`EaModel.from_pretrained(ea_model_path=FOLDER)`)", ""
        case "eagle", "sglang":
            chain = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1"
            return "SGLang", (
                f"python -m sglang.launch_server --model-path {target} "
                f"--speculative-algorithm {'EAGLE3' if wide else 'EAGLE'} --speculative-draft-model-path FOLDER "
                f"{chain} --speculative-num-draft-tokens {tokens + 1}"
            )
        case "eagle", _:
            name = "vLLM, of speculators' format" if format == "speculators" else "vLLM"
            return name, vllm(model="FOLDER", method="eagle3" if wide else "eagle")
        case "medusa", "vllm":
            return "vLLM up to 0.32", vllm(model="FOLDER", method="medusa")
        case "medusa", _:
            made = formats.medusa.HEADS
            github = "" if drafter.max_depth == made else f"; not that on GitHub, which makes {made} heads, some random"
            return f"The official Medusa code (`MedusaModel.from_pretrained(FOLDER)`{github})", ""
        case "mtp_sequential", "mimo":
            how = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
            return "vLLM, as MiMo", f"vllm serve FOLDER --speculative-config '{how}'"
        case "mtp_sequential", "speculators":
            return "speculators (`SpeculatorModel.from_pretrained(FOLDER)`)", ""
        case "mtp_sequential", _:
            return "transformers (`model.generate(..., use_mtp=True)`, of the stitched folder)", ""
        case "draft", _:
            return "transformers (`assistant_model=`), and vLLM", vllm(model="FOLDER", method="draft_model")
    raise ValueError(f"no engine for {options.name} as {format}")
