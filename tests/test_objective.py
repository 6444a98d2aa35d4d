"""The loss keeps its gradient where a drafter is nearly right, and a term says what its name says."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models.drafter import LOSS_TERMS
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
