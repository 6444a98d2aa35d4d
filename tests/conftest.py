"""What all tests share: no network, no tracker, and one thread: tiny tensors gain nothing from more, and wait long."""

import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it loads, here and in processes that tests start


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays a rank says so itself; what its process group left behind must not reach the next one."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
