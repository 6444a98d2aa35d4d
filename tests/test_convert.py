"""Formats of others: there and back without a bit lost, or refused by name; damaged checkpoints; the hub, dry."""

import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import target_of
from runs import checkpoint_of_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.conf.entry import load
from paceline.models import card, embedded, formats, hub
from paceline.models.draft_model import DraftOptions
from paceline.models.drafter import Drafter, Shape, build, options
from paceline.models.errors import Refusal
from paceline.models.export import load_export, read_export, save_export
from paceline.models.stored import save_tensors
from paceline.models.target import Target
from paceline.scripts.convert import run

VOCABULARY = torch.tensor([0, 2, 3, 7, 11, 30, 31, 63])
OWN = {"dtype": "bfloat16", "layer": {"rope": {"rope_type": "default", "rope_theta": 10_000.0}}}
STITCHED = {"taps": [-1], "hand_on": "normed"}
OF_MIMO = {"zero_first": True}
OF_SPECULATORS = {"taps": [8], "hand_on": "normed"}
# kind: (family of the target, method and options, formats that hold it)
HELD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "eagle3": ("llama", {"name": "eagle", "draft_vocab": 8}, ("eagle", "vllm", "sglang", "speculators")),
    "eagle3 of all ids": ("llama", {"name": "eagle"}, ("eagle", "vllm", "sglang", "speculators")),
    "eagle3 of two taps": ("llama", {"name": "eagle", "taps": [1, 6]}, ("vllm",)),
    "eagle": ("llama", {"name": "eagle", "join": "fc", "output": "shared"}, ("eagle", "vllm", "sglang")),
    "eagle with a bias": (
        "llama",
        {"name": "eagle", "join": "fc", "output": "shared", "fc_bias": True},
        ("eagle", "sglang"),
    ),
    "medusa": ("llama", {"name": "medusa", "heads": 5}, ("medusa", "vllm")),
    "medusa of three heads": ("llama", {"name": "medusa", "heads": 3}, ("medusa", "vllm")),
    "medusa, shared": ("llama", {"name": "medusa", "heads": 5, "output": "shared"}, ("medusa",)),
    "medusa of some ids": ("llama", {"name": "medusa", "heads": 2, "blocks": 2, "draft_vocab": 8}, ("vllm",)),
    "mtp": ("llama", {"name": "mtp_sequential", "modules": 2, **STITCHED}, ("mtp_stitched",)),
    "mtp, qwen3": ("qwen3", {"name": "mtp_sequential", **STITCHED}, ("mtp_stitched",)),
    "mtp of mimo": ("qwen2", {"name": "mtp_sequential", **OF_MIMO}, ("mimo",)),
    "mtp of speculators": ("qwen3", {"name": "mtp_sequential", **OF_SPECULATORS}, ("speculators",)),
    "draft": ("llama", {"name": "draft", "target_layers": [0, 3], "tables": "own"}, ("hf",)),
}
CASES = [(kind, format) for kind, (_, _, held) in HELD.items() for format in held]
_TARGETS: dict[str, Target] = {}


def target_for(family: str) -> Target:
    if family not in _TARGETS:
        _TARGETS[family] = target_of(family, num_hidden_layers=8)
    return _TARGETS[family]


