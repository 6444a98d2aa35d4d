"""MTP: training sees what decoding sees in every stream, what waits is read in time, the output is the target's."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from chains import (
    END,
    SHAPES,
    TERMS,
    TREE,
    Lesson,
    Scripted,
    apart,
    assert_a_prefill,
    assert_accepted,
    assert_foretold,
    assert_learns_as_defined,
    assert_the_targets,
    assert_trained_so,
    learnt,
    listed,
    listed_states,
    packed,
    remembering,
    served,
    states_of,
    texts,
    trained,
)
from fakes import FAMILIES, slow_greedy, target_of
from pydantic import ValidationError
from runs import ROOT, checkpoint_of_target, config, digest, options, steps
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.batch import Batch
from paceline.decode import Decoder, DynamicShape, StaticShape, chain
from paceline.models import streams
from paceline.models.drafter import Borrowed, Drafter, Shape, build
from paceline.models.drafter import options as options_of
from paceline.models.export import load_export, save_export
from paceline.models.hydra_heads import Join
from paceline.models.layers import DecoderLayer, silence
from paceline.models.mtp import Mtp
from paceline.models.mtp_sequential import MtpModule
from paceline.models.target import DTYPES, Head, Target
from paceline.train import objective
from paceline.train.loop import fit
from paceline.train.step import TrainStep, unrolled

Rows = list[tuple[int, int]]  # (position, depth)


@dataclass(frozen=True)
class Kind:
    """A method with options, and which rows the row (t, k) looks at by design: the formula, not the code."""

    name: str
    options: dict[str, Any]
    seen: Callable[[int, int], Rows]


KINDS = {
    # at the same depth, all that is verified: no token is read
    "mtp": Kind("mtp", {"heads": 4}, lambda t, k: [(i, k) for i in range(t + 1)]),
    # a module a depth: rows whose token is verified too, and itself
    "modules": Kind(
        "mtp_sequential", {"modules": 4}, lambda t, k: [*((i, k) for i in range(t + 1 - k)), *([(t, k)] if k else [])]
    ),
    # one module: the rows of depth 0, and its own chain
    "fastmtp": Kind(
        "mtp_sequential",
        {"modules": 1, "unroll": 4, "hand_on": "normed", "position_offset": 1},
        lambda t, k: [*((i, 0) for i in range(t + 1)), *((t, d) for d in range(1, k + 1))],
    ),
    # two: at depth 0 all, then the rows of depth 1 that need only verified tokens, and its own chain
    "two": Kind(
        "mtp_sequential",
        {"modules": 2, "unroll": 4, "zero_first": True},
        lambda t, k: [(i, min(k, 1)) for i in range(t + 1 - min(k, 1))] + [(t, d) for d in range(1, k + 1)],
    ),
    "hydra": Kind("hydra_heads", {"heads": 4, "blocks": 2}, lambda t, k: []),
    "hydra++": Kind("hydra_heads", {"heads": 4, "prefix": True}, lambda t, k: [(i, k) for i in range(t + 1)]),
}
RUNS = {  # by name: the program and its options
    "mtp": ("mtp", ["method=mtp", "method.heads=2"]),
    "sequential": ("mtp", ["method=mtp_sequential", "method.modules=2"]),
    "hydra": ("medusa", ["method=hydra_heads", "method.heads=2", "method.prefix=true"]),
}
any_kind = pytest.mark.parametrize("kind", KINDS)


def drafter_of(kind: str, target: Target, vocab_map: Tensor | None = None, spread: float = 0.0, **more: Any) -> Drafter:
    """A drafter with noise of this size on every weight, so that none is 0 or 1."""
    draft_vocab = None if vocab_map is None else len(vocab_map)
    made = {"name": KINDS[kind].name, "draft_vocab": draft_vocab, "start": "head"} | KINDS[kind].options | more
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build(options_of(KINDS[kind].name)(**made).fitted(target), Shape.of(target), vocab_map)
        drafter.start(target)
        drafter.borrow(target)
        for parameter in drafter.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return drafter


# ---------------------------------------------------------------- what is trained is what is served


@any_kind
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])  # shared key heads; normed q and k; biases
def test_a_training_pass_is_one_row_at_a_time_as_decoding_runs_it(family: str, kind: str) -> None:
    target = target_of(family)
    drafter = drafter_of(kind, target, spread=0.15).eval()
    batch, documents = packed()
    hidden, _ = states_of(target, drafter, batch)
    seen = KINDS[kind].seen
    for (line, start), ours in trained(drafter, batch, hidden, documents).items():
        words = documents[line, start]
        here = hidden[line, start : start + len(words)]
        assert (0, 0) in ours and (len(words) - 2, 0) in ours
        assert apart(ours, listed(drafter, words, here, seen)) < 1e-4
        assert apart(ours, served(drafter, words, here)) < 1e-4
        if family != "llama" or len(words) < 13 or kind == "hydra":
            continue
        # these faults would be seen
        for depth in range(4) if kind != "hydra++" else [0]:
            for which in (0, -1):  # not the first row, not the last
                fault = lambda t, k: seen(t, k)[1:] if which == 0 else seen(t, k)[:-1]  # noqa: B023, E731
                faulty = lambda t, k: (k == depth and fault(t, k)) or seen(t, k)  # noqa: B023, E731
                assert apart(listed(drafter, words, here, faulty), ours) > 1e-3, (depth, which)


@any_kind
@pytest.mark.parametrize("shape", [chain(4), TREE, DynamicShape(22, 4, 3)], ids=["chain", "static", "dynamic"])
def test_every_node_of_every_round_is_what_training_makes_of_its_path(
    shape: StaticShape | DynamicShape, kind: str
) -> None:
    target, prompts = target_of("llama"), texts([9, 1, 4])  # a single token has no row but in the first stream
    drafter = drafter_of(kind, target, spread=0.1).eval()
    verifier = Scripted([[0, 1, 0], [3, 0, 2], [1, 2, 1], [2, 0, 3], [0, 0, 0], [0, 3, 1]])
    stream = Decoder(target, drafter, shape, verifier).stream(prompts, 40)
    for number in range(7):
        before = [prompt + said for prompt, said in zip(prompts, stream.generation.tokens, strict=True)]
        for _ in prompts:
            next(stream)
        if number:
            assert_trained_so(drafter, target, verifier.trees[-1], before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hydra"])  # which attends to nothing
@pytest.mark.parametrize("shape", [TREE, DynamicShape(22, 4, 3)], ids=["static", "dynamic"])
def test_what_is_kept_after_every_round_is_a_prefill_of_the_verified_text(
    shape: StaticShape | DynamicShape, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row that leaves takes nothing along."""
    target, prompts = Target(target_of("llama").model, vocab=END), texts([5, 1, 8])  # nobody else says END
    drafter = drafter_of(kind, target, spread=0.1).eval()
    made = remembering(drafter, monkeypatch)
    verifier = Scripted([[0, 1, 2], [3, 2, 0], [1, 0], [0, 3], [0, 0], [2, 1]], ends=2)
    stream = Decoder(target, drafter, shape, verifier).stream(prompts, 40, eos=[END])
    for number, rows in enumerate(([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 2])):
        before = [prompts[row] + stream.generation.tokens[row] for row in rows]
        assert [next(stream).row for _ in rows] == rows
        if number:  # a round reads what was verified before it; the prompts' pass is none
            assert_a_prefill(made[0], target, drafter, before, shape.depth)
    assert stream.generation.tokens[1][-1] == END and len(made) == 1


