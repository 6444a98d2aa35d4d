"""Draft models: the logits of the model itself, the target's output, p/q acceptance, an export that stands alone."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import PROMPTS, TERMS, Logits, assert_learns_as_defined, packed, states_of, texts
from fakes import FAMILIES, model_of, slow_greedy, target_of
from runs import checkpoint_of_target, contents, digest, steps
from safetensors.torch import load_file, save_file
from test_verify import chi_square
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.conf.entry import load
from paceline.data.conversations import load_tokenizer
from paceline.decode import Decoder, DynamicShape, Sampler, StaticShape, chain, reject
from paceline.models.draft_model import DraftModel, DraftOptions, default_layers
from paceline.models.drafter import Context, Shape, build
from paceline.models.errors import Refusal
from paceline.models.export import load_export
from paceline.models.target import Target
from paceline.train.loop import fit
from paceline.train.step import unrolled

TREE = StaticShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SHAPES = {"chain": chain(4), "tree": TREE, "dynamic": DynamicShape(12, 3, 3)}


def cut(
    target: Target, layers: Sequence[int] | None = None, tables: str = "shared", spread: float = 0.0, **more: Any
) -> DraftModel:
    """A draft model of layers of the target, with noise of this size on every weight."""
    options = DraftOptions(name="draft", target_layers=layers, tables=tables, **more).fitted(target)
    drafter = build(options, Shape.of(target))
    assert isinstance(drafter, DraftModel)
    drafter.start(target)
    drafter.borrow(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return drafter.eval()


def small(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A random LM of another width than the target's, saved with the bundled tokenizer."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 288}
    model_of(family, **sizes | options).save_pretrained(folder)
    for file in (Path(__file__).parent.parent / "models" / "tiny").iterdir():
        shutil.copy(file, folder)
    return folder


# ---------------------------------------------------------------- the logits are the model's own


@pytest.mark.parametrize("tables", ["own", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_its_logits_are_those_of_the_model_at_every_position_the_first_included(family: str, tables: str) -> None:
    target = target_of(family)
    drafter = cut(target, [0, 1, 2], tables)  # all layers: the target itself
    batch, documents = packed()
    states = unrolled(drafter, batch, states_of(target, drafter, batch)[0], 3)
    for (line, start), words in documents.items():
        theirs = target.model(torch.tensor([words]), use_cache=False).logits[0]
        for k, state in enumerate(states):  # row j of depth k goes on from t = j - 1 and has read x[t + 1 + k]
            ours = drafter.head(state[line, start : start + len(words) - k], k)
            torch.testing.assert_close(ours, theirs[k:], atol=1e-5, rtol=1e-5)
        # in decoding: the text in two pieces, then a tree of two levels
        memory, count = drafter.memory(1, len(words) + 8), torch.tensor([len(words) // 2])
        ids, nothing = torch.tensor([words]), torch.zeros(1, len(words), 0)
        served = []
        for piece in torch.arange(len(words)).split([int(count), len(words) - int(count)]):
            ctx = Context(piece[None] - 1, torch.tensor([len(piece)]), memory)
            served.append(drafter.head(drafter.step(nothing[:, piece], ids[:, piece], 0, ctx)[1], 0))
        torch.testing.assert_close(torch.cat(served, 1)[0], theirs, atol=1e-5, rtol=1e-5)
        level = torch.full((1, 2), len(words))
        for depth, (nodes, parents) in enumerate((([7, 8], [0, 0]), ([9, 10], [1, 0])), start=1):
            at = Context(level - 2 + depth, torch.tensor([2]), memory, torch.tensor([parents]))
            state = drafter.step(nothing[:, :2], torch.tensor([nodes]), depth, at)[1]
        for node, path in enumerate(([8, 9], [7, 10])):
            theirs = target.model(torch.tensor([words + path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(drafter.head(state, 2)[0, node], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt_neox", "deepseek_v3"])
@pytest.mark.parametrize("tables", ["own", "shared"])
@torch.no_grad()
def test_a_cut_model_is_the_target_without_its_other_layers(family: str, tables: str) -> None:
    target = target_of(family, num_hidden_layers=4)
    drafter = cut(target, [0, -2], tables)
    assert drafter.options.target_layers == (0, 2)
    oracle = copy.deepcopy(target.model)
    blocks = next(m for m in oracle.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)
    del blocks[3], blocks[1]
    oracle.config.num_hidden_layers = 2
    if getattr(oracle.config, "layer_types", None):
        oracle.config.layer_types = oracle.config.layer_types[0::2]
    ids = torch.tensor(texts([9]))
    memory = drafter.memory(1, 9)
    _, state = drafter.step(torch.zeros(1, 9, 0), ids, 0, Context(torch.arange(9)[None] - 1, torch.tensor([9]), memory))
    wanted = oracle(ids, use_cache=False).logits
    torch.testing.assert_close(drafter.head(state, 0), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, target.model(ids).logits, atol=1e-1)


@torch.no_grad()
def test_a_16_bit_copy_turns_its_keys_by_the_angles_of_32() -> None:
    drafter = cut(target_of("llama", max_position_embeddings=4096))
    exact = drafter.model.rotary_emb.inv_freq.clone()
    assert drafter.bfloat16().model.rotary_emb.inv_freq.equal(exact) and drafter.dtype == torch.bfloat16


# ---------------------------------------------------------------- the output is the target's


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batched", [False, True], ids=["batch 1", "ragged 3"])
def test_greedy_output_is_the_targets(shape: StaticShape | DynamicShape, batched: bool) -> None:
    target = target_of("llama")
    plain = [slow_greedy(target, prompt, 24) for prompt in PROMPTS]
    for drafter in (cut(target, [0, 2]), cut(target, [0, 1, 2], spread=0.05)):  # seldom right, often right
        decoder = Decoder(target, drafter, shape)
        if batched:
            generation = decoder.generate(PROMPTS, 24)
            assert generation.tokens == plain
        else:
            assert [decoder.generate([prompt], 24).tokens[0] for prompt in PROMPTS] == plain
    accepted = decoder.generate(PROMPTS, 24).report
    assert 0 < accepted.num_accepted_tokens_per_pos[1] < accepted.num_drafts, "the toy must be right now and then"


@pytest.mark.parametrize("tables", ["own", "shared"])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0, seed=3), Sampler(0.7, 20, 0.9, seed=4)], ids=str)
def test_a_copy_of_the_target_is_always_accepted(sampler: Sampler, tables: str) -> None:
    target = target_of("llama")
    decoder = Decoder(target, cut(target, [0, 1, 2], tables), chain(4), reject, sampled=True)
    generation = decoder.generate(PROMPTS, 31, sampler=sampler)
    assert generation.report.num_accepted_tokens == generation.report.num_draft_tokens == 3 * 24
    assert generation.passes == 6
    if sampler.greedy:
        assert generation.tokens == [slow_greedy(target, prompt, 31) for prompt in PROMPTS]


def test_the_same_seed_gives_the_same_text_whoever_is_in_the_batch() -> None:
    target = target_of("llama")
    decoder = Decoder(target, cut(target, [0, 2]), TREE, reject, sampled=True)
    together = decoder.generate(PROMPTS, 20, sampler=Sampler(1.0, seed=5)).tokens
    alone = [decoder.generate([p], 20, sampler=Sampler(1.0, seed=5), rows=[i]).tokens[0] for i, p in enumerate(PROMPTS)]
    assert together == alone
    assert together != decoder.generate(PROMPTS, 20, sampler=Sampler(1.0, seed=6)).tokens


@pytest.mark.parametrize("shape", [chain(2), StaticShape(((0,), (1,), (0, 0)))], ids=["chain", "tree"])
@torch.no_grad()
def test_sampled_text_has_the_targets_distribution(shape: StaticShape) -> None:
    """Three tokens of a target of six, against their exact probabilities; q as drawn, and a q that was not."""
    target, sampler, rows = target_of("llama", vocab_size=6), Sampler(0.7, top_k=5, seed=1), 4000
    drafter, prompt = cut(target, [0, 2]), [1, 4]
    every = torch.tensor([[*prompt, *said] for said in product(range(6), repeat=3)])
    probs = sampler.probs(target.model(every).logits)  # [216, 5, 6]
    exact = probs[:, 1:4].gather(2, every[:, 2:, None])[..., 0].prod(1).double()
    assert abs(float(exact.sum()) - 1) < 1e-5

    def fit(verify: Any) -> float:
        decoder = Decoder(target, drafter, shape, verify, sampled=True)
        said = torch.tensor(decoder.generate([prompt] * rows, 3, sampler=sampler).tokens)
        index = said @ torch.tensor([36, 6, 1])
        return chi_square(torch.bincount(index, minlength=216).double(), rows * exact)

    def claiming(tree: Any, logits: Tensor, *more: Any) -> Any:
        tree.q = (tree.q > 0) / (tree.q > 0).sum(-1, keepdim=True).clamp(min=1)
        return reject(tree, logits, *more)

    assert fit(reject) > 1e-3
    assert fit(claiming) < 1e-6


def test_sampled_drafts_of_a_dynamic_tree_are_refused() -> None:
    target = target_of("llama")
    with pytest.raises(Refusal, match=r"decode\.drafts: sampled is not available with decode\.tree=dynamic"):
        Decoder(target, cut(target), DynamicShape(12, 3, 3), reject, sampled=True)


# ---------------------------------------------------------------- any small LM with the target's tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


def words(folder: Path, checkpoint: Path, *more: str) -> list[str]:
    """The command line of a small float32 run: one of the target's two layers, unless it begins otherwise."""
    begun = any(word.startswith(("method.model=", "method.init_from=")) for word in more)
    given = {} if begun else {"method.target_layers": "[0]"}
    given |= {
        "target": "hf",
        "target.path": checkpoint,
        "data": "jsonl",
        "data.path": checkpoint / "data.jsonl",
        "data.held_out": 0.1,
        "dtype": "float32",
        "export.dtype": "float32",
        "out": folder / "run",
        "train.steps": 4,
        "train.batch_tokens": 300,
        "train.log_every": 1,
        "eval.held_out_prompts": 2,
        "eval.max_new_tokens": 8,
    } | dict(word.split("=", 1) for word in more)
    return [f"{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize("rows", [259, 272, 304])  # the tokenizer's own size, less and more than the target's 288
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_table_of_another_length_drafts_what_the_tokenizer_knows(
    rows: int, family: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = small(tmp_path / "small", family, vocab_size=rows)
    options = DraftOptions(name="draft", model=str(model))
    for target in (Target.load(str(checkpoint), "float32", vocab=259), Target.load(str(checkpoint), "float32")):
        if target.vocab > rows:
            with pytest.raises(Refusal, match=rf"method\.model=.*: its embedding has {rows} rows, fewer"):
                options.fitted(target)
            continue
        drafter = build(options.fitted(target), Shape.of(target)).eval()
        drafter.start(target)
        drafter.borrow(target)
        prompts = [[5, 17, 3], [42, 8, 11, 60, 2]]
        for sampler in (Sampler(), Sampler(1.0, seed=2)):
            decoder = Decoder(target, drafter, TREE, reject, sampled=True)
            said = decoder.generate(prompts, 24, sampler=sampler).tokens
            assert max(map(max, said)) < target.vocab
            if sampler.greedy:
                assert said == [slow_greedy(target, prompt, 24) for prompt in prompts]


def test_another_tokenizer_is_refused_by_its_first_other_id_before_weights_load(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(tmp_path / "small")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    known = content["model"]["vocab"]
    ids = {i: token for token, i in known.items()}
    known[ids[70]], known[ids[71]] = 71, 70
    file.write_text(json.dumps(content))
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(Refusal, match=r"another tokenizer than the target's: id 70 is '.', the target's is '.';"):
        fit(load("draft", *words(tmp_path, checkpoint, f"method.model={model}")))
    del known[ids[71]]
    known[ids[70]] = 70
    file.write_text(json.dumps(content))
    with pytest.raises(Refusal, match="id 71 is not there"):
        DraftOptions(name="draft", model=str(model)).check_tokenizer(load_tokenizer(checkpoint))
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(Refusal, match="its tokenizer cannot be read"):
        DraftOptions(name="draft", model=str(model)).check_tokenizer(load_tokenizer(checkpoint))


LIMITED = {  # what a model sees at once, or turns its keys for
    "sliding": ("mistral", {"sliding_window": 48}),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 48, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


@pytest.mark.parametrize("kind", LIMITED)
def test_text_beyond_its_own_window_is_refused_in_decoding_and_in_training(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    family, limits = LIMITED[kind]
    model = small(tmp_path / "small", family, **limits)
    target, prompt = Target.load(str(checkpoint), "float32", vocab=259), [5, 17, 3, 42]
    drafter = build(DraftOptions(name="draft", model=str(model)).fitted(target), Shape.of(target)).eval()
    drafter.start(target)
    decoder = Decoder(target, drafter, chain(3))  # four nodes, two of them unfolded
    assert decoder.generate([prompt], 38).tokens == [slow_greedy(target, prompt, 38)]
    with pytest.raises(Refusal, match=r"^this draft model's window is 48 tokens, and .* need 49: .* max_new_tokens$"):
        decoder.generate([prompt], 39)
    with pytest.raises(Refusal, match=r"^data\.max_length: 512, but this draft model's window is 48 .* nearest: 48$"):
        fit(load("draft", *words(tmp_path, checkpoint, f"method.model={model}")))
    short = (f"method.model={model}", "data.max_length=48", "decode.nodes=2", "eval.every=1")
    with pytest.raises(Refusal, match=r"eval\.max_new_tokens: 40, .* leaves no prompt room in a window of 46; nearest"):
        fit(load("draft", *words(tmp_path, checkpoint, *short, "eval.max_new_tokens=40")))  # not at the first decode
    fit(load("draft", *words(tmp_path, checkpoint, *short, "eval.max_new_tokens=4")))


def test_a_model_that_is_not_whole_is_refused_by_its_first_missing_tensor(checkpoint: Path, tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    target = Target.load(str(checkpoint), "float32", vocab=259)
    drafter = build(DraftOptions(name="draft", model=str(model)).fitted(target), Shape.of(target))
    with pytest.raises(Refusal, match=rf"^method\.model={model}: tensor lm_head\.weight is missing"):
        drafter.start(target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("method.model=tiny", "method.target_layers=[0]"), "method.model: method.target_layers says already"),
        (("method.model=tiny", "method.tables=shared"), "method.tables: .* nearest: own"),
        (("method.model=nowhere/at/all",), "method.model: no such file or folder"),
        (("method.target_layers=[]",), r"method.target_layers: \[\] must be distinct"),
        (("method.target_layers=[1,1]",), r"method.target_layers: \[1, 1\] must be distinct"),
        (("+method.unroll=3",), "method.unroll: no such option"),
        (("+method.objective.smooth_l1=1.0",), "method.objective.smooth_l1"),
        (("method.table=own",), "method.table: no such option; nearest: method.tables"),
    ],
)
def test_what_a_draft_model_cannot_be_is_said_before_anything_loads(options: tuple[str, ...], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        load("draft", "target=tiny", *options)


@pytest.mark.parametrize("name, value", [("unroll", 3), ("draft_vocab", 64), ("taps", (-1,))])
def test_what_every_draft_model_has_alike_cannot_be_set(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"method\.{name}: .*nearest: "):
        DraftOptions(name="draft", **{name: value})


def test_layers_that_are_not_there_or_do_not_fit_are_named() -> None:
    with pytest.raises(Refusal, match=r"method\.target_layers: this target has layers 0 to 2 \(-1: the last\), not 3"):
        cut(target_of("llama"), [0, 3])
    with pytest.raises(Refusal, match=r"method\.target_layers: \[1, 2\] cannot be taken over, model\.layers\.0\.mlp"):
        cut(target_of("deepseek_v3"), [1, 2])  # its first layer is another kind
    assert [default_layers(n) for n in (1, 2, 4, 5, 30)] == [(0,), (0, -1), (0, -1), (0, 1, -2, -1), (0, 1, -2, -1)]


# ---------------------------------------------------------------- training, export, reload


@pytest.mark.parametrize("tables", ["own", "shared"])
def test_loss_and_every_gradient_are_those_of_a_naive_float64_pass(tables: str) -> None:
    target = target_of("llama")

    def states(exact: DraftModel, words: list[int], hidden: Tensor, depths: int) -> Logits:
        ids = torch.tensor([words])
        whole = exact._body[0](inputs_embeds=exact.borrowed.embed(ids)) if tables == "shared" else exact._body[0](ids)
        rows = whole.last_hidden_state[0]  # row i has read x[i]: at depth k, that of t = i - 1 - k
        return {(i - 1 - k, k): rows[i] for i in range(len(words)) for k in range(min(depths, i + 1))}

    drafter = cut(target, [0, 2], tables, spread=0.1, objective=TERMS).train()
    assert_learns_as_defined(target, drafter, states)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv", "lk"])
def test_every_objective_is_learnt_and_the_target_stays(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, load_target = [], Target.load

    def loaded(*args: Any) -> Target:
        target = load_target(*args)
        seen.append((target, digest(target)))
        return target

    monkeypatch.setattr(Target, "load", loaded)
    terms = {"method.objective.kl": 0.0} | {f"method.objective.{name}": 1.0}
    objective = [f"{term}={weight}" for term, weight in terms.items()]
    fit(load("draft", *words(tmp_path, checkpoint, "train.steps=12", "train.lr=3e-3", *objective)))
    losses = [line["loss"][0] for line in steps(tmp_path / "run")]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    ((target, before),) = seen
    assert digest(target) == before


@pytest.fixture(scope="module", params=["shared", "own", "model", "tied model"])
def run(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("run")
    kind = request.param
    if "model" in kind:
        how = f"method.model={small(folder / 'small', tie_word_embeddings='tied' in kind)}"
    else:
        how = f"method.tables={kind}"
    command = words(folder, checkpoint, how, "train.save_every=2")
    (folder / "command.json").write_text(json.dumps(command))
    fit(load("draft", *command))
    return folder / "run"


@torch.no_grad()
def test_an_export_of_tables_of_its_own_is_an_ordinary_causal_lm(run: Path, checkpoint: Path) -> None:
    target = Target.load(str(checkpoint), "float32", vocab=259)
    drafter, about = load_export(run / "export", target)
    ids = torch.tensor([[5, 17, 3, 42, 8]])
    memory = drafter.memory(1, 5)
    _, state = drafter.step(torch.zeros(1, 5, 0), ids, 0, Context(torch.arange(5)[None] - 1, torch.tensor([5]), memory))
    logits = drafter.head(state, 0)
    config = json.loads((run / "export" / "config.json").read_text())
    assert ("model_type" in config) == (about["method"]["tables"] == "own")
    if "model_type" in config:
        alone, report = AutoModelForCausalLM.from_pretrained(run / "export", output_loading_info=True)
        assert not any(report.values()) and alone.dtype == torch.float32
        torch.testing.assert_close(alone(ids).logits, logits, atol=1e-5, rtol=1e-5)
    code = (
        "import sys, torch\n"
        "from paceline.models.export import load_export\n"
        "from paceline.models.drafter import Context\n"
        "from paceline.models.target import Target\n"
        "drafter, _ = load_export(sys.argv[1], Target.load(sys.argv[2], 'float32', vocab=259))\n"
        "ids, memory = torch.tensor([[5, 17, 3, 42, 8]]), drafter.memory(1, 5)\n"
        "ctx = Context(torch.arange(5)[None] - 1, torch.tensor([5]), memory)\n"
        "with torch.no_grad():\n"
        "    torch.save(drafter.head(drafter.step(torch.zeros(1, 5, 0), ids, 0, ctx)[1], 0), sys.argv[3])\n"
    )
    found = run / "logits.pt"
    subprocess.run([sys.executable, "-c", code, run / "export", checkpoint, found], check=True, timeout=300, cwd="/")
    assert torch.equal(torch.load(found), logits)


def test_what_is_missing_extra_or_another_targets_is_refused(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    target = Target.load(str(checkpoint), "float32", vocab=259)
    broken = shutil.copytree(run / "export", tmp_path / "export")
    tensors = load_file(broken / "model.safetensors")
    assert all("embed" not in name and "lm_head" not in name for name in tensors) == (
        load_export(run / "export", target)[1]["method"]["tables"] == "shared"
    )
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(Refusal, match=r"tensor model\.norm\.weight is missing"):
        load_export(broken, target)
    save_file(tensors | {"model.norm.weight": norm, "extra": norm.clone()}, broken / "model.safetensors")
    with pytest.raises(Refusal, match="tensor extra belongs to no part"):
        load_export(broken, target)
    with pytest.raises(Refusal, match="fingerprint"):
        load_export(run / "export", target_of("llama"))


def test_a_run_that_was_stopped_ends_in_the_same_bytes(run: Path) -> None:
    whole = contents(run / "export")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "export")
    fit(load("draft", *json.loads((run.parent / "command.json").read_text()), "resume=true"))
    assert contents(run / "export") == whole


def test_training_goes_on_from_an_export(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    fit(load("draft", *words(tmp_path, checkpoint, f"method.init_from={run / 'export'}", "train.lr=1e-9")))
    target = Target.load(str(checkpoint), "float32", vocab=259)
    ours, theirs = (load_export(place / "export", target)[0].state_dict() for place in (tmp_path / "run", run))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(tensor, theirs[name], atol=1e-6) for name, tensor in ours.items())
