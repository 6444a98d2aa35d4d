"""Draft steps with compiled kernels between their products: the same steps, whatever attends, as the layers' own."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_packed import compiled, half_target
from torch import Tensor

from paceline.decode import Decoder, DraftTree, DynamicShape, StaticShape, chain, grow
from paceline.models import quick
from paceline.models.drafter import Context, Drafter, Shape, build, options, target_ids
from paceline.models.errors import Refusal
from paceline.models.hybrid import Hybrid
from paceline.models.kernels import MOST, kernels, topmost
from paceline.models.layers import Attention, GatedMLP, RMSNorm, Rotary
from paceline.models.packed import pack_weights
from paceline.models.quick import QuickAttention, QuickLayer, quicken
from paceline.models.target import Target

ATTENDING: dict[str, dict[str, Any]] = {
    "eagle3": {"name": "eagle", "taps": (0, 1, -1)},
    "eagle3, some ids": {"name": "eagle", "taps": (0, 1, -1), "draft_vocab": 40},
    "eagle1": {"name": "eagle", "join": "fc", "output": "shared"},
    "mtp": {"name": "mtp", "heads": 3},
    "mtp, one module": {"name": "mtp_sequential"},
    "mtp, three modules": {"name": "mtp_sequential", "modules": 3},
    "hydra++": {"name": "hydra_heads", "heads": 3, "prefix": True},
}


def pair(target: Target, **asked: Any) -> tuple[Drafter, Drafter]:
    """The same random drafter twice, packed, the second with its steps compiled."""
    opts = options(asked["name"]).model_validate(asked).fitted(target)
    torch.manual_seed(0)
    drafter = build(opts, Shape.of(target), None if opts.draft_vocab is None else torch.arange(opts.draft_vocab))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    drafter.bfloat16().eval().requires_grad_(False)
    both = drafter, copy.deepcopy(drafter)
    for one in both:
        one.borrow(target)
        pack_weights(one)
    quicken(both[1])
    return both


def stepped(drafter: Drafter, target: Target) -> list[Tensor]:
    """Rows of two texts of different lengths, two levels of a tree behind them, more text, and one row alone."""
    generator = torch.Generator().manual_seed(1)
    memory, out = drafter.memory(2, 40), []
    written, count = torch.zeros(2, dtype=torch.long), torch.tensor([7, 4])
    for rows in (7, 3):
        words = torch.randint(target.vocab, (len(count), rows), generator=generator)
        hidden = torch.randn(len(count), rows, len(drafter.taps) * target.hidden, generator=generator).bfloat16()
        ctx = Context(written[:, None] + torch.arange(rows), count, memory)
        feature, state = drafter.step(drafter.read(hidden), words, 0, ctx)
        batch, last = torch.arange(len(count)), count - 1
        out += [part[batch, last] for part in (feature, state)]
        if drafter.stream(1) == drafter.stream(0):
            feature, position = feature[batch, last][:, None], (written + count)[:, None]
            for depth, parents in ((1, [0, 0, 0]), (2, [2, 0])):
                parent = torch.tensor(parents).expand(len(count), -1)
                words = torch.randint(target.vocab, parent.shape, generator=generator)
                feature = feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))
                at = Context((position + depth - 1).expand_as(parent), count * 0 + len(parents), memory, parent)
                feature, state = drafter.step(feature, words, depth, at)
                out += [feature, state]
        memory = memory.select([len(count) - 1])
        written, count = (written + count)[1:], torch.tensor([2])
    return out


@compiled
@pytest.mark.parametrize("asked", ATTENDING.values(), ids=ATTENDING)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["by parts", "whole layers"])
@torch.no_grad()
def test_a_compiled_step_is_the_layers_own(
    asked: dict, qk_norm: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = kernels()
    assert functions is not None
    if whole and not functions.tiled:
        pytest.skip("this machine has no tiles")
    monkeypatch.setattr(functions, "tiled", whole)
    target = half_target("qwen3" if qk_norm else "llama", head_dim=32)
    slow, fast = pair(target, **asked)
    calls: list[type] = []
    for part, name in ((QuickAttention, "__call__"), (QuickLayer, "__call__"), (Attention, "forward")):
        look = getattr(part, name)
        noted = lambda *given, look=look, part=part: (calls.append(part), look(*given))[1]  # noqa: E731
        monkeypatch.setattr(part, name, noted)
    ours = stepped(fast, target)
    assert set(calls) == {QuickLayer if whole else QuickAttention}, "by kernels alone"
    calls.clear()
    theirs = stepped(slow, target)
    assert set(calls) == {Attention}
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).float().norm() < 0.03 * other.float().norm()


@compiled
@pytest.mark.parametrize("asked", ATTENDING.values(), ids=ATTENDING)
@pytest.mark.parametrize("slices", [1024, 3])
@pytest.mark.parametrize("size", [16, 32], ids=["heads beside tiles", "heads in tiles"])
@torch.no_grad()
def test_what_is_decoded_is_the_targets(asked: dict, slices: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.target.SLICE", slices)
    monkeypatch.setattr("paceline.decode.tree.SLICE", slices)
    target = half_target("llama", head_dim=size)
    target.exact()
    prompts = [[5, 9, 2, 40, 9], [3], [7, 7, 8, 1, 30, 22, 9]]
    plain = Decoder(target).generate(prompts, 24).tokens
    shape = StaticShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    for drafter in pair(target, **asked):
        for one in (shape, DynamicShape(9, 3, 3)):
            assert Decoder(target, drafter, one).generate(prompts, 24).tokens == plain


@compiled
@torch.no_grad()
def test_layers_go_on_by_themselves_where_kernels_cannot() -> None:
    """Another dtype, or weights that still learn."""
    target = half_target("llama")
    slow, fast = pair(target, **ATTENDING["eagle3"])
    norm = fast.midlayer.hidden_norm  # type: ignore[union-attr]
    x = torch.randn(1, 3, target.hidden)
    assert norm(x).dtype == torch.float32 and torch.equal(norm(x), type(norm).forward(norm, x))  # type: ignore[operator, arg-type]
    learning = slow.requires_grad_(True)
    quicken(learning)
    assert not any("forward" in vars(part) for part in learning.modules() if isinstance(part, RMSNorm))


@compiled
@torch.no_grad()
def test_a_copy_of_a_drafter_computes_with_weights_of_its_own() -> None:
    target = half_target("llama")
    drafter = pair(target, **ATTENDING["eagle3"])[1]
    copied = copy.deepcopy(drafter)
    drafter.norm.weight.zero_()  # type: ignore[operator, union-attr]
    x = torch.randn(1, 2, target.hidden).bfloat16()
    assert not drafter.norm(x).any() and copied.norm(x).any()  # type: ignore[operator]
    before = stepped(copied, target)
    for parameter in drafter.parameters():
        parameter.zero_()
    assert all(torch.equal(one, other) for one, other in zip(stepped(copied, target), before, strict=True))


ONE_LAYER = ["eagle3", "eagle3, some ids", "eagle1", "mtp, one module"]


@compiled
@pytest.mark.parametrize("asked", ONE_LAYER)
@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_a_static_tree_in_one_call_is_that_of_its_steps(
    asked: str, qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: of texts of different lengths, of which one leaves, round after round."""
    if not getattr(kernels(), "tiled", False):
        pytest.skip("this machine has no tiles")
    target = half_target("qwen3" if qk_norm else "llama", head_dim=32)
    by_steps, at_once = pair(target, **ATTENDING[asked])[1], pair(target, **ATTENDING[asked])[1]
    monkeypatch.setattr(by_steps, "unfold", lambda *_: None)
    calls: list[Any] = []
    monkeypatch.setattr(at_once, "unfold", noting(calls, at_once.unfold))
    # deep and narrow, wide; a rank that a draft vocabulary of 40 has not; a parent that is asked for twice
    paths = ((0,), (1,), (41,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 3), (0, 0, 1, 0), (1, 0, 3, 0))
    for shape in (StaticShape(paths), chain(3), StaticShape(((0,), (1,)))):
        trees = [list(rounds_of(drafter, target, shape)) for drafter in (by_steps, at_once)]
        for slow, fast in zip(*trees, strict=True):
            for part in ("tokens", "parents", "size", "logp", "ancestors"):
                assert torch.equal(getattr(slow, part), getattr(fast, part)), part
            assert len(slow.tokens[0]) > 2
    assert len(calls) == 9 and all(tree is not None for tree in calls)


