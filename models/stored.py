"""Tensors in files: read without trusting the file, and held against what they have to be.

Knows safetensors, pickles that hold tensors and nothing else, and json. Does not know what the tensors are for.
"""

import ctypes
import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.models.errors import Refusal

INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Spec:
    """What a tensor has to be. dtypes: one of these."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS


Manifest = Mapping[str, Spec]  # every tensor that a file holds, by name


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """As safetensors, readable by whom its neighbours are: safetensors alone leaves it to its writer."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def check(tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    """Raises Refusal for the first tensor that is missing, of another shape or dtype, not finite, or extra."""
    extra = sorted(set(tensors) - set(manifest))
    for name, spec in manifest.items():
        if name not in tensors:
            alike = [other for other in extra if tuple(tensors[other].shape) == spec.shape]
            renamed = f"; {alike[0]}, which belongs to no part, has its shape" if alike else ""
            raise Refusal(f"{where}: tensor {name} is missing{renamed}")
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape:
            raise Refusal(f"{where}: tensor {name} has shape {list(tensor.shape)}, expected {list(spec.shape)}")
        if tensor.dtype not in spec.dtypes:
            wanted = " or ".join(_name(dtype) for dtype in spec.dtypes)
            raise Refusal(f"{where}: tensor {name} is {_name(tensor.dtype)}, expected {wanted}")
    if extra:
        raise Refusal(f"{where}: tensor {extra[0]} belongs to no part of this drafter")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refusal(f"{where}: tensor {name} holds numbers that are not finite")


def manifest_of(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Spec]:
    """Of a module's own tensors. dtype: of its floating-point ones; None: any of FLOATS."""
    floats = FLOATS if dtype is None else (dtype,)
    return {
        name: Spec(tuple(tensor.shape), floats if tensor.is_floating_point() else (tensor.dtype,))
        for name, tensor in module.state_dict().items()
    }


def load_tensors(module: nn.Module, tensors: dict[str, Tensor], where: str, dtype: torch.dtype | None = None) -> None:
    """Fill a module from named tensors, strict in both directions. Refusal names the first fault. dtype: as above."""
    check(tensors, manifest_of(module, dtype), where)
    module.load_state_dict(tensors)


def dtype_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """The one dtype of all floating-point tensors, float32 where they differ: it holds them all."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- files


def read_json(file: Path, where: str) -> dict[str, Any]:
    """The object in a file. Raises Refusal."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"{where}: {file.name} cannot be read ({_reason(error)})") from error
    if not isinstance(content, dict):
        raise Refusal(f"{where}: {file.name} cannot be read (it holds no object)")
    return content


def read_tensors(file: Path, where: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a file by name, of a safetensors file only those called `names` where they are given.

    Any other suffix is taken for a pickle, of which only tensors in a dict are read: nothing in it is called.

    Raises:
        Refusal: what is no such file, damaged, or holds something else.
    """
    if not file.is_file():  # a pipe would be waited for
        raise Refusal(f"{where}: {file.name} cannot be read (there is no such file)")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                return {name: stored.get_tensor(name) for name in (stored.keys() if names is None else names)}
        if zipfile.is_zipfile(file):  # as torch writes it, unpacked: the size of the file bounds what is read
            with zipfile.ZipFile(file) as packed:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in packed.infolist()):
                    raise ValueError("it is compressed")
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of damaged files raise whatever they stumble over
        raise Refusal(f"{where}: {file.name} cannot be read ({_reason(error)})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        for name, tensor in content.items()
    ):
        raise Refusal(f"{where}: {file.name} cannot be read (it holds something else than tensors by name)")
    return {name: tensor.detach() for name, tensor in content.items()}


def tensor_files(folder: Path, where: str) -> dict[str, str]:
    """Names of all tensors in the safetensors files of a folder -> the file that holds each. Raises Refusal."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX, where).get("weight_map")
        if not isinstance(listed, dict):
            raise Refusal(f"{where}: {INDEX} has no weight_map")
        for file in listed.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise Refusal(f"{where}: {INDEX} leads to {str(file)[:80]!r}, which is no file of this folder's")
        return listed
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= dict.fromkeys(_names(file, where), file.name)
    return found


def _names(file: Path, where: str) -> list[str]:
    if not file.is_file():
        raise Refusal(f"{where}: {file.name} cannot be read (there is no such file)")
    try:
        with safe_open(file, "pt") as stored:
            return list(stored.keys())
    except Exception as error:  # as above
        raise Refusal(f"{where}: {file.name} cannot be read ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to write into that then takes the name of `folder`, whole or not at all, and replaces an older one."""
    work = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(work, ignore_errors=True)  # what a killed writer left
    work.mkdir(parents=True)
    try:
        yield work
    except BaseException:
        shutil.rmtree(work)
        raise
    if folder.exists():
        _exchange(work, folder)
        shutil.rmtree(work)
    else:
        work.rename(folder)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Meanwhile nobody else who asks gets the folder of a run. Raises Refusal where another process has it.

    That ends with the process, however it ends. Where the file system has no locks, nothing is promised.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refusal(f"out={folder}: another process is writing there; give another out") from None
        yield
    finally:
        os.close(held)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that at no moment there is none under either name.

    Where the system cannot (only Linux is asked), it takes two: a kill between them leaves the old one aside, whole.
    """
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap is None or swap(here, os.fsencode(new), here, os.fsencode(old), exchange) != 0:
        aside = old.with_name(f".{old.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        old.rename(aside)
        new.rename(old)
        aside.rename(new)
