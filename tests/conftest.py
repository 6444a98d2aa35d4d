"""What all tests share: no network, no tracker, and threads that leave the other workers their cores."""

import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = max(1, (os.cpu_count() or 1) // _WORKERS)
os.environ["OMP_NUM_THREADS"] = str(_THREADS)  # read by torch when it loads, here and in processes that tests start


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays a rank says so itself; what its process group left behind must not reach the next one."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
