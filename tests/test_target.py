"""What a target promises: its own arithmetic, taps by their documented numbers, and refusals by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import FAMILIES, VOCAB, model_of, slow_greedy, target_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from paceline.decode import Decoder
from paceline.models.eagle import default_taps
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.layers import Rotary
from paceline.models.target import Target, rope_frequencies

IDS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(2))

# ---------------------------------------------------------------- arithmetic, family by family


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


@torch.no_grad()
def test_the_head_on_the_last_tap_is_the_models_logits(target: Target) -> None:
    hidden, last = target(IDS, taps=(-1,))
    logits = target.model(IDS, use_cache=False).logits
    torch.testing.assert_close(hidden, last, atol=0, rtol=0)
    torch.testing.assert_close(target.head(last), logits, atol=1e-5, rtol=1e-5)
    some = torch.tensor([3, 17, 60])
    torch.testing.assert_close(target.head.rows(some)(last), logits[..., some], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_tap_is_the_input_of_the_named_layer(target: Target) -> None:
    taps = (2, 0, -1, 1)
    hidden, _ = target(IDS, taps=taps)
    oracle = target.model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    for tap, state in zip(taps, hidden.split(target.hidden, -1), strict=True):
        torch.testing.assert_close(state, oracle[tap], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.embed(IDS), oracle[0], atol=0, rtol=0)
    assert not any(block._forward_pre_hooks for block in target.blocks), "a pass leaves no hook behind"


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    first, second = IDS[0, :7], IDS[1, :5]
    packed = torch.cat([first, second])[None]
    documents = torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    hidden, _ = target(packed, taps=(1, -1), documents=documents, positions=positions)
    alone = [target(text[None], taps=(1, -1))[0][0] for text in (first, second)]
    torch.testing.assert_close(hidden[0], torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_decoding_without_a_drafter_is_the_models_greedy_text(target: Target) -> None:
    prompts = [IDS[0, :6].tolist(), IDS[1, :3].tolist()]
    texts = Decoder(target).generate(prompts, 8).tokens
    assert texts == [slow_greedy(target, prompt, 8) for prompt in prompts]
    assert texts[0] == target.hf_generate(torch.tensor(prompts[:1]), 8).tolist()


def test_an_attention_softcap_survives_a_request_for_sdpa() -> None:
    model = model_of("gemma2")
    wanted = model(IDS, use_cache=False).logits
    model.config._attn_implementation = "sdpa"  # which drops the soft-cap without a word
    target = Target(model)
    torch.testing.assert_close(target.head(target(IDS)[1]), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_features_belong_to_their_tokens_in_any_batch_and_order() -> None:
    target, shared = target_of(), IDS[0, :8].tolist()
    prompts = [shared, [*shared, *IDS[1, :3].tolist()], IDS[1, 3:8].tolist()]

    def features(rows: list[list[int]]) -> list[torch.Tensor]:
        width = max(map(len, rows))
        hidden, _ = target(torch.tensor([row + [0] * (width - len(row)) for row in rows]), taps=(0, 2, -1))
        return [states[: len(row)] for states, row in zip(hidden, rows, strict=True)]

    together, back = features(prompts), features(prompts[::-1])[::-1]
    for prompt, one, other in zip(prompts, together, back, strict=True):
        (alone,) = features([prompt])
        torch.testing.assert_close(one, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(other, alone, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- a target whose arithmetic is known by heart


class Adds(nn.Module):
    """A block that adds 1."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class Trunk(nn.Module):
    """Embeds id i as [10 i, 10 i], adds 1 in each of L blocks, and its final norm negates."""

    def __init__(self, layers: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 2)
        self.embed_tokens.weight.data = 10.0 * torch.arange(8.0)[:, None].expand(8, 2).clone()
        self.layers = nn.ModuleList(Adds() for _ in range(layers))

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithPast(last_hidden_state=-hidden)


