"""A trunk that learns with its drafter: what moves and what does not, what travels, and whose words the decoder keeps.

The reference of the loss walks over documents and positions in float64, through transformers' model without packing.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import VOCAB, slow_greedy, target_of
from runs import ROOT, checkpoint_of_target, config, contents, corpus, digest, metrics, options, steps
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from paceline.conf.entry import load
from paceline.data.batch import pack
from paceline.data.conversations import Example
from paceline.decode import Decoder, StaticShape, chain, drift
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.export import load_export, load_trunk
from paceline.models.medusa import MedusaOptions
from paceline.models.packed import packable, unpack_weights
from paceline.models.target import Target
from paceline.models.trunk import Learnt
from paceline.train import loop, yardstick
from paceline.train.loop import fit
from paceline.train.trunk import Learners, TrainedTrunk, Trunk

LORA = ("trunk=lora", "trunk.rank=4", "trunk.lr=1.0", "trunk.after=0.0", "trunk.depth_weight=1.0")
FULL = ("trunk=full", "trunk.lr=0.2", "trunk.after=0.0", "trunk.depth_weight=1.0")
KINDS = {"frozen": (), "lora": LORA, "full": FULL}
TRAINED = ("lora", "full")
METHODS = {
    "medusa": ("medusa", ("method.output=shared",)),
    "eagle3": ("eagle", ("decode.tree=chain", "method.unroll=2")),
    "mtp": ("mtp", ("method.heads=2", "method.draft_vocab=32", "decode.width=4")),
}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@dataclass
class Run:
    """What a run held in memory, and where it left what it wrote."""

    folder: Path
    before: list[str] = field(default_factory=list)
    trunks: list[Trunk] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)
    optimised: list[set[Tensor]] = field(default_factory=list)
    served: list[Target] = field(default_factory=list)

    @property
    def trunk(self) -> Any:
        return self.trunks[0]

    @property
    def export(self) -> Path:
        return self.folder / "run" / "export"


def trained(folder: Path, target: Path, method: str, *more: str) -> Run:
    """A run of a few steps, watched."""
    program, own = METHODS[method]
    run = Run(folder)
    trunk_of, optimizer, as_exported = loop.trunk_of, loop._optimizer, yardstick.as_exported

    def trunk(cfg: Any, target: Target, drafter: Drafter, *rest: Any) -> Trunk:
        run.before.append(digest(target))
        run.drafters.append(drafter)
        run.trunks.append(trunk_of(cfg, target, drafter, *rest))
        return run.trunks[-1]

    def optimised(cfg: Any, groups: list[dict[str, Any]]) -> Any:
        run.optimised.append({parameter for group in groups for parameter in group["params"]})
        return optimizer(cfg, groups)

    def exported(drafter: Drafter, target: Target, dtype: str) -> Drafter:
        run.served.append(target)
        return as_exported(drafter, target, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "trunk_of", trunk)
        patch.setattr(loop, "_optimizer", optimised)
        patch.setattr(yardstick, "as_exported", exported)
        fit(config(folder, target, "method.draft_vocab=64", *own, *more, program=program))
    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[tuple[str, str], Run]:
    return {
        (kind, method): trained(tmp_path_factory.mktemp(f"{kind}-{method}"), target_folder, method, *KINDS[kind])
        for kind in KINDS
        for method in METHODS
    }


each_run = pytest.mark.parametrize("kind, method", [(kind, method) for kind in KINDS for method in METHODS])
each_trained = pytest.mark.parametrize("kind, method", [(kind, method) for kind in TRAINED for method in METHODS])


# ---------------------------------------------------------------- what moves


@each_run
def test_the_original_keeps_its_bytes_and_only_what_learns_is_optimised_and_saved(
    kind: str, method: str, runs: dict[tuple[str, str], Run], target_folder: Path
) -> None:
    run = runs[kind, method]
    (before,), (drafter,), (optimised,), trunk = run.before, run.drafters, run.optimised, run.trunk
    assert digest(trunk.original) == before == digest(Target.load(str(target_folder), "float32"))
    assert not any(parameter.requires_grad for parameter in trunk.original.parameters())

    theirs = dict(trunk.original.named_parameters())
    mine = {name: p for name, p in trunk.live.named_parameters() if p.requires_grad}
    if kind == "frozen":
        assert trunk.live is trunk.original and not mine
    elif kind == "lora":
        assert mine and all(".lora_" in name and p.dtype == torch.float32 for name, p in mine.items())
        assert sum(".lora_A." in name for name in mine) == 2 * 7  # every linear layer of two decoder layers
        held = {p.data_ptr() for name, p in trunk.live.named_parameters() if name not in mine}
        assert held == {p.data_ptr() for p in theirs.values()}, "its own weights are the original's, and no copies"
        assert all(p.any() for name, p in mine.items() if ".lora_B." in name), "they began as zeros"
    else:
        assert mine.keys() == theirs.keys()
        assert not any(p.equal(theirs[name]) for name, p in mine.items()), "all have moved"

    names = {f"drafter.{name}" if mine else name for name, p in drafter.named_parameters() if p.requires_grad}
    kept = {"drafter.token_map" if mine else "token_map"} & {
        f"drafter.{name}" if mine else name for name in drafter.state_dict()
    }
    kept |= {f"drafter.{name}" if mine else name for name in ("d2t", "t2d") if name in drafter.state_dict()}
    names |= {f"trunk.live.{name}" for name in mine}
    assert optimised == {*(p for p in drafter.parameters() if p.requires_grad), *mine.values()}
    place = run.folder / "run" / "checkpoints" / "step-000003"
    assert load_file(place / "drafter.safetensors").keys() == names | kept
    assert {key.split("|")[0] for key in load_file(place / "optimizer.safetensors")} == names
    exported = load_file(run.export / "model.safetensors")
    assert exported.keys() == drafter.state_dict().keys()
    assert (run.export / "trunk").exists() == bool(mine)


def test_a_trunk_waits_while_its_drafter_learns_and_then_follows_a_schedule_of_its_own(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[float], bool, dict[str, Tensor], dict[str, Tensor]]] = []
    update = loop._update

    def watched(
        cfg: Any, accelerator: Any, trained: Any, step: Any, trunk: Any, optimizer: Any, parts: Any, *rest: Any
    ) -> Any:
        news = update(cfg, accelerator, trained, step, trunk, optimizer, parts, *rest)
        ours, theirs = ({n: p.detach().clone() for n, p in m.named_parameters()} for m in (step.drafter, trunk.live))
        seen.append(([group["lr"] for group in optimizer.param_groups], trunk.moving, ours, theirs))
        return news

    monkeypatch.setattr(loop, "_update", watched)
    more = ("trunk.after=0.5", "train.steps=8", "train.schedule=linear", "train.lr=0.01", "train.warmup=0.0")
    fit(config(tmp_path, target_folder, *FULL, *more, "train.weight_decay=0.1"))
    assert [rates for rates, *_ in seen] == [
        [pytest.approx(0.01 * (8 - i) / 8), pytest.approx(0.2 * 0.01 * (8 - i) / 4 if i >= 4 else 0)] for i in range(8)
    ]
    assert [moving for _, moving, *_ in seen] == [False] * 4 + [True] * 4
    for number, (first, second) in enumerate(pairwise(seen), start=2):
        assert not any(first[2][name].equal(second[2][name]) for name in first[2])
        stands = [first[3][name].equal(second[3][name]) for name in first[3]]
        assert all(stands) if number <= 4 else not any(stands)
    lines = steps(tmp_path / "run")
    assert [line["trunk_distil"] is None for line in lines] == [True] * 4 + [False] * 4
    assert lines[4]["trunk_distil"] == pytest.approx(0, abs=1e-5) and lines[-1]["trunk_distil"] > 1e-4


def test_every_parameter_of_the_heads_has_the_heads_rate() -> None:
    target, heads = target_of("llama"), medusa(target_of("llama"))
    first, second = trunk_on(target, "lora").groups(heads)
    assert set(first["params"]) == set(heads.parameters()) and any(p.ndim == 1 for p in first["params"])
    assert (first["multiple"], second["multiple"]) == (1.0, 0.25)


# ---------------------------------------------------------------- the loss

SAYS: dict[str, Any] = {
    "lr": 0.25,
    "after": 0.0,
    "depth_weight": 0.3,
    "depth_ramp": 0.0,
    "next_weight": 0.7,
    "distil_weight": 1.3,
}


def trunk_on(target: Target, kind: str, **more: Any) -> TrainedTrunk:
    adapters = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "modules": None} if kind == "lora" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = TrainedTrunk(target, SimpleNamespace(kind=kind, **{**SAYS, **adapters, **more}))
    draw = torch.Generator().manual_seed(5)
    for parameter in trunk.trained().values():  # as after some training
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    return trunk


def medusa(target: Target, **more: Any) -> Drafter:
    drafter = build(MedusaOptions(name="medusa", **{"heads": 2, "output": "shared", **more}), Shape.of(target), None)
    draw = torch.Generator().manual_seed(6)
    for parameter in drafter.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    return drafter


def documents() -> list[Example]:
    draw = torch.Generator().manual_seed(1)
    return [
        Example(torch.randint(VOCAB, (n,), generator=draw), torch.rand(n, generator=draw) < 0.6) for n in (9, 14, 7)
    ]


def reference(trunk: TrainedTrunk, drafter: Any, examples: list[Example]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Sums and counts of `depth 0`, `depth 1`, `next` and `distil`, document by document, position by position."""
    sums = {name: torch.zeros((), dtype=torch.float64) for name in ("depth 0", "depth 1", "next", "distil")}
    counts = dict.fromkeys(sums, 0)
    for example in examples:
        ids = example.ids[None]
        live = trunk.live.model(ids, output_hidden_states=True, use_cache=False)
        with torch.no_grad():
            original = trunk.original.model(ids, use_cache=False).logits[0].log_softmax(-1)
        states, said = live.hidden_states[-1][0], live.logits[0].log_softmax(-1)
        matrix = trunk.live.model.get_output_embeddings().weight
        for t in range(len(example) - 1):
            if example.supervised[t + 1]:
                sums["next"] = sums["next"] - said[t, example.ids[t + 1]]
                sums["distil"] = sums["distil"] + (original[t].exp() * (original[t] - said[t])).sum()
                counts["next"] += 1
                counts["distil"] += 1
            for k, block in enumerate(drafter.blocks):
                if t + 2 + k < len(example) and example.supervised[t + 2 + k]:
                    state = states[t] + F.silu(block.layers[0](states[t]))
                    drafted = (matrix @ state).log_softmax(-1)
                    taught = said[t + 1 + k].detach()
                    sums[f"depth {k}"] = sums[f"depth {k}"] + (taught.exp() * (taught - drafted)).sum()
                    counts[f"depth {k}"] += 1
    return sums, counts


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", TRAINED)
def test_every_term_and_gradient_is_that_of_a_slow_float64_reference(kind: str, tied: bool) -> None:
    examples, weights = documents(), [0.3, 0.3 * 0.8, 0.7, 1.3]
    exact = trunk_on(target_of("llama", tie_word_embeddings=tied).double(), kind)
    exact.live.double()
    slow = medusa(exact.original).double()
    theirs, counts = reference(exact, slow, examples)
    sum(w * theirs[n] / counts[n] for w, n in zip(weights, theirs, strict=True)).backward()  # type: ignore[union-attr]

    target = target_of("llama", tie_word_embeddings=tied)
    trunk, drafter, batch = trunk_on(target, kind), medusa(target), pack(examples, 16)
    for chunk in (4, 512):
        step = trunk.step(drafter, chunk, VOCAB)
        step.zero_grad()
        trunk.turn(1, 1)
        assert trunk.weights([1.0, 0.8]) == pytest.approx(weights) and trunk.terms == ("next", "distil")
        found = step.counts(batch)
        assert found.learnt.tolist() == list(counts.values()) and len(found.asked) == 2
        sums = step(batch, torch.tensor(weights) / found.learnt)
        sums.total.backward()
        torch.testing.assert_close(sums.loss.double(), torch.stack(list(theirs.values())), rtol=1e-5, atol=0.0)
        ours = dict(Learners(drafter, trunk).named_parameters())
        for name, parameter in Learners(slow, exact).named_parameters():
            if not parameter.requires_grad:
                assert ours[name].grad is None
                continue
            (mine, other) = (ours[name].grad, parameter.grad)
            assert mine is not None and other is not None and other.any(), name
            assert (mine.double() - other).norm() < 1e-4 * other.norm(), (name, chunk)