# ---------------------------------------------------------------- the output is the target's, and training foretells it


@cache
def lesson(kind: str) -> Lesson:
    target = target_of("llama")
    return learnt(target, drafter_of(kind, target))


@any_kind
def test_a_text_learnt_by_heart_is_accepted_when_it_is_decoded(kind: str) -> None:
    assert_accepted(lesson(kind))


@any_kind
def test_ranks_foretell_what_every_round_of_a_greedy_chain_accepts(kind: str) -> None:
    played = assert_foretold(lesson(kind), 4)
    assert len(played) >= 3 and {0, 4} <= played, played


@pytest.mark.parametrize("temperature", [0.0, 0.4], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@any_kind
def test_the_output_is_the_targets(kind: str, shape: StaticShape | DynamicShape, temperature: float) -> None:
    assert_the_targets(lesson(kind), shape, temperature)


@any_kind
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_can_be_drafted_for_from_random_weights(family: str, kind: str) -> None:
    target = target_of(family)
    drafter, (batch, _) = drafter_of(kind, target, start="random"), packed()
    TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
    prompts = texts([6, 3])
    generation = Decoder(target, drafter.eval(), TREE).generate(prompts, 6)
    assert generation.tokens == [slow_greedy(target, prompt, 6) for prompt in prompts]


# ---------------------------------------------------------------- where a drafter begins


BEGINNINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("mtp", {}),
    "mtp as a layer": ("mtp", {"start": "target", "taps": (2,)}),
    "sequential": ("modules", {}),
    "one module": ("fastmtp", {"hand_on": "raw"}),
    "hydra": ("hydra", {}),
    "hydra++": ("hydra++", {"output": "shared"}),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "granite", "phi3"])
