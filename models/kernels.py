"""drafts.cpp and what it includes, compiled for this machine when they are first wanted, and called by addresses.

Knows a C++ compiler and ctypes. Does not know what the numbers mean: packed.py does.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.errors import Refusal
from paceline.models.made import made_once

SOURCES = [
    Path(__file__).with_name(name) for name in ("drafts.cpp", "passes.cpp", "kernels.cpp")
]  # each includes the next
LANES, WIDEST = 16, 256  # as in kernels.cpp: rows are multiples of the one, heads no wider than the other
MOST = 64  # numbers that `topmost` picks of a row
# no -ffast-math: the order of every sum is part of what is promised
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_ADDRESS, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES = {
    "norm": [_ADDRESS] * 3 + [_COUNT] * 3 + [_NUMBER],
    "gated": [_ADDRESS] * 2 + [_COUNT] * 3,
    "largest": [_ADDRESS] * 2 + [_COUNT] * 4,
    "attend": [_ADDRESS] * 11 + [_COUNT] * 10 + [_NUMBER] * 2,
    "move": [_ADDRESS] * 5 + [_COUNT] * 6,
    "topmost": [_ADDRESS] * 4 + [_COUNT] * 4,
    "learn": [_ADDRESS] * 7 + [_COUNT] * 6 + [_NUMBER] * 2,
    "look_along_chains": [_ADDRESS] * 8 + [_COUNT] * 7,
    "look_back_along_chains": [_ADDRESS] * 13 + [_COUNT] * 7,
    "linear": [_ADDRESS] * 5 + [_COUNT] * 6,
    "gated_linear": [_ADDRESS] * 4 + [_COUNT] * 4,
    "layers": [_ADDRESS] * 9 + [_COUNT] * 13 + [_NUMBER] * 2,
    "likeliest": [_ADDRESS] * 9 + [_COUNT] * 7 + [_NUMBER],
    "unfold": [_ADDRESS] * 4 + [_COUNT] * 2 + [_NUMBER] * 2,
    "unfold_dynamic": [_ADDRESS] * 5 + [_COUNT] * 3 + [_NUMBER] * 4,
}
ANSWERS = {"likeliest": _COUNT, "unfold": _COUNT, "unfold_dynamic": _COUNT}  # what others return is nothing


class Library(ctypes.CDLL):
    """One for all: a model that is copied, as a trunk that is to be trained, keeps the library of the one it is of.

    tiled: whether there are products: a processor with AMX, and a system that lets it be used.
    """

    tiled: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> "Library":
        return self


@lru_cache
def kernels() -> Library | None:
    """The functions of kernels.cpp; None where there is no compiler, or it does not take the source."""
    compiler = next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if (found := shutil.which(name or ""))), ""
    )
    if not compiler or platform.system() != "Linux":
        return None
    made_of = (*(source.read_text() for source in SOURCES), compiler, *FLAGS, torch.__version__, _processor())
    name = f"kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"

    def build(work: Path) -> None:
        subprocess.run([compiler, *FLAGS, SOURCES[0], "-o", work / "kernels.so"], check=True, capture_output=True)

    try:
        library = Library(str(made_once(name, build) / "kernels.so"))
    except (OSError, Refusal, subprocess.CalledProcessError):
        return None
    for function, arguments in SIGNATURES.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = ANSWERS.get(function)
    library.tiled = bool(library.tiles())
    return library


@contextlib.contextmanager
def without_tiles() -> Iterator[None]:
    """What is packed or loaded meanwhile is computed as on a processor that has none."""
    functions = kernels()
    if functions is None:
        yield
        return
    there, functions.tiled = functions.tiled, False
    try:
        yield
    finally:
        functions.tiled = there


def topmost(x: Tensor, many: int, width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first `width` numbers of each row of x [..., D], None for all: the log of their sum of exponentials
    [..., 1], the `many` largest, descending, and where they lie [..., many]; fewer where there are not so many.
    """
    width = x.shape[-1] if width is None else min(width, x.shape[-1])
    many, quick = min(many, width), kernels() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None
    if quick is None or many > MOST or x.requires_grad or not x.is_contiguous():
        x = x[..., :width].float()
        return x.logsumexp(-1, keepdim=True), *x.topk(many, -1)
    mass, top = (torch.empty(*x.shape[:-1], n, dtype=torch.float32) for n in (1, many))
    where = torch.empty(top.shape, dtype=torch.long)
    at = [part.data_ptr() for part in (mass, top, where, x)]
    quick.topmost(*at, mass.numel(), width, x.shape[-1], many)
    return mass, top, where


PAGE, CHUNK = 1 << 21, 1 << 26  # bytes: of a large page, and that are asked of the system at once


class Arena:
    """Memory of large pages, where the system has them: weights that every pass reads once lie in it, a quarter quicker
    to read for that. What a tensor was given is free again when all of its chunk is.
    """

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def bfloat16(self, numbers: int) -> Tensor:
        """[numbers], not set."""
        size = -(-2 * numbers // 64) * 64
        if self._used + size > len(self._chunk):
            whole = max(-(-size // PAGE) * PAGE, CHUNK)
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared has no large pages
            buffer = mmap.mmap(-1, whole + PAGE, flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a system without them
                    buffer.madvise(mmap.MADV_HUGEPAGE)
            chunk = torch.frombuffer(buffer, dtype=torch.uint8)
            begin = -chunk.data_ptr() % PAGE
            self._chunk, self._used = chunk[begin : begin + whole], 0
        part = self._chunk[self._used : self._used + 2 * numbers]
        self._used += size
        return part.view(torch.bfloat16)


ARENA = Arena()


def _processor() -> str:
    """What `-march=native` looks at: a cache may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
