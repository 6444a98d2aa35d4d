"""What is made on this machine once and then kept: folders in the cache that appear whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.models.errors import Refusal


def cache_root() -> Path:
    """`$PACELINE_CACHE`, by default `paceline` under the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PACELINE_CACHE") or Path(home) / "paceline")


def made_once(name: str, build: Callable[[Path], None]) -> Path:
    """A folder of the cache, built by one process while others wait. Raises Refusal where that is not possible."""
    root = cache_root()
    done = root / name
    if done.is_dir():
        return done
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.is_dir():
                work = root / f".{name}"
                shutil.rmtree(work, ignore_errors=True)  # what a killed builder left
                work.mkdir()
                build(work)
                work.rename(done)
    except OSError as error:
        raise Refusal(f"PACELINE_CACHE: {done} cannot be made ({error}); nearest: another folder") from error
    return done
