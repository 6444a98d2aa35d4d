"""What an export promises: the same logits in another process, nothing missing or extra, only for its own target."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from fakes import VOCAB, target_of
from safetensors.torch import load_file, save_file

from paceline.decode import Decoder, chain
from paceline.models.drafter import Drafter, Shape, build, options
from paceline.models.errors import Refusal
from paceline.models.export import describe, load_export, save_export
from paceline.models.target import Target

MAP = torch.arange(1, VOCAB, 3)
KINDS = {
    f"{output}, {'some ids' if ids is not None else 'all ids'}, {blocks} blocks": (output, ids, blocks)
    for output, ids, blocks in product(("own", "shared"), (None, MAP), (1, 2))
}
STATES = torch.randn(5, 32, generator=torch.Generator().manual_seed(7))


def medusa(
    target: Target, output: str = "own", ids: torch.Tensor | None = None, blocks: int = 1, seed: int = 0
) -> Drafter:
    """Heads as after some training: no weight is at its start."""
    vocab = None if ids is None else len(ids)
    opts = options("medusa")(name="medusa", heads=3, blocks=blocks, output=output, draft_vocab=vocab)
    drafter = build(opts, Shape.of(target), ids)
    drafter.start(target)
    drafter.borrow(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter.eval()


def saved(drafter: Drafter, target: Target, where: Path, dtype: str = "bfloat16", **about) -> Path:
    return save_export(drafter, where, dtype, {"name": "hf", "fingerprint": target.fingerprint}, **about)


@torch.no_grad()
def logits(drafter: Drafter) -> torch.Tensor:
    """[3, 5, D]"""
    feature = drafter.read(STATES[None])
    return torch.cat([drafter.head(drafter.step(feature, None, k, None)[1], k) for k in range(3)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama", tie_word_embeddings=True)


@pytest.fixture
def export(target: Target, tmp_path: Path) -> Path:
    return saved(medusa(target, ids=MAP), target, tmp_path / "export")


@pytest.fixture(scope="module")
def reloaded(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Logits of each kind of export, read back in a new process."""
    where = tmp_path_factory.mktemp("exports")
    target.model.save_pretrained(where / "target")
    for index, kind in enumerate(KINDS.values()):
        saved(medusa(target, *kind), target, where / str(index))
    torch.save(STATES, where / "states.pt")
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from paceline.models.export import load_export\n"
        "from paceline.models.target import Target\n"
        "where, many = Path(sys.argv[1]), int(sys.argv[2])\n"
        "target, states, out = Target.load(str(where / 'target'), 'float32'), torch.load(where / 'states.pt'), []\n"
        "for index in range(many):\n"
        "    drafter, _ = load_export(where / str(index), target)\n"
        "    feature = drafter.read(states[None])\n"
        "    out.append(torch.cat([drafter.head(drafter.step(feature, None, k, None)[1], k) for k in range(3)]))\n"
        "torch.save(out, where / 'logits.pt')\n"
    )
    command = [sys.executable, "-c", code, str(where), str(len(KINDS))]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(KINDS, torch.load(where / "logits.pt"), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_computes_the_same_bits(kind: str, target: Target, reloaded: dict[str, torch.Tensor]) -> None:
    drafter = medusa(target, *KINDS[kind]).bfloat16()
    drafter.borrow(target)
    ours = logits(drafter)
    assert ours.dtype == reloaded[kind].dtype and torch.equal(ours, reloaded[kind])
    assert ours.shape == (3, 5, VOCAB if KINDS[kind][1] is None else len(MAP))


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_trained_is_written(kind: str, target: Target, tmp_path: Path) -> None:
    output, ids, blocks = KINDS[kind]
    drafter = medusa(target, output, ids, blocks)
    tensors = load_file(saved(drafter, target, tmp_path / "export", "float32") / "model.safetensors")
    wanted = {f"blocks.{k}.layers.{i}.{part}" for k in range(3) for i in range(blocks) for part in ("weight", "bias")}
    wanted |= {f"lm_heads.{k}.weight" for k in range(3) if output == "own"} | (
        {"token_map"} if ids is not None else set()
    )
    assert set(tensors) == wanted
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in tensors.items())


