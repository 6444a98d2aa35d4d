"""What the decoder promises: the output is the target's, whatever drafts, whoever is in the batch, however it ends."""

from dataclasses import dataclass

import pytest
import torch
from fakes import VOCAB, Dictated, assert_holds, counts, slow_greedy, target_of

from paceline.decode import Decoder, DynamicShape, Held, Sampler, StaticShape, chain, reject, walk
from paceline.models.cache import Cache
from paceline.models.drafter import Drafter, Shape, build, options
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.medusa import Medusa
from paceline.models.target import Target

NEW = 40
PROMPTS = [
    torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (3, 9, 17)
]
FAR = VOCAB // 2  # a rank that no shape here reaches
FORK = StaticShape(
    ((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1))
)  # depth 3; the second branch goes deepest
SHAPES = {"chain of 1": chain(1), "chain of 4": chain(4), "fork": FORK, "dynamic": DynamicShape(12, 3, 3)}
any_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says greedily after each prompt, by the slow oracle."""
    return [slow_greedy(target, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(plain: list[list[int]]) -> list[list[int]]:
    """Prompts with what follows them."""
    return [prompt + said for prompt, said in zip(PROMPTS, plain, strict=True)]


@pytest.fixture(scope="module")
def medusa(target: Target) -> Drafter:
    """Untrained heads, their weights random enough to draft varied nonsense."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build(options("medusa")(name="medusa", heads=4), Shape.of(target))
        drafter.start(target)
        for parameter in drafter.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


@pytest.fixture(scope="module")
def ngram(target: Target) -> Drafter:
    return build(options("ngram")(name="ngram"), Shape.of(target))


def rounds(stream) -> list[list[list[int]]]:
    """Per row, the new tokens of each round after the prefill."""
    said: dict[int, list[list[int]]] = {}
    for event in stream:
        said.setdefault(event.row, []).append(event.tokens)
    return [said[row][1:] for row in sorted(said)]


# ---------------------------------------------------------------- greedy


@any_shape
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("who", ["medusa", "ngram"])
def test_greedy_output_is_the_targets(target, plain, who, batched, shape, request) -> None:
    decoder = Decoder(target, request.getfixturevalue(who), shape)
    if batched:
        assert decoder.generate(PROMPTS, NEW).tokens == plain
    else:
        assert [decoder.generate([prompt], NEW).tokens[0] for prompt in PROMPTS] == plain


def test_plain_decoding_is_transformers_own(target, plain) -> None:
    assert target.hf_generate(torch.tensor(PROMPTS[:1]), NEW).tolist() == plain[0]
    generation = Decoder(target).generate(PROMPTS, NEW)
    assert generation.tokens == plain
    assert generation.report.mean_acceptance_length == 1.0 and generation.passes == NEW - 1


def test_the_tiny_targets_text_is_transformers_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    tiny = Target.load(folder("tiny"), "float32", vocab=260)
    drafter = build(options("medusa")(name="medusa", heads=3), Shape.of(tiny))
    drafter.start(tiny)
    prompt = list(b"A paceline is a file of riders.")
    said = Decoder(tiny, drafter, FORK).generate([prompt], 64)
    assert said.tokens[0] == slow_greedy(tiny, prompt, 64)
    if max(said.tokens[0]) < 260:
        assert said.tokens[0] == tiny.hf_generate(torch.tensor([prompt]), 64).tolist()


