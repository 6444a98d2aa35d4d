"""What all tests share: no network, no tracker, and one thread: tiny tensors gain nothing from more, and wait long."""

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it loads, here and in processes that tests start


@pytest.fixture(autouse=True)
def _no_log_of_another_test() -> Iterator[None]:
    """What Hydra or a library makes of the root logger in one test would write to that test's closed streams."""
    yield
    for logger in (logging.getLogger(), logging.getLogger("hydra")):
        logger.setLevel(logging.WARNING)
        for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:
            logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays a rank says so itself; what its process group left behind must not reach the next one."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
