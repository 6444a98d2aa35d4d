"""Packed weights are the same layers: same answers, same gradients to what is read, the weights untouched."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, Dictated, model_of, target_of
from test_cache import ancestors
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decode import Decoder, StaticShape, chain
from paceline.decode.sampler import likeliest
from paceline.models import packed
from paceline.models import target as targets
from paceline.models.cache import Cache
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.kernels import FLAGS, SIGNATURES, SOURCES, Library, kernels
from paceline.models.layers import GatedMLP, LayerOptions
from paceline.models.packed import Packed, PackedLayer, PackedTrunk, pack_weights, packable, unpack_weights
from paceline.models.target import Target

PACKS = packable(torch.zeros(1, 1, dtype=torch.bfloat16))
possible = pytest.mark.skipif(not PACKS, reason="torch packs no bfloat16 weights on this machine")


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


def tiled_functions() -> Library:
    """Of passes.cpp; skips where this machine has no tiles."""
    functions = kernels()
    if functions is None or not functions.tiled:
        pytest.skip("this machine multiplies no tiles")
    return functions


@possible
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(32, 32), (96, 80), (64, 75), (576, 192)])
@torch.no_grad()
def test_products_in_tiles_are_products(depth: int, width: int, bias: bool) -> None:
    """And each row's bits are its own, whatever lies beside it; widths that end within a tile write no further."""
    tiled_functions()
    generator = torch.Generator().manual_seed(0)
    weight, x, added = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((width, depth), (70, depth), (70, width))
    )
    offset = torch.randn(width, generator=generator).bfloat16() if bias else None
    product = Packed(weight, offset)
    assert product.tiles is not None
    wanted = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    whole, more = product(x), product(x, added)
    assert whole.shape == (70, width) and product(x[:0]).shape == (0, width)
    for found, true in ((whole, wanted), (more, wanted + added.double())):
        assert (found - true).abs().max() < 0.005 * true.abs().max()
    for some in (slice(0, 1), slice(0, 2), slice(5, 21), slice(3, 35), slice(30, 70)):
        assert torch.equal(product(x[some]), whole[some]) and torch.equal(product(x[some], added[some]), more[some])
    assert torch.equal(product(x[:6].view(2, 3, depth)), whole[:6].view(2, 3, width))


@possible
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_gate_is_computed_behind_its_product(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, generator = tiled_functions(), torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((96, 64), (2, 9, 64)))
    offset = torch.randn(96, generator=generator).bfloat16() if bias else None
    product = Packed(weight, offset, halves=True)
    first, second = F.linear(x.double(), weight.double(), None if offset is None else offset.double()).chunk(2, -1)
    wanted = F.silu(first) * second
    assert product.halves and torch.equal(product(x), Packed(weight, offset)(x)), "in their usual order otherwise"
    assert (product.gated(x) - wanted).abs().max() < 0.01 * wanted.abs().max()
    monkeypatch.setattr(functions, "tiled", False)
    assert (Packed(weight, offset, halves=True).gated(x) - wanted).abs().max() < 0.02 * wanted.abs().max()


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

    def __init__(self, weight: Tensor, bias: Tensor | None = None, halves: bool = False):
        self.weight, self.bias, self.tiles = weight, bias, None

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if added is None else out + added


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


# ---------------------------------------------------------------- what is compiled

compiled = pytest.mark.skipif(not PACKS or kernels() is None, reason="no packed weights or no compiler here")