def drafter_of(target: Target, dtype: torch.dtype = torch.bfloat16, **said: Any) -> Drafter:
    """As after some training: no weight is at its start."""
    asked = options(said["name"])(**said).fitted(target)
    drafter = build(asked, Shape.of(target), VOCABULARY if asked.draft_vocab else None)
    if isinstance(asked, DraftOptions):
        drafter.start(target)
        drafter.options = asked.model_copy(update={"target_layers": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return drafter.to(dtype).eval()


def exported(folder: Path, target: Target, drafter: Drafter, **about: Any) -> Path:
    dtype = str(drafter.dtype).removeprefix("torch.")
    return save_export(drafter, folder, dtype, {"name": "hf", "path": None, "fingerprint": target.fingerprint}, **about)


def converted(export: Path, folder: Path, target: Target, format: str) -> Path:
    """The export, in a format. Formats that lie inside the target's checkpoint get one."""
    drafter, about = read_export(export)
    where = folder.parent / "target"
    if not where.exists():
        target.model.save_pretrained(where)
    checkpoint = formats.written(drafter, format, about["target"] | {"folder": str(where)})
    folder.mkdir()
    checkpoint.save(folder)
    return folder


@pytest.mark.parametrize("kind, format", CASES)
def test_there_and_back_no_bit_is_lost(kind: str, format: str, tmp_path: Path) -> None:
    family, said, _ = HELD[kind]
    target = target_for(family)
    first = exported(tmp_path / "export", target, drafter_of(target, **said))
    theirs = converted(first, tmp_path / "theirs", target, format)
    assert not (theirs / "drafter.json").exists()
    layout = formats.reader(theirs)
    assert layout is formats.layout_of(said["name"], format), "the folder is known for what it is"
    again = exported(tmp_path / "again", target, layout.load(theirs, target))
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    ours, back = (read_export(folder)[0].options.made_of() for folder in (first, again))
    assert ours == back
    # and the other way round: what was read is written as it was
    there, here = (file for file in (theirs, converted(again, tmp_path / "theirs2", target, format)))
    for file in there.iterdir():
        if file.suffix == ".pt":  # a zip holds dates
            one, other = (torch.load(folder / file.name, weights_only=True) for folder in (there, here))
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        else:
            assert file.read_bytes() == (here / file.name).read_bytes(), file.name


EAGLE3: dict[str, Any] = {"name": "eagle", "draft_vocab": 8}
EAGLE1: dict[str, Any] = {"name": "eagle", "join": "fc", "output": "shared"}
NOT_HELD: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a bias of attention": (
        "qwen2",
        EAGLE3,
        "vllm",
        "self_attn.q_proj.bias has no place there; train with method.layer.",
    ),
    "normed heads": ("qwen3", EAGLE3, "sglang", "self_attn.q_norm.weight has no place there"),
    "a bias of fc": ("llama", EAGLE3 | {"fc_bias": True}, "eagle", "fc.bias has no place there"),
    "a bias of EAGLE-1's fc": ("llama", EAGLE1 | {"fc_bias": True}, "vllm", "fc.bias has no place there"),
    "no head": ("llama", EAGLE3 | {"output": "shared"}, "vllm", "lm_head.weight would be missing"),
    "another head": ("llama", EAGLE1 | {"output": "own"}, "eagle", "lm_head.weight has no place in EAGLE-1"),
    "some ids": ("llama", EAGLE1 | {"draft_vocab": 8}, "sglang", "d2t, a draft vocabulary, has no place in EAGLE-1"),
    "other layers": ("llama", EAGLE3 | {"taps": [1, 3, 6]}, "eagle", "the official code reads [2, 4, 5]"),
    "two taps": ("llama", EAGLE3 | {"taps": [1, 6]}, "sglang", "fc.weight reads three hidden states"),
    "the last state": ("llama", EAGLE3 | {"taps": [1, 4, -1]}, "vllm", "engines read inputs of layers 1 to 7"),
    "other heads": ("llama", EAGLE3 | {"layer": {"head_dim": 4}}, "eagle", "method.layer.head_dim=4"),
    "an activation": ("llama", EAGLE3 | {"layer": {"activation": "relu"}}, "vllm", "that layer computes silu"),
    "rope": (
        "llama",
        EAGLE3 | {"layer": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}},
        "eagle",
        "method.layer.rope: yarn",
    ),
    "blocks": ("llama", {"name": "medusa", "heads": 5, "blocks": 2}, "medusa", "method.blocks=2"),
    "ids of heads": ("llama", {"name": "medusa", "heads": 5, "draft_vocab": 8}, "medusa", "token_map"),
    "shared heads": ("llama", {"name": "medusa", "output": "shared"}, "vllm", "lm_heads.0.weight would be missing"),
    "a convention": ("llama", {"name": "mtp_sequential"}, "mtp_stitched", "method.taps=[8]: its reader has [-1]"),
    "modules": ("qwen2", {"name": "mtp_sequential", "modules": 2, **OF_MIMO}, "mimo", "method.modules=2"),
    "another layer of MTP": (
        "llama",
        {"name": "mtp_sequential", **OF_SPECULATORS},
        "speculators",
        "its layers are Qwen3's",
    ),
    "another state": ("qwen3", {"name": "mtp_sequential", **STITCHED}, "speculators", "its reader has [8]"),
    "another trunk": ("llama", {"name": "mtp_sequential", **OF_MIMO}, "mimo", "MiMo's layers are Qwen2's"),
    "another layer than the trunk's": (
        "llama",
        {"name": "mtp_sequential", "layer": {"intermediate": 16}, **STITCHED},
        "mtp_stitched",
        "method.layer.intermediate=16: a module is a layer of its target's kind, which has 48",
    ),
    "tables": ("llama", {"name": "draft", "target_layers": [0]}, "hf", "train with method.tables=own"),
    "another method": ("llama", {"name": "hydra_heads"}, "medusa", "holds no drafter of method hydra_heads; only"),
    "another format": ("llama", EAGLE3, "medusa", "nearest: eagle (of eagle, sglang, speculators, vllm)"),
    "EAGLE-1": ("llama", EAGLE1, "speculators", "holds EAGLE-3 only"),
}


