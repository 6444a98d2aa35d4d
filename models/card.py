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
from paceline.models.embedded import NAMES

MEANINGS = {
    "mean_acceptance_length": "tokens per pass of the target (1.0: drafts never helped)",
    "draft_acceptance_rate": "accepted draft tokens / proposed ones",
    "per_position_acceptance_rate": "share of all passes that accepted at least 1, 2, .. draft tokens",
}


def card(drafter: Drafter, about: dict[str, Any], format: str = "native") -> str:
    """README.md of a folder that holds this drafter. about: drafter.json. format: what the folder is written in."""
    method, target = drafter.options.name, _target(about["target"])
    lines = ["---", "library_name: paceline", "tags:", "- speculative-decoding", f"- {method}"]
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", target)
    if hub:
        lines += [f"base_model: {target}"]
    lines += ["---", "", f"# A drafter for {target}: {method}", ""]
    lines += [f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} million parameters, {about['dtype']}, trained"]
    lines[-1] += (
        " with [paceline](https://pypi.org/project/paceline) to guess what this target says next. The output of"
    )
    lines += ["speculative decoding is the target's own, whatever the drafter guesses.", "", *_measured(about)]
    served = f", `TARGET` {_found(about['target'])}" if not hub else ""
    lines += ["## How to use it", "", f"`FOLDER` is this folder{served}.", ""]
    lines += [*_launches(drafter, target if hub else "TARGET", format), ""]
    lines += ["Made of:", "", "```json", json.dumps(drafter.options.made_of(), indent=2), "```", ""]
    return "\n".join(lines)


def _target(target: dict[str, Any]) -> str:
    """A hub id as it is, of a folder its name: where it lay is nobody's business."""
    path = target.get("path") or target.get("name") or "its target"
    return Path(path).name if os.path.isabs(path) else path


def _found(target: dict[str, Any]) -> str:
    """Where a target lies that has no hub id; an embedded one where paceline has put it."""
    if target.get("name") in NAMES:
        code = f"from paceline.models.embedded import folder; print(folder('{target['name']}'))"
        return f'the folder that `python -c "{code}"` prints'
    return f"the folder or hub id of {_target(target)}"


def _measured(about: dict[str, Any]) -> list[str]:
    """A table of the figures that there are."""
    found = about.get("acceptance") or {}
    rows = [(name, found[name]) for name in MEANINGS if found.get(name) is not None]
    if not rows:
        return ["Nothing was measured of it.", ""]
    rounds, made = found.get("num_drafts"), about.get("provenance") or {}
    how = f", over {rounds} passes" if rounds else ""
    when = f", after {made['step']} optimiser steps" if made.get("step") else ""
    prompts = made.get("decoded", "held-out prompts")  # the first exports did not say how many
    lines = [
        f"Decoded on {prompts}, during training{when}{how}:",
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
        engine, command = layout.launch(drafter, other, target)
        typed = [] if here else [f"python scripts/convert.py from=FOLDER to=OTHER format={other}"]
        typed += [command.replace("FOLDER", "FOLDER" if here else "OTHER")] if command else []
        lines += [f"{engine}{' (not run here)' if command else ''}{':' if typed else '.'}", ""]
        lines += ["```", *typed, "```", ""] if typed else []
    return lines
