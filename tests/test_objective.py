"""The loss keeps its gradient where a drafter is nearly right, and a term says what its name says."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models.drafter import LOSS_TERMS
from paceline.models.kernels import kernels
from paceline.train import objective
from paceline.train.objective import (
    FEATURE_TERMS,
    NEEDS_TEACHER,
    TERMS,
    Taught,
    learn,
    mixed_features,
    scored,
    smooth_l1,
)


def by_hand(name: str, logits: Tensor, labels: Tensor, teacher: Taught) -> Tensor:
    """[R] from the definitions, in float64."""
    draft = logits.double().softmax(-1)
    if name == "ce":
        return -draft.gather(1, labels[:, None])[:, 0].log()
    target = teacher.p.double()
    if name == "reverse_kl":
        return (draft * (draft / target).log()).sum(-1)
    overlap = torch.minimum(target, draft).sum(-1)
    if name in ("tv", "lk"):
        return 1 - overlap if name == "tv" else -overlap.log()
    return (target * (target / draft).log()).sum(-1)


def drafted(rows: int, vocab: int, apart: float) -> tuple[Tensor, Tensor, Taught]:
    """Draft logits in bfloat16, labels, and a teacher whose logits are `apart` from them."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=noise)
    draft = (logits + apart * torch.randn(rows, vocab, generator=noise)).bfloat16()
    return draft, logits.argmax(-1), Taught.of(logits.bfloat16())


@pytest.mark.parametrize("name", TERMS)
def test_every_term_and_its_gradient_are_by_definition(name: str) -> None:
    draft, labels, teacher = drafted(8, 64, apart=1.0)
    found, gradient = scored({name: 0.7}, draft.float(), labels, teacher)
    exact = draft.double().requires_grad_()
    wanted = 0.7 * by_hand(name, exact, labels, teacher)
    wanted.sum().backward()
    assert exact.grad is not None
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=0.0)
    assert (gradient - exact.grad).norm() < 1e-5 * exact.grad.norm()


