"""Whole training runs in seconds, and what they leave behind: for the tests of the loop, the resume and two ranks.

Knows the entry's options and the names of a run's files.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.conf.entry import load
from paceline.models.target import Target
from paceline.train.loop import fit

ROOT = Path(__file__).parent.parent
VOCAB = 288  # rows of the tables; the bundled tokenizer knows 259 ids


def corpus(path: Path, documents: int, seed: int = 0) -> Path:
    """Short conversations of uneven length."""
    draw = random.Random(seed)
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "town", "while", "rain", "fell")
    lines = [
        {"prompt": " ".join(draw.choices(words, k=3)), "response": " ".join(draw.choices(words, k=draw.randint(3, 14)))}
        for _ in range(documents)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def checkpoint_of_target(folder: Path, tied: bool = True) -> Path:
    """A random Llama whose greedy text varies, with the bundled tokenizer: what target=hf reads. And 24 documents."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for file in (ROOT / "models" / "tiny").iterdir():
        shutil.copy(file, folder)
    corpus(folder / "data.jsonl", 24)
    return folder


def windowed(folder: Path, target_folder: Path, window: int) -> Path:
    """The same target with a window of so many tokens."""
    shutil.copytree(target_folder, folder)
    about = json.loads((folder / "config.json").read_text())
    about |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def options(folder: Path, target: Path, *more: str) -> list[str]:
    """The command line of a small float32 run into `folder` / run."""
    small = {
        "target": "hf",
        "target.path": target,
        "data": "jsonl",
        "data.path": target / "data.jsonl",
        "data.held_out": 0.1,
        "data.cache": "null",
        "dtype": "float32",
        "export.dtype": "float32",
        "out": folder / "run",
        "train.steps": 3,
        "train.batch_tokens": 300,
        "train.lr": 1e-2,
        "train.log_every": 1,
        "method.draft_vocab": 64,
        "eval.held_out_prompts": 2,
        "eval.max_new_tokens": 8,
        "decode.tree": "chain",
    }
    given = dict(word.split("=", 1) for word in more)
    return [f"{key}={value}" for key, value in (small | given).items()]


def config(folder: Path, target: Path, *more: str, program: str = "medusa") -> Any:
    """`options`, checked, for a program of train/."""
    return load(program, *options(folder, target, *more))


def ranks(world: int, program: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> list[Any]:
    """`fit` as so many processes that are one run, begun: forked off one that has all modules loaded, so in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.train.loop", "paceline.train.yardstick", "runs"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(env or {})}
    begun = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        begun.append(context.Process(target=_rank, args=(program, list(words), places | own if world > 1 else {})))
        begun[-1].start()
    return begun


def _rank(program: str, words: list[str], env: dict[str, str]) -> None:
    os.environ.update(env)
    fit(load(program, *words))


def finished(processes: list[Any], timeout: float = 300) -> list[int]:
    """Exit codes of processes that have been waited for; a hang is a failure."""
    for process in processes:
        process.join(timeout)
        assert process.exitcode is not None, "it hangs"
    return [process.exitcode for process in processes]


def metrics(out: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without the figures that a clock gives."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for figure in ("tokens_per_second", "seconds"):
            line.pop(figure, None)
    return lines


def steps(out: Path) -> list[dict[str, Any]]:
    """The lines of optimiser steps."""
    return [line for line in metrics(out) if "loss" in line]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def digest(target: Target) -> str:
    """sha256 of every parameter of a target."""
    whole = hashlib.sha256()
    for name, parameter in target.named_parameters():
        whole.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
