"""What the one KV cache promises, against transformers' own DynamicCache and fresh prefills, for every family."""

import pytest
import torch
from fakes import FAMILIES, VOCAB, assert_holds, target_of
from torch import Tensor

from paceline.models import target as targets
from paceline.models.cache import SLICE, Cache
from paceline.models.errors import Refusal
from paceline.models.target import Target

# node      0    1    2    3    4    5    6         0 -> 1 -> 3 -> 5
# parent    -    0    0    1    2    3    4           -> 2 -> 4 -> 6
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
PATHS = [[0], [0, 2, 4, 6], [0, 1, 3]]  # scattered, ragged


def ancestors(parents: list[int]) -> Tensor:
    """[N, N], by the definition."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        while parent >= 0:
            seen[node, parent] = True
            parent = parents[parent]
    return seen


def texts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def prefilled(target: Target, rows: list[list[int]], slack: int = 16) -> Cache:
    """A cache of these texts, in one padded pass."""
    width = max(map(len, rows))
    cache = target.new_cache(len(rows), width + slack)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    target(ids, cache=cache)
    target.keep(cache, ids[:, :0], torch.tensor([len(row) for row in rows]))
    return cache


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


@pytest.mark.parametrize("lengths", [[7], [5, 2, 9]])
@torch.no_grad()
def test_every_node_of_a_tree_sees_its_own_path_and_what_is_kept_is_a_prefill(
    target: Target, lengths: list[int]
) -> None:
    rows = texts(lengths)
    cache = prefilled(target, rows)
    for turn in range(2):  # what the first tree leaves in the slack must not reach the second
        drafts = texts([len(PARENTS)] * len(rows))
        seen = ancestors(PARENTS)
        _, last = target(torch.tensor(drafts), tree=seen.expand(len(rows), -1, -1), cache=cache)
        logits = target.head(last)
        for index, (row, words) in enumerate(zip(rows, drafts, strict=True)):
            for node in range(len(PARENTS)):
                path = [words[j] for j in range(len(PARENTS)) if seen[node, j]]
                plain = target.model(torch.tensor([row + path]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[index, node], plain, atol=1e-5, rtol=1e-5)

        paths = [PATHS[(index + turn + 1) % 3] for index in range(len(rows))]
        width = max(map(len, paths))
        nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths])
        target.keep(cache, nodes, torch.tensor([len(path) for path in paths]))
        rows = [row + [words[j] for j in path] for row, words, path in zip(rows, drafts, paths, strict=True)]
        assert_holds(cache, target, rows)


@pytest.mark.parametrize("slice_", [SLICE, 3])
@torch.no_grad()
def test_a_chain_pass_continues_each_row_at_its_own_end(
    target: Target, slice_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once or in slices, some of which lie behind the end of a row."""
    monkeypatch.setattr(targets, "SLICE", slice_)
    rows, more = texts([5, 2, 9]), texts([4, 4, 4])
    cache = prefilled(target, rows)
    _, last = target(torch.tensor(more), cache=cache)
    assert cache.length.tolist() == [5, 2, 9], "nothing is committed yet"
    for index, (row, words) in enumerate(zip(rows, more, strict=True)):
        plain = target.model(torch.tensor([row + words]), use_cache=False).logits[0, len(row) :]
        torch.testing.assert_close(target.head(last)[index], plain, atol=1e-5, rtol=1e-5)
    target.keep(cache, torch.arange(4).expand(3, -1), torch.tensor([4, 0, 2]))
    assert_holds(cache, target, [rows[0] + more[0], rows[1], rows[2] + more[2][:2]])


@pytest.fixture(scope="module")
def llama() -> Target:
    return target_of("llama")


@torch.no_grad()
def test_rows_that_leave_take_nothing_along(llama: Target) -> None:
    rows = texts([5, 2, 9])
    cache = prefilled(llama, rows)
    cache.select(torch.tensor([2, 0]))
    assert_holds(cache, llama, [rows[2], rows[0]])
    words = texts([3, 3])
    llama(torch.tensor(words), cache=cache)
    llama.keep(cache, torch.arange(3).expand(2, -1), torch.tensor([1, 3]))
    assert_holds(cache, llama, [rows[2] + words[0][:1], rows[0] + words[1]])


def test_a_pass_beyond_the_capacity_is_refused_with_both_numbers(llama: Target) -> None:
    cache = prefilled(llama, texts([5]), slack=2)
    with pytest.raises(Refusal, match=r"holds 7 tokens, 5 \+ 3"):
        llama(torch.tensor([[1, 2, 3]]), cache=cache)
    llama(torch.tensor([[1, 2]]), cache=cache)  # what fits still does


def test_buffers_are_allocated_once(llama: Target) -> None:
    cache = prefilled(llama, texts([5]))
    before = [buffer.data_ptr() for buffer in (*cache.keys, *cache.values)]
    llama(torch.tensor([[1, 2, 3]]), cache=cache)
    llama.keep(cache, torch.tensor([[0, 2]]), torch.tensor([2]))
    assert [buffer.data_ptr() for buffer in (*cache.keys, *cache.values)] == before
    assert cache.keys[0].shape == (1, 2, cache.capacity, 8)


# ---------------------------------------------------------------- a tree written level by level


def keys(values: list[list[int]]) -> Tensor:
    """Numbers [B, N] as keys of one head, of one number each."""
    return torch.tensor(values, dtype=torch.float)[:, None, :, None]


@pytest.mark.parametrize("rows", [1, 2])
def test_levels_lie_behind_each_other_and_are_forgotten_together(rows: int) -> None:
    cache = Cache(rows, 12)
    cache.place(3)
    cache.update(keys([[1, 2, 3], [4, 5, 0]][:rows]), keys([[1, 2, 3], [4, 5, 0]][:rows]), 0)
    cache.keep(torch.empty(rows, 0, dtype=torch.long), torch.tensor([3, 2][:rows]))
    for turn in range(2):  # nothing of a tree outlasts it
        cache.place(2)
        assert cache.slots.tolist() == [[3, 4], [2, 3]][:rows]
        cache.update(keys([[10, 11], [20, 21]][:rows]), keys([[10, 11], [20, 21]][:rows]), 0)
        cache.place(1, behind=2)
        assert cache.slots.tolist() == [[5], [4]][:rows]
        seen, _ = cache.update(keys([[12], [22]][:rows]), keys([[12], [22]][:rows]), 0)
        assert [row[:size] for row, size in zip(seen[:, 0, :, 0].tolist(), (6, 5), strict=False)] == [
            [1, 2, 3, 10, 11, 12],
            [4, 5, 20, 21, 22],
        ][:rows]
        # a node that descends from the second of the level before
        related = torch.tensor([[[False, True, True]]]).expand(rows, -1, -1)
        looked_at = [
            row[mask].tolist() for row, mask in zip(seen[:, 0, :, 0], cache.visible(related)[:, 0], strict=True)
        ]
        assert looked_at == [[1, 2, 3, 11, 12], [4, 5, 21, 22]][:rows], turn
    with pytest.raises(Refusal, match=r"holds 12 tokens, 11 \+ 2"):
        cache.place(2, behind=8)