@pytest.mark.parametrize("what", NOT_HELD)
def test_what_has_no_place_is_refused_by_name(what: str, tmp_path: Path) -> None:
    family, said, format, message = NOT_HELD[what]
    target = target_for(family)
    export = exported(tmp_path / "export", target, drafter_of(target, **said))
    with pytest.raises(Refusal) as refusal:
        converted(export, tmp_path / "theirs", target, format)
    assert str(refusal.value).startswith(f"format={format}: ") and message in str(refusal.value)
    assert "\n" not in str(refusal.value) and not (tmp_path / "theirs").exists()


def test_both_ways_to_count_layers_are_written_and_must_agree(tmp_path: Path) -> None:
    target = target_for("llama")
    export = exported(tmp_path / "export", target, drafter_of(target, **EAGLE3))
    folder = converted(export, tmp_path / "theirs", target, "vllm")
    config = json.loads((folder / "config.json").read_text())
    after, last = config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert (after, last) == ([2, 4, 5], [1, 3, 4])
    assert "norm_output" not in config, "false would take the norm before the head away from SpecForge"
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = after
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=r"that in eagle_config names the last of them, \[1, 3, 4\]|one less each"):
        formats.reader(folder).load(folder, target)


@pytest.mark.parametrize("marked", [True, False], ids=["t2d", "no t2d"])
def test_ids_in_the_place_of_offsets_are_told_apart(marked: bool, tmp_path: Path) -> None:
    target = target_for("llama")
    export = exported(tmp_path / "export", target, drafter_of(target, **EAGLE3))
    folder = converted(export, tmp_path / "theirs", target, "vllm")

    def absolute(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = VOCABULARY.clone()
        if not marked:
            del tensors["t2d"]

    rewrite(folder / "model.safetensors", absolute)
    with pytest.raises(Refusal, match="d2t holds ids, engines add each one's place to it"):
        formats.reader(folder).load(folder, target)


# ---------------------------------------------------------------- damaged checkpoints


class Hostile:
    """Unpickled, it would run a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file, which stays of its kind."""
    pickled = file.suffix in (".bin", ".pt")
    tensors = torch.load(file, weights_only=True) if pickled else load_file(file)
    change(tensors)
    if pickled:
        torch.save(tensors, file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def some(tensors: dict[str, Tensor], draw: random.Random) -> str:
    """A tensor that cannot be done without."""
    return draw.choice(sorted(name for name in tensors if name not in ("t2d", "embed_tokens.weight")))


def misshapen(tensor: Tensor, draw: random.Random) -> Tensor:
    return draw.choice([tensor[:-1], tensor[None], tensor.flatten()[:0], torch.cat([tensor, tensor])])


def retyped(tensor: Tensor, draw: random.Random) -> Tensor:
    kinds = [torch.float64, torch.int8, torch.float8_e4m3fn, torch.int16]
    return tensor.to(draw.choice(kinds))


def renamed(tensors: dict[str, Tensor], draw: random.Random) -> None:
    name = some(tensors, draw)
    tensors[draw.choice([f"x.{name}", name.replace("weight", "Weight") + "_", name.upper(), "../" + name])] = (
        tensors.pop(name)
    )


def header(size: int, text: bytes) -> bytes:
    return struct.pack("<Q", size) + text


def huge(draw: random.Random) -> bytes:
    """A safetensors file whose header promises more than there is."""
    vast = {"fc.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
    text = json.dumps(vast).encode()
    overlapping = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]}}).encode()
    many = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [0] * 400, "data_offsets": [0, 0]} for i in range(50)}
    ).encode()
    return draw.choice(
        [
            header(2**63 - 1, b"{}"),
            header(10**9, b"{" + b" " * 100),
            header(2**64 - 1, b""),
            header(len(text), text),
            header(len(overlapping), overlapping),
            header(len(many), many) + b"\0" * 7,
            header(len(text) + 1, text),
            b"\xff" * 7,
            b"",
        ]
    )


