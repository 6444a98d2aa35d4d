"""Environments for other people's programs: one for each recipe, made once, beside the libraries of this one.

Knows venv and pip. Does not know what is run in them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from paceline.models.errors import Refusal


@dataclass(frozen=True)
class Recipe:
    """What pip installs. alone: without what it says it needs, which would bring another torch along. others: with."""

    name: str
    alone: tuple[str, ...]
    others: tuple[str, ...] = field(default=())


def python_of(recipe: Recipe, root: Path) -> Path:
    """The interpreter of a recipe's environment under `root`, which is made where it is not there yet, minutes long.

    Whatever it does not hold itself, torch above all, it takes from the environment this program runs in.

    Raises Refusal where pip cannot install it.
    """
    folder = root / recipe.name
    python, ready = folder / "bin" / "python", folder / "recipe.txt"
    if ready.exists() and ready.read_text() == repr(recipe):
        return python
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    for words in (("--no-deps", *recipe.alone), recipe.others):
        if not words:
            continue
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *words]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line] or [f"exit code {done.returncode}"]
            raise Refusal(f"peers: {recipe.name}: pip install {' '.join(words)} failed ({said[0]})")
    ready.write_text(repr(recipe))
    return python