def test_an_export_describes_itself(target: Target, tmp_path: Path) -> None:
    drafter = medusa(target, blocks=2)
    where = saved(drafter, target, tmp_path / "export", "float32", tree={"paths": [[0]]}, acceptance={"rounds": 1})
    about = describe(where)
    assert about["method"]["heads"] == 3 and about["method"]["blocks"] == 2 and about["taps"] == [-1]
    assert about["shape"] == {"hidden": 32, "layers": 3, "vocab": VOCAB}
    assert about["target"]["fingerprint"] == target.fingerprint
    assert about["tree"] == {"paths": [[0]]} and about["acceptance"] == {"rounds": 1}
    engine = json.loads((where / "config.json").read_text())
    assert engine["architectures"] == ["MedusaModel"] and (engine["num_heads"], engine["num_hidden_layers"]) == (3, 2)
    assert (engine["hidden_size"], engine["vocab_size"], engine["torch_dtype"]) == (32, VOCAB, "float32")
    assert len({file.stat().st_mode for file in where.iterdir()}) == 1, "who may read one may read all"


def test_a_reloaded_drafter_decodes_as_before_and_learns_nothing(target: Target, export: Path) -> None:
    drafter, _ = load_export(export, target, "float32")
    assert not drafter.training and not any(p.requires_grad for p in drafter.parameters())
    before = medusa(target, ids=MAP).bfloat16().float()
    prompts = [[1, 2, 3], [4, 5]]
    ours, theirs = (Decoder(target, d, chain(3)).generate(prompts, 16) for d in (before, drafter))
    assert ours.tokens == theirs.tokens and ours.reports == theirs.reports


# ---------------------------------------------------------------- refusals


