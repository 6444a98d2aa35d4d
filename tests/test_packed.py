"""Packed weights are the same linear layers: same answers, same gradients to what is read, the weights untouched."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.models.packed import Packed, pack_weights, packable
from paceline.models.target import Target, folder

possible = pytest.mark.skipif(
    not packable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="torch packs no bfloat16 weights on this machine"
)


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias).bfloat16().requires_grad_(False)


@possible
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 7, 48), (0, 48), (300, 48)], ids=str)
def test_answers_are_those_of_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, packed = layer(bias), layer(bias)
    pack_weights(packed)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-2, atol=1e-2)
    assert packed(x).shape == (*shape[:-1], 80) and torch.equal(packed.weight, plain.weight)
    assert packed(x.float().bfloat16()[..., :]).dtype == torch.bfloat16


@possible
def test_what_is_read_still_gets_its_gradient() -> None:
    frozen = layer(True)
    pack_weights(frozen)
    x = torch.randn(3, 48, dtype=torch.bfloat16, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, frozen.weight.sum(0).expand(3, -1))


def test_only_frozen_bfloat16_layers_are_packed() -> None:
    trained, single, custom = layer(True).requires_grad_(True), layer(True).float(), layer(True)

    class Special(nn.Linear):
        pass

    custom.__class__ = Special
    for module in (trained, single, custom):
        pack_weights(module)
        assert not isinstance(module.forward, Packed)


@possible
def test_a_loaded_target_is_packed_and_says_what_it_said() -> None:
    target = Target.load(folder("tiny"))
    assert sum(isinstance(part.forward, Packed) for part in target.model.modules()) == 4 * 7 + 1
    ids = torch.arange(20)[None]
    _, last = target(ids)
    plain = Target.load(folder("tiny"), "float32")
    assert not any(isinstance(part.forward, Packed) for part in plain.model.modules())
    theirs = plain.head(plain(ids)[1])
    torch.testing.assert_close(target.head(last).float(), theirs, rtol=0, atol=0.05 * float(theirs.abs().max()))
    head = target.head.rows(torch.tensor([3, 5]))
    assert torch.equal(head(last), F.linear(last, target.head.weight[[3, 5]]))
