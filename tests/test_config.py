"""The command line: what is wrong is refused in one line before anything loads, what is right holds from any folder."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.conf.elsewhere import ELSEWHERE, GIVEN, here
from paceline.conf.entry import entry, load
from paceline.conf.schema import TrainConfig
from paceline.conf.section import option_names, validated
from paceline.models.errors import Refusal
from paceline.scripts.compare import planned

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"

# What is typed, and what the one line must hold: the option, and the nearest that is valid.
REFUSED = {
    "method.head=3": ["method.head:", "method.heads"],
    "method.hed=3": ["method.hed:", "nearest: method.head"],
    "+trainer.lrr=1e-3": ["trainer.lrr:", "nearest: train.lr"],
    "method=medussa": ["method:", "'medussa'", "nearest: medusa"],
    "experiment=dmo": ["experiment:", "'dmo'", "nearest: demo"],
    "train.lr=-1": ["train.lr:", "-1", "greater than 0"],
    "train.lr=1e-4x": ["train.lr:", "'1e-4x'", "number"],
    "decode.depth=6": ["decode.depth: 6 is deeper than the drafter's 4 heads; nearest: 4"],
    "eval.prompts=demo": ["eval.prompts:", "no such option", "nearest: eval.held_out_prompts"],
    "train.lr=[1": ["train.lr:", "cannot be read"],
}
ALSO_REFUSED = {
    "decode.nodes=1": ["decode.nodes: 1 is the root alone", "nearest: 2"],
    "+train.lrr=1e-3": ["train.lrr:", "nearest: train.lr"],
    "++method.hed=4": ["method.hed:", "nearest: method.head"],
    "method={hedas: 3}": ["method.hedas:", "nearest: method.heads"],
    "lr=1e-3": ["lr:", "nearest: train.lr"],
    "+experimnt=demo": ["experimnt:", "nearest: experiment"],
    "hydra.rn.dir=x": ["hydra.rn.dir:", "nearest: hydra.run.dir"],
    "method=null": ["method:"],
    "train=5": ["train:", "nearest: default"],
    "accelerate=cpu": ["accelerate:", "no such option"],
    "eval.batch=4": ["eval.batch:", "no such option"],
    "eval.limit=4": ["eval.limit:", "nearest: data.limit"],
    "eval=prompts": ["eval.every:", "must be given"],
    "~train.lr": ["train.lr:", "must be given"],
    "train.lr=": ["train.lr:", "number"],
    "train.steps=2.5": ["train.steps:", "integer"],
    "train.steps=null": ["train.steps", "train.epochs", "train.tokens", "exactly one"],
    "train.epochs=2": ["train.steps", "train.epochs", "exactly one"],
    "train.tokens=1000": ["train.steps", "train.tokens", "exactly one"],
    "train.minutes=0": ["train.minutes: 0", "greater than 0"],
    "train.steps=${nope}": ["train.steps:", "nope"],
    "seed=1,2": ["seed:", "--multirun"],
    "method=medusa,ngram": ["method:", "--multirun"],
    "method=ngram": ["method:", "nothing to train", "drafter=ngram"],
    "method.name=medussa": ["method.name:", "nearest: medusa"],
    "train.compile=maybe": ["train.compile:", "nearest: auto"],
    "decode.node_cost=2": ["decode.node_cost:", "less than 1"],
    "method.heads=0": ["method.heads:", "greater than or equal to 1"],
    "method.unroll=9": ["method.unroll:", "nearest: method.heads=9"],
    "method.draft_vocab=4": ["decode.width:", "method.draft_vocab=4"],
    "decode.tree=chian": ["decode.tree:", "nearest: chain"],
    "decode.temperature=-0.1": ["decode.temperature:", "greater than or equal to 0"],
    "decode.drafts=sampld": ["decode.drafts: 'sampld'", "nearest: sampled"],
    "decode.drafts=sampled": ["decode.drafts: sampled needs decode.temperature above 0", "nearest: decode.drafts=lik"],
    "decode.top_p=0": ["decode.top_p:", "greater than 0"],
    "decode.top_p=1.5": ["decode.top_p:", "less than or equal to 1"],
    "decode.top_k=-1": ["decode.top_k:", "greater than or equal to 0"],
    "data.path=x": ["data.path:", "data=jsonl"],
    "data=jsonl": ["data.path:", "must be given"],
    "data.split=test": ["data.split: read only by data=hub, not by data=self"],
    "data.streaming=true": ["data.streaming: read only by data=hub, not by data=self"],
    "target=hf": ["target.path:", "must be given"],
    "target=export": ["target:", "nearest: smollm2"],
    "target=Qwen/Qwen3-0.6B": ["target:", "nearest: target=hf target.path=Qwen/Qwen3-0.6B"],
    "data=mine.jsonl": ["data:", "nearest: data=jsonl data.path=mine.jsonl"],
    "target.path=x": ["target.path:", "target=hf"],
    "target.quantize=null": ["target.quantize:", "target=export", "nearest: none"],
    "dtype=float8": ["dtype:", "nearest: float"],
    "--mulirun": ["--mulirun:", "nearest: --multirun"],
    "--learning-rate": ["--learning-rate: options are given as NAME=VALUE, this one as train.lr=VALUE"],
    "--seed=1": ["--seed: options are given as NAME=VALUE, this one as seed=VALUE"],
    "--config-name=mdusa": ["mdusa", "nearest: medusa"],
    "heads": ["heads:", "NAME=VALUE"],
}
# The same for train/eagle.py, the options parted by bars.
EAGLE_REFUSED = {
    "method=eagle|method.taps=[0,1]": ["method.taps: [0, 1]", "join=fc", "nearest: [-1]"],
    "method.taps=[1,1]": ["method.taps: [1, 1]", "distinct"],
    "method.taps=[]": ["method.taps: []"],
    "method=hass|method.join=attention": ["method.objective.smooth_l1:", "join=attention", "nearest: 0"],
    "+method.objective.smooth_l1=1": ["method.objective.smooth_l1:", "nearest: method.objective"],
    "method.objective={smooth_l1: 1.0}": ["method.objective.smooth_l1:", "nearest: method.objective"],
    "decode.drafts=sampled|decode.temperature=1": [
        "decode.drafts:",
        "decode.tree=dynamic",
        "nearest: decode.tree=static",
    ],
    "decode.drafts=sampled|decode.temperature=1|decode.tree=chain|decode.verify=walk": [
        "decode.verify: walk is not for decode.drafts=sampled; nearest: reject"
    ],
    "method=hss": ["method:", "'hss'", "nearest: hass"],
    "method.join=attn": ["method.join: 'attn'", "nearest: attention"],
    "method.start=targt": ["method.start: 'targt'", "nearest: target"],
    "method.noise=-0.1": ["method.noise: -0.1", "greater than or equal to 0"],
    "method.noise=inf": ["method.noise: inf", "finite"],
    "method.unroll=0": ["method.unroll: 0", "greater than 0"],
    "method.layer.head=3": ["method.layer.head:", "nearest: method.layer.heads"],
    "+method.layer.kv_head=3": ["method.layer.kv_head:", "nearest: method.layer.kv_heads"],
    "method.layer.activation=sillu": ["method.layer.activation: sillu", "silu, swish, gelu"],
    "method.layer.heads=4|method.layer.kv_heads=3": ["method.layer.kv_heads: 3", "4 heads", "nearest: 2"],
    "method.layer.head_dim=15": ["method.layer.head_dim: 15", "nearest: 16"],
    "method.layer.heads=2.5": ["method.layer.heads: 2.5", "integer"],
    "method.layer.eps=0": ["method.layer.eps: 0", "greater than 0"],
    "method.layer.rope={rope_type: dynamic}": ["method.layer.rope: dynamic", "nearest: rope_type: default"],
    "method.layer.rope={rope_type: default}": ["method.layer.rope: rope_theta", "rope_theta: 10000.0"],
    "method.layer.rope={rope_type: default, rope_theta: many}": ["method.layer.rope: rope_theta 'many' is no positive"],
    "method.layer.rope={rope_type: yarn, rope_theta: 1e4}": ["method.layer.rope: rope_type yarn needs factor"],
    "method.layer=5": ["method.layer: 5"],
    "method.init_from=nowhere": ["method.init_from: no such file or folder", "nowhere"],
    "method.init_from=conf": ["method.init_from=", "no export there"],
}


# Names that options have elsewhere, for programs that have these options, and what is said of them.
CALLED_ELSEWHERE = {
    "medusa train.learning_rate": "here it is train.lr",
    "medusa learning_rate": "here it is train.lr",
    "medusa train.max_steps": "here it is train.steps",
    "medusa train.num_train_epochs": "here it is train.epochs",
    "medusa train.batch_size": "here it is train.batch_tokens (tokens of a step, over all processes)",
    "medusa train.per_device_train_batch_size": "here it is train.batch_tokens (tokens of a step, over all processes)",
    "medusa train.warmup_steps": "here it is train.warmup (a share of the steps)",
    "medusa model": "here it is target.path (with target=hf)",
    "draft model": "nearest: method.model",  # an option of its own
    "medusa method.num_heads": "here it is method.heads",
    "eagle method.num_heads": "here it is method.layer.heads",
    "medusa method.num_medusa_heads": "here it is method.heads",
    "medusa method.num_layers": "here it is method.blocks",
    "draft method.num_layers": "here it is method.target_layers (which of the target's, as [0,1,28,29])",
    "eagle method.draft_vocab_size": "here it is method.draft_vocab",
    "evaluate decode.num_speculative_tokens": "here it is decode.depth",
    "evaluate eval.max_tokens": "here it is eval.max_new_tokens",
    "evaluate eval.batch_size": "here it is eval.batch",
    "generate max_tokens": "here it is max_new_tokens",
    "synthesize max_tokens": "nearest: answer.max_tokens",
    "synthesize batch_size": "here it is batch",
}


def typed(monkeypatch: pytest.MonkeyPatch, name: str, *words: str, text: tuple[str, ...] = ()) -> list[Any]:
    """The configs that `run` gets when the program NAME is called with these words."""
    got: list[Any] = []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    entry(name, got.append, text)()
    return got


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, name: str = "medusa"
) -> str:
    """The one line with which the program NAME refuses these words."""
    with pytest.raises(SystemExit) as exit_:
        typed(monkeypatch, name, *words)
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("paceline: "), (out, err)
    return err


@pytest.mark.parametrize("option", REFUSED)
def test_a_wrong_option_is_one_line_and_exit_2(option: str) -> None:
    done = subprocess.run([sys.executable, "train/medusa.py", option], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    for words in ["paceline: ", *REFUSED[option]]:
        assert words in done.stderr


@pytest.mark.parametrize("option", ALSO_REFUSED)
def test_every_other_mistake_is_one_line_too(option: str, monkeypatch: Any, capsys: Any) -> None:
    line = refusal(monkeypatch, capsys, option)
    for words in ALSO_REFUSED[option]:
        assert words in line, line


@pytest.mark.parametrize("words", CALLED_ELSEWHERE)
def test_an_option_is_known_by_the_name_it_has_elsewhere(words: str, monkeypatch: Any, capsys: Any) -> None:
    name, option = words.split()
    line = refusal(monkeypatch, capsys, f"{option}=1", name=name)
    assert line == f"paceline: {option}: no such option; {CALLED_ELSEWHERE[words]}\n"


def test_every_name_from_elsewhere_leads_to_an_option_and_is_none_itself() -> None:
    there: set[str] = set()
    for file in CONF.rglob("*.yaml"):
        group = file.parent.relative_to(CONF).as_posix()
        if group not in ("accelerate", "comparison", "experiment"):
            options = option_names(yaml.safe_load(file.read_text()))
            there |= {group, *(option if group == "." else f"{group}.{option}" for option in options)}
    there |= {option.replace("method.", "ngram.") for option in there}  # the package that scripts give it
    assert set(ELSEWHERE) <= there and set(GIVEN) <= set(ELSEWHERE)
    names = [name for known in ELSEWHERE.values() for name in known]
    assert there.isdisjoint(names)
    for name in names:
        assert here(name, ELSEWHERE), name  # nor is it how an option ends that another name leads to


@pytest.mark.parametrize("words", EAGLE_REFUSED)
def test_what_eagle_cannot_be_is_one_line_before_a_model_loads(words: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    line = refusal(monkeypatch, capsys, *words.split("|"), name="eagle")
    for part in EAGLE_REFUSED[words]:
        assert part in line, line


def test_eagles_program_refuses_in_one_line_too() -> None:
    command = [sys.executable, "train/eagle.py", "method=eagle", "method.taps=[0,1]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    assert "paceline: method.taps: [0, 1]" in done.stderr


def test_an_eagle_drafts_as_deep_as_asked_and_its_layer_can_be_said() -> None:
    cfg = load("eagle", "decode.depth=64", "method.unroll=9", "method.layer.heads=6", "method.layer.qk_norm=true")
    assert cfg.decode.depth == 64 and cfg.method.unroll == 9
    layer = cfg.method.layer
    assert (layer.heads, layer.qk_norm, layer.kv_heads) == (6, True, None)
    cfg = load("eagle", "method.layer.rope={rope_type: linear, rope_theta: 10000.0, factor: 2.0}")
    assert cfg.method.layer.rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert validated(TrainConfig, yaml.safe_load(cfg.yaml()), "/nowhere") == cfg
    eagle, hass = (load("eagle", f"method={name}").method for name in ("eagle", "hass"))
    assert (eagle.unroll, hass.unroll) == (1, 3) and eagle.model_copy(update={"unroll": 3}) == hass


@pytest.mark.parametrize(
    ("words", "drafts", "verify"),
    [
        ((), "likeliest", "walk"),
        (("decode.verify=reject",), "likeliest", "reject"),  # greedy
        (("decode.temperature=1.0",), "likeliest", "walk"),
        (("decode.temperature=1.0", "decode.verify=reject"), "sampled", "reject"),
        (("decode.temperature=1.0", "decode.verify=reject", "decode.tree=dynamic"), "likeliest", "reject"),
        (("decode.temperature=1.0", "decode.drafts=sampled"), "sampled", "reject"),
        (("decode.temperature=1.0", "decode.drafts=likeliest", "decode.verify=reject"), "likeliest", "reject"),
    ],
)
def test_sampled_drafts_and_rejection_follow_each_other(words: tuple[str, ...], drafts: str, verify: str) -> None:
    decode = load("medusa", *words).decode
    assert (decode.drafts, decode.verify) == (drafts, verify)


def test_a_missing_file_is_named_in_full_with_its_neighbour(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    line = refusal(monkeypatch, capsys, "data=jsonl", "data.path=./chat.jsonl")
    assert f"data.path: no such file or folder: {tmp_path}/chat.jsonl; nearest: {tmp_path}/chats.jsonl" in line
    line = refusal(monkeypatch, capsys, "resume=runs/latest")
    assert f"resume: no such file or folder: {tmp_path}/runs/latest; nearest: {tmp_path}" in line
    line = refusal(monkeypatch, capsys, "target=hf", "target.path=./model")
    assert f"target.path: no such file or folder: {tmp_path}/model" in line


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_found_for_it(
    monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for name, words in {
        "medusa": [f"out={file}/x/y"],
        "evaluate": ["drafter=none", f"out={file}/x/y"],
        "synthesize": ["target=tiny", f"out={file}/x/y"],
    }.items():
        line = refusal(monkeypatch, capsys, *words, name=name)
        assert f"out: {file}/x/y cannot be written, {file} is no folder; give another out" in line
    line = refusal(monkeypatch, capsys, "drafter=none", f"plain={file}/x/plain.json", name="evaluate")
    assert f"plain: {file}/x cannot be written" in line
    line = refusal(monkeypatch, capsys, f"from={tmp_path}", f"to={file}/x", "format=native", name="convert")
    assert f"to: {file}/x cannot be written" in line
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    line = refusal(monkeypatch, capsys, "--multirun", "seed=1,2", f"out={tmp_path}/runs/${{seed}}")
    assert f"out: {tmp_path}/runs/1 cannot be written, {tmp_path} cannot be written into; give another" in line


def test_what_a_program_would_not_read_is_refused_by_it(monkeypatch: Any, capsys: Any) -> None:
    parts = "data.parts=[{source: self, streaming: true}]"
    line = refusal(monkeypatch, capsys, "data=mixture", parts)
    assert "data.parts.streaming: read only by source=hub, not by source=self" in line
    line = refusal(monkeypatch, capsys, "given.source=self", "given.split=test", "out=x", name="synthesize")
    assert "given.split: read only by given.source=hub, not by given.source=self" in line
    assert "trunk: lora" in refusal(monkeypatch, capsys, "trunk=lora", name="cache_features")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refusal(monkeypatch, capsys, "target.device=cuda:1")
    assert "target.device: cuda:1 is one GPU, each of 2 processes has its own; nearest: cuda" in line
    assert typed(monkeypatch, "medusa", "target.device=cuda")[0].target.device == "cuda"


def test_scripts_need_their_drafter(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "drafter: must be given" in refusal(monkeypatch, capsys, name="evaluate")
    assert "nearest: ngram" in refusal(monkeypatch, capsys, "drafter=ngrm", name="evaluate")
    line = refusal(monkeypatch, capsys, "drafter=none", "eval.prompts=bnch", name="evaluate")
    assert "eval.prompts:" in line and "nearest: bench" in line
    assert load("evaluate", "drafter=none").target.name == "smollm2"
    assert load("evaluate", "drafter=ngram", "target=tiny").target.name == "tiny"
    (tmp_path / "export").mkdir()
    cfg = load("evaluate", "drafter=export")
    assert (cfg.drafter, cfg.target.name) == (str(tmp_path / "export"), "export")


def test_evaluation_takes_no_options_of_training(monkeypatch: Any, capsys: Any) -> None:
    for option, near in (("eval.held_out_prompts=3", "nearest: eval.prompts"), ("eval.every=2", "nearest: ")):
        line = refusal(monkeypatch, capsys, "drafter=none", option, name="evaluate")
        assert f"{option.partition('=')[0]}: no such option; {near}" in line


def test_a_wrong_option_is_refused_before_torch_loads() -> None:
    code = (
        "import sys\nfrom paceline.conf.entry import entry\n"
        "sys.argv = ['medusa.py', 'train.lr=-1']\n"
        "try: entry('medusa', print)()\n"
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "2 False", done


def test_one_rank_speaks_for_all(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as exit_:
        typed(monkeypatch, "medusa", "train.lr=-1")
    assert exit_.value.code == 2 and capsys.readouterr().err == ""


def test_what_a_run_refuses_is_one_line_too(monkeypatch: Any, capsys: Any) -> None:
    def run(cfg: TrainConfig) -> None:
        raise Refusal("target: too large\nfor this machine")

    monkeypatch.setattr(sys, "argv", ["medusa.py"])
    with pytest.raises(SystemExit) as exit_:
        entry("medusa", run)()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "paceline: target: too large for this machine\n"


def test_what_one_process_alone_may_have_met_it_says_itself(monkeypatch: Any, capsys: Any) -> None:
    def run(cfg: TrainConfig) -> None:
        raise Refusal(f"seed: {cfg.seed}", common=cfg.seed == 1)

    monkeypatch.setenv("RANK", "1")
    said = []
    for seed in (0, 1):
        monkeypatch.setattr(sys, "argv", ["medusa.py", f"seed={seed}"])
        with pytest.raises(SystemExit) as exit_:
            entry("medusa", run)()
        assert exit_.value.code == 2
        said.append(capsys.readouterr().err)
    assert said == ["paceline: rank 1: seed: 0\n", ""]


@pytest.mark.parametrize("chdir", ["true", "false"])
@pytest.mark.parametrize("words", [[], ["--multirun"]])
def test_relative_paths_start_where_the_command_was_given(
    chdir: str, words: list[str], monkeypatch: Any, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "ckpt").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["data=jsonl", "data.path=./d.jsonl", "resume=./ckpt", "out=runs/a"]
    moved = [f"hydra.job.chdir={chdir}", "hydra.run.dir=elsewhere", "hydra.sweep.dir=elsewhere"]
    (cfg,) = typed(monkeypatch, "medusa", *words, *options, *moved)
    assert cfg.data.path == str(tmp_path / "d.jsonl")
    assert cfg.resume == str(tmp_path / "ckpt")
    assert cfg.out == str(tmp_path / "runs/a")


def test_hydra_leaves_no_folder(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "medusa") and list(tmp_path.iterdir()) == []


def test_multirun_runs_every_job_or_none(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cfgs = typed(monkeypatch, "medusa", "-m", "seed=1,2", "out='runs/seed${seed}'")
    assert [(c.seed, c.out) for c in cfgs] == [(i, str(tmp_path / f"runs/seed{i}")) for i in (1, 2)]
    assert len(typed(monkeypatch, "medusa", "-m", "seed=1,2", "target=tiny,smollm2")) == 4
    assert "method.heads" in refusal(monkeypatch, capsys, "-m", "method.heads=4,0")
    line = refusal(monkeypatch, capsys, "-m", "seed=1,2", "out=runs/one")
    assert "out:" in line and str(tmp_path / "runs/one") in line


@pytest.mark.parametrize(
    "flags", [["--cfg", "job"], ["--help"], ["--info", "defaults"], ["--cfg", "job", "-p", "train"]]
)
def test_hydras_own_flags_work(flags: list[str], monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) if flags == ["--help"] else contextlib.nullcontext():
        assert typed(monkeypatch, "medusa", *flags) == []
    assert "batch_tokens" in capsys.readouterr().out or flags[0] == "--info"


@pytest.mark.parametrize(
    "words",
    ["Yes, really? It's {so} [bad] = $5 (or ${HOME})", "ends in \\", "a 'quoted' \"word\" \\' \\${x}", "1", "true", ""],
)
def test_a_prompt_arrives_as_typed(words: str, monkeypatch: Any) -> None:
    (cfg,) = typed(monkeypatch, "generate", f"prompt={words}", text=("prompt",))
    assert cfg.prompt == words


# ---------------------------------------------------------------------------------------------------------------------
# The yaml files


def choices() -> list[str]:
    groups = [d for d in CONF.iterdir() if d.is_dir() and d.name not in ("accelerate", "__pycache__")]
    return [f"{group.name}={file.stem}" for group in sorted(groups) for file in sorted(group.glob("*.yaml"))]


@pytest.mark.parametrize("choice", choices())
def test_every_yaml_of_every_group_is_valid(choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats.jsonl").touch()
    for place in ("self", "given", "foreign.jsonl"):  # what comparison=words compares is made before
        (tmp_path / "outputs/words" / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    needs = {
        "target=hf": ["target.path=org/model"],
        "data=jsonl": [f"data.path={tmp_path}/chats.jsonl"],
        "data=parquet": [f"data.path={tmp_path}"],
        "data=text": [f"data.path={tmp_path}"],
        "data=hub": ["data.path=org/chats"],
        "data=mixture": [f"data.parts=[{{path: {tmp_path}/chats.jsonl, weight: 2}}, {{source: self}}]"],
    }
    recipes = [f"experiment={name}" for name in ("llama31_8b", "llama33_70b", "qwen3_8b")]
    needs |= dict.fromkeys(recipes, needs["data=jsonl"])
    elsewhere = {"method=ngram": ["method@ngram=ngram"]} | {word: [word] for word in ("target=export", "eval=prompts")}
    if choice.startswith("comparison="):
        assert planned(load("compare", choice, f"out={tmp_path}/runs"))  # every job's own options too
    elif choice in elsewhere:
        assert load("evaluate", f"drafter={tmp_path}", *elsewhere[choice])
    else:
        cfg = load("medusa", choice, *needs.get(choice, []))
        assert validated(TrainConfig, yaml.safe_load(cfg.yaml()), "/nowhere") == cfg  # config.yaml of a run reads back


@pytest.mark.parametrize(
    "name", ["medusa", "eagle", "cache_features", "generate", "synthesize", "inspect_data", "benchmark"]
)
def test_every_entry_runs_on_the_tiny_target(name: str) -> None:
    assert load(name, "target=tiny").target.name == "tiny"


def test_every_number_says_how_to_choose_it() -> None:
    recipes = ("experiment", "comparison")  # values for options that are explained elsewhere
    for file in [*CONF.glob("*.yaml"), *(f for f in CONF.glob("*/*.yaml") if f.parent.name not in recipes)]:
        for line in file.read_text().splitlines():
            if re.match(r"\s*\w+: -?\d", line) and "num_machines" not in line and "rank" not in line:
                assert "# " in line or file.parent.name == "accelerate", f"{file.name}: {line}"


@pytest.mark.parametrize("file", sorted((CONF / "accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_its_files(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    processes = {"cpu": 1, "multi_node": 16}.get(file.stem, 2)
    assert load_config_from_file(str(file)).num_processes == processes


def test_a_config_cannot_be_changed() -> None:
    cfg = load("medusa")
    with pytest.raises(ValueError, match="frozen"):
        cfg.train.steps = 3
    assert os.path.isabs(load("medusa", "out=x").out)
