"""What every script that decodes begins with: the target, drafter, tree and sampler that a checked config asks for.

What drafter.json alone gives away is refused before the target loads. Does not know prompts, reports or screens.
"""

import json
import math
import os
import platform
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.data.conversations import known_ids, load_tokenizer, stop_ids, template_hash
from paceline.decode import VERIFIERS, Decoder, DynamicShape, Sampler, Shape, shape_of
from paceline.models.drafter import Drafter, build, check_depth, options
from paceline.models.drafter import Shape as Sizes
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.export import describe, load_export, load_trunk
from paceline.models.hybrid import Hybrid
from paceline.models.target import Target, device_of


@dataclass
class Runtime:
    """A target ready to decode with its drafter (`decoder`) and alone (`plain`), in the same loop.

    stops: ids that end an answer. drafter, target: what they are, in plain types. original: the target as it was before
    it was trained with the drafter; the same where it was not. exact: whether bits are promised. decode: the options of
    cfg, a tuned tree filled in.
    """

    tokenizer: Any
    decoder: Decoder
    plain: Decoder
    sampler: Sampler
    stops: list[int]
    drafter: dict[str, Any]
    target: dict[str, Any]
    original: Target
    exact: bool
    decode: Any


def runtime(cfg: Any, rows: int = 1) -> Runtime:
    """Load what `cfg` (of a script that decodes) asks for. rows: how many are decoded together, where a tree is tuned.

    Raises Refusal, or BadData for a tokenizer.
    """
    about = describe(cfg.drafter) if cfg.drafter not in ("none", "ngram") else {}
    asked = settled(cfg.decode, about, rows, cfg.drafter)
    meant = target_of(cfg, about)
    where = folder(meant.name, meant.path)
    device = device_of(meant.device)
    tokenizer = load_tokenizer(where, meant.trust_remote_code)
    original = Target.load(where, cfg.dtype, device, known_ids(tokenizer), meant.quantize, meant.trust_remote_code)
    target, drafter = original, None
    if about:
        target = load_trunk(cfg.drafter, original, meant.trust_remote_code)
        drafter, about = load_export(cfg.drafter, target, cfg.dtype)
        drafter = with_lookup(drafter, asked)
        if about["target"].get("template_sha256") not in (None, template_hash(tokenizer)):
            print("paceline: the drafter was trained under another chat template; it will guess worse", file=sys.stderr)
    elif cfg.drafter == "ngram":
        drafter = build(cfg.ngram, Sizes.of(target))
    exact = promised(target, asked.exact)
    shape = shape_for(asked, drafter, about)
    if cfg.decode.tree == "tuned":
        _note_of_another_place(about[tuned_as(asked)], made_by(target, cfg.dtype, exact))
    verify, sampled = VERIFIERS[asked.verify], asked.drafts == "sampled"
    return Runtime(
        tokenizer,
        Decoder(target, drafter if shape.depth else None, shape, verify, timed=True, sampled=sampled),
        Decoder(target, timed=True),
        Sampler.of(asked),
        stop_ids(tokenizer),
        {
            "name": drafter.options.name + " and lookup" * bool(asked.lookup) if drafter is not None else "none",
            "path": cfg.drafter if about else None,
            "options": drafter.options.model_dump(mode="json") if drafter is not None else None,
            "parameters": sum(p.numel() for p in drafter.parameters()) if drafter is not None else 0,
        },
        {
            "name": meant.name,
            "path": where,
            "fingerprint": target.fingerprint,
            "vocab": target.vocab,
            "quantize": meant.quantize,
            "trunk": (about.get("trunk") or {}).get("kind", "frozen"),
        },
        original,
        exact,
        asked,
    )


def promised(target: Target, exact: bool | None) -> bool:
    """Let passes of `target` give the same bits whatever is drafted, as decode.exact asks; None: where they can.

    Raises Refusal where they cannot, and it was asked for.
    """
    if exact is False:
        return target.dtype == torch.float32
    try:
        target.exact()
    except Refusal:
        if exact:
            raise
        return False
    return True


def settled(asked: Any, about: dict[str, Any], rows: int, drafter: str) -> Any:
    """The `decode` options `asked`, what is tuned filled in with the choice of `about` for the nearest size of batch.

    Raises Refusal where nothing was tuned.
    """
    if asked.tree != "tuned":
        return asked
    choices = (about.get(tuned_as(asked)) or {}).get("choices")
    if not choices:
        hint = f"python scripts/tune.py drafter={drafter}" if about else "only an export can be"
        raise Refusal(f"decode.tree: drafter={drafter} has not been tuned ({hint}); nearest: static")
    choice = choices[min(choices, key=lambda size: abs(math.log(int(size) / rows)))]
    names = ("nodes", "depth", "width", "node_cost", "depth_cost")
    found = {name: choice[name] for name in names}
    plain = {"tree": "chain", "nodes": 1, "depth": None}
    return asked.model_copy(update=plain if choice["tree"] == "plain" else found | {"tree": choice["tree"]})


