"""kernels.cpp, compiled for this machine when it is first wanted, and called by addresses.

Knows a C++ compiler and ctypes. Does not know what the numbers mean: packed.py does.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from paceline.models.errors import Refusal
from paceline.models.made import made_once

SOURCE = Path(__file__).with_name("kernels.cpp")
# no -ffast-math: the order of every sum is part of what is promised
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_ADDRESS, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES = {
    "norm": [_ADDRESS] * 3 + [_COUNT] * 2 + [_NUMBER],
    "gated": [_ADDRESS] * 2 + [_COUNT] * 2,
    "largest": [_ADDRESS] * 2 + [_COUNT] * 3,
    "attend": [_ADDRESS] * 10 + [_COUNT] * 6 + [_NUMBER] * 2,
}


class Library(ctypes.CDLL):
    """One for all: a model that is copied, as a trunk that is to be trained, keeps the library of the one it is of."""

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
    made_of = (SOURCE.read_text(), compiler, *FLAGS, torch.__version__, _processor())
    name = f"kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"

    def build(work: Path) -> None:
        subprocess.run([compiler, *FLAGS, SOURCE, "-o", work / "kernels.so"], check=True, capture_output=True)

    try:
        library = Library(str(made_once(name, build) / "kernels.so"))
    except (OSError, Refusal, subprocess.CalledProcessError):
        return None
    for function, arguments in SIGNATURES.items():
        getattr(library, function).argtypes, getattr(library, function).restype = arguments, None
    return library


def _processor() -> str:
    """What `-march=native` looks at: a cache may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
