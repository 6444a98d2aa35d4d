"""Checkpoints of others: one file a layout, which reads it and writes it, or says in one line why it cannot.

A module here has: METHOD, what drafter it holds; FORMATS, the names under which it is written; `recognised(folder)`;
`load(folder, target, option)`; `faults(drafter, format)`, what of a drafter has no place there, by name;
`launch(drafter, format, target)`, who reads it and how that is started; `written(drafter, format, target)`, the
checkpoint of one without; and `understood(checkpoint, shape, where)`, its way back, by which what is written is checked
before it is kept. One whose drafters read text by themselves also has
`check_tokenizer(folder, tokenizer, option)`: whether there is one to compare with the target's, which it does.
"""

from pathlib import Path
from typing import Any

from paceline.models.drafter import Drafter
from paceline.models.errors import Refusal
from paceline.models.formats import eagle, hf, medusa, mtp, speculators, speculators_mtp
from paceline.models.formats.common import SAFE, Checkpoint, base_config, same

LAYOUTS: tuple[Any, ...] = (
    speculators_mtp,
    speculators,
    mtp,
    medusa,
    hf,
    eagle,
)  # the first that recognises a folder reads it


def names() -> list[str]:
    """Of all formats, paceline's own apart."""
    return sorted({name for layout in LAYOUTS for name in layout.FORMATS})


def formats_of(method: str) -> list[str]:
    """Formats that hold drafters of a method."""
    return sorted({name for layout in LAYOUTS if method == layout.METHOD for name in layout.FORMATS})


def reader(folder: str | Path) -> Any:
    """The layout that reads this folder, None for none of them."""
    return next((layout for layout in LAYOUTS if layout.recognised(folder)), None)


def layout_of(method: str, format: str) -> Any:
    """The module that writes drafters of a method as `format`. Raises Refusal where there is none."""
    for layout in LAYOUTS:
        if method == layout.METHOD and format in layout.FORMATS:
            return layout
    others = formats_of(method)
    nearest = f"; nearest: {others[0]} (of {', '.join(others)})" if others else "; only format=native does"
    raise Refusal(f"format={format}: holds no drafter of method {method}{nearest}")


def unchanged(drafter: Drafter, format: str) -> bool:
    """Whether an export of paceline's own, as it is, is such a checkpoint already."""
    layout = layout_of(drafter.options.name, format)
    if layout.ONTO_TARGET:
        return False
    made = layout.written(drafter, format, {})
    own = made.config == base_config(drafter) and made.tensors.keys() == drafter.state_dict().keys()
    return own and made.file == SAFE


def written(drafter: Drafter, format: str, target: dict[str, Any]) -> Checkpoint:
    """A drafter as a checkpoint of `format`, read back and found to be the same, bit by bit.

    Args:
        target: what drafter.json says of it, and `folder`, where its checkpoint lies, for formats that need it.

    Raises:
        Refusal: what the format, or the code that reads it, cannot hold, by name.
    """
    layout = layout_of(drafter.options.name, format)
    fault = next(layout.faults(drafter, format), None)
    if fault is not None:
        raise Refusal(f"format={format}: {fault}")
    checkpoint = layout.written(drafter, format, target)
    again = layout.understood(checkpoint, drafter.shape, f"format={format}")
    lost = same(drafter, again)
    if lost is not None:
        raise Refusal(f"format={format}: has no place for {lost}")
    return checkpoint
