"""What an adapter is asked and how it answers, in the files of a folder. Imports nothing of paceline's or a peer's.

    asked.json           do, method, depths, drafter and target (folders), sizes of a drafter that is to be made
    text.safetensors     ids [T]; states [L + 1, T, H]: the input of each of L layers, and the output of the last
                         last [T, H]: behind the final norm; embed, head [V, H]: the target's tables
    answer.safetensors   logits [K, T, D]: row t of depth k has read ids up to t + 1 + k; NaN where the text has ended
    answer.json          taps: the states that were read, as the peer's own code has them; version; found (of config)

`read` loads `drafter`; `write` makes a drafter with random weights and leaves it in `drafter`; `config` has no logits,
but says in words what was made of the drafter's config.json.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Logits = list[Tensor]  # by depth, [T' <= T, D]


def main(
    peer: str,
    read: Callable[[Any], Any] | None = None,
    write: Callable[[Any], Any] | None = None,
    config: Callable[[Any], Any] | None = None,
) -> None:
    """Answer what the folder on the command line asks.

    peer: its name on PyPI. read, write: -> logits, taps. config: -> taps, what was made of it.
    """
    place = Path(sys.argv[1])
    about = json.loads((place / "asked.json").read_text())
    asked = SimpleNamespace(place=place, **about, **load_file(place / "text.safetensors"))
    torch.manual_seed(1)
    do = {"read": read, "write": write, "config": config}[asked.do]
    if do is None:
        raise SystemExit(f"{peer} does not {asked.do} such a drafter")
    if asked.do == "config":
        taps, found = do(asked)
        (place / "answer.json").write_text(json.dumps({"taps": taps, "version": version(peer), "found": found}))
        return
    with torch.no_grad():
        logits, taps = do(asked)
    length = len(asked.ids)
    whole = torch.full((len(logits), length, logits[0].shape[-1]), torch.nan)
    for depth, found in enumerate(logits):
        rows = min(len(found), length - 1 - depth)
        whole[depth, :rows] = found[:rows].float()
    save_file({"logits": whole}, place / "answer.safetensors")
    (place / "answer.json").write_text(json.dumps({"taps": taps, "version": version(peer)}))


def config_of(asked: Any) -> dict[str, Any]:
    """config.json of the drafter that is to be read."""
    return json.loads((Path(asked.drafter) / "config.json").read_text())


def shaken(module: nn.Module) -> None:
    """Move every weight from where it starts: a norm of ones, or a layer of zeros, would hide that it is left out."""
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)


def recorded(module: nn.Module) -> Logits:
    """The outputs [1, T, D] of a module from now on, without the first dimension."""
    found: Logits = []
    module.register_forward_hook(lambda _, inputs, output: found.append(output[0].detach().float().clone()))
    return found
