"""What training has changed of a target: in memory, beside an exported drafter, and the target that it makes.

    lora    adapter_config.json, adapter_model.safetensors    what peft reads too
    full    config.json, model.safetensors ...                a checkpoint, what transformers reads

Knows targets and that folder of an export. Does not know drafters, nor how a trunk is trained.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.models.embedded import quiet_transformers
from paceline.models.errors import Refusal
from paceline.models.stored import save_tensors
from paceline.models.target import DTYPES, Target

PEFT = "base_model.model."  # how the names in peft's files begin
FOLDER = "trunk"  # in an export
TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")  # how its files begin


@dataclass(frozen=True)
class Learnt:
    """kind: `lora` or `full`. tensors: as `Target.changed` names them. rank, alpha: of adapters, else 0 and 1."""

    kind: str
    tensors: dict[str, Tensor]
    rank: int = 0
    alpha: float = 1.0

    @classmethod
    def by(cls, live: Target, kind: str, rank: int, alpha: float, dtype: str) -> "Learnt":
        """What `live` has learnt, as it is written: adapters in float32, all the weights in `dtype`."""
        tensors = live.changed()
        if kind == "full":
            return cls(kind, {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()})
        return cls(kind, tensors, rank, alpha)

    def applied(self, original: Target) -> Target:
        """The trained trunk, frozen, in the dtype of `original`. KeyError or ValueError: that is another."""
        return original.changed_by(self.tensors, self.alpha / self.rank if self.rank else 1.0)

    def save(self, folder: Path, original: Target) -> None:
        """Write it. All the weights are a checkpoint by itself, with the tokenizer if `original` lies in a folder."""
        folder.mkdir(parents=True)
        if self.kind == "full":
            dtype = next(iter(self.tensors.values())).dtype
            with quiet_transformers():
                self.applied(original).model.to(dtype).save_pretrained(folder)
            for file in Path(original.source).glob("*"):
                if file.name.startswith(TOKENIZER):
                    shutil.copy(file, folder)
            return
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": original.source,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "bias": "none",
            "target_modules": sorted(n.removesuffix(".lora_A.weight") for n in self.tensors if ".lora_A." in n),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        named = {PEFT + name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(named, folder / "adapter_model.safetensors")


def read(folder: Path, kind: str, original: Target, trust_remote_code: bool = False) -> Target:
    """The trunk that `Learnt.save` wrote into `folder`, in the dtype and on the device of its `original`.

    Raises Refusal: files that are missing or damaged, or fit another target.
    """
    if kind == "full":
        dtype = next(name for name, known in DTYPES.items() if known == original.dtype)
        return Target.load(str(folder), dtype, str(original.device), original.vocab, "none", trust_remote_code)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        stored = load_file(folder / "adapter_model.safetensors", device=str(original.device))
        tensors = {name.removeprefix(PEFT): tensor for name, tensor in stored.items()}
        return Learnt(kind, tensors, config["r"], config["lora_alpha"]).applied(original)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{folder}: the trunk's adapter cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Refusal(f"{folder}: the trunk's adapter does not fit ({type(error).__name__}: {error})") from error


def fingerprint(folder: Path, original: str) -> str:
    """Identifies a trunk that was written: the fingerprint of its original, and a hash of what was trained."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stored:
            digest.update(hashlib.file_digest(stored, "sha256").digest())
    return f"{original}+{digest.hexdigest()[:16]}"