def test_the_weight_of_the_depths_rises_as_a_sine_once_the_trunk_moves() -> None:
    trunk = trunk_on(target_of("llama"), "lora", after=0.2, depth_ramp=0.5)
    found = []
    for number in range(1, 11):
        trunk.turn(number, 10)
        found.append(trunk.weights([1.0])[0] / 0.3)
    rise = [torch.tensor(torch.pi / 2 * i / 4).sin().item() for i in (1, 2, 3, 4)]
    assert found == pytest.approx([1, 1, *rise, 1, 1, 1, 1])


def test_a_trunk_that_waits_gives_zero_gradients_and_the_originals_states() -> None:
    target = target_of("llama")
    for kind in TRAINED:
        trunk, drafter = TrainedTrunk(target, trunk_on(target, kind, after=0.5).options), medusa(target)
        step, batch = trunk.step(drafter, 512, VOCAB), pack(documents(), 16)
        trunk.turn(1, 2)
        counts, sums = step.counts(batch), step(batch)
        assert counts.learnt[2:].tolist() == [0, 0] and sums.loss[2:].tolist() == [0.0, 0.0]
        sums.total.backward()
        assert all(p.grad is not None and not p.grad.any() for p in trunk.trained().values())
        assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
        hidden, _ = target(batch.ids, (-1,), documents=batch.document, positions=batch.positions)
        torch.testing.assert_close(trunk(batch, (-1,), VOCAB, 512, torch.ones(2))[0], hidden)


