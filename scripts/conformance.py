"""Do others' programs draft with our drafters what we draft, and we with theirs? Asked of their own code.

    python scripts/conformance.py                              # all peers, on a small random target: minutes
    python scripts/conformance.py peers=[speculators] target=smollm2

For each peer an environment is made from PyPI (scripts/venvs.py), and an adapter (scripts/adapters/) run in it. Both
sides get the same text and hidden states, and their logits are compared, every depth, every place, in float32.

    to it      a random drafter of ours is written in a format, the peer reads it
    from it    the peer writes a random drafter of its own, we read it

Writes conformance.json and conformance.md into `out`. Knows no format.

    Legend: T text, L layers of the target, K depths, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.entry import entry
from paceline.conf.section import nearest
from paceline.models.errors import Refusal
from paceline.scripts.venvs import Recipe, python_of

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.drafter import Drafter

Row = dict[str, Any]
CLOSE = 1e-4  # logits of the same drafter in float32
LENGTH, DEPTHS, KNOWN = 24, 4, 48  # of the text; of a chain; ids of a draft vocabulary
SECONDS = 600  # that an adapter may take
ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Case:
    """A kind of drafter that a peer knows. format: it reads. writes: whether it writes it. depths: compared.

    served: the peer computes otherwise in training than those do that serve what it writes; asked for is the latter.
    config: only its configuration classes run here.
    """

    method: str
    format: str
    writes: bool = True
    depths: int = DEPTHS
    served: bool = False
    config: bool = False


@dataclass(frozen=True)
class Peer:
    """A program, the recipe of its environment, and what is asked of it."""

    name: str
    recipe: Recipe
    cases: tuple[Case, ...]


_OLD = ("transformers==4.46.3", "numpy<2")
_ENGINE: tuple[str, ...] = (  # what an engine's configuration classes import
    *("aiohttp", "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "ipython", "lark"),
    *("llguidance", "msgspec", "openai>=2.25", "orjson", "oss-harmony", "partial-json-parser", "pillow"),
    *("prometheus_client", "py-cpuinfo", "pybase64", "pyzmq", "regex", "setproctitle", "uvloop"),
)
PEERS = (
    Peer(
        "economize",
        Recipe("economize", ("economize==0.3.2",)),
        (Case("eagle3", "speculators", False), Case("eagle3", "sglang", False), Case("medusa", "medusa", False)),
    ),
    Peer(
        "speculators",
        Recipe(
            "speculators",
            ("speculators==0.9.0", "hs-connectors==0.9.0"),
            ("transformers==5.19.0", "loguru<=0.7.3", "pydantic-settings", "openai>=2", "aiohttp", "click", "typer"),
        ),
        # later steps of its MTP look at drafted keys of other chains, as no tree and no other reader does
        (Case("eagle3", "speculators"), Case("mtp", "speculators", depths=1)),
    ),
    Peer(
        "specforge",
        Recipe("specforge", ("specforge==0.2.0",), ("transformers==5.8.1",)),
        (Case("eagle3", "vllm"),),
    ),
    Peer(
        "modelopt",
        Recipe(
            "modelopt",
            ("nvidia-modelopt==0.47.0",),
            ("transformers<5.15", "ninja", "nvidia-ml-py", "omegaconf", "pulp<4", "regex", "scipy", "requests"),
        ),
        (Case("eagle3", "vllm"), Case("eagle3", "vllm", served=True)),
    ),
    Peer("eagle_llm", Recipe("eagle_llm", ("eagle-llm==1.2.1",), _OLD), (Case("eagle", "eagle"),)),
    Peer("medusa_llm", Recipe("medusa_llm", ("medusa-llm==0.1",), _OLD), (Case("medusa", "medusa"),)),
    Peer(
        "vllm",
        Recipe("vllm", ("vllm==0.33.0", "xgrammar==0.2.8"), _ENGINE),
        (
            Case("eagle3", "vllm", writes=False, config=True),
            Case("eagle3", "speculators", writes=False, config=True),
            Case("eagle", "vllm", writes=False, config=True),
        ),
    ),
    Peer(
        "sglang",
        Recipe("sglang", ("sglang==0.5.23",), _ENGINE),
        (
            Case("eagle3", "sglang", writes=False, config=True),
            Case("eagle", "sglang", writes=False, config=True),
        ),
    ),
)
# Another base than 10,000 is what a reader would miss that does not look for it
_ROPE = {"rope_type": "default", "rope_theta": 50_000.0}


def ours(layers: int) -> dict[str, dict[str, Any]]:
    """Kind of drafter -> its options, for a target of so many layers."""
    return {
        "eagle3": {"name": "eagle", "draft_vocab": KNOWN, "layer": {"rope": _ROPE}},
        "eagle": {
            "name": "eagle",
            "join": "fc",
            "output": "shared",
            "layer": {"rope": _ROPE | {"rope_theta": 10_000.0}},  # eagle-llm knows no other
        },
        "medusa": {"name": "medusa", "heads": DEPTHS},
        "mtp": {
            "name": "mtp_sequential",
            "taps": [layers],
            "hand_on": "normed",
            "layer": {"qk_norm": True, "rope": _ROPE},
        },
    }


def run(cfg: Any) -> None:
    from rich.console import Console
    from rich.progress import track

    from paceline.scripts.decoding import write_json, write_whole

    known = {peer.name: peer for peer in PEERS}
    for name in cfg.peers:
        if name not in known:
            raise Refusal(f"peers: no such peer {name!r}; nearest: {nearest(name, known)} (of {', '.join(known)})")
    out, console = Path(cfg.out), Console(soft_wrap=True, highlight=False)
    text = Text(cfg.target)
    rows: list[Row] = []
    for name in track(cfg.peers, "peers", console=console, disable=not console.is_terminal):
        for row in compared(known[name], text, out, Path(cfg.venvs)):
            rows.append(row)
            console.print(_line(row))
    write_json(out / "conformance.json", {"close": CLOSE, "target": text.about["path"], "rows": rows})
    write_whole(out / "conformance.md", table(rows))
    console.print(f"{out / 'conformance.md'}, .json")
    if not all(row["agrees"] for row in rows):
        sys.exit(1)


class Text:
    """A text, and what the target makes of it.

    ids [T]; states [L + 1, T, H]: the input of each layer and the output of the last; last [T, H]: behind the norm.
    """

    def __init__(self, asked: Any):
        import torch

        from paceline.models.embedded import folder
        from paceline.models.target import Target

        where = str(Path(folder(asked.name, asked.path)).resolve())
        if not Path(where).is_dir():
            raise Refusal(f"target.path: {where} is no folder, and others' programs have to read it")
        self.target = Target.load(where, "float32", "cpu")
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(self.target.vocab, (LENGTH,), generator=draw)
        taps = tuple(range(self.target.layers + 1))
        with torch.no_grad():
            hidden, last = self.target(self.ids[None], taps)
        self.states, self.last = torch.stack(hidden[0].chunk(len(taps), -1)), last[0]
        config = self.target.config
        names = ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"]
        names += ["max_position_embeddings", "rms_norm_eps", "hidden_act"]
        self.sizes = {name: getattr(config, name) for name in names} | {"rope_theta": _ROPE["rope_theta"]}
        self.sizes["head_dim"] = self.target.hidden // config.num_attention_heads
        self.vocabulary = torch.randperm(self.target.vocab, generator=draw)[:KNOWN].sort().values
        self.about = {
            "name": "hf",
            "path": where,
            "folder": where,
            "fingerprint": self.target.fingerprint,
            "architectures": list(config.architectures or []),
        }

    def drafter(self, method: str) -> Drafter:
        """One of ours, every weight of it random, ready to draft."""
        import torch

        from paceline.models.drafter import Shape, build, options

        said = ours(self.target.layers)[method]
        asked = options(said["name"])(**said).fitted(self.target)
        torch.manual_seed(0)
        made = build(asked, Shape.of(self.target), self.vocabulary if asked.draft_vocab else None)
        for parameter in made.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        made.borrow(self.target)
        return made.float().eval()


def compared(peer: Peer, text: Text, out: Path, venvs: Path) -> Iterator[Row]:
    """A row for each direction of each case."""
    for case in peer.cases:
        for to_it in (True, False) if case.writes else (True,):
            place = (out / peer.name / f"{_what(case)}-{case.format if to_it else 'theirs'}").resolve()
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            row: Row = {"peer": peer.name, "version": None, "method": _what(case), "depths": case.depths}
            row |= {"way": "to it" if to_it else "from it", "format": case.format if to_it else None, "agrees": False}
            row |= dict.fromkeys(("difference", "largest", "taps", "their_taps", "found", "fault"))
            try:
                row |= _compared(peer, case, text, place, venvs, to_it)
            except Refusal as refusal:
                row["fault"] = str(refusal)
            yield row


def _compared(peer: Peer, case: Case, text: Text, place: Path, venvs: Path, to_it: bool) -> Row:
    """What is found in one direction. Raises Refusal where either side fails."""
    from paceline.models import formats

    drafter, found = text.drafter(case.method), Row()
    if to_it:
        checkpoint = formats.written(drafter, case.format, text.about)
        (place / "drafter").mkdir()
        checkpoint.save(place / "drafter")
    do = "config" if case.config else "read" if to_it else "write"
    answer, theirs = _asked(peer, case, text, place, venvs, do, drafter)
    if not to_it:
        layout = formats.reader(place / "drafter")
        if layout is None:
            raise Refusal("what it wrote is of no format that is known here")
        found["format"] = layout.__name__.rpartition(".")[2]
        drafter = layout.load(place / "drafter", text.target).float()
    found |= {"version": answer["version"], "taps": list(drafter.taps), "their_taps": answer["taps"]}
    found["agrees"] = answer["taps"] == list(drafter.taps)
    if case.config:
        return found | {"found": answer["found"], "depths": 0}
    found |= _difference(chains(drafter, text, case.depths), theirs)
    return found | {"agrees": found["agrees"] and found["difference"] <= CLOSE}


def _what(case: Case) -> str:
    return f"{case.method}{', as served' if case.served else ''}"


def _asked(
    peer: Peer, case: Case, text: Text, place: Path, venvs: Path, do: str, drafter: Drafter
) -> tuple[dict[str, Any], Tensor | None]:
    """What the adapter of a peer answers, and its logits [K, T, D], if it has any. Raises Refusal where it fails."""
    from safetensors.torch import load_file, save_file

    target = text.target
    tables = {"embed": target.model.get_input_embeddings().weight, "head": target.head.weight}
    tensors = {"ids": text.ids, "states": text.states, "last": text.last} | tables
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, place / "text.safetensors"
    )
    asked = {
        "do": do,
        "method": case.method,
        "depths": case.depths,
        "drafter": str(place / "drafter"),
        "target": text.about["path"],
        "served": case.served,
        "layers": target.layers,
        "sizes": text.sizes,
        "taps": list(drafter.taps),
        "vocabulary": text.vocabulary.tolist(),
    }
    (place / "asked.json").write_text(json.dumps(asked, indent=2) + "\n")
    command = [str(python_of(peer.recipe, venvs)), str(ADAPTERS / f"peer_{peer.name}.py"), str(place)]
    with (place / "log.txt").open("w") as log:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise Refusal(f"no answer within {SECONDS} s") from None
    if done.returncode:
        said = [line for line in (place / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
        raise Refusal(f"{said[-1].strip() if said else 'it said nothing'} (all of it: {place / 'log.txt'})")
    tensors = load_file(place / "answer.safetensors") if (place / "answer.safetensors").exists() else {}
    return json.loads((place / "answer.json").read_text()), tensors.get("logits")


def chains(drafter: Drafter, text: Text, depths: int) -> Tensor:
    """[K, T, D] logits of a chain from every place, fed with the text, node after node as the decoder runs it."""
    import torch

    from paceline.models.drafter import Context

    states = torch.cat([text.states, text.last[None]])  # taps -1 is the last of these
    hidden = torch.cat([states[tap] for tap in drafter.taps], -1)[None]
    ids, length = text.ids[None], len(text.ids)
    found: Tensor | None = None
    with torch.no_grad():
        features = drafter.read(hidden)
        for place in range(length - 1):
            memory = drafter.memory(1, length + depths)
            context = Context(torch.arange(place + 1)[None], torch.tensor([place + 1]), memory)
            feature, state = drafter.step(features[:, : place + 1], ids[:, 1 : place + 2], 0, context)
            for depth in range(min(depths, length - 1 - place)):
                if depth:
                    context = Context(torch.tensor([[place + depth]]), torch.tensor([1]), memory, torch.tensor([[0]]))
                    token = ids[:, place + 1 + depth : place + 2 + depth]
                    feature, state = drafter.step(feature[:, -1:], token, depth, context)
                logits = drafter.head(state[:, -1:], depth)[0, 0]
                if found is None:
                    found = torch.full((depths, length, len(logits)), torch.nan)
                found[depth, place] = logits
    assert found is not None
    return found


def _difference(ours: Tensor, theirs: Tensor | None) -> Row:
    """The largest difference of logits that both sides have, and the largest of ours. Raises Refusal for none."""
    if theirs is None:
        raise Refusal("it gave no logits")
    if ours.shape != theirs.shape:
        raise Refusal(f"its logits have shape {list(theirs.shape)}, ours {list(ours.shape)}")
    both = ours.isfinite() & theirs.isfinite()
    if not bool(both.any(2).any(1).all()):
        raise Refusal("a depth has no logits")
    return {"difference": float((ours - theirs)[both].abs().max()), "largest": float(ours[both].abs().max())}


def _line(row: Row) -> str:
    verdict = "[green]agrees[/]" if row["agrees"] else "[red]differs[/]"
    return f"{verdict} {row['peer']} {row['version']}, {row['method']} {row['way']} ({row['format']}): {_found(row)}"


def _found(row: Row) -> str:
    """In words, what came of it."""
    if row["fault"]:
        return row["fault"]
    if row["found"]:
        found = f"its configuration is that of {row['found']}"
    else:
        found = f"logits differ by {row['difference']:.0e} at most, of up to {row['largest']:.0f}"
    if row["taps"] != row["their_taps"]:
        found += f"; it reads hidden states {row['their_taps']}, we {row['taps']}"
    return found


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        f"Logits in float32 agree where they differ by {CLOSE:.0e} at most, and the same hidden states are read.",
        "",
    ]
    lines += ["| peer | drafter | way | format | depths | agrees | found |", "|" + "---|" * 7]
    for row in rows:
        cells = (f"{row['peer']} {row['version'] or ''}", row["method"], row["way"], row["format"], row["depths"])
        lines.append(f"| {' | '.join(map(str, cells))} | {'yes' if row['agrees'] else 'no'} | {_found(row)} |")
    return "\n".join(lines) + "\n"


main = entry("conformance", run)

if __name__ == "__main__":
    main()