WRONG = [-1, 0, 10**12, 10**30, "4", [], {}, 1.5, True, "\N{BOMB}" * 3]
TEXTS = ["{", "", "[1]", "null", "[" * 100_000, '{"a": ' * 100_000, "\x00\x01", '{"hidden_size": ' + "9" * 5000 + "}"]


def config_wrong(folder: Path, draw: random.Random) -> None:
    """config.json or drafter.json as it may be after an accident, or as someone with ill will writes it."""
    file = folder / ("drafter.json" if (folder / "drafter.json").exists() else "config.json")
    if draw.random() < 0.4:
        file.write_text(draw.choice(TEXTS))
        return
    about = json.loads(file.read_text())
    place, keys = about, ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    if file.name == "drafter.json":
        place = draw.choice([about["shape"], about["method"]])
        keys = ("hidden", "vocab") if place is about["shape"] else ("name", "draft_vocab", "layer", "taps", "output")
    elif "transformer_layer_config" in about:
        place = about["transformer_layer_config"]
    key = draw.choice([key for key in keys if key in place])
    place[key] = draw.choice([value for value in WRONG if value is not True])
    file.write_text(json.dumps(about))


def tensors_of(folder: Path) -> Path:
    """The file that holds the drafter's tensors."""
    names = ("mtp.safetensors", "medusa_lm_head.pt", "pytorch_model.bin", "model.safetensors")
    return next(folder / name for name in names if (folder / name).exists())


def hostile(folder: Path, draw: random.Random) -> None:
    """A pickle that would leave a mark, in the place of the tensors or beside them."""
    file, mark = tensors_of(folder), Hostile(f"touch {folder.parent / 'ran'}")
    content: Any = draw.choice(
        [mark, {"fc.weight": mark}, [mark], {mark.command: torch.zeros(1)}, {"a": [torch.zeros(1)]}]
    )
    if file.suffix == ".safetensors":  # under a name that is a pickle's
        file.unlink()
        (folder / INDEX).unlink(missing_ok=True)
        file = folder / draw.choice(["pytorch_model.bin", "model.safetensors"])
    if draw.random() < 0.5:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))


INDEX = "model.safetensors.index.json"