@torch.no_grad()
def test_fresh_weights_say_what_the_target_says(family: str, beginning: str) -> None:
    kind, more = BEGINNINGS[beginning]
    if family == "granite" and "target" in more.values():
        pytest.skip("its multipliers are no part of a layer here")
    target, (batch, _) = target_of(family), packed()
    drafter, real = drafter_of(kind, target, **more), batch.document >= 0
    assert drafter.taps == more.get("taps", (-1,) if kind.startswith("hydra") else (3,))
    hidden, last = states_of(target, drafter, batch)
    for k, state in enumerate(unrolled(drafter, batch, hidden, 4)):
        torch.testing.assert_close(drafter.head(state, k)[real], target.head(last)[real], atol=1e-3, rtol=1e-3)


def test_what_a_method_cannot_be_is_refused_by_name() -> None:
    for name, wrong, says in (
        ("mtp_sequential", {"modules": 3, "unroll": 2}, r"method\.unroll: 2 .*nearest: method\.unroll=3"),
        ("mtp_sequential", {"taps": (0, 1)}, r"method\.taps: \[0, 1\]"),
        ("mtp", {"taps": (0, 1)}, r"method\.taps: \[0, 1\]"),
        ("mtp", {"heads": 3, "unroll": 2}, r"method\.unroll: 2 .*nearest: method\.heads=2"),
        ("hydra_heads", {"start": "target"}, r"method\.start: .*method\.prefix=false.*nearest: head"),
    ):
        with pytest.raises(ValidationError, match=says):
            options_of(name)(name=name, **wrong)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("rows", [streams.ROWS, 5])  # at once, or a few at a time
