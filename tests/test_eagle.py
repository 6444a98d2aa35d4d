"""EAGLE: training sees what decoding sees, the tree's keys are a prefill's, the output is the target's.

The reference runs a document one row at a time, in float64, over rows that it lists itself.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import chains
import pytest
import torch
from chains import (
    DEPTHS,
    END,
    PROMPTS,
    TERMS,
    TREE,
    Lesson,
    Logits,
    Scripted,
    apart,
    assert_a_prefill,
    assert_accepted,
    assert_foretold,
    assert_learns_as_defined,
    assert_the_targets,
    assert_trained_so,
    learnt,
    listed_states,
    packed,
    remembering,
    served,
    states_of,
    texts,
)
from fakes import FAMILIES, VOCAB, slow_greedy, target_of
from runs import checkpoint_of_target, config, digest
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from paceline.data.batch import Batch, pack
from paceline.data.conversations import Example, load_tokenizer, stop_ids
from paceline.decode import Decoder, DynamicShape, StaticShape, chain, grow
from paceline.models import streams
from paceline.models.drafter import Context, Drafter, Options, Shape, build
from paceline.models.eagle import Eagle, EagleOptions, default_taps
from paceline.models.errors import Refusal
from paceline.models.export import load_export, save_export
from paceline.models.target import DTYPES, Target
from paceline.train import loop
from paceline.train.loop import fit
from paceline.train.step import TrainStep, predicted, ranks, unrolled, wanted

FEATURES = {"smooth_l1": 1.0, "kl": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"join": "fc", "output": "shared", "detach": True, "objective": FEATURES, "unroll": 1, "fc_bias": True},
    "hass": {"join": "fc", "output": "shared", "detach": True, "objective": FEATURES, "unroll": 3},
    "eagle3": {"join": "attention", "output": "own", "unroll": 4},
}
any_method = pytest.mark.parametrize("method", METHODS)


def eagle(target: Target, method: str, vocab_map: Tensor | None = None, spread: float = 0.0, **more: Any) -> Eagle:
    """A drafter of a method, with noise of this size on every weight, so that none is 0 or 1."""
    draft_vocab = None if vocab_map is None else len(vocab_map)
    options = EagleOptions(name="eagle", draft_vocab=draft_vocab, **METHODS[method] | more).fitted(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build(options, Shape.of(target), vocab_map)
        assert isinstance(drafter, Eagle)
        drafter.start(target)
        drafter.borrow(target)
        for parameter in drafter.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return drafter


# ---------------------------------------------------------------- what is trained is what is served


def all_of_it(t: int, k: int) -> tuple[list[int], list[int]]:
    """The verified rows, and the depths of its own chain, that the row at depth k of the chain from t looks at."""
    return list(range(t + 1)), list(range(1, k + 1))


@torch.no_grad()
def by_hand(
    target: Target,
    drafter: Eagle,
    words: list[int],
    hidden: Tensor,
    seen: Callable[[int, int], tuple[list[int], list[int]]] = all_of_it,
    place: Callable[[int, int], int] = lambda t, k: t + k,
) -> Logits:
    """The same from the papers' formulas, in float64: one query over rows that are listed one by one."""
    own = {name: parameter.double() for name, parameter in drafter.named_parameters()}
    opts, form = drafter.options, drafter.options.layer
    under = "midlayer." if opts.join == "attention" else "layers.0."
    table = target.model.get_input_embeddings().weight.double()
    theta, size = target.config.rope_parameters["rope_theta"], form.head_dim
    turn = 1.0 / theta ** (torch.arange(size // 2).double() * 2 / size)

    def linear(name: str, x: Tensor) -> Tensor:
        y = own[f"{name}.weight"] @ x
        return y + own[f"{name}.bias"] if f"{name}.bias" in own else y

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + form.eps).sqrt() * own[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:  # [heads, D], its halves as the parts of complex numbers
        half = size // 2
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turn), position * turn)
        return torch.cat([z.real, z.imag], 1)

    def heads(name: str, x: Tensor) -> Tensor:
        y = linear(f"{under}self_attn.{name}_proj", x).view(-1, size)
        return norm(f"{under}self_attn.{name}_norm", y) if form.qk_norm and name != "v" else y

    keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by (t, depth)

    def row(feature: Tensor, t: int, k: int) -> Tensor:
        embedded = table[words[t + 1 + k]]
        if opts.join == "fc":
            x = residual = linear("fc", torch.cat([embedded, feature]))
        else:
            residual = feature
            x = torch.cat([norm(f"{under}input_layernorm", embedded), norm(f"{under}hidden_norm", feature)])
        query = turned(heads("q", x), place(t, k))
        keys[t, k] = turned(heads("k", x), place(t, k)), heads("v", x)
        verified, chained = seen(t, k)
        rows = [keys[i, 0] for i in verified] + [keys[t, depth] for depth in chained]
        share = form.heads // form.kv_heads
        answers = []
        for h in range(form.heads):
            weights = torch.stack([query[h] @ key[h // share] * size**-0.5 for key, _ in rows]).softmax(0)
            answers.append(sum(w * value[h // share] for w, (_, value) in zip(weights, rows, strict=True)))
        out = residual + linear(f"{under}self_attn.o_proj", torch.cat(answers))
        x = norm(f"{under}post_attention_layernorm", out)
        gate, up = linear(f"{under}mlp.gate_proj", x), linear(f"{under}mlp.up_proj", x)
        return out + linear(f"{under}mlp.down_proj", F.silu(gate) * up)

    logits: Logits = {}
    for t in range(len(words) - 1):
        feature = hidden[t].double()
        if opts.join == "attention":
            feature = linear("fc", feature)
        for k in range(min(DEPTHS, len(words) - 1 - t)):
            feature = row(feature, t, k)
            state = feature if opts.join == "fc" else norm("norm", feature)
            weight = target.head.weight.double() if opts.output == "shared" else own["lm_head.weight"]
            logits[t, k] = weight @ state
    return logits


@any_method
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])  # shared key heads; normed q and k; biases
@torch.no_grad()
def test_a_training_pass_is_one_row_at_a_time_as_decoding_runs_it(family: str, method: str) -> None:
    target = target_of(family)
    drafter = eagle(target, method, spread=0.15).eval()
    assert drafter.options.layer.kv_heads == 2 and drafter.options.layer.qk_norm == (family == "qwen3")
    assert drafter.options.layer.qkv_bias == (family == "qwen2")
    batch, documents = packed()
    hidden, _ = states_of(target, drafter, batch)
    states = unrolled(drafter, batch, hidden, DEPTHS)
    assert all(state.isfinite().all() for state in states), "padding too"
    for (line, start), words in documents.items():
        here = hidden[line, start : start + len(words)]
        trained = {
            (t, k): drafter.head(states[k][line, start + t], k)
            for t in range(len(words) - 1)
            for k in range(min(DEPTHS, len(words) - 1 - t))
        }
        exact = by_hand(target, drafter, words, here)
        assert apart(trained, exact) < 1e-4
        assert apart(served(drafter, words, here), exact) < 1e-4
        # these faults would be seen
        faults: list[dict[str, Any]] = [
            {"seen": lambda t, k: (list(range(t + (k == 0))) or [t], list(range(1, k + 1)))},  # not its own first row
            {"seen": lambda t, k: (list(range(t + 1)), [k] if k else [])},  # not the chain between
            {"seen": lambda t, k: (list(range(t + 1)), list(range(1, k)))},  # not itself
            {"place": lambda t, k: t},
            {"place": lambda t, k: t + k + (k > 0)},
        ]
        for fault in faults:
            assert apart(by_hand(target, drafter, words, here, **fault), exact) > 1e-2


# ---------------------------------------------------------------- the keys of a tree


@any_method
@pytest.mark.parametrize("shape", [TREE, DynamicShape(22, 3, 3)], ids=["static", "dynamic"])
def test_what_is_kept_after_every_round_is_a_prefill_of_the_verified_text(
    shape: StaticShape | DynamicShape, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = target_of("llama"), texts([9, 4])
    drafter = eagle(target, method, spread=0.1).eval()
    made = remembering(drafter, monkeypatch)
    stream = Decoder(target, drafter, shape, Scripted([[0, 1], [3, 0], [1, 2], [2, 3], [0, 0]])).stream(prompts, 40)
    for number in range(6):
        before = [prompt + said for prompt, said in zip(prompts, stream.generation.tokens, strict=True)]
        for _ in prompts:
            next(stream)
        if number:  # a round reads what was verified before it; the prompts' pass is none
            assert_a_prefill(made[0], target, drafter, before, 3)
    assert [report.num_accepted_tokens for report in stream.generation.reports] == [6, 6] and len(made) == 1


@any_method
def test_a_row_that_leaves_takes_nothing_along(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = Target(target_of("llama").model, vocab=END), texts([5, 3, 8])  # nobody else says END
    drafter = eagle(target, method, spread=0.1).eval()
    made = remembering(drafter, monkeypatch)
    verifier = Scripted([[1, 0, 2], [0, 2, 3], [3, 1], [0, 0]], ends=2)
    stream = Decoder(target, drafter, TREE, verifier).stream(prompts, 40, eos=[END])
    for number, rows in enumerate(([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 2], [0, 2])):
        before = [prompts[row] + stream.generation.tokens[row] for row in rows]
        assert [next(stream).row for _ in rows] == rows
        if number:
            assert_a_prefill(made[0], target, drafter, before, 3)
    assert stream.generation.tokens[1][-1] == END


@any_method
@torch.no_grad()
def test_a_node_sees_its_ancestors_and_nobody_else(method: str) -> None:
    target, rows = target_of("llama"), texts([7, 4])
    drafter = eagle(target, method, spread=0.1).eval()
    count = torch.tensor([len(row) - 1 for row in rows])
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    levels = [([0, 0, 0], [[5, 6, 7], [8, 9, 10]]), ([2, 0, 0, 2], [[11, 12, 13, 14], [15, 16, 17, 18]])]
    levels.append(([3, 0, 1], [[19, 20, 21], [22, 23, 24]]))

    def nodes(tokens: list[list[list[int]]]) -> list[Tensor]:
        """The states of all levels, the verified rows having been read."""
        memory = drafter.memory(2, 20)
        hidden = target(ids, drafter.taps)[0][:, :-1]
        ctx = Context(torch.arange(6).expand(2, -1), count, memory)
        feature, state = drafter.step(drafter.read(hidden), ids[:, 1:], 0, ctx)
        last = torch.arange(2), count - 1
        feature, out = feature[last][:, None], []
        for depth, ((parents, _), words) in enumerate(zip(levels, tokens, strict=True), start=1):
            parent = torch.tensor(parents).expand(2, -1)
            feature = feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))
            places = (count - 1 + depth)[:, None].expand(2, len(parents))
            at = Context(places, torch.full((2,), len(parents)), memory, parent)
            feature, state = drafter.step(feature, torch.tensor(words), depth, at)
            out.append(state)
        return out

    words = [level[1] for level in levels]
    states = nodes(words)
    # each node's path, walked alone
    for row, text in enumerate(rows):
        for node, parent in enumerate(levels[2][0]):
            above = levels[1][0][parent]
            path = [words[0][row][above], words[1][row][parent], words[2][row][node]]
            line = torch.tensor([text])
            memory, one = drafter.memory(1, 20), torch.ones(1, dtype=torch.long)
            ctx = Context(torch.arange(len(text) - 1)[None], count[row : row + 1], memory)
            feature, _ = drafter.step(drafter.read(target(line, drafter.taps)[0][:, :-1]), line[:, 1:], 0, ctx)
            feature = feature[:, -1:]
            for depth, (word, place) in enumerate(zip(path, (above, parent, node), strict=True), start=1):
                at = Context(torch.tensor([[len(text) - 2 + depth]]), one, memory, torch.zeros(1, 1, dtype=torch.long))
                feature, state = drafter.step(feature, torch.tensor([[word]]), depth, at)
                torch.testing.assert_close(state[0, 0], states[depth - 1][row, place], atol=1e-5, rtol=1e-5)
    # another token changes the states of its node and of those below, to the bit
    changed = [[list(words) for words in level] for level in words]
    changed[0][0][0] = 40
    others = nodes(changed)
    for depth, below in enumerate(([0], [1, 2], [2])):  # node 0 of the first level, its children, and theirs
        for node in range(len(levels[depth][0])):
            same = states[depth][0, node].equal(others[depth][0, node])
            assert same == (node not in below), (depth, node)
        assert states[depth][1].equal(others[depth][1])


@any_method
@pytest.mark.parametrize("shape", [TREE, DynamicShape(22, 3, 3)], ids=["static", "dynamic"])
@torch.no_grad()
def test_every_node_of_a_tree_is_what_training_makes_of_its_path(
    shape: StaticShape | DynamicShape, method: str
) -> None:
    target, rows = target_of("llama"), texts([7, 4])
    drafter = eagle(target, method, spread=0.1).eval()
    count = torch.tensor([len(row) - 1 for row in rows])
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    ctx = Context(torch.arange(6).expand(2, -1), count, drafter.memory(2, 6 + 1 + shape.unfolded))
    tree = grow(drafter, shape, drafter.read(target(ids, drafter.taps)[0][:, :-1]), ids[:, 1:], ctx)
    assert_trained_so(drafter, target, tree, rows)


# ---------------------------------------------------------------- the output is the target's, and training foretells it


SHAPES = chains.SHAPES | {"chain of 6": chain(6), "dynamic of 6": DynamicShape(14, 6, 3)}
EVEN = torch.arange(0, VOCAB, 2)


@cache
def lesson(method: str, drafted: bool) -> Lesson:
    target = target_of("llama")
    return learnt(target, eagle(target, method, EVEN if drafted else None))


@any_method
def test_a_text_learnt_by_heart_is_accepted_when_it_is_decoded(method: str) -> None:
    assert assert_accepted(lesson(method, False)).max_depth is None


@pytest.mark.parametrize(("method", "drafted"), [*((method, False) for method in METHODS), ("eagle3", True)])
def test_ranks_foretell_what_every_round_of_a_greedy_chain_accepts(method: str, drafted: bool) -> None:
    played = assert_foretold(lesson(method, drafted), 5)
    assert 0 in played and len(played) >= 3 and (max(played) >= 4 or drafted), played


@pytest.mark.parametrize("temperature", [0.0, 0.4], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@any_method
def test_the_output_is_the_targets(method: str, shape: StaticShape | DynamicShape, temperature: float) -> None:
    assert_the_targets(lesson(method, False), shape, temperature)


# ---------------------------------------------------------------- where a drafter begins


def last_layer(target: Target) -> dict[str, Tensor]:
    """The target's own last layer under Llama's names, taken apart by what is known of its family."""
    own = {name: parameter.detach() for name, parameter in target.blocks[-1].named_parameters()}
    if "self_attn.qkv_proj.weight" in own:  # phi3: 4 query heads, 2 key heads, 2 value heads, of 8 each
        fused, both = own.pop("self_attn.qkv_proj.weight"), own.pop("mlp.gate_up_proj.weight")
        own |= {"self_attn.q_proj.weight": fused[:32], "self_attn.k_proj.weight": fused[32:48]}
        own |= {
            "self_attn.v_proj.weight": fused[48:],
            "mlp.gate_proj.weight": both[:48],
            "mlp.up_proj.weight": both[48:],
        }
    if target.config.model_type == "gemma":
        own = {name: 1 + weight if "norm" in name else weight for name, weight in own.items()}
    return own


@pytest.mark.parametrize("join", ["fc", "attention"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "granite"])
@torch.no_grad()
def test_a_drafter_that_starts_as_the_targets_last_layer_has_its_bits(family: str, join: str) -> None:
    target = target_of(family)
    output = "shared" if join == "fc" else "own"
    options = EagleOptions(name="eagle", join=join, output=output, start="target", fc_bias=True)
    drafter = build(options.fitted(target), Shape.of(target))
    assert isinstance(drafter, Eagle)
    drafter.start(target)
    drafter.borrow(target)
    theirs, ours = last_layer(target), dict(drafter._layer[0].named_parameters())
    final = target.body.norm.weight + (family == "gemma")
    if join == "attention":
        ours["input_layernorm.weight"] = ours.pop("hidden_norm.weight")  # of the state; the embedding has its own
        for name in [f"self_attn.{x}_proj.weight" for x in "qkv"]:
            assert not ours[name][:, :32].any(), "the embedding is silent at first"
            ours[name] = ours[name][:, 32:]
        assert drafter.norm.weight.equal(final) and drafter.lm_head.weight.equal(target.head.weight * target.head.scale)
    else:
        theirs.pop("input_layernorm.weight")  # EAGLE-1 has none
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].equal(weight), name
    # and then it says what the target says, where the highest tap is that layer's input and nothing scales the parts
    if join == "attention" and family != "granite":
        assert drafter.taps == (1, 2, -1)
        drafter = build(options.model_copy(update={"taps": (0, 1, 2)}).fitted(target), Shape.of(target))
        drafter.start(target)
        drafter.borrow(target)
        batch, _ = packed()
        hidden, last = states_of(target, drafter, batch)
        (state,) = unrolled(drafter, batch, hidden, 1)
        real = batch.document >= 0
        torch.testing.assert_close(drafter.head(state, 0)[real], target.head(last)[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_can_be_drafted_for_from_random_weights(family: str) -> None:
    target = target_of(family)
    assert target.window is None or target.window >= 64
    for method in METHODS:
        drafter = eagle(target, method)
        batch, _ = packed()
        sums = TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head)
        sums.total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
        prompts = texts([6, 3])
        generation = Decoder(target, drafter.eval(), TREE).generate(prompts, 6)
        assert generation.tokens == [slow_greedy(target, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe", "deepseek_v3", "cohere", "phi", "olmo2", "stablelm"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_layer_that_is_not_made_of_llamas_parts_is_no_start(family: str, method: str) -> None:
    target = target_of(family)
    with pytest.raises(Refusal, match=r"method\.start: .* nearest: method\.start=random"):
        eagle(target, method, start="target")


@pytest.mark.parametrize("family", ["llama", "granite", "qwen3_moe", "deepseek_v3", "olmo2"])
def test_a_head_to_start_from_is_the_targets_whatever_its_layers(family: str) -> None:
    target = target_of(family)
    drafter, blank = (eagle(target, "eagle3", start=start) for start in ("head", "random"))
    assert drafter.norm.weight.equal(target.body.norm.weight)
    assert drafter.lm_head.weight.equal(target.head.weight * target.head.scale)
    hidden, _ = states_of(target, drafter, packed()[0])
    torch.testing.assert_close(drafter.read(hidden), hidden[..., -32:])
    for (name, ours), theirs in zip(drafter.midlayer.named_parameters(), blank.midlayer.parameters(), strict=True):
        silent = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # so that it passes the feature on
        assert ours.equal(torch.zeros_like(theirs) if silent else theirs), name
    with pytest.raises(Refusal, match=r"method\.start: .* RMSNorm .* nearest: method\.start=random"):
        eagle(target_of("phi"), "eagle3", start="head")


def test_a_start_that_does_not_fit_is_refused_by_name() -> None:
    target = target_of("llama")
    with pytest.raises(Refusal, match=r"method\.layer: mlp\.gate_proj\.weight would be \[64, 32\].*method\.start=head"):
        eagle(target, "eagle3", start="target", layer={"intermediate": 64})
    for layer in (3, -4):
        with pytest.raises(Refusal, match=rf"method\.start_layer: .* layers 0 to 2 .* not {layer}"):
            eagle(target, "eagle3", start="target", start_layer=layer)
    third = eagle(target, "eagle3", start="target", start_layer=0)
    assert third.midlayer.mlp.up_proj.weight.equal(target.blocks[0].mlp.up_proj.weight)


@any_method
def test_the_unroll_compiles_whole_once_for_all_widths_and_gives_the_same_gradients(method: str) -> None:
    target = target_of("llama")
    drafter = eagle(target, method, spread=0.1).train()
    torch._dynamo.reset()
    seen: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(len(inputs))
        return graph.forward

    compiled = torch.compile(unrolled, dynamic=True, fullgraph=True, backend=counting)
    for lengths in ([6, 9, 13], [8, 8, 7, 3], [20, 2, 5]):
        batch = pack([Example(torch.tensor(words), torch.ones(len(words)).bool()) for words in texts(lengths)], 20)
        hidden, _ = states_of(target, drafter, batch)
        found = []
        there = torch.stack([predicted(batch, k) for k in range(drafter.unroll)]).flatten(1)
        for run in (unrolled, compiled):
            states = run(drafter, batch, hidden, drafter.unroll, wanted(drafter, batch, there, 2))
            sum(state.square().mean() for state in states).backward()
            found.append([*states, *(p.grad for p in drafter.parameters() if p.grad is not None)])
            drafter.zero_grad()
        assert len(found[0]) == len(found[1]) > drafter.unroll
        for eager, fused in zip(*found, strict=True):
            torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-6)
    assert len(seen) == 1


@any_method
def test_training_leaves_the_targets_bytes_alone(method: str) -> None:
    target = target_of("llama", tie_word_embeddings=True)
    before, batch = digest(target), packed()[0]
    drafter = eagle(target, method, start="target")
    mine = {parameter.data_ptr() for parameter in drafter.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in target.parameters()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(3):
        TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head).total.backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        optimizer.step()
    assert digest(target) == before
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())


# ---------------------------------------------------------------- between depths


@pytest.mark.parametrize("rows", [streams.ROWS, 5])  # at once, or a few at a time
@pytest.mark.parametrize("drafted", [False, True])
@any_method
def test_loss_and_every_gradient_are_those_of_a_naive_float64_pass(
    method: str, drafted: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ROWS", rows)
    monkeypatch.setattr(streams, "LONG", rows)
    target = target_of("llama")
    terms = TERMS if method == "eagle3" else TERMS | {"smooth_l1": 0.6}
    drafter = eagle(target, method, torch.arange(0, 64, 2) if drafted else None, spread=0.15, objective=terms)
    seen = lambda t, k: [*((i, 0) for i in range(t + 1)), *((t, depth) for depth in range(1, k + 1))]  # noqa: E731
    assert_learns_as_defined(target, drafter, partial(listed_states, seen=seen))


@pytest.mark.parametrize("detach", [True, False])
@any_method
def test_a_depth_shapes_the_feature_before_it_only_where_that_is_not_detached(method: str, detach: bool) -> None:
    target, (batch, _) = target_of("llama"), packed()
    drafter = eagle(target, method, detach=detach, unroll=3, noise=0.1)
    given, handed, step = [], [], drafter.step

    def watching(feature: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        given.append(feature)
        onward, state = step(feature, *rest)
        handed.append(onward)
        return onward, state

    drafter.step = watching  # type: ignore[method-assign]
    states = unrolled(drafter, batch, states_of(target, drafter, batch)[0], 3)
    for k in (1, 2):
        assert given[k].equal(handed[k - 1]), "no noise between depths"
        (gradient,) = torch.autograd.grad(states[k].sum(), handed[k - 1], retain_graph=True, allow_unused=True)
        assert gradient is None if detach else gradient.any()
    assert drafter.fc is not None
    (gradient,) = torch.autograd.grad(states[0].sum(), drafter.fc.weight)
    assert gradient.any(), "what the target's states become is learnt"


@any_method
def test_noise_is_for_the_features_of_training_alone(method: str) -> None:
    target, (batch, _) = target_of("llama"), packed()
    drafter, quiet = eagle(target, method, noise=0.1), eagle(target, method)
    hidden, _ = states_of(target, drafter, batch)
    clean = quiet.read(hidden)
    assert not drafter.read(hidden).equal(drafter.read(hidden))
    added = drafter.read(hidden) - clean
    assert 0.09 < added.max() <= 0.1 + 1e-5 and -0.1 - 1e-5 <= added.min() < -0.09 and added.mean().abs() < 0.01
    assert drafter.eval().read(hidden).equal(clean)


class Seer(Drafter):
    """Carries what the target's state will be in the text 0, 1, 2, ..., whose state at i is i."""

    def __init__(self) -> None:
        super().__init__(Options(name="seer", unroll=4, objective={"smooth_l1": 1.0}), Shape(1, 3, VOCAB))

    def step(self, feature: Tensor, tokens: Tensor, depth: int, ctx: Context) -> tuple[Tensor, Tensor]:
        return feature + 1, feature + 1

    def head(self, state: Tensor, depth: int) -> Tensor:
        return F.one_hot(state[..., 0].long() % VOCAB, VOCAB).float()


def test_a_feature_is_held_against_the_targets_own_where_it_stands() -> None:
    text = torch.arange(10)[None]
    batch = Batch(text, text, torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    step, hidden, counts = TrainStep(Seer()), text[..., None].float(), [8, 7, 6, 5]
    for shift, loss in ((0, 0.0), (1, 0.5), (-2, 1.5)):  # 1 away is 1 / 2, 2 away is 2 - 1 / 2
        sums = step(batch, hidden, hidden + shift, None)  # type: ignore[arg-type]
        assert (sums.loss / step.counts(batch).learnt).tolist() == [loss] * 4 and step.counts(
            batch
        ).learnt.tolist() == counts


# ---------------------------------------------------------------- taps


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (2, (0, 1, -1)),
        (3, (1, 2, -1)),
        (4, (1, 2, 3)),
        (5, (1, 2, 4)),
        (6, (1, 3, 5)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
    ],
)
def test_default_taps_are_a_low_a_middle_and_a_high_state_of_any_depth(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps and len({tap % (layers + 1) for tap in taps}) == 3
    if layers <= 7:
        target = target_of("llama", num_hidden_layers=layers)
        assert eagle(target, "eagle3").taps == taps and eagle(target, "hass").taps == (-1,)


def test_a_single_layer_has_no_three_taps_and_the_refusal_says_what_it_has() -> None:
    target = target_of("llama", num_hidden_layers=1)
    with pytest.raises(
        Refusal, match=r"method\.taps: this target has 1 layer.*nearest: method\.taps=\[0,-1\]"
    ) as refusal:
        eagle(target, "eagle3")
    assert "\n" not in str(refusal.value)
    batch, _ = packed()
    for taps in ((0, -1), (-1,)):
        drafter = eagle(target, "eagle3", taps=taps, start="target")
        assert drafter.taps == taps
        TrainStep(drafter)(batch, *states_of(target, drafter, batch), target.head)


# ---------------------------------------------------------------- exports


EXPORTS = {method: (method, vocab_map) for method, vocab_map in (("eagle", None), ("hass", EVEN), ("eagle3", EVEN))}


def exported(drafter: Drafter, target: Target, where: Path, dtype: str = "bfloat16") -> Path:
    return save_export(drafter, where, dtype, {"name": "hf", "fingerprint": target.fingerprint})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", EXPORTS)
@torch.no_grad()
def test_an_export_says_what_the_trained_drafter_said_and_holds_nothing_else(
    method: str, dtype: str, tmp_path: Path
) -> None:
    target, (batch, _) = (
        target_of("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        packed(),
    )
    drafter = eagle(target, *EXPORTS[method], spread=0.1, noise=0.1).eval()
    where = exported(drafter, target, tmp_path / "export", dtype)
    again, about = load_export(where, target)
    ours = drafter.to(DTYPES[dtype])
    ours.borrow(target)
    assert isinstance(again, Eagle) and not again.training and again.dtype == DTYPES[dtype]
    hidden, _ = states_of(target, ours, batch)
    for k, (state, theirs) in enumerate(zip(*(unrolled(d, batch, hidden, 4) for d in (ours, again)), strict=True)):
        for one, other in ((state, theirs), (ours.head(state, k), again.head(theirs, k))):
            assert one.equal(other) or dtype == "bfloat16"  # which steps quicker, and rounds elsewhere
            assert (one - other).float().norm() <= 0.02 * one.float().norm()
    assert about["method"]["layer"] == ours.options.layer.model_dump() and about["taps"] == list(ours.taps)
    layer = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [f"self_attn.{x}_norm.weight" for x in "qk"]
    layer += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")] + ["post_attention_layernorm.weight"]
    if method == "eagle3":  # the official names
        wanted = {f"midlayer.{name}" for name in [*layer, "input_layernorm.weight", "hidden_norm.weight"]}
        wanted |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    else:
        wanted = {f"layers.0.{name}" for name in layer} | {"fc.weight"}
        wanted |= {"fc.bias"} if method == "eagle" else {"d2t", "t2d"}
    tensors = load_file(where / "model.safetensors")
    assert tensors.keys() == wanted
    if "d2t" in wanted:
        assert tensors["d2t"].equal(EVEN - torch.arange(32)) and tensors["t2d"].nonzero()[:, 0].equal(EVEN)


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "marked too many": (lambda t: t["t2d"].__setitem__(1, True), "t2d marks other tokens than d2t leads to"),
    "marked too few": (lambda t: t["t2d"].__setitem__(0, False), "t2d marks other tokens than d2t leads to"),
    "marked others": (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d marks other tokens than d2t leads to"),
    "led elsewhere": (lambda t: t["d2t"].__setitem__(31, t["d2t"][31] + 1), "t2d marks other tokens than d2t leads to"),
    "led to one twice": (lambda t: t["d2t"].__setitem__(3, t["d2t"][2] - 1), "ascending list of distinct ids below 64"),
    "led beyond the table": (lambda t: t.update(d2t=t["d2t"] + 5), "ascending list of distinct ids below 64"),
    "no offsets but ids": (lambda t: t.update(d2t=EVEN.clone()), "ascending list of distinct ids below 64"),
    "one of them missing": (lambda t: t.pop("t2d"), "tensor t2d is missing"),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_a_draft_vocabulary_that_contradicts_itself_is_refused(fault: str, tmp_path: Path) -> None:
    target = target_of("llama")
    where = exported(eagle(target, "eagle3", EVEN), target, tmp_path / "export")
    damage, says = CONTRADICTIONS[fault]
    tensors = load_file(where / "model.safetensors")
    damage(tensors)
    save_file(tensors, where / "model.safetensors")
    with pytest.raises(Refusal) as refusal:
        load_export(where, target)
    assert str(refusal.value).startswith(f"drafter={where}: ") and says in str(refusal.value)


BY_HAND: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"no {size}": ({"layer": {size: None}}, f"method.layer.{size}: null")
        for size in ("heads", "kv_heads", "head_dim", "intermediate", "eps", "rope")
    },
    "no taps": ({"taps": None}, "method.taps: null"),
    "negative heads": ({"layer": {"heads": -1}}, "method.layer.heads: "),
    "theta in words": ({"layer": {"rope": {"rope_theta": "many"}}}, "method.layer.rope: rope_theta 'many' is no"),
    "theta of nothing": ({"layer": {"rope": {"rope_theta": None}}}, "method.layer.rope: rope_theta None is no"),
    "theta below 0": ({"layer": {"rope": {"rope_theta": -1.0}}}, "method.layer.rope: rope_theta -1.0 is no"),
    "no theta": ({"layer": {"rope": {}}}, "method.layer.rope: rope_theta is missing"),
    "half a head": (
        {"layer": {"rope": {"rope_theta": 1e4, "partial_rotary_factor": "half"}}},
        "method.layer.rope: {'rope_theta': 10000.0, 'partial_rotary_factor': 'half'} gives no angles",
    ),
    "factor in words": (
        {"layer": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"}}},
        "method.layer.rope: {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 'two'} gives no angles",
    ),
}


@pytest.mark.parametrize("fault", BY_HAND)
def test_an_export_that_was_edited_by_hand_is_refused_by_folder_and_option(fault: str, tmp_path: Path) -> None:
    target = target_of("llama")
    where = exported(eagle(target, "eagle3"), target, tmp_path / "export")
    about = json.loads((where / "drafter.json").read_text())
    change, says = BY_HAND[fault]
    layer = about["method"]["layer"] | change.get("layer", {})
    about["method"] |= change | {"layer": layer}
    (where / "drafter.json").write_text(json.dumps(about))
    with pytest.raises(Refusal) as refusal:
        load_export(where, target)
    assert str(refusal.value).startswith(f"drafter={where}: {says}") and "\n" not in str(refusal.value)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint_of_target(tmp_path_factory.mktemp("target"))
    lines = [{"prompt": "HELLO", "response": f"{n} ZEBRAS & {n * n} GNUS!"} for n in range(24)]
    (folder / "other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(folder: Path, target_folder: Path, *more: str, program: str = "eagle") -> Path:
    """A run of train/PROGRAM.py over three steps; its folder."""
    small = ("method.draft_vocab=16", "decode.width=4", "decode.nodes=6", "train.save_every=1", "train.keep=9")
    folder.mkdir(exist_ok=True)
    fit(config(folder, target_folder, *small, *more, program=program))
    return folder / "run"


def described(run: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    about = json.loads((run / "export" / "drafter.json").read_text())
    return about, load_file(run / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A run of EAGLE-3 on the first data."""
    return run(tmp_path_factory.mktemp("trained"), target_folder)


def test_the_stop_tokens_can_be_drafted_and_the_vocabulary_is_the_checkpoints_too(
    trained: Path, target_folder: Path
) -> None:
    about, tensors = described(trained)
    ids = tensors["d2t"] + torch.arange(16)
    assert len(ids) == 16 and tensors["t2d"].nonzero()[:, 0].equal(ids)
    tokenizer = load_tokenizer(target_folder)
    assert set(stop_ids(tokenizer)) <= set(ids.tolist()) and ids.max() < len(tokenizer)
    assert 0.5 < about["vocabulary_coverage"] < 1 and about["method"]["draft_vocab"] == 16
    kept = load_file(trained / "checkpoints" / "step-000003" / "drafter.safetensors")
    assert kept.keys() == tensors.keys() and kept["d2t"].equal(tensors["d2t"])


OTHER = "data.path={}/other.jsonl"


def test_other_data_gives_another_vocabulary_but_not_to_weights_that_go_on(
    trained: Path, target_folder: Path, tmp_path: Path
) -> None:
    other = OTHER.format(target_folder)
    before, theirs = described(trained)
    fresh, ours = described(run(tmp_path / "fresh", target_folder, other, "train.steps=1"))
    assert not ours["d2t"].equal(theirs["d2t"]) and fresh["vocabulary_coverage"] != before["vocabulary_coverage"]
    place = trained / "checkpoints" / "step-000002"
    for name, word in (("resumed", f"resume={place}"), ("begun", f"method.init_from={trained}/export")):
        about, ours = described(run(tmp_path / name, target_folder, other, word, "train.steps=4"))
        assert ours["d2t"].equal(theirs["d2t"]) and ours["t2d"].equal(theirs["t2d"])
        assert about["vocabulary_coverage"] == before["vocabulary_coverage"]
        assert "init_from" not in about["method"] and about["method"] == before["method"]


@pytest.mark.parametrize(
    ("program", "more"),
    [("eagle", ["method=eagle3"]), ("eagle", ["method=hass"]), ("medusa", ["method.heads=2"])],
    ids=["eagle3", "hass", "medusa"],
)
def test_a_run_goes_on_from_an_exports_weights(
    program: str, more: list[str], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path / "first", target_folder, *more, program=program)
    begun: list[tuple[Drafter, dict[str, Tensor]]] = []
    trunk_of = loop.trunk_of

    def watching(cfg: Any, target: Target, drafter: Drafter, *rest: Any) -> Any:
        begun.append((drafter, {name: tensor.clone() for name, tensor in drafter.state_dict().items()}))
        return trunk_of(cfg, target, drafter, *rest)

    monkeypatch.setattr(loop, "trunk_of", watching)
    # how it is trained may differ, what it is may not
    asked = [*more, f"method.init_from={first}/export", "method.decay=0.5", "train.log_every=1"]
    asked += ["method.unroll=2"] if program == "eagle" else []
    second = run(tmp_path / "second", target_folder, *asked, program=program)
    ((drafter, weights),) = begun
    exported = load_file(first / "export" / "model.safetensors")
    assert weights.keys() == exported.keys() and all(weights[name].equal(exported[name]) for name in weights)
    assert drafter.training and all(parameter.requires_grad for parameter in drafter.parameters())
    about, tensors = described(second)
    assert about["method"] == json.loads((first / "export" / "drafter.json").read_text())["method"] | {
        "decay": 0.5,
        "unroll": drafter.options.unroll,
    }
    assert not any(tensors[name].equal(weights[name]) for name in dict(drafter.named_parameters()))
    # the same data at first: its loss goes on where the other's ended, not where it began
    losses = [
        [json.loads(line)["loss"][0] for line in (r / "metrics.jsonl").read_text().splitlines() if "loss" in line]
        for r in (first, second)
    ]
    assert losses[1][0] < losses[0][0]


def test_what_an_export_is_made_of_cannot_be_asked_to_be_otherwise(
    trained: Path, target_folder: Path, tmp_path: Path
) -> None:
    export = trained / "export"

    def refused(*words: str, program: str = "eagle") -> str:
        with pytest.raises(Refusal) as refusal:
            config(tmp_path, target_folder, f"method.init_from={export}", *words, program=program)
        assert "\n" not in str(refusal.value) and str(export) in str(refusal.value)
        return str(refusal.value)

    # before any model loads
    assert "method.draft_vocab: 64, but" in refused() and "nearest: method.draft_vocab=16" in refused()
    same = "method.draft_vocab=16", "decode.width=8"
    assert "method.name: medusa, but" in refused(*same, program="medusa")
    assert "nearest: method=eagle" in refused(*same, program="medusa")
    assert "method.join: fc, but" in refused(*same, "method.join=fc")
    assert "method.layer.heads: 2, but" in refused(*same, "method.layer.heads=2")
    assert "nearest: method.layer.heads=4" in refused(*same, "method.layer.heads=2")
    assert "method.taps: [0], but" in refused(*same, "method.taps=[0]")

    # once the target is known
    def fails(*words: str) -> str:
        with pytest.raises(Refusal) as refusal:
            run(tmp_path, target_folder, f"method.init_from={export}", *words)
        return str(refusal.value)

    assert "method.draft_vocab: null, but" in fails("method.draft_vocab=null")
    assert fails("target=tiny", "target.path=null").startswith(f"method.init_from={export} was trained for a target")


@any_method
def test_a_run_in_bfloat16_trains_and_its_export_drafts_in_any_dtype(
    method: str, target_folder: Path, tmp_path: Path
) -> None:
    more = ("dtype=bfloat16", "export.dtype=bfloat16", "train.steps=2", "data.features=memory", "decode.tree=static")
    about, _ = described(run(tmp_path, target_folder, f"method={method}", *more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines[-1]["held_out_accuracy"]) == 4, "as deep as it is decoded, not as it is trained"
    assert about["taps"] == ([0, 1, -1] if method == "eagle3" else [-1]) and about["dtype"] == "bfloat16"
    for theirs, ours in (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        target = Target.load(str(target_folder), theirs)
        drafter, _ = load_export(tmp_path / "run" / "export", target, ours)
        assert [len(said) for said in Decoder(target, drafter, TREE).generate(PROMPTS, 8).tokens] == [8] * 3


def test_a_run_with_noise_that_broke_off_ends_as_if_it_had_not(target_folder: Path, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", target_folder, "method=eagle", "eval.every=1")
    place = whole / "checkpoints" / "step-000001"
    again = run(tmp_path / "again", target_folder, "method=eagle", "eval.every=1", f"resume={place}")
    for file in ("drafter.safetensors", "optimizer.safetensors"):
        ours, theirs = ((folder / "checkpoints" / "step-000003" / file).read_bytes() for folder in (again, whole))
        assert ours == theirs


def test_a_token_that_cannot_be_drafted_is_a_miss() -> None:
    target, (batch, _) = target_of("llama"), packed()
    drafter = eagle(target, "eagle3", EVEN)
    hidden, last = states_of(target, drafter, batch)
    step = TrainStep(drafter)
    counts, sums = step.counts(batch), step(batch, hidden, last, target.head.rows(EVEN))
    assert (sums.right <= counts.learnt).all() and (counts.learnt < counts.asked).all()
    found = ranks(drafter, batch, hidden, 4)
    assert [(found[:, k] == len(EVEN)).sum() for k in range(4)] == (counts.asked - counts.learnt).tolist()
