"""A drafter into another format, or anyone's drafter into paceline's own.

    python scripts/convert.py from=outputs/mine/export to=outputs/mine/vllm format=vllm
    python scripts/convert.py from=OWNER/NAME to=outputs/theirs format=native target=hf target.path=FOLDER

What is written is read back and compared, bit by bit, before it takes its name. Does not know any format.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.models.hub import found, push_to_hub

    source, to = found(cfg.source), Path(cfg.to)
    _check_replaceable(to)
    if to.resolve() == source.resolve():
        raise Refusal(f"to: {to} is what is converted; nearest: {to}-{cfg.format}")
    convert(cfg, source, to)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{to}: {cfg.format}, read back and the same bit by bit. How engines are started: {to / 'README.md'}")
    if cfg.push is not None:
        files = push_to_hub(to, cfg.push, cfg.private, cfg.dry_run)
        console.print(f"{'would be uploaded' if cfg.dry_run else 'uploaded'} to {cfg.push}: {', '.join(files)}")


def convert(cfg: Any, source: Path, to: Path) -> None:
    """Write the drafter of one folder to another. Raises Refusal for what cannot be read, or has no place there."""
    from paceline.models import formats
    from paceline.models.card import card
    from paceline.models.export import read_export, save_export
    from paceline.models.formats.common import same
    from paceline.models.stored import whole
    from paceline.models.target import DTYPES

    drafter, about = _read(cfg, source)
    if cfg.dtype is not None:
        drafter.to(DTYPES[cfg.dtype])
    about["dtype"] = str(drafter.dtype).removeprefix("torch.")
    if cfg.format == "native":
        more = {name: value for name, value in about.items() if name not in ("dtype", "target")}
        with whole(to) as work:
            save_export(drafter, work, about["dtype"], about["target"], **more)
            lost = same(drafter, read_export(work, "to")[0])
            if lost is not None:
                raise Refusal(f"to: {to}: {lost} was read back as another than was written")
        return
    checkpoint = formats.written(drafter, cfg.format, about["target"] | _where(cfg, about))
    with whole(to) as work:
        checkpoint.save(work)
        (work / "README.md").write_text(card(drafter, about, cfg.format))


def _read(cfg: Any, source: Path) -> tuple[Any, dict[str, Any]]:
    """The drafter in `source`, and of drafter.json what stays true of it."""
    from paceline.models import formats
    from paceline.models.export import read_export

    if (source / "drafter.json").is_file():
        drafter, about = read_export(source, "from")
        if about.get("trunk") is not None:
            raise Refusal(
                f"from={source}: its target was trained with it, and formats of others have no place for that"
            )
        kept = ("target", "tree", "vocabulary_coverage", "provenance", "acceptance")
        return drafter, {name: about[name] for name in kept if name in about}
    layout = formats.reader(source)
    if layout is None:
        raise Refusal(f"from={source}: neither an export nor a checkpoint of {', '.join(formats.names())}")
    if cfg.target.name == "export":
        raise Refusal(f"target: from={source} does not say whom it drafts for; give target=hf target.path=FOLDER")
    target, about, tokenizer = _target(cfg)
    if hasattr(layout, "check_tokenizer") and not layout.check_tokenizer(source, tokenizer, "from"):
        print(f"paceline: from={source} has no tokenizer: that its ids are the target's is not known", file=sys.stderr)
    drafter = layout.load(source, target, "from")
    return drafter, {"target": about, "provenance": {"converted_from": layout.__name__.rpartition(".")[2]}}


def _target(cfg: Any) -> tuple[Any, dict[str, Any], Any]:
    """The target that is asked for, what drafter.json says of it, and its tokenizer."""
    from paceline.data.conversations import known_ids, load_tokenizer, template_hash
    from paceline.models.embedded import folder
    from paceline.models.target import Target, device_of

    asked = cfg.target
    where = folder(asked.name, asked.path)
    tokenizer = load_tokenizer(where, asked.trust_remote_code)
    device = device_of(asked.device)
    ids, quantize = known_ids(tokenizer), asked.quantize or "none"
    target = Target.load(where, "bfloat16", device, ids, quantize, asked.trust_remote_code)
    about = {
        "name": asked.name,
        "path": asked.path,
        "quantize": asked.quantize,
        "trust_remote_code": asked.trust_remote_code,
        "fingerprint": target.fingerprint,
        "template_sha256": template_hash(tokenizer),
    }
    return target, about, tokenizer


def _where(cfg: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Where the target's checkpoint lies, and its architecture, as far as that is on this machine."""
    from paceline.models.embedded import folder
    from paceline.models.stored import read_json

    asked = about["target"] if cfg.target.name == "export" else {"name": cfg.target.name, "path": cfg.target.path}
    if asked["name"] == "hf" and not os.path.isdir(asked.get("path") or ""):
        return {}
    place = Path(folder(asked["name"], asked.get("path")))
    return {"folder": str(place), "architectures": read_json(place / "config.json", "target").get("architectures")}


def _check_replaceable(to: Path) -> None:
    """Raises Refusal where a folder holds something else than a drafter: it would be gone."""
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / "config.json").is_file())):
        raise Refusal(f"to: {to} holds something else than a drafter, and would be replaced; give another folder")


main = entry("convert", run)

if __name__ == "__main__":
    main()