def test_a_batch_with_nothing_supervised_moves_nothing() -> None:
    target = target_of("llama")
    trunk, drafter = trunk_on(target, "full"), medusa(target)
    sums = trunk.step(drafter, 512, VOCAB)(pack([]))
    assert sums.loss.tolist() == [0.0] * 4
    sums.total.backward()
    assert all(
        p.grad is not None and not p.grad.any() for p in Learners(drafter, trunk).parameters() if p.requires_grad
    )


# ---------------------------------------------------------------- what travels

RELOADED = """
import sys, torch
from pathlib import Path
from paceline.models.export import load_export, load_trunk
from paceline.models.target import Target
target = Target.load(sys.argv[1], sys.argv[3], "cpu", 259)
trunk = load_trunk(sys.argv[2], target)
drafter, _ = load_export(sys.argv[2], trunk)
ids = torch.arange(40, 60)[None]
with torch.no_grad():
    hidden, last = trunk(ids, drafter.taps)
    torch.save([trunk.head(last), drafter.read(hidden), target.head(target(ids)[1])], sys.argv[4])
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TRAINED)
def test_a_new_process_verifies_with_the_trunk_that_was_trained(
    kind: str, dtype: str, target_folder: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path, target_folder, "mtp", *KINDS[kind], f"dtype={dtype}", f"export.dtype={dtype}")
    command = [sys.executable, "-c", RELOADED, target_folder, run.export, dtype, tmp_path / "said.pt"]
    subprocess.run(command, check=True, timeout=300, cwd="/")
    theirs = torch.load(tmp_path / "said.pt")
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        served = run.trunk.as_exported(dtype)
        hidden, last = served(ids, run.drafters[0].taps)
        assert served.head(last).equal(theirs[0]) and not theirs[0].equal(theirs[2])
        # the trainer's yardstick decoded with just that trunk
        assert run.served[-1].head(run.served[-1](ids)[1]).equal(theirs[0])
        drafter = yardstick.as_exported(run.drafters[0], served, dtype)
        assert drafter.read(hidden).equal(theirs[1])


@each_trained
def test_greedy_output_is_the_trained_trunks_own(
    kind: str, method: str, runs: dict[tuple[str, str], Run], target_folder: Path
) -> None:
    run = runs[kind, method]
    original = Target.load(str(target_folder), "float32", vocab=259)
    trunk = load_trunk(run.export, original)
    drafter, _ = load_export(run.export, trunk)
    tree = StaticShape(((0,), (1,), (0, 0), (1, 0), (1, 1)))
    prompts = [list(range(40, 60)), list(range(70, 75)), list(range(90, 121))]
    alone = [slow_greedy(trunk, prompt, 24) for prompt in prompts]
    # the oracle is the model that was trained, adapters beside its weights
    assert alone == [slow_greedy(run.trunk.live.eval(), prompt, 24) for prompt in prompts]
    assert alone != [slow_greedy(original, prompt, 24) for prompt in prompts], "it says what it always said"
    for shape in (chain(2), tree):
        decoder = Decoder(trunk, drafter, shape)
        assert decoder.generate(prompts, 24).tokens == alone
        assert [decoder.generate([prompt], 24).tokens[0] for prompt in prompts] == alone


def test_the_folder_of_a_trunk_is_what_peft_and_transformers_read(
    runs: dict[tuple[str, str], Run], target_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    ids = torch.arange(40, 60)[None]
    original = Target.load(str(target_folder), "float32")
    for kind in TRAINED:
        run = runs[kind, "medusa"]
        trunk = load_trunk(run.export, original)
        ours = trunk.head(trunk(ids)[1])
        if kind == "lora":
            base = Target.load(str(target_folder), "float32").model
            theirs = PeftModel.from_pretrained(base, run.export / "trunk")(ids, use_cache=False).logits
        else:
            cfg = config(tmp_path, run.export / "trunk", f"data.path={target_folder}/data.jsonl", "train.steps=1")
            fit(cfg)  # with its tokenizer: a target like any other
            other = Target.load(str(run.export / "trunk"), "float32")
            theirs = other.head(other(ids)[1])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_drafter_is_refused_a_trunk_that_is_not_its_own(
    runs: dict[tuple[str, str], Run], target_folder: Path, tmp_path: Path
) -> None:
    lora, full = (runs[kind, "medusa"].export for kind in TRAINED)
    original = Target.load(str(target_folder), "float32")
    with pytest.raises(Refusal, match="trained together with its target"):
        load_export(lora, original)
    with pytest.raises(Refusal, match="trained together with its target"):
        load_export(lora, load_trunk(full, original))
    with pytest.raises(Refusal, match="was trained for a target with fingerprint"):
        load_trunk(lora, target_of("llama"))
    assert load_trunk(runs["frozen", "medusa"].export, original) is original
    with pytest.raises(Refusal, match="its target was trained with it"):
        load("medusa", f"method.init_from={lora}", "method.output=shared")

    damaged = Path(shutil.copytree(lora, tmp_path / "damaged"))
    file = damaged / "trunk" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    with pytest.raises(Refusal, match="its trunk is damaged or another's"):
        load_trunk(damaged, original)
    about = json.loads((damaged / "drafter.json").read_text())
    about["trunk"]["kind"] = "half"
    (damaged / "drafter.json").write_text(json.dumps(about))
    with pytest.raises(Refusal, match=r"drafter\.json is damaged"):
        load_trunk(damaged, original)


@pytest.mark.skipif(not packable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="nothing is packed on this machine")
def test_a_served_trunk_computes_with_its_own_weights_and_the_original_with_its(target_folder: Path) -> None:
    original = Target.load(str(target_folder), "bfloat16")
    ids = torch.arange(40, 60)[None]
    before = original.head(original(ids)[1])
    for kind in TRAINED:
        trunk = trunk_on(original, kind)
        served = trunk.as_exported("bfloat16")
        assert sum("forward" in vars(part) for part in served.model.modules()) == 1 + 2 + 1  # trunk, layers, head
        said = served.head(served(ids)[1])
        unpack_weights(served.model)
        plain = served.head(served(ids)[1])
        assert (said.float() - plain.float()).abs().max() < 0.05 * plain.abs().max()
        assert not said.equal(before) and original.head(original(ids)[1]).equal(before)
        with torch.no_grad():
            live = trunk.live.head(trunk.live(ids)[1].to(served.dtype if kind == "lora" else torch.float32))
        assert (said.float() - live.float()).abs().max() < 0.1 * live.abs().max()
        if kind == "lora":
            assert not live.equal(before)
        assert not any("forward" in vars(part) for part in trunk.live.model.modules()), "nothing of it is packed"


def test_an_adapter_is_merged_in_float32_and_costs_nothing() -> None:
    target = target_of("llama").bfloat16()
    trunk = trunk_on(target, "lora")
    learnt = trunk.learnt("bfloat16")
    assert isinstance(learnt, Learnt) and all(t.dtype == torch.float32 for t in learnt.tensors.values())
    served = trunk.as_exported("bfloat16")
    path = "model.layers.1.mlp.down_proj"
    a, b = (learnt.tensors[f"{path}.lora_{x}.weight"] for x in "AB")
    weight = target.model.get_submodule(path).weight
    merged = (weight.double() + 6.0 / 3 * b.double() @ a.double()).to(torch.bfloat16)
    assert served.model.get_submodule(path).weight.equal(merged)
    assert [type(m) for m in served.model.modules()] == [type(m) for m in target.model.modules()]
    assert served.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


# ---------------------------------------------------------------- how far it moved


def test_drift_is_the_mean_divergence_and_agreement_over_the_answers() -> None:
    original = target_of("llama")
    trunk = trunk_on(original, "full").as_exported("float32")
    texts = [([3, 4, 5], [6, 7]), ([9], [1, 2, 3, 4]), ([8, 8], [])]
    kls, agree = [], 0
    for prompt, answer in texts:
        for place in range(len(answer)):
            said = torch.tensor([prompt + answer[:place]])
            p, q = (t.model(said, use_cache=False).logits[0, -1].double().log_softmax(-1) for t in (original, trunk))
            kls.append(float((p.exp() * (p - q)).sum()))
            agree += int(p.argmax() == q.argmax())
    found = drift(original, trunk, texts).as_dict()
    assert found == {"mean_kl": pytest.approx(sum(kls) / 6, rel=1e-4), "greedy_agreement_rate": agree / 6, "tokens": 6}
    assert found["mean_kl"] > 0.01 and 0 < agree < 6
    same = drift(original, original, texts).as_dict()
    assert same == {"mean_kl": pytest.approx(0, abs=1e-6), "greedy_agreement_rate": 1.0, "tokens": 6}
    assert drift(original, trunk, []).as_dict() == {"mean_kl": None, "greedy_agreement_rate": None, "tokens": 0}


def test_an_evaluation_compares_with_the_trained_trunk_and_says_how_far_it_moved(
    runs: dict[tuple[str, str], Run], tmp_path: Path
) -> None:
    from paceline.scripts import evaluate

    for kind in KINDS:
        run = runs[kind, "medusa"]
        words = ["eval.limit=2", "eval.max_new_tokens=12", "dtype=float32", "hf_baseline=false", f"out={tmp_path}"]
        evaluate.run(load("evaluate", f"drafter={run.export}", *words))
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["target"]["trunk"] == kind and report["exactness"]["identical"] == 2
        about = json.loads((run.export / "drafter.json").read_text())
        if kind == "frozen":
            assert report["drift"] is None and "trunk" not in about and about["drift"] is None
        else:
            assert report["drift"]["mean_kl"] > 0 and report["drift"]["tokens"] == 24
            assert report["target"]["fingerprint"] == about["trunk"]["fingerprint"]
            assert about["drift"]["mean_kl"] > 0 and about["drift"] == {
                name.removeprefix("trunk_"): value
                for name, value in metrics(run.folder / "run")[-1].items()
                if name.removeprefix("trunk_") in about["drift"]
            }


# ---------------------------------------------------------------- several processes, and a run that broke off

SIX = ("train.steps=6", "train.save_every=3", "train.keep=9", "eval.every=3")


@pytest.mark.parametrize("kind", TRAINED)
def test_a_run_that_broke_off_ends_as_if_it_had_not(
    kind: str, tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*KINDS[kind], *SIX, "trunk.after=0.3", *(["trunk.dropout=0.2"] if kind == "lora" else [])]
    fit(config(tmp_path, target_folder, *words, f"out={tmp_path}/whole"))
    update, calls = loop._update, 0

    def dying(*args: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return update(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_update", dying)
        fit(config(tmp_path, target_folder, *words))
    fit(config(tmp_path, target_folder, *words, "resume=true"))
    whole, again = tmp_path / "whole", tmp_path / "run"
    assert contents(again / "checkpoints" / "step-000006") == contents(whole / "checkpoints" / "step-000006")
    assert contents(again / "export") == contents(whole / "export") and metrics(again) == metrics(whole)


def test_a_run_of_before_there_was_a_choice_goes_on(tmp_path: Path, target_folder: Path) -> None:
    fit(config(tmp_path, target_folder, *SIX))
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text()
    assert "trunk:\n  kind: frozen\n" in text
    file.write_text(text.replace("trunk:\n  kind: frozen\n", ""))
    fit(config(tmp_path, target_folder, *SIX, "resume=true"))
    with pytest.raises(Refusal, match=r"trunk.kind=lora \(it was frozen\): start afresh"):
        fit(config(tmp_path, target_folder, *SIX, "resume=true", "trunk=lora"))


TWO = ("train.steps=4", "train.save_every=1", "train.keep=9", "train.clip=1e9", "data.held_out=0.0", "eval.every=0")


def checkpoint(run: Path, step: int, file: str) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / f"{file}.safetensors")


@pytest.mark.parametrize("kind", TRAINED)
def test_two_processes_have_the_gradients_of_one(kind: str, tmp_path: Path, target_folder: Path) -> None:
    corpus(tmp_path / "data.jsonl", 7, seed=1)
    words = [*KINDS[kind], *TWO, "trunk.after=0.25", f"data.path={tmp_path}/data.jsonl", "train.batch_tokens=160"]
    fit(config(tmp_path, target_folder, *words, f"out={tmp_path}/one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "train/medusa.py")]
    more = options(tmp_path, target_folder, *words, "train.accumulate=2", f"out={tmp_path}/two")
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for step in (2, 3):  # in the first the trunk waits
        ours, theirs = (checkpoint(tmp_path / name, step, "optimizer") for name in ("two", "one"))
        moments = [key for key in theirs if key.endswith("|exp_avg") and theirs[key].any()]
        assert any("trunk." in key for key in moments) and any("drafter." in key for key in moments)
        assert max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in moments) < 1e-4
    ours, theirs = (checkpoint(tmp_path / name, 4, "drafter") for name in ("two", "one"))
    floats = [name for name in theirs if theirs[name].is_floating_point()]
    assert max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in floats) < 1e-3


# ---------------------------------------------------------------- options


def test_medusa2_and_pretraining_choose_their_trunk_and_a_word_changes_it() -> None:
    medusa2 = load("medusa", "method=medusa2")
    assert medusa2.method == load("medusa").method and load("medusa").trunk.kind == "frozen"
    assert (medusa2.trunk.kind, medusa2.trunk.lr, medusa2.trunk.after) == ("lora", 0.25, 0.2)
    assert load("medusa", "method=medusa2", "trunk=full").trunk.kind == "full"
    scratch = load("mtp", "target=tiny_pretrain").trunk
    assert (scratch.kind, scratch.next_weight, scratch.distil_weight) == ("full", 1.0, 0.0)


def refusals() -> Iterator[tuple[list[str], str]]:
    yield ["trunk=lora", "data.features=memory"], r"data.features: memory .*trunk=lora.*nearest: online"
    yield ["trunk=full", "train.compile=auto"], r"train.compile: auto is for a frozen trunk.*nearest: false"
    yield ["trunk=full", "target.quantize=4bit"], r"target.quantize: 4bit .*nearest: none"
    yield ["trunk=full", "trunk.distil_weight=0"], r"trunk.next_weight, trunk.distil_weight: .*nearest"
    yield ["trunk=lora", "trunk.modules=[]"], r"trunk.modules: \[\]"
    yield ["trunk=lora", "trunk.rank=0"], r"trunk.rank: 0"
    yield ["trunk=lora", "trunk.lr=-1"], r"trunk.lr: -1"
    yield ["trunk=lora", "trunk.after=1"], r"trunk.after: 1"
    yield ["trunk=lora", "trunk.ranks=2"], r"trunk.ranks: no such option; nearest: trunk.rank"
    yield ["trunk=frozen", "+trunk.rank=2"], r"trunk.rank: no such option"
    yield ["trunk=loar"], r"trunk: no such choice 'loar'; nearest: lora"
    yield ["trunk.kind=half"], r"trunk.kind: no such kind 'half'"
    yield ["target=tiny_pretrain", "trunk=frozen"], r"trunk: frozen, but target=tiny_pretrain.*nearest: pretrain"


@pytest.mark.parametrize("words, says", list(refusals()), ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_a_trunk_cannot_be_is_refused_before_a_model_loads(words: list[str], says: str) -> None:
    with pytest.raises(Refusal, match=says) as refusal:
        load("medusa", *words)
    assert "\n" not in str(refusal.value)


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, target_folder: Path) -> None:
    with pytest.raises(Refusal, match=r"trunk.modules: no linear layer .* is called qproj; of .*'q_proj'"):
        fit(config(tmp_path, target_folder, "trunk=lora", "trunk.modules=[qproj]"))
    live = target_of("llama").adapted(2, 2.0, 0.0, ["q_proj", "v_proj"])
    assert len(live.changed()) == 3 * 2 * 2