@compiled
@pytest.mark.parametrize("asked", ONE_LAYER)
@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.012, 0.0), (0.004, 0.2)], ids=["free", "nodes cost", "depths cost"])
@torch.no_grad()
def test_a_dynamic_tree_in_one_call_is_that_of_its_steps(
    asked: str, costs: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not getattr(kernels(), "tiled", False):
        pytest.skip("this machine has no tiles")
    target = half_target("llama", head_dim=32)
    by_steps, at_once = pair(target, **ATTENDING[asked])[1], pair(target, **ATTENDING[asked])[1]
    monkeypatch.setattr(by_steps, "unfold_dynamic", lambda *_: None)
    calls: list[Any] = []
    monkeypatch.setattr(at_once, "unfold_dynamic", noting(calls, at_once.unfold_dynamic))
    sizes = set()
    for nodes, depth, width in ((9, 3, 3), (30, 4, 6), (64, 2, 45), (6, 1, 8), (100, 3, 4)):
        shape = DynamicShape(nodes, depth, width, *costs)
        trees = [list(rounds_of(drafter, target, shape)) for drafter in (by_steps, at_once)]
        for slow, fast in zip(*trees, strict=True):
            for part in ("tokens", "parents", "size", "logp"):
                assert torch.equal(getattr(slow, part), getattr(fast, part)), part
            sizes.add(tuple(fast.size.tolist()))
    assert len(calls) == 15 and all(tree is not None for tree in calls)
    assert max(map(max, sizes)) > 9 and (not any(costs) or any(len(set(both)) > 1 for both in sizes)), "trees differ"


@compiled
@pytest.mark.parametrize("shape", [chain(3), DynamicShape(9, 3, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("asked", ["eagle3", "eagle3, some ids"])
@torch.no_grad()
def test_a_lookup_that_finds_nothing_leaves_the_drafter_its_one_call(
    asked: str, shape: StaticShape | DynamicShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the trees are those of its steps, whatever is found."""
    if not getattr(kernels(), "tiled", False):
        pytest.skip("this machine has no tiles")
    target, found = half_target("llama", head_dim=32), []
    for shortest in (1, 3):  # random words: one has occurred before sooner or later, three in a row have not
        drafter = pair(target, **ATTENDING[asked])[1]
        calls: list[Any] = []
        by_steps, at_once = Hybrid(drafter, shortest), Hybrid(drafter, shortest)
        for name in ("unfold", "unfold_dynamic"):
            monkeypatch.setattr(by_steps, name, lambda *_: None)
            monkeypatch.setattr(drafter, name, noting(calls, getattr(drafter, name)))
        trees = [list(rounds_of(hybrid, target, shape)) for hybrid in (by_steps, at_once)]
        for slow, fast in zip(*trees, strict=True):
            for part in ("tokens", "parents", "size", "logp"):
                assert torch.equal(getattr(slow, part), getattr(fast, part)), part
        assert all(call is not None for call in calls)
        found.append(len(calls))
    assert found[0] < found[1] == 3


def noting(calls: list[Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """The same, whose answers `calls` holds afterwards."""
    return lambda *given: calls.append(whole(*given)) or calls[-1]


def rounds_of(drafter: Drafter, target: Target, shape: StaticShape | DynamicShape) -> Iterator[DraftTree]:
    """Three rounds of two texts, the second of which is gone in the last."""
    generator = torch.Generator().manual_seed(2)
    memory, written = drafter.memory(2, 60), torch.full((2,), min(0, drafter.first_row))
    for counts in ([9, 5], [1, 3], [2]):
        count = torch.tensor(counts)
        if len(count) < len(written):
            memory, written = memory.select([0]), written[:1]
        words = torch.randint(target.vocab, (len(count), max(counts)), generator=generator)
        hidden = torch.randn(*words.shape, len(drafter.taps) * target.hidden, generator=generator).bfloat16()
        ctx = Context(written[:, None] + torch.arange(max(counts)), count, memory)
        yield grow(drafter, shape, drafter.read(hidden), words, ctx, vocab=target.vocab - 3)
        written = written + count


@compiled
@torch.no_grad()
def test_a_tree_that_the_memory_has_no_room_for_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not getattr(kernels(), "tiled", False):
        pytest.skip("this machine has no tiles")
    target = half_target("llama", head_dim=32)
    drafter = pair(target, **ATTENDING["eagle3"])[1]
    memory = drafter.memory(1, 32)
    hidden = torch.randn(1, 31, 3 * target.hidden).bfloat16()
    ctx = Context(torch.arange(31)[None], torch.tensor([31]), memory)
    with pytest.raises(RuntimeError, match="made for less"):
        grow(drafter, chain(4), drafter.read(hidden), torch.ones(1, 31, dtype=torch.long), ctx)


@compiled
@pytest.mark.parametrize("asked", [*ATTENDING, "medusa", "medusa, own"])
@torch.no_grad()
def test_the_likeliest_of_a_head_in_one_call_are_those_of_its_logits(asked: str) -> None:
    medusa = {"medusa": {"name": "medusa", "heads": 2}, "medusa, own": {"name": "medusa", "heads": 2, "output": "own"}}
    target = half_target("llama")
    slow, fast = pair(target, **(ATTENDING | medusa)[asked])
    state = torch.randn(2, 3, target.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    for many, known in ((1, None), (5, 33), (50, 40), (MOST + 1, None)):
        logp, ids = fast.likeliest(state, 1, many, known)
        theirs, _ = slow.likeliest(state, 1, many, known)
        assert logp.shape == theirs.shape == ids.shape
        torch.testing.assert_close(logp, theirs, rtol=0.02, atol=0.02)
        everywhere = slow.head(state, 1).float()[..., :known].log_softmax(-1)
        places = torch.full((target.vocab + 1,), -1).index_put(
            (target_ids(slow, torch.arange(everywhere.shape[-1])),), torch.arange(everywhere.shape[-1])
        )
        torch.testing.assert_close(everywhere.gather(-1, places[ids]), logp, rtol=0.02, atol=0.02)
    with pytest.raises(Refusal, match="not finite"):
        fast.likeliest(torch.full_like(state, torch.nan), 1, 3)


def test_nothing_is_compiled_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    target = half_target("llama")
    monkeypatch.setattr(quick, "kernels", lambda: None)
    _, drafter = pair(target, **ATTENDING["eagle3"])
    for part in drafter.modules():
        if isinstance(part, Attention | GatedMLP):
            assert "forward" not in vars(part)


# ---------------------------------------------------------------- the largest of a row


@pytest.mark.parametrize("width", [1, 7, 16, 250, 4096])
@pytest.mark.parametrize("many", [1, 8, MOST, MOST + 1])
def test_the_largest_of_a_row_and_its_mass(width: int, many: int) -> None:
    x = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0)).mul(20).bfloat16()
    x[0, 1, ::3] = -torch.inf
    mass, top, where = topmost(x, many, width)
    known = x[..., :width].float()
    torch.testing.assert_close(mass, known.logsumexp(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    assert torch.equal(top, known.topk(min(many, width), -1).values)
    assert torch.equal(known.gather(-1, where), top)


@compiled
def test_the_earlier_of_equals_comes_first_and_what_is_no_number_is_seen() -> None:
    x = torch.zeros(4, 48).bfloat16()
    x[0, [5, 20, 40]] = 2.0
    x[1, 33] = torch.nan
    x[2, 33] = torch.inf
    x[3] = -torch.inf
    mass, top, where = topmost(x, 4)
    assert where[0].tolist() == [5, 20, 40, 0] and top[0].tolist() == [2, 2, 2, 0]
    assert mass[1].isnan() and mass[2] == torch.inf and mass[3] == -torch.inf
    assert set(topmost(x[:, 3:], 3)[2].tolist()[0]) == {2, 17, 37}, "a view is read as it is meant"


def test_a_drafter_whose_logits_are_no_numbers_is_refused() -> None:
    target = half_target("llama")
    _, drafter = pair(target, name="medusa", heads=2)
    with pytest.raises(Refusal, match=r"not finite in torch\.bfloat16"):
        drafter.likeliest(torch.full((1, 1, target.hidden), torch.nan).bfloat16(), 0, 3)


@torch.no_grad()
def test_angles_that_are_looked_up_are_those_that_are_computed() -> None:
    rotary, positions = Rotary(torch.tensor([1.0, 0.3, 0.01])), torch.tensor([[0, 3, 700], [5, 5, 64]])
    for dtype in (torch.bfloat16, torch.float32):
        for asked in (positions[:, :2], positions, positions - 1, positions[:, :0]):  # -1: padding
            for offset in (0, 2, -1):
                with torch.enable_grad():
                    computed = rotary(asked, dtype, offset)
                for ours, theirs in zip(rotary(asked, dtype, offset), computed, strict=True):
                    assert torch.equal(ours, theirs)
        zero, before = torch.tensor([[0]]), torch.tensor([[-1.0, -0.3, -0.01]])
        _, sin = rotary(zero, dtype, -1)
        assert torch.equal(sin[0, 0], torch.cat([before, before], -1).sin().to(dtype))