@pytest.mark.parametrize("drafted", [False, True])
@any_kind
def test_loss_and_every_gradient_are_those_of_a_naive_float64_pass(
    kind: str, drafted: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ROWS", rows)
    monkeypatch.setattr(streams, "LONG", rows)
    target = target_of("llama")
    ids = torch.arange(0, 64, 2) if drafted else None
    drafter = drafter_of(kind, target, ids, spread=0.15, objective=TERMS)
    assert_learns_as_defined(target, drafter, partial(listed_states, seen=KINDS[kind].seen))


def knows_the_text(name: str) -> tuple[Drafter, Callable[[Tensor], Tensor]]:
    """A drafter whose own weights know that n + 1 follows n, and what it must be handed as the state of a token."""
    size, one_hot = 16, lambda ids: F.one_hot(ids % 16, 16).float()
    layer = dict(heads=2, kv_heads=2, head_dim=8, intermediate=size, eps=1e-6, rope={"rope_theta": 1e4})
    made: dict[str, dict[str, Any]] = {
        "mtp": {"heads": 4, "layer": layer},
        "mtp_sequential": {"modules": 2, "unroll": 4, "layer": layer},
        "hydra_heads": {"heads": 4, "output": "shared"},
    }
    options = options_of(name)(name=name, taps=(-1,), objective={"ce": 1.0}, **made[name])
    drafter, follows = build(options, Shape(size, 1, size)), torch.eye(size).roll(1, 0)  # e(n) -> n + 1
    drafter.borrowed = Borrowed(one_hot, Head(100 * follows))
    for part in drafter.modules():
        if isinstance(part, DecoderLayer):
            silence(part)
        if isinstance(part, MtpModule):  # hears the embedding alone
            part.eh_proj.weight.data.copy_(torch.eye(size, 2 * size))
        if isinstance(part, Join):  # the last embedding
            nn.init.zeros_(part.linear.weight), nn.init.zeros_(part.linear.bias)
            part.res_connection.weight.data.copy_(torch.eye(size).repeat(1, part.linear.in_features // size))
            part.res_connection.weight.data[:, :-size] = 0
    if isinstance(drafter, Mtp):
        for k, part in enumerate(drafter.layers):  # e(n) -> e(n + 1 + k), much louder than what it is added to
            part.mlp.gate_proj.weight.data.copy_(torch.eye(size))
            part.mlp.up_proj.weight.data.copy_(torch.eye(size))
            part.mlp.down_proj.weight.data.copy_(100 * torch.eye(size).roll(1 + k, 0))
    return drafter, one_hot


@pytest.mark.parametrize("name", ["mtp", "mtp_sequential", "hydra_heads"])
def test_an_oracle_of_the_methods_own_weights_loses_nothing_at_any_depth(name: str) -> None:
    drafter, state = knows_the_text(name)
    text = torch.arange(10)[None]
    batch = Batch(text, text, torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    step = TrainStep(drafter)
    counts = step.counts(batch).learnt
    assert counts.tolist() == [8, 7, 6, 5]  # 10 - 2 - k
    sums = step(batch, state(text), state(text), None)  # type: ignore[arg-type]
    assert (sums.loss < 1e-4).all() and sums.right.tolist() == counts.tolist()
    # a text whose tokens are three apart, with the states of this one
    wrong = Batch(3 * text % 16, text, batch.document, batch.supervised)
    assert (step(wrong, state(text), state(text), None).loss / counts > 1).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("run", ["mtp", "sequential", "hydra"])
def test_each_head_is_averaged_over_its_own_labels(
    run: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objective.TERMS, "ce", lambda drafted, labels, *_: torch.ones(len(labels)))
    minimised: list[float] = []
    backward = Accelerator.backward

    def watching(self: Accelerator, loss: Tensor, **more: Any) -> None:
        minimised.append(loss.item())
        backward(self, loss, **more)

    monkeypatch.setattr(Accelerator, "backward", watching)
    program, more = RUNS[run]
    words = (
        "method.objective.kl=0",
        "method.objective.ce=1",
        "method.decay=0.5",
        "train.steps=2",
        "data.features=memory",
    )
    fit(config(tmp_path, target_folder, *more, *words, program=program))
    lines = steps(tmp_path / "run")
    assert all(line["loss"] == [1.0] * len(line["loss"]) for line in lines)
    assert minimised == pytest.approx([sum(0.5**k for k in range(len(lines[0]["loss"])))] * 2)


@any_kind
def test_training_leaves_the_targets_bytes_alone(kind: str) -> None:
    target, (batch, _) = target_of("llama", tie_word_embeddings=True), packed()
    before, drafter = digest(target), drafter_of(kind, target)
    mine = {parameter.data_ptr() for parameter in drafter.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in target.parameters()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(3):
        TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head).total.backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        optimizer.step()
    assert digest(target) == before
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())


# ---------------------------------------------------------------- exports and runs

EVEN = torch.arange(0, 64, 2)


@any_kind
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.no_grad()
def test_an_export_says_what_the_trained_drafter_said(kind: str, dtype: str, tmp_path: Path) -> None:
    target, (batch, _) = target_of("qwen3"), packed()
    drafter = drafter_of(kind, target, EVEN, spread=0.1).eval()
    about = {"name": "hf", "fingerprint": target.fingerprint}
    again, said = load_export(save_export(drafter, tmp_path / "export", dtype, about), target)
    ours = drafter.to(DTYPES[dtype])
    ours.borrow(target)
    hidden, _ = states_of(target, ours, batch)
    for k, (state, theirs) in enumerate(zip(*(unrolled(d, batch, hidden, 4) for d in (ours, again)), strict=True)):
        for one, other in ((state, theirs), (ours.head(state, k), again.head(theirs, k))):
            assert one.equal(other) or dtype == "bfloat16"  # which steps quicker, and rounds elsewhere
            assert (one - other).float().norm() <= 0.02 * one.float().norm()
    trained_ones = {name for name, _ in ours.named_parameters()} | {"token_map"}
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == trained_ones
    assert said["taps"] == list(ours.taps) and said["method"]["layer"] == ours.options.layer.model_dump()


RELOADED = """
import sys, torch
from paceline.models.export import load_export
from paceline.models.target import Target
from paceline.data.batch import Batch
from paceline.train.step import unrolled
target = Target.load(sys.argv[1], "float32", vocab=259)
drafter, _ = load_export(sys.argv[2], target)
ids = torch.arange(20)[None]
batch = Batch(ids, ids, torch.zeros_like(ids), ids >= 0)
with torch.no_grad():
    hidden, _ = target(ids, drafter.taps)
    states = unrolled(drafter, batch, hidden, drafter.unroll)
    torch.save([drafter.head(state, k) for k, state in enumerate(states)], sys.argv[3])
"""


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_was_launched_leaves_an_export_that_another_process_reads(
    run: str, target_folder: Path, tmp_path: Path
) -> None:
    program, more = RUNS[run]
    words = options(tmp_path, target_folder, *more, "method.draft_vocab=16", "decode.width=4", "data.features=memory")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [*launcher, str(ROOT / "train" / f"{program}.py"), *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    export = tmp_path / "run" / "export"
    said = []
    for number in range(2):
        file = tmp_path / f"{number}.pt"
        subprocess.run([sys.executable, "-c", RELOADED, target_folder, export, file], check=True, cwd=tmp_path)
        said.append(torch.load(file, weights_only=True))
    target = Target.load(str(target_folder), "float32", vocab=259)
    drafter, _ = load_export(export, target)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        hidden = target(ids, drafter.taps)[0]
    assert drafter.options.name == more[0].removeprefix("method=") and hidden.isfinite().all()
    assert len(said[0]) == drafter.unroll and all(a.equal(b) and a.isfinite().all() for a, b in zip(*said, strict=True))