class Counting(nn.Module):
    """The stub in the clothes of a causal LM."""

    base_model_prefix = "model"
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, layers: int):
        super().__init__()
        self.model = Trunk(layers)
        self.lm_head = nn.Linear(2, 8, bias=False)
        self.config = type("Config", (), {"hidden_size": 2, "num_hidden_layers": layers, "vocab_size": 8})()
        self.config.get_text_config = lambda: self.config

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache=False):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids).last_hidden_state))


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_taps_mean_what_is_documented(layers: int) -> None:
    target = Target(Counting(layers))
    wanted = sorted({0, layers // 2, layers - 1})
    hidden, last = target(torch.tensor([[4]]), taps=(*wanted, layers, -1))
    # the input of layer k has passed k blocks; that of the final norm all of them, and its output, -1, the norm too
    assert hidden[0, 0, ::2].tolist() == [*(40.0 + k for k in (*wanted, layers)), -(40.0 + layers)]
    assert last[0, 0, 0] == -(40.0 + layers)
    with pytest.raises(Refusal, match=rf"method.taps: .* layers 0 to {layers - 1} .* not {layers + 1}"):
        target(torch.tensor([[4]]), taps=(layers + 1,))


@pytest.mark.parametrize(
    ("layers", "default"),
    [(2, (0, 1, -1)), (3, (1, 2, -1)), (5, (1, 2, 4)), (7, (2, 3, 4)), (30, (2, 15, 27))],
)
def test_eagles_default_taps_are_those_of_the_papers_where_there_are_enough_layers(
    layers: int, default: tuple[int, ...]
) -> None:
    assert default_taps(layers) == default
    hidden, _ = Target(Counting(layers))(torch.tensor([[4]]), taps=default)
    assert hidden[0, 0, ::2].tolist() == [40.0 + k if k >= 0 else -(40.0 + layers) for k in default]
    # the first of them has passed as many blocks as it says, the last may have passed all and the final norm
    assert len(set(hidden[0, 0].tolist())) == 3


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_angles_of_a_drafter_are_those_of_its_target(kind: str) -> None:
    # stablelm's rotary may turn a part of each head
    more = {} if kind == "partial" else {"head_dim": 16}
    target = target_of("stablelm" if kind == "partial" else "llama", rope_parameters=dict(ROPES[kind]), **more)
    form = target.layer_form()
    frequencies, scaling = rope_frequencies(form["rope"], form["head_dim"])
    theirs = target.body.rotary_emb
    torch.testing.assert_close(frequencies, theirs.inv_freq, atol=0, rtol=0)
    assert scaling == theirs.attention_scaling and (scaling != 1) == (kind == "yarn")
    assert len(frequencies) == (2 if kind == "partial" else form["head_dim"] // 2)
    positions = torch.tensor([[0, 1, 7, 100]])
    for ours, oracle in zip(
        Rotary(frequencies, scaling)(positions, torch.float32), theirs(IDS.float(), positions), strict=True
    ):
        torch.testing.assert_close(ours[:, 0], oracle, atol=0, rtol=0)
    json_round = json.loads(json.dumps(form))
    assert json_round == form, "an export holds it"


def test_angles_that_depend_on_the_length_are_not_for_drafters() -> None:
    for kind in ("dynamic", "longrope", "yam"):
        with pytest.raises(
            Refusal, match=rf"method\.layer\.rope: {kind} is not available .* nearest: rope_type: default"
        ):
            rope_frequencies({"rope_type": kind, "rope_theta": 1e4}, 8)
    with pytest.raises(Refusal, match=r"method\.layer\.rope: rope_theta is missing"):
        rope_frequencies({"rope_type": "default"}, 8)
    with pytest.raises(Refusal, match=r"method\.layer\.rope: rope_type linear needs factor"):
        rope_frequencies({"rope_type": "linear", "rope_theta": 1e4}, 8)


@pytest.mark.parametrize(("part", "names"), [("logits", "logits"), ("embeddings", "embeddings")])
def test_arithmetic_that_is_not_understood_is_refused(part: str, names: str) -> None:
    model = Counting(2)
    if part == "logits":
        forward = model.forward
        model.forward = lambda *args, **more: CausalLMOutputWithPast(logits=2 * forward(*args, **more).logits)
    else:
        model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] + 5,), prepend=True)
    with pytest.raises(Refusal, match=rf"Counting does something to its {names}"):
        Target(model)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {}),
        ("falcon_mamba", {}),
        ("jamba", {"num_experts": 2}),
        ("lfm2", {"full_attn_idxs": [1]}),
        ("recurrent_gemma", {"attention_window_size": 32}),
        (
            "qwen3_next",
            {
                "head_dim": 8,
                "num_hidden_layers": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "num_experts": 2,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 8,
            },
        ),
    ],
)
def test_what_cannot_forget_is_refused_by_name(family: str, options: dict) -> None:
    model = model_of(family, **options)
    with pytest.raises(Refusal, match=rf"{type(model).__name__} keeps .* cannot forget rejected draft tokens"):
        Target(model)