@dataclass
class Watched:
    """A target's cache, seen from outside while it decodes."""

    cache: Cache | None = None

    def watch(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        make = target.new_cache

        def new_cache(batch: int, capacity: int) -> Cache:
            self.cache = make(batch, capacity)
            return self.cache

        monkeypatch.setattr(target, "new_cache", new_cache)


def test_scripted_counts_are_accepted_and_the_cache_is_a_prefill_after_every_round(
    target, plain, texts, monkeypatch
) -> None:
    script, watched = [0, 4, 1, 0, 3], Watched()
    watched.watch(target, monkeypatch)
    drafter = Dictated(texts, counts(script, len(PROMPTS[1])))
    stream = Decoder(target, drafter, chain(4)).stream(PROMPTS[1:2], NEW)
    gained = []
    for event in stream:
        said = stream.generation.tokens[0]
        assert said == plain[0 + 1][: len(said)] and watched.cache is not None
        assert_holds(watched.cache, target, [PROMPTS[1] + said[:-1]])  # all but the last, which is the next root
        gained.append(event.drafted)
    assert gained[1:6] == script and stream.generation.tokens[0] == plain[1]


@pytest.mark.parametrize(
    ("shape", "ranks"), [(FORK, (1, 1, 0)), (DynamicShape(24, 3, 3), (1, 0, 0))], ids=["static", "dynamic"]
)
def test_a_second_branch_is_followed_and_committed(target, plain, texts, shape, ranks, monkeypatch) -> None:
    watched = Watched()
    watched.watch(target, monkeypatch)
    first = len(PROMPTS[0])
    # the text goes on as the second child of each root, then at the ranks named; every fourth token is a bonus
    drafter = Dictated(texts, lambda place: (*ranks, 0)[(place - first - 1) % 4])
    stream = Decoder(target, drafter, shape).stream(PROMPTS[:1], 24)
    for _ in stream:
        assert watched.cache is not None
        assert_holds(watched.cache, target, [PROMPTS[0] + stream.generation.tokens[0][:-1]])
    assert stream.generation.tokens[0] == plain[0][:24]
    assert stream.generation.report.num_accepted_tokens_per_pos[2] == 5, "the toy must accept the branch to its end"


class Careful(Dictated):
    """Checks that what it is handed belongs together: tap 0 of the target is the embedding of the text's own tokens."""

    def __init__(self, target: Target, texts, rank):
        super().__init__(texts, rank)
        self.taps, self.embed, self.rounds = (0,), target.embed, 0

    def read(self, hidden):
        self.hidden = hidden
        return super().read(hidden)

    def step(self, feature, tokens, depth, ctx):
        before = [len(known) for known in ctx.memory]
        out = super().step(feature, tokens, depth, ctx)
        for row, (first, count) in enumerate(zip(before, ctx.count.tolist(), strict=True)) if depth == 0 else ():
            places = torch.arange(first - 1, first - 1 + count)  # of the states; each one's token stands one further
            text = torch.tensor(ctx.memory[row])
            assert ctx.positions[row, :count].tolist() == places.tolist()
            assert tokens[row, :count].tolist() == text[places + 1].tolist()
            states = self.embed(text[places.clamp(min=0)]) * (places >= 0)[:, None]  # row -1 has none
            torch.testing.assert_close(self.hidden[row, :count], states)
            self.rounds += 1
        return out


@pytest.mark.parametrize(
    ("shape", "ranks"), [(chain(4), (0, 0, FAR)), (FORK, (1, 1, 0, 1, 0, 1, FAR))], ids=["chain", "fork"]
)
def test_states_tokens_and_positions_of_every_round_belong_together(target, plain, texts, shape, ranks) -> None:
    drafter = Careful(target, texts, lambda place: ranks[place % len(ranks)])
    assert Decoder(target, drafter, shape).generate(PROMPTS, NEW).tokens == plain
    assert drafter.rounds > 3 * 10


# ---------------------------------------------------------------- degenerate drafters and limits


@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("new", [0, 1, 2, 9, NEW])
def test_a_perfect_drafter_needs_no_more_rounds_than_it_must(target, plain, texts, k: int, new: int) -> None:
    generation = Decoder(target, Dictated(texts), chain(k)).generate(PROMPTS[:1], new)
    assert generation.tokens == [plain[0][:new]]
    after_prefill = max(0, new - 1)
    report = generation.report
    assert report.num_drafts == generation.passes == -(-after_prefill // (k + 1))
    assert report.num_accepted_tokens == report.num_draft_tokens == after_prefill - report.num_drafts


@pytest.mark.parametrize("shape", [chain(1), chain(32), FORK], ids=["chain of 1", "chain of 32", "fork"])
def test_a_hopeless_drafter_costs_rounds_and_nothing_else(target, plain, texts, shape) -> None:
    generation = Decoder(target, Dictated(texts, lambda place: FAR), shape).generate(PROMPTS[:1], NEW)
    assert generation.tokens == plain[:1]
    assert generation.report.draft_acceptance_rate == 0.0
    assert generation.report.mean_acceptance_length == 1.0 and generation.passes == NEW - 1


def test_a_drafter_may_be_silent_now_and_then_or_always(target, plain, texts) -> None:
    moody = Dictated(texts, lambda place: None if place % 5 < 2 else 0)
    generation = Decoder(target, moody, chain(4)).generate(PROMPTS, NEW)
    assert generation.tokens == plain and generation.report.draft_acceptance_rate == 1.0
    assert 1.0 < generation.report.mean_acceptance_length < 5.0
    generation = Decoder(target, Dictated(texts, lambda place: None), chain(4)).generate(PROMPTS, NEW)
    assert generation.tokens == plain
    assert generation.report.draft_acceptance_rate is None and generation.report.num_draft_tokens == 0


def test_a_leaf_that_is_accepted_was_offered_nothing_further(target, texts) -> None:
    lopsided = StaticShape(((0,), (1,), (1, 0)))  # the first branch ends at once, the second would go on
    report = Decoder(target, Dictated(texts), lopsided).generate(PROMPTS[:1], 11).report
    assert report.per_position_acceptance_rate == [1.0, 0.0] and report.num_drafts == 5
    assert report.conditional_acceptance_rate == [1.0, None]


def test_no_prompts_are_no_output_and_an_empty_one_is_named(target) -> None:
    assert Decoder(target).generate([], 4).tokens == []
    with pytest.raises(Refusal, match="prompt 1 is empty"):
        Decoder(target).generate([[1], []], 4)


# ---------------------------------------------------------------- what ends a row


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("batched", [False, True])
def test_an_end_token_ends_the_row_wherever_it_falls_in_a_block(target, plain, texts, k: int, batched: bool) -> None:
    for row, said in enumerate(plain):
        end = next(i for i in range(5, NEW) if said[i] not in said[:i])
        prompts = PROMPTS if batched else PROMPTS[row : row + 1]
        stream = Decoder(target, Dictated(texts), chain(k)).stream(prompts, NEW, eos=[said[end]])
        streamed: dict[int, list[int]] = {}
        for event in stream:
            streamed.setdefault(event.row, []).extend(event.tokens)
            assert event.finished == (event.tokens[-1] == said[end] or len(streamed[event.row]) == NEW)
        mine = row if batched else 0
        assert stream.generation.tokens[mine] == streamed[mine] == said[: end + 1]
        # of the last round only what lies at or before the end counts: a perfect drafter stays perfect
        report = stream.generation.reports[mine]
        assert report.emitted == end and report.draft_acceptance_rate == 1.0
        assert report.num_accepted_tokens <= report.num_draft_tokens <= end


def test_a_drafted_end_token_that_is_rejected_ends_nothing(target, plain, texts) -> None:
    absent = next(token for token in range(VOCAB) if all(token not in said for said in plain))
    rigged = [list(text) for text in texts]
    drafter = Dictated(rigged, lambda place: FAR)
    head = drafter.head

    def always_end(state, depth):
        logits = head(state, depth)
        logits[..., absent] = 99.0
        return logits

    drafter.head = always_end
    generation = Decoder(target, drafter, chain(4)).generate(PROMPTS, NEW, eos=[absent])
    assert generation.tokens == plain and generation.report.num_accepted_tokens == 0


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_stop_is_judged_after_every_single_token(target, plain, texts, k: int) -> None:
    seen: list[int] = []

    def stop(said: list[int]) -> bool:
        seen.append(len(said))
        return said[-2:] == plain[0][6:8]

    generation = Decoder(target, Dictated(texts), chain(k)).generate(PROMPTS[:1], NEW, stop=stop)
    assert generation.tokens == [plain[0][:8]] and seen == list(range(1, 9))


def test_a_first_token_may_be_the_last(target, plain, texts) -> None:
    generation = Decoder(target, Dictated(texts), chain(4)).generate(PROMPTS[:1], NEW, eos=[plain[0][0]])
    assert generation.tokens == [plain[0][:1]] and generation.passes == 0
    assert generation.report.mean_acceptance_length is None


# ---------------------------------------------------------------- rows and neighbours


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_row_is_the_same_in_any_company_and_order(target, plain, texts, order) -> None:
    # one row ends early; 0 is the id that fills the shorter rows of a batch, and may be an end token all the same
    rank = lambda place: FAR if place % 7 in (0, 3) else 0  # noqa: E731
    decoder = Decoder(target, Dictated(texts, rank), chain(4))
    early = plain[0][11]
    alone = [decoder.stream([prompt], NEW, eos=[early, 0]) for prompt in PROMPTS]
    by_itself = [rounds(stream)[0] for stream in alone]
    together = decoder.stream([PROMPTS[i] for i in order], NEW, eos=[early, 0])
    assert rounds(together) == [by_itself[i] for i in order]
    assert together.generation.tokens == [alone[i].generation.tokens[0] for i in order]
    assert together.generation.reports == [alone[i].generation.reports[0] for i in order]


@pytest.mark.parametrize("batch", [4, 16])
def test_acceptance_does_not_depend_on_the_neighbours(target, medusa, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    others = [torch.randint(VOCAB, (2 + i % 7,), generator=generator).tolist() for i in range(batch - 1)]
    decoder = Decoder(target, medusa, FORK)
    alone = rounds(decoder.stream(PROMPTS[1:2], 16))[0]
    assert rounds(decoder.stream([*others[:2], PROMPTS[1], *others[2:]], 16))[2] == alone


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
@pytest.mark.parametrize(
    "sampler", [Sampler(0.7, seed=3), Sampler(1.0, seed=4), Sampler(1.0, 20, 0.9, seed=5)], ids=["T=0.7", "T=1", "top"]
)
def test_sampled_output_is_plain_samplings_token_for_token(target, medusa, ngram, sampler, shape) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    wanted = Decoder(target).generate(prompts, 24, sampler=sampler).tokens
    assert wanted[0] != wanted[3], "each row has noise of its own"
    for drafter in (medusa, ngram):
        decoder = Decoder(target, drafter, shape)
        assert decoder.generate(prompts, 24, sampler=sampler).tokens == wanted
        for row in (1, 3):  # alone, under its own key
            assert decoder.generate([prompts[row]], 24, sampler=sampler, rows=[row]).tokens == [wanted[row]]


@torch.no_grad()
def test_a_sampled_token_depends_on_seed_row_and_position_alone(target) -> None:
    sampler, rows = Sampler(0.9, seed=8), [7, 3]
    said = Decoder(target).generate(PROMPTS[:2], 12, sampler=sampler, rows=rows).tokens
    for prompt, row, tokens in zip(PROMPTS, rows, said, strict=False):
        text = list(prompt)
        for token in tokens:  # the slow oracle
            logits = target.model(torch.tensor([text]), use_cache=False).logits[:, -1]
            assert sampler.choose(logits, [(row, len(text))]) == [token]
            text.append(token)


def test_a_drafter_that_knows_the_sample_is_accepted_whole(target) -> None:
    sampler = Sampler(1.0, seed=6)
    said = Decoder(target).generate(PROMPTS[:1], NEW, sampler=sampler).tokens[0]
    generation = Decoder(target, Dictated([PROMPTS[0] + said]), chain(4)).generate(PROMPTS[:1], NEW, sampler=sampler)
    assert generation.tokens == [said] and generation.report.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8])
@pytest.mark.parametrize("verifier", [walk, reject])
def test_a_temperature_of_nothing_is_greedy_decoding(target, plain, medusa, temperature, verifier) -> None:
    decoder = Decoder(target, medusa, FORK, verifier)
    assert decoder.generate(PROMPTS[:2], 16, sampler=Sampler(temperature)).tokens == [said[:16] for said in plain[:2]]


def test_seeds_give_different_texts_and_the_same_seed_the_same(target, medusa) -> None:
    def said(seed: int) -> tuple[int, ...]:
        return tuple(
            Decoder(target, medusa, FORK, reject).generate(PROMPTS[:1], 4, sampler=Sampler(1.5, seed=seed)).tokens[0]
        )

    assert said(1) == said(1) and len({said(seed) for seed in range(16)}) > 8


# ---------------------------------------------------------------- interruptions


def test_an_exception_or_a_dropped_stream_leaves_the_decoder_as_good_as_new(target, plain, texts, ngram) -> None:
    rounds_begun = []

    def fails_once(*arguments):
        rounds_begun.append(arguments)
        if len(rounds_begun) == 2:
            raise RuntimeError("in round 2")
        return walk(*arguments)

    for drafter in (Dictated(texts, counts([0, 4, 1], len(PROMPTS[1]))), ngram):
        rounds_begun.clear()
        decoder = Decoder(target, drafter, chain(4), fails_once)
        with pytest.raises(RuntimeError, match="in round 2"):
            decoder.generate(PROMPTS, NEW)
        assert decoder.generate(PROMPTS, NEW).tokens == plain
        stream = decoder.stream(PROMPTS, NEW)
        for _ in range(4):  # the three rows' first tokens, then into the middle of a round
            next(stream)
        del stream
        assert decoder.generate(PROMPTS, NEW).tokens == plain
        assert not any(block._forward_pre_hooks for block in target.blocks)


@pytest.mark.parametrize("where", ["step", "head", "pass", "verify", "keep", "stop"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_in_any_round_leaves_the_decoder_and_its_conversation_as_good_as_new(
    target, plain, texts, medusa, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is called in a round fails: before it has done anything, or when all is done."""
    calls, fails_at, late = 0, 0, False

    def failing(call):
        def instead(*given, **more):
            nonlocal calls
            calls += 1
            if calls == fails_at and not late:
                raise error("early")
            out = call(*given, **more)
            if calls == fails_at:
                raise error("late")
            return out

        return instead

    stop = failing(lambda said: False) if where == "stop" else None
    decoder = Decoder(target, medusa, FORK, failing(walk) if where == "verify" else walk)
    owner, name = {"pass": (target, "forward"), "keep": (target, "keep")}.get(where, (medusa, where))
    if where not in ("verify", "stop"):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    held = Held()
    for number in (1, 2, 5):
        for late in (False, True):
            for prompts, more in ((PROMPTS, {}), (PROMPTS[:1], {"held": held})):
                calls, fails_at = 0, number
                with pytest.raises(error, match="late" if late else "early"):
                    decoder.generate(prompts, NEW, stop=stop, **more)
                fails_at = 0
                assert decoder.generate(prompts, NEW, **more).tokens == plain[: len(prompts)]
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in target.blocks)


def test_a_stream_stopped_after_any_round_leaves_the_decoder_as_good_as_new(target, plain, medusa) -> None:
    decoder, held = Decoder(target, medusa, FORK), Held()
    for rounds_taken in (1, 2, 3, 6):
        for prompts, more in ((PROMPTS, {}), (PROMPTS[:1], {"held": held})):
            stream = decoder.stream(prompts, NEW, **more)
            for _ in range(rounds_taken):
                next(stream)
            other = decoder.generate(PROMPTS[1:2], NEW).tokens  # while it is not over
            del stream
            assert other == plain[1:2] and decoder.generate(prompts, NEW, **more).tokens == plain[: len(prompts)]


def test_two_streams_of_one_decoder_do_not_meet(target, plain, texts) -> None:
    decoder = Decoder(target, Dictated(texts), chain(4))
    streams = [decoder.stream([prompt], NEW) for prompt in PROMPTS]
    for _ in range(NEW):
        for stream in streams:
            next(stream, None)
    assert [stream.generation.tokens[0] for stream in streams] == plain


# ---------------------------------------------------------------- drafters that do not fit


def test_a_tree_deeper_than_the_heads_is_refused_before_anything_runs(target, medusa) -> None:
    for shape in (chain(5), DynamicShape(16, 5, 4)):
        with pytest.raises(Refusal, match=r"decode\.depth: 5 is deeper than the drafter's 4 heads; nearest: 4"):
            Decoder(target, medusa, shape)
    assert Decoder(target, medusa).shape == chain(4), "by default as deep as trained"


def test_heads_that_overflow_are_named_not_hidden_by_verification(target) -> None:
    drafter = build(options("medusa")(name="medusa", heads=2), Shape.of(target))
    assert isinstance(drafter, Medusa)
    drafter.start(target)
    drafter.lm_heads[1].weight.data *= 1e5
    with pytest.raises(Refusal, match=r"not finite in torch\.float16: decode with dtype="):
        Decoder(target, drafter.half(), chain(2)).generate(PROMPTS[:1], 8)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output", ["own", "shared"])
def test_target_and_drafter_may_have_different_dtypes(target_dtype, drafter_dtype, output) -> None:
    target = Target(target_of("llama").model.to(target_dtype))
    drafter = build(options("medusa")(name="medusa", heads=2, output=output), Shape.of(target))
    drafter.start(target)
    drafter.to(drafter_dtype).borrow(target)
    assert len(Decoder(target, drafter, FORK_OF_TWO).generate(PROMPTS, 8).tokens[0]) == 8


FORK_OF_TWO = StaticShape(((0,), (1,), (1, 0)))


def test_heads_over_a_padded_table_draft_only_what_can_be_said(target) -> None:
    padded = Target(target.model, vocab=60)
    drafter = build(options("medusa")(name="medusa", heads=3), Shape.of(padded))
    drafter.start(padded)
    with torch.no_grad():
        drafter.lm_heads[0].weight[60:] *= 30
        drafter.lm_heads[0].weight[60:] += 5
    seen: list[int] = []

    def watching(tree, logits, sampler, places):
        assert logits.shape[-1] == 60
        seen.extend(tree.tokens.flatten().tolist())
        return walk(tree, logits, sampler, places)

    shape = StaticShape(((0,), (1,), (2,), (0, 0), (0, 0, 0)))
    said = Decoder(padded, drafter, shape, watching).generate(PROMPTS, 32).tokens
    assert max(seen) < 60 and said == [slow_greedy(padded, prompt, 32) for prompt in PROMPTS]


def test_an_id_that_the_target_has_no_row_for_is_refused() -> None:
    for wrong in (64, -1):
        with pytest.raises(Refusal, match=rf"prompt 1 has id {wrong}, its table has 64 rows"):
            Decoder(target_of()).stream([[1, 2], [3, wrong]], 4)