def half_target(family: str, layers: int = 3, **options: Any) -> Target:
    """A bfloat16 target, packed, of widths that kernels.cpp takes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": layers}
    target = Target(model_of(family, **sizes | options).bfloat16())
    pack_weights(target.model)
    return target


@compiled
def test_a_processor_without_tiles_has_all_the_functions_too(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "clang++"))))
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("no other processor here has tiles")
    built = tmp_path / "kernels.so"
    flags = [flag for flag in FLAGS if flag != "-O3"]
    subprocess.run([compiler, *flags, "-mno-amx-bf16", SOURCES[0], "-o", built], check=True, capture_output=True)
    library = ctypes.CDLL(str(built))
    assert library.tiles() == 0 and all(hasattr(library, name) for name in SIGNATURES)


@compiled
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("qwen2", {"num_attention_heads": 6}),
        ("qwen3", {"head_dim": 64}),
        ("qwen3", {"head_dim": 128}),
        ("llama", {"hidden_size": 96, "head_dim": 32, "num_attention_heads": 12, "num_key_value_heads": 1}),
        # 70 slots lie within its limit, the next power of two does not
        (
            "llama",
            {
                "max_position_embeddings": 72,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            },
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("tiled", [True, False])
@torch.no_grad()
def test_compiled_passes_are_those_of_the_operators(
    family: str, options: dict, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts in one row, a ragged prompt, a tree behind it, and another behind what was kept of that; every tap."""
    functions = kernels()
    assert functions is not None
    monkeypatch.setattr(functions, "tiled", tiled and functions.tiled)
    target = half_target(family, **options)
    quick = target.body.forward
    assert isinstance(quick, PackedTrunk) and quick._kernels is not None
    assert quick._tiled == (functions.tiled and options.get("head_dim", 16) % 32 == 0), "heads of whole blocks"
    taps = (*range(target.layers + 1), -1)
    ids = torch.randint(VOCAB, (2, 37), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 20 + [1] * 17, [2] * 37])
    positions = torch.tensor([[*range(20), *range(17)], [*range(37)]])
    tree = ancestors([-1, 0, 0, 1, 2, 3, 4, 1, 6]).expand(2, -1, -1)
    found = []
    for functions in (quick._kernels, None):
        quick._kernels = functions
        for layer in target.blocks:
            layer.forward.functions = functions
        cache = target.new_cache(2, 70)
        passes = [target(ids, taps, documents=documents, positions=positions)[0], target(ids, taps, cache=cache)[0]]
        target.keep(cache, ids[:, :0], torch.tensor([37, 20]))
        for words in (ids[:, :9], ids[:, 9:18]):
            passes.append(target(words, taps, tree=tree, cache=cache)[0])
            target.keep(cache, torch.tensor([[0, 2, 4], [0, 1, 0]]), torch.tensor([3, 2]))
        cache.select(torch.tensor([1]))
        passes.append(target(ids[:1, :1], taps, cache=cache)[0])
        found.append(passes)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).float().norm() < 0.03 * theirs.float().norm()


