"""Many texts in a batch that is kept full: each is what it would be alone, and drawn from the right distribution."""

from dataclasses import replace

import pytest
import torch
from fakes import VOCAB, slow_greedy, target_of

from paceline.decode import draw
from paceline.decode.draw import drawn
from paceline.decode.sampler import Sampler
from paceline.decode.writer import Job, Writer
from paceline.models import target as targets
from paceline.models.cache import SLICE
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.target import Target


def jobs(count: int, **options: float) -> list[Job]:
    """Prompts of one to forty tokens, many of which begin alike, and limits of one to nine."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(VOCAB, (12,), generator=generator).tolist()
    made = []
    for key in range(count):
        length = int(torch.randint(1, 28, (1,), generator=generator))
        own = torch.randint(VOCAB, (length,), generator=generator).tolist()
        made.append(Job(key, (common if key % 3 else []) + own, 1 + key % 9, **options))
    return made


def written(writer: Writer, wanted: list[Job]) -> dict[int, list[int]]:
    left = iter(wanted)
    return {job.key: new for job, new in writer.write(lambda: next(left, None))}


@pytest.mark.parametrize("rows", [SLICE, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_every_text_is_what_the_target_says_alone(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SLICE", rows)
    target = target_of(family)
    wanted = jobs(9)
    found = written(Writer(target, 4), wanted)
    assert found == {job.key: slow_greedy(target, job.ids, job.limit) for job in wanted}


def test_compiled_passes_say_what_the_operators_say() -> None:
    """In bfloat16 on a CPU what lies between the products is compiled: slots that grow, move and are read by some."""
    target = Target.load(folder("tiny"))
    wanted = [replace(job, limit=6 + 40 * (job.key == 4)) for job in jobs(11)]
    wanted += [replace(job, key=100 + job.key, ids=[*job.ids, *range(250)]) for job in wanted[:3]]
    found = written(Writer(target, 4), wanted)
    with torch.no_grad():
        for job in wanted:
            whole = torch.tensor([[*job.ids, *found[job.key]]])
            logits = target.model(whole, use_cache=False).logits[0, len(job.ids) - 1 : -1, : target.vocab].float()
            chosen = logits.gather(1, whole[0, len(job.ids) :, None])[:, 0]
            assert (logits.amax(1) - chosen < 0.02).all(), "each is the likeliest, or as likely up to rounding"


def test_a_text_ends_with_its_end_of_turn() -> None:
    target = target_of()
    wanted = jobs(9)
    whole = {job.key: slow_greedy(target, job.ids, job.limit) for job in wanted}
    end = whole[8][3]
    found = written(Writer(target, 3, eos=[end]), wanted)
    assert found == {key: new[: new.index(end) + 1] if end in new else new for key, new in whole.items()}
    assert any(len(found[key]) < len(whole[key]) for key in whole)


def test_sampled_text_depends_on_seed_and_key_not_on_the_batch() -> None:
    target = target_of()
    wanted = jobs(12, temperature=1.0, top_p=0.9)
    alone = written(Writer(target, 1, seed=5), wanted)
    assert written(Writer(target, 5, seed=5), wanted[::-1]) == alone
    assert written(Writer(target, 5, seed=6), wanted) != alone


def test_a_finished_row_is_replaced_at_once_and_what_it_has_read_is_not_read_again() -> None:
    """Each answer goes on from the text before: two chains of five, in two rows, in as many passes as one needs."""
    target = target_of()
    writer = Writer(target, 2)
    waiting = [Job(key, [key + 1] * 20, 4) for key in range(2)]
    read: list[int] = []
    passed = writer._pass
    writer._pass = lambda slots, some, rows, ids: read.append(ids.numel()) or passed(slots, some, rows, ids)  # type: ignore[method-assign, func-returns-value]
    done = 0
    for job, new in writer.write(lambda: waiting.pop() if waiting else None):
        done += 1
        if len(job.ids) < 20 + 4 * 4:
            waiting.append(Job(job.key, [*job.ids, *new], 4))
    assert done == 10
    assert writer.tokens == 40
    assert sum(read) == 2 * 19 + 40, "the prompts, and each token once"


def test_a_long_text_is_read_beside_rows_that_have_written_much() -> None:
    """What pads the other rows of its pass needs room behind them."""
    target = target_of(max_position_embeddings=1024)
    wanted = [Job(0, [3, 4], 240), Job(1, [5], 1), Job(2, [7] * 200, 2)]
    waiting = list(wanted)
    given: list[int] = []
    writer = Writer(target, 2)

    def more() -> Job | None:
        return waiting.pop(0) if waiting and (len(waiting) > 1 or writer.tokens > 200) else None

    given = [len(new) for _, new in writer.write(more)]
    assert sorted(given) == [1, 2, 240]


def test_longer_jobs_make_room_and_too_long_ones_are_refused() -> None:
    target = target_of("gemma2", max_position_embeddings=1024)  # attends to 64 tokens
    short, long = Job(0, [1, 2], 3), Job(1, [5] * 300, 3)
    with pytest.raises(Refusal, match="64"):
        written(Writer(target, 2), [short, long])
    target = target_of(max_position_embeddings=1024)
    assert written(Writer(target, 1), [short, long])[1] == slow_greedy(target, long.ids, 3)


@pytest.mark.parametrize(
    "temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (3.0, 0.95), (1.0, 1e-6), (1.0, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("ids", [7, 600])
def test_tokens_are_drawn_from_the_samplers_distribution(ids: int, temperature: float, top_p: float) -> None:
    """All of the unit interval is walked through: how often a token is drawn is its probability, to one step."""
    logits = 3 * torch.randn(1, ids, generator=torch.Generator().manual_seed(ids))
    steps = 10_000
    noise = (torch.arange(steps).double() + 0.5) / steps
    many = [drawn(logits.expand(len(n), -1), *full(len(n), temperature, top_p), n) for n in noise.split(2000)]
    found = torch.bincount(torch.cat(many), minlength=ids)
    expected = Sampler(temperature, top_p=top_p).probs(logits[0]).double()
    assert (found - expected * steps).abs().max() < 1.5
    assert not found[expected == 0].any()


@pytest.mark.parametrize("block", [2, 16, 256])
def test_a_partial_sort_that_does_not_prove_top_p_is_not_used(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat logits of 600 ids: the likeliest few never hold 0.99, whatever is sorted at first."""
    logits = torch.linspace(0, 0.1, 600)[None].expand(50, -1)
    noise = torch.linspace(0, 0.999, 50).double()
    whole = drawn(logits, *full(50, 1.0, 0.99), noise)
    monkeypatch.setattr(draw, "BLOCK", block)
    assert drawn(logits, *full(50, 1.0, 0.99), noise).tolist() == whole.tolist()
    assert whole.unique().numel() == 50


def test_rows_of_one_batch_keep_their_own_temperature_and_top_p() -> None:
    logits = torch.randn(1, 300).expand(60, -1)
    temperature, top_p = torch.tensor([0.0, 0.5, 2.0]).repeat(20), torch.tensor([1.0, 0.8]).repeat_interleave(30)
    noise = torch.rand(60).double()
    alone = [drawn(logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], noise[i : i + 1]) for i in range(60)]
    assert drawn(logits, temperature, top_p, noise).tolist() == [int(token) for token in alone]


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_the_ends_of_the_noise_are_tokens_that_are_possible(noise: float) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [5, 270]] = torch.tensor([0.0, -3.0])
    for top_p in (1.0, 0.99):
        token = int(drawn(logits, *full(1, 1.0, top_p), torch.tensor([noise]).double()))
        assert token == (5 if noise == 0.0 else 270)


def full(rows: int, temperature: float, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows,), temperature), torch.full((rows,), top_p)