def test_what_takes_no_positions_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"BloomForCausalLM takes no position ids"):
        target_of("bloom")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_window_is_respected_to_the_last_token(family: str) -> None:
    target, prompt = target_of(family, sliding_window=16), IDS[0, :9].tolist()
    assert target.window == 16
    # 9 + 6 + a tree of the root alone = 16: equal to transformers, whose cache does slide
    assert Decoder(target).generate([prompt], 6).tokens[0] == target.hf_generate(torch.tensor([prompt]), 6).tolist()
    with pytest.raises(Refusal, match=r"window is 16 tokens, and prompt .* need 17") as refusal:
        Decoder(target).generate([prompt], 7)
    assert "\n" not in str(refusal.value)
    with pytest.raises(Refusal, match=r"window is 16 tokens, and .* need 17"):
        target(torch.zeros(1, 17, dtype=torch.long))
    packed = torch.zeros(1, 32, dtype=torch.long)  # documents that fit the window may be packed into longer rows
    target(packed, documents=torch.arange(32)[None] // 16, positions=torch.arange(32)[None] % 16)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert target_of("qwen2", sliding_window=16, use_sliding_window=False).window is None
    assert target_of("mistral").window is None


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_missing_bitsandbytes_is_one_clear_line(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(Refusal) as refusal:
        Target.load("nowhere", quantize=quantize)
    assert str(refusal.value).startswith(f"target.quantize={quantize} needs bitsandbytes: pip install")
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        Target.load(str(tmp_path))
    assert str(refusal.value).startswith(f"target.path={tmp_path}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("base", r"tensor lm_head\.weight is missing: no whole LlamaForCausalLM"),
        ("renamed", r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("drafter", r"tensor lm_head\.weight \(and 19 more\) is missing"),
        ("misshapen", r"tensor model\.norm\.weight has shape \[33\], LlamaForCausalLM of its config\.json \[32\]"),
        ("damaged", r"\S+"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_and_not_made_up(fault: str, says: str, tmp_path: Path) -> None:
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if fault == "base":
        model.model.save_pretrained(tmp_path)
    elif fault == "renamed":
        tensors["model.layers.1.mlp.upwards.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    elif fault == "drafter":
        tensors = {"model.norm.weight": tensors["model.norm.weight"], "fc.weight": torch.zeros(32, 64)} | {
            name: tensor for name, tensor in tensors.items() if ".layers.0." in name
        }
    elif fault == "misshapen":
        tensors["model.norm.weight"] = torch.ones(33)
    if fault != "base":
        save_file(tensors, file, metadata={"format": "pt"})
    if fault == "damaged":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Refusal, match=rf"^target\.path={tmp_path}: {says}") as refusal:
        Target.load(str(tmp_path))
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- identity and vocabulary


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint on disk."""
    where = tmp_path_factory.mktemp("checkpoint")
    model_of("llama", tie_word_embeddings=True).save_pretrained(where)
    return str(where)


def test_the_fingerprint_is_the_weights_not_the_dtype(saved: str) -> None:
    prints = {Target.load(saved, dtype).fingerprint for dtype in ("float32", "bfloat16", "float16")}
    assert len(prints) == 1
    (theirs,) = prints
    with torch.no_grad():
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            changed = Target.load(saved)
            changed.model.get_submodule(f"model.layers.1.{part}").weight.normal_()
            assert changed.fingerprint.split("-")[0] == theirs.split("-")[0]
            assert changed.fingerprint.split("-")[1] != theirs.split("-")[1]
        changed = Target.load(saved)
        changed.model.get_input_embeddings().weight.mul_(-1)
        assert changed.fingerprint.split("-")[1] == theirs.split("-")[1] != changed.fingerprint


def test_rows_that_only_pad_the_table_are_never_said(saved: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():  # padding rows that would win every time
        model.get_input_embeddings().weight[60:] = 20 * model.get_input_embeddings().weight[:4]
    target = Target(model, vocab=60)
    assert max(slow_greedy(Target(model), [1, 2, 3], 16)) >= 60, "the toy must show the fault"
    said = Decoder(target).generate([[1, 2, 3]], 32).tokens[0]
    assert max(said) < 60
    assert said == slow_greedy(target, [1, 2, 3], 32)


def test_two_processes_building_the_same_target_both_get_it_whole(tmp_path: Path) -> None:
    code = (
        "from paceline.models.embedded import folder\n"
        "from paceline.models.target import Target\n"
        "print(Target.load(folder('tiny'), 'float32').fingerprint, folder('tiny'))"
    )
    environment = {**os.environ, "PACELINE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-1", "tiny-1.lock"]


def test_a_killed_build_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder("tiny")
    assert not (tmp_path / "tiny-1").exists()
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert (Path(folder("tiny")) / "tokenizer.json").is_file()