def tuned_as(asked: Any) -> str:
    """The entry of drafter.json that holds what is tuned: with a lookup, other trees pay."""
    return "tuned_with_lookup" if asked.lookup else "tuned"


def with_lookup(drafter: Drafter, asked: Any) -> Drafter:
    """The drafter, or with `decode.lookup` both as one."""
    return Hybrid(drafter, asked.lookup) if asked.lookup else drafter


def made_by(target: Target, dtype: str, exact: bool) -> dict[str, Any]:
    """What costs depend on."""
    return {
        "machine": _machine(target.device),
        "device": str(target.device),
        "dtype": dtype,
        "exact": exact,
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
    }


def _note_of_another_place(tuned: dict[str, Any], here: dict[str, Any]) -> None:
    there = tuned["cost"]["made"]
    other = [f"{name} {there.get(name)}, here {value}" for name, value in here.items() if there.get(name) != value]
    if other:
        print(
            f"paceline: the tree was tuned elsewhere ({'; '.join(other)}): scripts/tune.py tunes it here",
            file=sys.stderr,
        )


def shape_for(asked: Any, drafter: Drafter | None, about: dict[str, Any]) -> Shape:
    """The tree that the `decode` options ask for. about: drafter.json of an export, {} where the drafter has none."""
    paths = (about.get("tree") or {}).get("paths", ())
    costs = asked.node_cost, asked.depth_cost
    return shape_of(asked.tree, asked.nodes, asked.depth, asked.width, drafter, paths, *costs)


def target_of(cfg: Any, about: dict[str, Any]) -> Any:
    """The options of the target that is meant. Raises Refusal where the export already contradicts them."""
    if not about:
        return cfg.target
    if not cfg.decode.lookup:  # copies go deeper than the drafter's own heads
        check_depth(cfg.decode.depth, options(about["method"]["name"]).model_validate(about["method"]).depth_limit())
    theirs = about["target"]
    if cfg.target.name != "export":
        embedded = ("smollm2", "tiny")
        if cfg.target.name in embedded and theirs["name"] in embedded and cfg.target.name != theirs["name"]:
            raise Refusal(
                f"target: drafter={cfg.drafter} was not trained for {cfg.target.name}; nearest: {theirs['name']}"
            )
        return cfg.target
    if theirs["path"] and os.path.isabs(theirs["path"]) and not os.path.isdir(theirs["path"]):
        raise Refusal(
            f"target: that of drafter={cfg.drafter} is not at {theirs['path']} any more; "
            "say where it is: target=hf target.path=FOLDER"
        )
    if theirs.get("trust_remote_code") and not cfg.target.trust_remote_code:
        raise Refusal(
            f"target.trust_remote_code: that of drafter={cfg.drafter} was loaded with Python code of its own when the "
            "drafter was trained; target.trust_remote_code=true runs it here too"
        )
    quantize = cfg.target.quantize or theirs.get("quantize") or "none"  # the first exports did not say it
    return cfg.target.model_copy(update={"name": theirs["name"], "path": theirs["path"], "quantize": quantize})


def setting(cfg: Any, ready: Runtime) -> dict[str, Any]:
    """How and where it was decoded. The tree is the one really drafted: `static` is a chain where there is no tree."""
    shape, asked = ready.decoder.shape, ready.decode
    if isinstance(shape, DynamicShape):
        tree = "dynamic"
    else:
        tree = "static" if any(any(path) for path in shape.paths) else "chain"
    return {
        "dtype": cfg.dtype,
        "exact": ready.exact,
        "tree": tree,
        "depth": shape.depth,
        "nodes": shape.nodes,
        "width": asked.width,
        "drafts": asked.drafts,
        "verify": asked.verify,
        "lossy": asked.verify == "typical",
        **asdict(ready.sampler),
        "threads": torch.get_num_threads(),
        "device": str(ready.decoder.target.device),
        "machine": _machine(ready.decoder.target.device),
        "command": shlex.join(sys.orig_argv[1:]),  # as typed: sys.argv holds what was made of it
        **{name: version(name) for name in ("paceline", "torch", "transformers")},
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Indented, but lists of numbers each on one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(file, re.sub(r"\[\n[^][{}\"]*\n *\]", lambda found: " ".join(found[0].split()), text) + "\n")


def write_whole(file: Path, text: str) -> None:
    """The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