def tensors_changed(export: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(export / "model.safetensors")
    change(tensors)
    save_file(tensors, export / "model.safetensors")


def about_changed(export: Path, change: Callable[[dict], object]) -> None:
    about = json.loads((export / "drafter.json").read_text())
    change(about)
    (export / "drafter.json").write_text(json.dumps(about))


def truncated(export: Path) -> None:
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda e: tensors_changed(e, lambda t: t.pop("blocks.1.layers.0.bias")),
        "tensor blocks.1.layers.0.bias is missing",
    ),
    "extra": (
        lambda e: tensors_changed(e, lambda t: t.update({"blocks.3.layers.0.bias": torch.zeros(32)})),
        "tensor blocks.3.layers.0.bias belongs to no part",
    ),
    "misshapen": (
        lambda e: tensors_changed(e, lambda t: t.update({"lm_heads.0.weight": torch.zeros(7, 32)})),
        "tensor lm_heads.0.weight has shape [7, 32], expected [21, 32]",
    ),
    "no map": (lambda e: tensors_changed(e, lambda t: t.pop("token_map")), "tensor token_map is missing"),
    "shorter map": (
        lambda e: tensors_changed(e, lambda t: t.update({"token_map": MAP[:-1].clone()})),
        "tensor token_map has shape [20], expected [21]",
    ),
    "map beyond the table": (
        lambda e: tensors_changed(e, lambda t: t.update({"token_map": MAP + 10})),
        "ascending list of distinct ids below 64",
    ),
    "map with an id twice": (
        lambda e: tensors_changed(e, lambda t: t.update({"token_map": MAP.clamp(max=50)})),
        "ascending list of distinct ids below 64",
    ),
    "map not asked for": (
        lambda e: about_changed(e, lambda a: a["method"].update(draft_vocab=None)),
        "tensor lm_heads.0.weight has shape [21, 32], expected [64, 32]",
    ),
    "truncated": (truncated, "model.safetensors cannot be read"),
    "no tensors": (lambda e: (e / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "no description": (lambda e: (e / "drafter.json").unlink(), "no export there (it has no drafter.json)"),
    "half a description": (lambda e: (e / "drafter.json").write_text('{"paceline": 1,'), "drafter.json cannot be read"),
    "not a description": (lambda e: (e / "drafter.json").write_text("[]"), "drafter.json cannot be read"),
    "no target": (lambda e: about_changed(e, lambda a: a.pop("target")), "drafter.json is damaged"),
    "no width": (lambda e: about_changed(e, lambda a: a["shape"].update(hidden=None)), "drafter.json is damaged"),
    "no such dtype": (lambda e: about_changed(e, lambda a: a.update(dtype="int3")), "drafter.json is damaged"),
    "another format": (lambda e: about_changed(e, lambda a: a.update(paceline=99)), "written in format 99"),
    "another method": (
        lambda e: about_changed(e, lambda a: a["method"].update(name="medussa")),
        "method 'medussa' is not known here; one of draft, eagle, ",
    ),
    "unknown option": (lambda e: about_changed(e, lambda a: a["method"].update(head=3)), "method.head: "),
    "more heads than the file": (
        lambda e: about_changed(e, lambda a: a["method"].update(heads=4)),
        "tensor blocks.3.layers.0.weight is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_export_is_refused_by_name(fault: str, target: Target, export: Path) -> None:
    damage, says = FAULTS[fault]
    damage(export)
    with pytest.raises(Refusal) as refusal:
        load_export(export, target)
    text = str(refusal.value)
    assert text.startswith(f"drafter={export}") and says in text and "\n" not in text


def test_heads_that_share_are_refused_a_map_they_did_not_ask_for(target: Target, tmp_path: Path) -> None:
    export = saved(medusa(target, "shared"), target, tmp_path / "export")
    tensors_changed(export, lambda tensors: tensors.update(token_map=MAP))
    with pytest.raises(Refusal, match="tensor token_map belongs to no part"):
        load_export(export, target)


def test_the_folder_above_an_export_is_met_with_the_way_down(target: Target, export: Path) -> None:
    with pytest.raises(Refusal, match=f"nearest: {export}"):
        load_export(export.parent, target)


def test_a_drafter_for_another_target_is_refused_with_both_fingerprints(target: Target, export: Path) -> None:
    other_layers = target_of("llama", tie_word_embeddings=True)
    with torch.no_grad():
        other_layers.model.get_submodule("model.layers.2.mlp.up_proj").weight.normal_()
    for other in (other_layers, target_of("qwen2"), target_of("llama", num_hidden_layers=2)):
        assert other.fingerprint != target.fingerprint
        with pytest.raises(Refusal) as refusal:
            load_export(export, other)
        text = str(refusal.value)
        assert target.fingerprint in text and other.fingerprint in text and "\n" not in text


def test_a_quantised_target_is_known_by_its_tables(target: Target, export: Path, monkeypatch) -> None:
    tables = target.fingerprint.split("-")[0]
    monkeypatch.setattr(Target, "fingerprint", f"{tables}-quantised")
    load_export(export, target)
    monkeypatch.setattr(Target, "fingerprint", "0123456789abcdef-quantised")
    with pytest.raises(Refusal, match="trained for a target with fingerprint"):
        load_export(export, target)


@pytest.mark.parametrize("vocab_map", [None, torch.arange(8), torch.arange(32)])
def test_a_draft_vocabulary_needs_a_map_of_its_size(vocab_map, target: Target) -> None:
    opts = options("medusa")(name="medusa", draft_vocab=16)
    with pytest.raises(Refusal, match=r"method\.draft_vocab=16 needs a map"):
        build(opts, Shape.of(target), vocab_map)
    with pytest.raises(Refusal, match=r"method\.draft_vocab=None needs a map"):
        build(options("medusa")(name="medusa"), Shape.of(target), torch.arange(8))


# ---------------------------------------------------------------- killed while writing


@pytest.mark.parametrize("there_before", [True, False])
def test_a_killed_writer_leaves_an_export_whole_or_none(target: Target, tmp_path: Path, there_before: bool) -> None:
    old, new, where = medusa(target), medusa(target, seed=1), tmp_path / "run" / "export"
    print_ = target.fingerprint
    whole = {
        tuple(logits(drafter.bfloat16()).flatten().tolist()): name for drafter, name in ((old, "old"), (new, "new"))
    }
    if there_before:
        saved(old, target, where)

    def write_and_die(at: int) -> int:
        """Save the new export in a child that kills itself before its `at`-th file operation; its exit status."""
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        left = at

        def watch(event: str, _) -> None:
            nonlocal left
            left -= event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlsym")
            if left == 0:
                signal.raise_signal(signal.SIGKILL)

        sys.addaudithook(watch)
        save_export(new, where, "bfloat16", {"fingerprint": print_})
        os._exit(0)

    found = []
    for at in range(1, 100):
        status = write_and_die(at)
        if where.exists():
            drafter, _ = load_export(where, target)
            found.append(whole[tuple(logits(drafter).flatten().tolist())])
        else:
            found.append("none")
        if status == 0:
            break
    before = "old" if there_before else "none"
    assert len(found) > 5 and found[0] == before and found[-1] == "new"
    assert set(found) == {before, "new"} and found == sorted(found, key=["none", "old", "new"].index)
    assert [path.name for path in where.parent.iterdir()] == ["export"], "what killed writers left is gone"
