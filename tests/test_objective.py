"""The loss keeps its gradient where a drafter is nearly right, and a term says what its name says."""

import pytest
import torch
from torch import Tensor

from paceline.models.drafter import LOSS_TERMS
from paceline.train.objective import FEATURE_TERMS, NEEDS_TEACHER, TERMS, Taught, mixed, smooth_l1


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
def test_every_term_is_its_definition(name: str) -> None:
    draft, labels, teacher = drafted(8, 64, apart=1.0)
    found = TERMS[name](draft.float(), labels, teacher)
    torch.testing.assert_close(found.double(), by_hand(name, draft, labels, teacher), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", TERMS)
def test_bfloat16_logits_lose_less_than_a_hundredth_of_the_gradient(name: str) -> None:
    draft, labels, teacher = drafted(8, 4096, apart=1e-2)
    ours = draft.clone().requires_grad_()
    mixed({name: 1.0}, ours, labels, teacher, ours, ours).sum().backward()
    exact = draft.double().requires_grad_()
    by_hand(name, exact, labels, teacher).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    assert (ours.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()


def test_a_mix_is_the_weighted_sum_and_asks_a_teacher_only_where_it_is_used() -> None:
    draft, labels, teacher = drafted(8, 64, apart=1.0)
    ce, kl = (TERMS[name](draft.float(), labels, teacher) for name in ("ce", "kl"))
    torch.testing.assert_close(mixed({"ce": 0.3, "kl": 0.7}, draft, labels, teacher, draft, draft), 0.3 * ce + 0.7 * kl)
    for name in TERMS.keys() - NEEDS_TEACHER:
        mixed({name: 1.0}, draft, labels, None, draft, draft)


@pytest.mark.parametrize("name", TERMS.keys() - {"ce"})
def test_a_term_of_the_target_is_least_and_flat_where_the_draft_is_the_target(name: str) -> None:
    logits, labels, teacher = drafted(8, 64, apart=0.0)
    same = logits.float().requires_grad_()
    TERMS[name](same, labels, teacher).sum().backward()
    assert TERMS[name](same, labels, teacher).abs().max() < 1e-6
    assert same.grad is not None and same.grad.abs().max() < 1e-6
    assert bool((TERMS[name](logits.roll(1, 1), labels, teacher) > 0.01).all())


def test_an_unlikely_draft_still_learns_from_lk_and_no_term_is_infinite() -> None:
    teacher = Taught.of(torch.tensor([[200.0, 0.0, 0.0]]))
    for name in TERMS:
        far = torch.tensor([[0.0, 200.0, 0.0]], requires_grad=True)
        loss = TERMS[name](far, torch.tensor([0]), teacher)
        loss.sum().backward()
        assert far.grad is not None and far.grad.isfinite().all() and loss.isfinite().all()
        assert (far.grad.abs().max() > 0.1) == (name in ("ce", "kl", "lk")), "the others do not see what q lacks"


def test_every_term_that_can_be_asked_for_is_there() -> None:
    assert TERMS.keys() | FEATURE_TERMS.keys() == LOSS_TERMS


def test_smooth_l1_is_its_definition_averaged_over_the_state() -> None:
    noise = torch.Generator().manual_seed(0)
    state, goal = (3 * torch.randn(8, 64, generator=noise) for _ in range(2))
    away = (state - goal).double().abs()
    wanted = torch.where(away < 1, away**2 / 2, away - 0.5).mean(-1)
    assert (away < 1).any() and (away > 1).any()
    torch.testing.assert_close(smooth_l1(state, goal).double(), wanted, rtol=1e-5, atol=0.0)
    draft, labels, teacher = drafted(8, 64, apart=1.0)
    both = mixed({"smooth_l1": 0.5, "kl": 0.1}, draft, labels, teacher, state.bfloat16(), goal.bfloat16())
    in_float = smooth_l1(state.bfloat16().float(), goal.bfloat16().float())
    torch.testing.assert_close(both, 0.5 * in_float + 0.1 * TERMS["kl"](draft.float(), labels, teacher))
