"""SGLang: whether its configuration classes take a drafter for what it is. Its layers need compiled kernels and are not
run; Triton and torchvision, which it imports first of all, are stood in for."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import transformers.modeling_utils  # noqa: F401, looks for them itself


class StandIn(MetaPathFinder, Loader):
    """Finds whatever is asked for of a few libraries, and nothing in it."""

    LIBRARIES = ("triton", "torchvision", "sgl_kernel")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.LIBRARIES else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name, __version__="3.5.0")

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(StandIn())

from asked import main  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402


def config(asked: Any) -> Any:
    read = ModelConfig(model_path=asked.drafter, is_draft_model=True, dtype="float32").hf_config
    # as its model runner: the nested key, and one more, which is the layer whose input that is
    layers = read.eagle_config["eagle_aux_hidden_state_layer_ids"] if asked.method == "eagle3" else [-2]
    theta, known = read.rope_parameters["rope_theta"], getattr(read, "draft_vocab_size", None)
    found = f"{read.architectures[0]}; rope_theta {theta:.0f}, draft_vocab_size {known}"
    return [layer + 1 for layer in layers], found


main("sglang", config=config)