@compiled
def test_compiled_passes_leave_the_listener_and_the_other_cache_alone() -> None:
    target = half_target("llama")
    ids, heard = torch.arange(12)[None], []
    handle = target.blocks[1].register_forward_hook(lambda *_: heard.append(1))
    cache = target.new_cache(1, 20)
    first = target(ids, cache=cache)[1]
    handle.remove()
    assert heard == [1]
    target.keep(cache, ids[:, :0], torch.tensor([12]))
    assert torch.isfinite(target(ids[:, :2], cache=cache)[1]).all()  # goes on as the cache was begun

    class Elsewhere(Cache):
        def update(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            heard.append(2)
            return super().update(*given, **more)

    for other in (target.new_cache(1, 20), Elsewhere(1, 20)):
        assert (target(ids, cache=other)[1] - first).float().norm() < 0.03 * first.float().norm()
    assert heard == [1] + [2] * target.layers


# ---------------------------------------------------------------- the same bits in every pass


def assert_same_bits_in_trees(target: Target, placements: int, deepest: int = 120) -> None:
    """Trees of 2 to 64 nodes at random places behind texts of all lengths, against the path read token by token: the
    logits, and the keys and values that are committed."""
    generator = torch.Generator().manual_seed(5)

    def below(limit: int, least: int = 0) -> int:
        return int(torch.randint(least, limit, (), generator=generator))

    def one_by_one(words: Tensor, cache: Cache) -> Tensor:
        said = []
        for word in words:
            said.append(target.head(target(word.view(1, 1), cache=cache)[1])[0, 0])
            target.keep(cache, word.new_zeros(1, 0), torch.tensor([1]))
        return torch.stack(said)

    edges = [15, 16, 31, 32, 63, 64, 95, 96]  # of vectors and of products
    text = torch.randint(target.vocab, (1, deepest), generator=generator)
    slow = target.new_cache(1, 2 * deepest)
    one_by_one(text[0], slow)
    for trial in range(placements):
        length = edges[trial] if trial < len(edges) else below(deepest, 1)
        nodes = (2, 64, 33, 32, 31)[trial] if trial < 5 else below(65, 2)
        seen = ancestors([-1, *(below(node, max(0, node - 6)) for node in range(1, nodes))])
        words = torch.randint(target.vocab, (2, nodes), generator=generator)
        cache = target.new_cache(2, 2 * deepest)
        short = below(length, 0) + 1
        target(text[:, :length].expand(2, -1), cache=cache)
        target.keep(cache, text[:, :0].expand(2, -1), torch.tensor([length, short]))
        last = target(words, tree=seen.expand(2, -1, -1), cache=cache)[1]
        logits = target.head(last)[0]
        path = seen[below(nodes)].nonzero()[:, 0]
        target.keep(cache, path.expand(2, -1), torch.tensor([len(path), 0]))
        plain = target.new_cache(1, 2 * deepest)
        target(text[:, :1], cache=plain)
        for ours, theirs in zip((*plain.keys, *plain.values), (*slow.keys, *slow.values), strict=True):
            ours[:, :, :length] = theirs[:, :, :length]
        target.keep(plain, text[:, :0], torch.tensor([length]))
        assert torch.equal(one_by_one(words[0, path], plain), logits[path]), (trial, nodes, length)
        for ours, theirs in zip((*cache.keys, *cache.values), (*plain.keys, *plain.values), strict=True):
            assert torch.equal(ours[:1, :, : length + len(path)], theirs[:, :, : length + len(path)]), (trial, nodes)


@compiled
@torch.no_grad()
def test_an_exact_target_gives_a_node_the_same_bits_wherever_it_lies() -> None:
    for family, options in (
        ("llama", {"hidden_size": 192, "intermediate_size": 512}),
        ("qwen3", {"head_dim": 32}),
        ("llama", {"hidden_size": 288, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}),
    ):
        target = half_target(family, **options)
        target.exact()
        assert_same_bits_in_trees(target, 60)


@compiled
@torch.no_grad()
def test_an_exact_target_commits_the_same_bits_of_a_prompt_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ragged batch; 79 leaves a single row to the last."""
    ids = torch.randint(VOCAB, (3, 80), generator=torch.Generator().manual_seed(6))
    for family, options in (("llama", {"hidden_size": 192, "intermediate_size": 512}), ("qwen3", {"head_dim": 32})):
        target = half_target(family, **options)
        target.exact()
        found = []
        for rows in (80, 79, 33, 13):
            monkeypatch.setattr(targets, "SLICE", rows)
            cache = target.new_cache(3, 90)
            passed = target(ids, (1, -1), cache=cache)
            target.keep(cache, ids[:, :0], torch.tensor([80, 33, 7]))
            found.append([*passed, *cache.keys, *cache.values])
        for cut in found[1:]:
            assert all(torch.equal(ours, whole) for ours, whole in zip(cut, found[0], strict=True))


@compiled
@torch.no_grad()
def test_bits_that_depend_on_the_slot_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = half_target("llama", hidden_size=192, intermediate_size=512)
    target.exact()
    monkeypatch.setattr(target.body.forward, "_kernels", None)  # transformers' attention
    with pytest.raises(AssertionError):
        assert_same_bits_in_trees(target, 20)


@compiled
@compiled
@pytest.mark.parametrize("trained", ["adapted", "unfrozen"])
def test_a_target_whose_passes_are_compiled_can_be_trained(trained: str) -> None:
    target, ids = half_target("llama"), torch.arange(12).view(1, -1)
    _, before = target(ids, cache=target.new_cache(1, 12))
    live = target.adapted(2, 2.0, 0.0, None) if trained == "adapted" else target.unfrozen()
    optimizer = torch.optim.SGD([p for p in live.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # an adapter's second matrix is 0 at first
        live(ids)[1].float().square().sum().backward()
        optimizer.step()
    assert not torch.equal(live(ids)[1], target(ids)[1]), "it learns"
    _, after = target(ids, cache=target.new_cache(1, 12))
    assert torch.equal(after, before), "and the target it is of says what it said, with its own passes"


def test_exact_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    target_of("llama").exact()  # float32
    with pytest.raises(
        Refusal, match=r"decode\.exact: torch\.bfloat16 passes of GraniteForCausalLM .*; nearest: dtype=float32"
    ):
        Target(model_of("granite").bfloat16()).exact()
    rounding = half_target("llama")
    call = Packed.__call__

    def by_width(self: Packed, x: Tensor, added: Tensor | None = None) -> Tensor:
        return call(self, x, added) * (1 if x.shape[-2] != 3 else 1.01)

    monkeypatch.setattr(Packed, "__call__", by_width)
    with pytest.raises(Refusal, match=r"products round by their width; nearest: dtype=float32"):
        rounding.exact()


@compiled
def test_exact_text_is_the_same_drafted_or_not_alone_or_in_company() -> None:
    target = half_target("llama")
    target.exact()
    prompts = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 40, 17)]
    plain = Decoder(target).generate(prompts, 40).tokens
    texts = [prompt + said for prompt, said in zip(prompts, plain, strict=True)]
    fork = StaticShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))
    for shape in (chain(4), fork):
        drafted = Decoder(target, Dictated(texts, lambda place: (VOCAB // 2, 1, 0, 1, 0, 0)[place % 6]), shape)
        for some in (prompts, prompts[2:3]):
            out = drafted.generate(some, 40)
            assert out.tokens == plain[: len(some)] if len(some) > 1 else plain[2:3]
            assert out.report.mean_acceptance_length > 1.2


def test_the_likeliest_is_the_first_of_the_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 5, 1024, 3000):
        logits = torch.randn(3, 4, width + 7, generator=generator).bfloat16()  # many ties
        logits[0, 0] = -torch.inf
        logits[0, 1] = torch.tensor([-0.0, 0.0]).repeat(width + 7)[: width + 7]
        logits[1] = -logits[1].abs()
        logits[2, 0, width // 2], logits[2, 2, width // 2] = torch.nan, -torch.nan
        logits[2, 1, width // 3] = torch.inf
        for some in (logits, logits[..., :width], logits[0, 1], logits[..., :width].transpose(0, 1)):
            assert torch.equal(likeliest(some), some.float().max(-1).indices)
