"""The comparison with others' programs: that it would notice, and that what it compares is what the decoder runs."""

import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from paceline.data.batch import Batch
from paceline.scripts import conformance
from paceline.scripts.conformance import Case, Peer, Recipe, Text, chains, compared, table
from paceline.train.step import unrolled

# Medusa's formula, by hand, as a peer's adapter: head k of the file for depth k + SHIFT
BY_HAND = """
from pathlib import Path
import torch
from asked import main
from torch.nn import functional as F

def read(asked):
    t = torch.load(Path(asked.drafter) / "medusa_lm_head.pt", weights_only=True)
    def head(k):
        x = asked.last + F.silu(F.linear(asked.last, t[f"{k}.0.linear.weight"], t[f"{k}.0.linear.bias"]))
        return x @ t[f"{k}.1.weight"].T
    return [head((k + SHIFT) % asked.depths) for k in range(asked.depths)], [TAP]

main("torch", read)
"""


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(Namespace(name="tiny", path=None))


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa", "mtp"])
def test_what_is_compared_is_what_is_trained(kind: str, text: Text) -> None:
    drafter, ids = text.drafter(kind), text.ids[None]
    states = torch.cat([text.states, text.last[None]])
    hidden = torch.cat([states[tap] for tap in drafter.taps], -1)[None]
    batch = Batch(ids, torch.arange(len(text.ids))[None], torch.zeros_like(ids), ids >= 0)
    ours = chains(drafter, text, 3)
    with torch.no_grad():
        for depth, state in enumerate(unrolled(drafter, batch, hidden, 3)):
            rows = len(text.ids) - 1 - depth
            torch.testing.assert_close(ours[depth, :rows], drafter.head(state, depth)[0, :rows], atol=1e-4, rtol=0)
            assert ours[depth, rows:].isnan().all()


@pytest.mark.parametrize(
    "shift, tap, agrees, says",
    [
        (0, "-1", True, "logits differ by"),
        (1, "-1", False, "logits differ by"),
        (0, "2", False, "it reads hidden states [2], we [-1]"),
        (0, "nothing", False, "NameError: name 'nothing' is not defined"),
    ],
    ids=["the same", "another slot", "another layer", "a fault"],
)
def test_a_peer_that_does_otherwise_is_told_apart(
    shift: int, tap: str, agrees: bool, says: str, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(conformance.ADAPTERS / "asked.py", tmp_path)
    (tmp_path / "peer_hand.py").write_text(BY_HAND.replace("SHIFT", str(shift)).replace("TAP", tap))
    monkeypatch.setattr(conformance, "ADAPTERS", tmp_path)
    monkeypatch.setattr(conformance, "python_of", lambda recipe, root: Path(sys.executable))
    peer = Peer("hand", Recipe("hand", ()), (Case("medusa", "medusa", writes=False),))
    rows = list(compared(peer, text, tmp_path / "out", tmp_path))
    assert [row["agrees"] for row in rows] == [agrees]
    assert says in table(rows) and f"| {'yes' if agrees else 'no'} |" in table(rows)


@pytest.mark.parametrize("taps", [[1, 2, 3], [0, 1, 2]], ids=["the same layers", "others"])
def test_a_configuration_that_is_taken_for_another_is_told_apart(
    taps: list[int], text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(conformance.ADAPTERS / "asked.py", tmp_path)
    answer = f'main("torch", config=lambda asked: ({taps}, asked.method))'
    (tmp_path / "peer_engine.py").write_text(f"from asked import main\n{answer}\n")
    monkeypatch.setattr(conformance, "ADAPTERS", tmp_path)
    monkeypatch.setattr(conformance, "python_of", lambda recipe, root: Path(sys.executable))
    peer = Peer("engine", Recipe("engine", ()), (Case("eagle3", "vllm", writes=False, config=True),))
    (row,) = compared(peer, text, tmp_path / "out", tmp_path)
    assert row["agrees"] == (taps == [1, 2, 3]) and row["difference"] is None and row["version"] == torch.__version__
    assert "its configuration is that of eagle3" in table([row])