@pytest.mark.parametrize("name", TERMS)
def test_bfloat16_logits_lose_less_than_a_hundredth_of_the_gradient(name: str) -> None:
    draft, labels, teacher = drafted(8, 4096, apart=1e-2)
    ours = draft.clone()
    learn({name: 1.0}, ours[None], labels, torch.ones(1, 8, dtype=torch.bool), teacher.logp, torch.ones(1))
    exact = draft.double().requires_grad_()
    by_hand(name, exact, labels, teacher).sum().backward()
    assert exact.grad is not None
    assert (ours.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()


def test_a_mix_is_the_weighted_sum_and_asks_a_teacher_only_where_it_is_used() -> None:
    draft, labels, teacher = drafted(8, 64, apart=1.0)
    ce, kl = (scored({name: 1.0}, draft, labels, teacher) for name in ("ce", "kl"))
    both = scored({"ce": 0.3, "kl": 0.7}, draft, labels, teacher)
    for mixed, first, second in zip(both, ce, kl, strict=True):
        torch.testing.assert_close(mixed, 0.3 * first + 0.7 * second)
    for name in TERMS.keys() - NEEDS_TEACHER:
        scored({name: 1.0}, draft, labels, None)


def test_terms_are_summed_in_the_order_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run is a new process, whose sets have another order: its sums would have other bits."""
    draft, labels, teacher = drafted(4, 16, apart=1.0)
    called: list[str] = []
    for name, term in TERMS.items():

        def noted(*arguments: Any, name: str = name, term: Any = term) -> Tensor:
            called.append(name)
            return term(*arguments)

        monkeypatch.setitem(TERMS, name, noted)
    for names in permutations(TERMS):
        called.clear()
        scored(dict.fromkeys(names, 1.0), draft, labels, teacher)
        assert called == list(names)


def test_rows_are_learnt_in_blocks_as_they_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each depth counts its own rows, ties go to the first id, and blocks of 3 rows leave one of 2."""
    draft, labels, teacher = drafted(11, 64, apart=1.0)
    depths = torch.stack([draft, draft.roll(1, 0), (2 * draft).round()])
    there = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    monkeypatch.setattr(objective, "BLOCK", 3 * 64)
    found = depths.clone()
    loss, right = learn({"kl": 0.7, "ce": 0.3}, found, labels, there, teacher.logp, torch.tensor([1.0, 2.0, 3.0]))
    for k, part in enumerate(depths):
        value, gradient = scored({"kl": 0.7, "ce": 0.3}, part, labels, teacher)
        torch.testing.assert_close(loss[k], value[there[k]].sum())
        assert right[k] == (part.argmax(-1) == labels)[there[k]].sum()
        assert not found[k, ~there[k]].any()
        torch.testing.assert_close(found[k].float(), (k + 1) * gradient * there[k][:, None], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", sorted(TERMS.keys() - {"ce"}))
def test_a_term_of_the_target_is_least_and_flat_where_the_draft_is_the_target(name: str) -> None:
    logits, labels, teacher = drafted(8, 64, apart=0.0)
    value, gradient = scored({name: 1.0}, logits, labels, teacher)
    assert value.abs().max() < 1e-6 and gradient.abs().max() < 1e-6
    assert bool((scored({name: 1.0}, logits.roll(1, 1), labels, teacher)[0] > 0.01).all())


def test_an_unlikely_draft_still_learns_from_lk_and_no_term_is_infinite() -> None:
    teacher = Taught.of(torch.tensor([[200.0, 0.0, 0.0]]))
    for name in TERMS:
        value, gradient = scored({name: 1.0}, torch.tensor([[0.0, 200.0, 0.0]]), torch.tensor([0]), teacher)
        assert value.isfinite().all() and gradient.isfinite().all()
        assert (gradient.abs().max() > 0.1) == (name in ("ce", "kl", "lk")), "the others do not see what q lacks"


def test_every_term_that_can_be_asked_for_is_there() -> None:
    assert TERMS.keys() | FEATURE_TERMS.keys() == LOSS_TERMS


def test_smooth_l1_is_its_definition_averaged_over_the_state() -> None:
    noise = torch.Generator().manual_seed(0)
    state, goal = (3 * torch.randn(8, 64, generator=noise) for _ in range(2))
    away = (state - goal).double().abs()
    wanted = torch.where(away < 1, away**2 / 2, away - 0.5).mean(-1)
    assert (away < 1).any() and (away > 1).any()
    torch.testing.assert_close(smooth_l1(state, goal).double(), wanted, rtol=1e-5, atol=0.0)
    in_float = smooth_l1(state.bfloat16().float(), goal.bfloat16().float())
    weights = {"smooth_l1": 0.5, "kl": 0.1}
    torch.testing.assert_close(mixed_features(weights, state.bfloat16(), goal.bfloat16()), 0.5 * in_float)


# ---------------------------------------------------------------- what is compiled

compiled = pytest.mark.skipif(kernels() is None, reason="no compiler here")


@compiled
@pytest.mark.parametrize("weights", [{"kl": 1.0}, {"ce": 0.4}, {"kl": 0.7, "ce": 0.3, "smooth_l1": 1.0}], ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 250, 4096])
def test_rows_that_kernels_take_are_those_of_the_definition(weights: dict[str, float], vocab: int) -> None:
    """Of three depths, some rows that do not count, factors, ids behind the vocabulary that stay as they are."""
    noise = torch.Generator().manual_seed(3)
    whole = torch.randn(3, 8, vocab + 6, generator=noise).mul(4).bfloat16()
    taught = torch.randn(8, vocab + 3, generator=noise).mul(4).bfloat16()
    taught[2, 1::2] = -torch.inf  # ruled out
    whole[1, 2, 1:vocab:2] = -torch.inf
    labels, there = torch.randint(vocab, (8,), generator=noise), torch.rand(3, 8, generator=noise) < 0.8
    labels[2], there[1, 2] = 0, True
    whole[0, 4, :] = 0.0  # all alike: the first is drafted
    labels[4], there[0, 4] = 0, True
    factors = torch.tensor([1.0, 0.5, 0.25])
    exact = whole[..., :vocab].double().requires_grad_()
    logq, logp = exact.log_softmax(-1), taught[:, :vocab].double().log_softmax(-1)
    between = torch.where(logp > -torch.inf, logp.exp() * (logp - logq), 0.0).sum(-1)
    wanted = weights.get("kl", 0.0) * between
    wanted = wanted - weights.get("ce", 0.0) * logq.gather(-1, labels.expand(3, 8)[..., None])[..., 0]
    wanted = torch.where(there, wanted, 0.0)
    (wanted * factors[:, None]).sum().backward()
    ours = whole.clone()
    teacher = taught[:, :vocab] if "kl" in weights else None
    loss, right = learn(weights, ours[..., :vocab], labels, there, teacher, factors)
    torch.testing.assert_close(loss.double(), wanted.sum(1).detach(), rtol=1e-5, atol=1e-5)
    assert right.tolist() == ((whole[..., :vocab].max(-1).indices == labels) & there).sum(1).tolist()
    assert exact.grad is not None and torch.equal(ours[..., vocab:], whole[..., vocab:])
    assert (ours[..., :vocab].double() - exact.grad).norm() < 3e-3 * exact.grad.norm()
    assert not ours[..., :vocab][~there].any()


@compiled
def test_a_row_of_what_is_no_number_is_nan_and_no_other() -> None:
    for place, bad in ((0, torch.nan), (1, torch.inf)):
        logits, teacher = torch.zeros(1, 3, 20).bfloat16(), torch.zeros(3, 20).bfloat16()
        (logits[0], teacher)[place][1, 17] = bad
        labels, there = torch.tensor([1, 2, 3]), torch.ones(1, 3, dtype=torch.bool)
        assert learn({"kl": 1.0}, logits, labels, there, teacher, torch.ones(1))[0].isnan()
        assert logits[0, 1].isnan().all() and not logits[0, [0, 2]].isnan().any()
        there[0, 1] = False
        assert learn({"kl": 1.0}, logits, labels, there, teacher, torch.ones(1))[0].isfinite()


@compiled
def test_kernels_and_operators_teach_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(5)
    logits, teacher = (torch.randn(n, 7, 300, generator=noise).mul(3).bfloat16() for n in (2, 1))
    labels, there = torch.randint(300, (7,), generator=noise), torch.ones(2, 7, dtype=torch.bool)
    found = []
    for functions in (kernels, lambda: None):
        monkeypatch.setattr(objective, "kernels", functions)
        gradient = logits.clone()
        given = {"kl": 0.5, "ce": 0.5}, gradient, labels, there, teacher[0], torch.tensor([1.0, 0.3])
        found.append((*learn(*given), gradient.float()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)
