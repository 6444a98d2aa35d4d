"""Packed weights are the same layers: same answers, same gradients to what is read, the weights untouched."""

import pytest
import torch
from fakes import VOCAB, target_of
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models import packed
from paceline.models.layers import GatedMLP, LayerOptions
from paceline.models.packed import Packed, PackedLayer, PackedTrunk, pack_weights, packable, unpack_weights
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
    plain, quick = layer(bias), layer(bias)
    pack_weights(quick)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.testing.assert_close(quick(x), plain(x), rtol=1e-2, atol=1e-2)
    assert quick(x).shape == (*shape[:-1], 80) and torch.equal(quick.weight, plain.weight)
    assert quick(x.float().bfloat16()[..., :]).dtype == torch.bfloat16


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
def test_layers_that_read_the_same_rows_are_one_product_until_they_are_unpacked() -> None:
    torch.manual_seed(0)
    options = LayerOptions(heads=4, kv_heads=2, head_dim=16, intermediate=96, qkv_bias=True, mlp_bias=True)
    plain, quick = GatedMLP(48, options), GatedMLP(48, options)
    quick.load_state_dict(plain.state_dict())
    x = torch.randn(5, 48).bfloat16()
    for module in (plain, quick):
        module.bfloat16().requires_grad_(False)
    pack_weights(quick)
    assert quick.state_dict().keys() == plain.state_dict().keys()
    assert not isinstance(quick.gate_proj.forward, Packed) and isinstance(quick.down_proj.forward, Packed)
    torch.testing.assert_close(quick(x), plain(x), rtol=1e-2, atol=1e-2)
    quick.gate_proj.weight.zero_()
    assert quick(x).abs().max() > 0.1, "what is packed no longer reads the weights"
    unpack_weights(quick)
    assert not (quick(x) - quick.down_proj(quick.act(quick.gate_proj(x)) * quick.up_proj(x))).any()


# ---------------------------------------------------------------- whole layers


class Unpacked(Packed):
    """Stands for a packed weight in float32, so that all else is compared exactly."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_packed_layers_are_the_layers_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows, a prompt, a tree behind it, taps, and what is read by its embeddings."""
    plain, target = target_of(family), target_of(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for ours, theirs in zip(target.parameters(), plain.parameters(), strict=True):  # no bias 0, no norm 1
            theirs.data += 0.1 * torch.randn_like(theirs)
            ours.data.copy_(theirs)
    monkeypatch.setattr(packed, "packable", lambda weight: True)
    monkeypatch.setattr(packed, "Packed", Unpacked)
    pack_weights(target.model)
    assert isinstance(target.body.forward, PackedTrunk)
    assert all(isinstance(layer.forward, PackedLayer) for layer in target.blocks)
    assert not any(isinstance(part.forward, Packed) for layer in target.blocks for part in layer.modules())

    taps = (1, target.layers - 1, target.layers, -1)
    ids = torch.arange(24).reshape(2, 12) % VOCAB
    document = torch.tensor([[0] * 5 + [1] * 7, [2] * 10 + [-1] * 2])
    rows = {"documents": document, "positions": torch.tensor([[*range(5), *range(7)], [*range(12)]])}
    caches = [one.new_cache(2, 30) for one in (plain, target)]
    tree = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool().expand(2, -1, -1)
    found = []
    for one, cache in zip((plain, target), caches, strict=True):
        passes = [*one(ids, taps, **rows), *one(ids, taps, cache=cache)]
        one.keep(cache, ids[:, :0], torch.tensor([12, 9]))
        passes += one(ids[:, :4], taps, tree=tree, cache=cache)
        mask = torch.zeros(2, 1, 12, 12).masked_fill(~torch.ones(12, 12).bool().tril(), torch.finfo(torch.float32).min)
        embeds = one.embed(ids).requires_grad_()
        out = one.body(inputs_embeds=embeds, attention_mask=mask, position_ids=torch.arange(12)[None]).last_hidden_state
        out.square().sum().backward()
        found.append([*passes, out, embeds.grad])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    own = [one.hf_generate(ids[:1], 6) for one in (plain, target)]  # with transformers' own cache
    assert torch.equal(*own)
    unpack_weights(target.model)
    assert not any("forward" in part.__dict__ for part in target.model.modules())


def test_layers_with_parts_of_their_own_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "packable", lambda weight: True)
    monkeypatch.setattr(packed, "Packed", Unpacked)
    granite, trained = target_of("granite"), target_of("llama")
    trained.blocks[0].mlp.up_proj.weight.requires_grad_(True)
    for target in (granite, trained):
        pack_weights(target.model)
    assert not any(isinstance(part.forward, (PackedLayer, PackedTrunk)) for part in granite.model.modules())
    assert [isinstance(layer.forward, PackedLayer) for layer in trained.blocks] == [False] + [True] * (
        trained.layers - 1
    )
    assert not isinstance(trained.body.forward, PackedTrunk)


@possible
def test_a_loaded_target_is_packed_and_says_what_it_said() -> None:
    target = Target.load(folder("tiny"))
    assert isinstance(target.body.forward, PackedTrunk) and isinstance(target.model.lm_head.forward, Packed)
    ids = torch.arange(20)[None]
    _, last = target(ids)
    plain = Target.load(folder("tiny"), "float32")
    assert not any(isinstance(part.forward, Packed) for part in plain.model.modules())
    theirs = plain.head(plain(ids)[1])
    torch.testing.assert_close(target.head(last).float(), theirs, rtol=0, atol=0.05 * float(theirs.abs().max()))
    head = target.head.rows(torch.tensor([3, 5]))
    assert torch.equal(head(last), F.linear(last, target.head.weight[[3, 5]]))
