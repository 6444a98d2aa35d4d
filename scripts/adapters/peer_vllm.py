"""vLLM: whether its configuration classes take a drafter for what it is, as `--speculative-config` would have them do.

Its layers need compiled kernels and are not run.
"""

from typing import Any

from asked import main
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS as KNOWN
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


def config(asked: Any) -> Any:
    said = SpeculativeConfig(
        model=asked.drafter,
        method=asked.method,
        num_speculative_tokens=asked.depths,
        target_model_config=ModelConfig(model=asked.target, dtype="float32", enforce_eager=True),
        target_parallel_config=ParallelConfig(),
    )
    read = said.draft_model_config.hf_config
    (name,) = read.architectures
    taps = list(get_eagle3_aux_layers_from_config(said) or []) if asked.method == "eagle3" else [-1]
    return taps, f"{name}{'' if name in KNOWN else ', which it has no class for'}; {vars_of(read)}"


def vars_of(read: Any) -> str:
    theta = read.rope_parameters["rope_theta"]
    return f"rope_theta {theta:.0f}, draft_vocab_size {getattr(read, 'draft_vocab_size', None)}"


main("vllm", config=config)