def astray(folder: Path, draw: random.Random) -> None:
    """A file that is another's, no file, or leads out of the folder."""
    file = tensors_of(folder)
    if (folder / INDEX).exists():
        out = draw.choice(
            [f"../target/{file.name}", "/etc/passwd", "..", "", "a/b.safetensors", 7, None, file.name + "\0"]
        )
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = dict.fromkeys(index["weight_map"], out)
        (folder / INDEX).write_text(json.dumps(index))
        return
    file.unlink()
    kind = draw.choice(["folder", "pipe", "loop", "elsewhere"])
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "loop" else "/etc/passwd")


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "truncated": lambda f, draw: os.truncate(tensors_of(f), draw.randrange(tensors_of(f).stat().st_size)),
    "a tensor missing": lambda f, draw: rewrite(tensors_of(f), lambda t: t.pop(some(t, draw))),
    "a tensor renamed": lambda f, draw: rewrite(tensors_of(f), lambda t: renamed(t, draw)),
    "another shape": lambda f, draw: rewrite(
        tensors_of(f), lambda t: t.update({n: misshapen(t[n], draw) for n in [some(t, draw)]})
    ),
    "another dtype": lambda f, draw: rewrite(
        tensors_of(f), lambda t: t.update({n: retyped(t[n], draw) for n in [some(t, draw)]})
    ),
    "not finite": lambda f, draw: rewrite(
        tensors_of(f),
        lambda t: next(v for _, v in sorted(t.items()) if v.is_floating_point()).view(-1)[:1].fill_(torch.nan),
    ),
    "noise": lambda f, draw: tensors_of(f).write_bytes(draw.randbytes(draw.randrange(2000))),
    "a hostile pickle": hostile,
    "a huge header": lambda f, draw: tensors_of(f).write_bytes(huge(draw)),
    "a path astray": astray,
    "config": config_wrong,
}
WHOLE = ("native eagle3", "native medusa", "eagle", "bin", "vllm", "speculators", "medusa", "mtp_stitched", "hf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Path]]:
    """Copies of sound checkpoints."""
    where, target = tmp_path_factory.mktemp("sound"), target_for("llama")
    kinds = {
        "medusa": "medusa",
        "native medusa": "medusa of some ids",
        "mtp_stitched": "mtp",
        "hf": "draft",
        "vllm": "eagle",
    }
    for name in WHOLE:
        said = HELD[kinds.get(name, "eagle3")][1]
        export = exported(where / f"{name} export", target, drafter_of(target, **said))
        if name.startswith("native"):
            export.rename(where / name)
            continue
        folder = converted(export, where / name, target, "eagle" if name == "bin" else name)
        if name == "bin":
            torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()

    def copy(name: str, to: Path) -> Path:
        to.mkdir()
        for file in (where / name).iterdir():
            (to / file.name).write_bytes(file.read_bytes())
        return to

    yield copy


def read(folder: Path, target: Target) -> Drafter:
    """As the entries do."""
    if (folder / "drafter.json").exists():
        return load_export(folder, target)[0]
    layout = formats.reader(folder)
    if layout is None:
        raise Refusal(f"drafter={folder}: neither an export nor a checkpoint that is known")
    return layout.load(folder, target)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_sound_is_read(name: str, sound: Callable[[str, Path], Path], tmp_path: Path) -> None:
    read(sound(name, tmp_path / "sound"), target_for("llama"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_ends_in_one_named_line(
    damage: str, sound: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """22 random cases a kind of damage, 242 in all: no other error, no drafter, no code that ran."""
    target, draw = target_for("llama"), random.Random(damage)
    for number in range(22):
        name = WHOLE[number % len(WHOLE)]
        folder = sound(name, tmp_path / str(number))
        DAMAGE[damage](folder, draw)
        try:
            drafter = read(folder, target)
        except Refusal as refusal:
            text = str(refusal)
        else:
            pytest.fail(f"case {number} ({name}) was read: {drafter.options}")
        assert str(folder) in text and "\n" not in text.strip() and len(text) < 1000, text
    assert not (tmp_path / "ran").exists()


def test_the_hostile_pickle_would_have_run(tmp_path: Path) -> None:
    """That the mark is missing above is worth something: a loader that trusts leaves it."""
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Hostile(f"touch {tmp_path / 'ran'}")))
    with (tmp_path / "x.bin").open("rb") as file:
        pickle.load(file)
    assert (tmp_path / "ran").exists()


# ---------------------------------------------------------------- the program, the card, the hub


def test_the_program_converts_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = checkpoint_of_target(tmp_path / "target")
    target = Target.load(str(where), vocab=259)
    about = {"acceptance": {"mean_acceptance_length": 1.75, "num_drafts": 40}, "tree": {"paths": [[0]], "nodes": 8}}
    drafter = drafter_of(target, name="medusa", heads=5)
    export = exported(tmp_path / "export", target, drafter, **about)
    run(load("convert", f"from={export}", f"to={tmp_path / 'out'}", "format=medusa", "push=me/heads", "dry_run=true"))
    said = capsys.readouterr().out
    assert "would be uploaded to me/heads: README.md, config.json, medusa_lm_head.pt" in " ".join(said.split())
    words = [f"from={tmp_path / 'out'}", f"to={tmp_path / 'back'}", "format=native"]
    with pytest.raises(Refusal, match=r"target: .* does not say whom it drafts for; give target=hf"):
        run(load("convert", *words))
    run(load("convert", *words, "target=hf", f"target.path={where}"))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    load_export(tmp_path / "back", target)

    def spoiling(tensors: dict[str, Any], *more: Any, **named: Any) -> None:
        save_tensors({name: -tensor for name, tensor in tensors.items()}, *more, **named)

    with monkeypatch.context() as patch:  # a disk that does not keep what it was given
        patch.setattr("paceline.models.export.save_tensors", spoiling)
        with pytest.raises(Refusal, match=r"to: .*worse: tensor \S+ was read back as another than was written"):
            run(load("convert", f"from={export}", f"to={tmp_path / 'worse'}", "format=native"))
    assert not (tmp_path / "worse").exists()
    with pytest.raises(Refusal, match="holds something else than a drafter"):
        run(load("convert", f"from={export}", f"to={tmp_path}", "format=vllm"))
    with pytest.raises(Refusal, match="format: no such format 'medussa'; nearest: medusa"):
        load("convert", f"from={export}", f"to={tmp_path / 'x'}", "format=medussa")


def test_the_tokenizer_of_a_draft_model_is_compared_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = checkpoint_of_target(tmp_path / "target")
    target = Target.load(str(where), vocab=259)
    drafter = drafter_of(target, name="draft", target_layers=[0], tables="own")
    export = exported(tmp_path / "export", target, drafter)
    model = tmp_path / "model"
    run(load("convert", f"from={export}", f"to={model}", "format=hf"))
    words = [f"from={model}", f"to={tmp_path / 'back'}", "format=native", "target=hf", f"target.path={where}"]
    capsys.readouterr()
    run(load("convert", *words))
    assert capsys.readouterr().err == (
        f"paceline: from={model} has no tokenizer: that its ids are the target's is not known\n"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(where / name, model)
    run(load("convert", *words))
    assert not capsys.readouterr().err
    content = json.loads((model / "tokenizer.json").read_text())
    known = content["model"]["vocab"]
    first, second = (next(token for token, i in known.items() if i == number) for number in (70, 71))
    known[first], known[second] = 71, 70
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refusal, match=rf"^from={model}: another tokenizer than the target's: id 70 is "):
        run(load("convert", *words))


def test_the_card_has_what_was_measured_and_a_line_for_each_engine(tmp_path: Path) -> None:
    target = target_for("llama")
    bare = (exported(tmp_path / "bare", target, drafter_of(target, **EAGLE3)) / "README.md").read_text()
    assert "Nothing was measured of it." in bare and "mean_acceptance_length" not in bare
    assert '"method": "eagle3"' in bare and "--speculative-algorithm EAGLE3" in bare
    assert "format=vllm" not in bare and "format=speculators" in bare, "only what needs converting is to be converted"
    found = {"mean_acceptance_length": 2.125, "per_position_acceptance_rate": [0.5, None], "num_drafts": 80}
    about = {"acceptance": found, "provenance": {"step": 300, "decoded": "3 held-out prompts"}}
    drafter = drafter_of(target, **EAGLE3 | {"fc_bias": True})
    told = (exported(tmp_path / "told", target, drafter, **about) / "README.md").read_text()
    assert "Decoded on 3 held-out prompts, during training, after 300 optimiser steps, over 80 passes" in told
    assert "| 2.125 |" in told and "| 0.500 - |" in told
    for heads, says in ((5, False), (3, True)):
        drafter = drafter_of(target, name="medusa", heads=heads)
        told_ = (exported(tmp_path / f"{heads}", target, drafter) / "README.md").read_text()
        assert ("not that on GitHub, which makes 5 heads, some random" in told_) == says
    assert "draft_acceptance_rate |" not in told and "`format=vllm` cannot hold it: fc.bias" in told
    for page in (bare, told, told_):
        assert "```\n```" not in page, "an engine without a command has no block for one"
        assert "`FOLDER` is this folder, `TARGET` the folder or hub id of " in page
    at_home = card.card(drafter, {"target": {"name": "tiny", "path": None}, "dtype": "float32"})
    (code,) = re.findall(r'`TARGET` the folder that `python -c "(.*)"` prints\.$', at_home, re.MULTILINE)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{embedded.folder('tiny')}\n", "the target that comes along is where the card says"
    assert "vllm serve TARGET " in bare and "--model-path TARGET " in bare, "a mere name is no path to be served"


def test_the_hub_is_asked_for_files_and_for_nothing_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    class Api:
        def create_repo(self, repo: str, **how: Any) -> None:
            asked["create"] = (repo, how)

        def upload_folder(self, **how: Any) -> None:
            asked["upload"] = how

    def download(repo: str, **how: Any) -> str:
        asked["download"] = (repo, how)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    target = target_for("llama")
    export = exported(tmp_path / "export", target, drafter_of(target, **EAGLE3))
    (export / "modeling.py").write_text("raise SystemExit\n")
    files = ["README.md", "config.json", "drafter.json", "model.safetensors"]
    assert hub.push_to_hub(export, "me/it", dry_run=True) == files and not asked
    assert hub.push_to_hub(export, "me/it") == files
    assert (
        asked["create"] == ("me/it", {"private": True, "exist_ok": True}) and asked["upload"]["allow_patterns"] == files
    )
    assert hub.from_hub("me/it") == tmp_path and not any(
        ".py" in kind for kind in asked["download"][1]["allow_patterns"]
    )
    with pytest.raises(Refusal, match="holds no drafter"):
        hub.push_to_hub(tmp_path, "me/it", dry_run=True)
    monkeypatch.undo()
    with pytest.raises(Refusal, match="from=me/none-such: neither a folder nor to be had from the hub"):
        hub.found("me/none-such")  # the tests have no network
