"""Write conversations a drafter can learn from, in the target's own words: from nothing, or from what users asked.

    python scripts/synthesize.py target=smollm2 count=512 out=outputs/self
    python scripts/synthesize.py target=smollm2 given.source=jsonl given.path=prompts.jsonl count=null
    python scripts/synthesize.py engine=server server.url=http://localhost:8000/v1 server.model=NAME ...

Writes shards into `out`, an input of data=jsonl data.path=OUT, and how they were made into out/made. Stopped or killed
and run again, it goes on where it was.
"""

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal


def run(cfg: Any) -> None:
    from paceline.models.stored import alone

    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):  # two would write every conversation twice
        _synthesize(cfg, out)


def _synthesize(cfg: Any, out: Path) -> None:
    from rich.console import Console

    from paceline.data.conversations import Skipped, load_tokenizer, set_aside
    from paceline.data.near import Known
    from paceline.data.shards import Shards, whole_lines
    from paceline.data.synthesis import Filters, Synthesis
    from paceline.decode.progress import progress
    from paceline.models.embedded import folder

    language = _language() if cfg.language else None
    tokenizer = load_tokenizer(folder(cfg.target.name, cfg.target.path), cfg.target.trust_remote_code)
    skipped = Skipped(where=str(cfg.given.path))
    starts, content = _starts(cfg, skipped)
    engine, written_by, tokens = engine_of(cfg, tokenizer)
    made = out / "made"
    about = _provenance(cfg, tokenizer, content) | written_by
    _same(out, made / "provenance.json", about)

    # What an earlier run has written and dropped. Its user's turns are known, so that none comes twice.
    shards, aside = Shards(out, cfg.shard, about), Shards(out / "held_out", cfg.shard, about)
    known, done, count = Known(cfg.filter.near), set[str](), 0
    for old in (*shards.read(), *aside.read()):
        known.fault(first_asked(old))
        done.add(old["id"])
        count += 1
    drops = made / "dropped.jsonl"
    before = list(whole_lines(drops)) if drops.exists() else []
    done |= {drop["id"] for drop in before}

    synthesis = Synthesis(
        tokenizer,
        starts,
        mix_of(cfg.prompt),
        mix_of(cfg.answer),
        cfg.count,
        cfg.seed,
        done,
        count,
        known,
        Filters(**cfg.filter.plain()),
        cfg.max_length,
        language,
    )
    with drops.open("a") as dropped, progress("conversations", cfg.count, done=count) as bar:
        for chat, record, reason in synthesis.run(engine):
            if record is None:
                dropped.write(json.dumps({"id": chat, "reason": reason}) + "\n")
                dropped.flush()
                continue
            (aside if set_aside(first_asked(record), cfg.held_out) else shards).add(record)
            bar.advance(f"{tokens()} tokens, {tokens() / bar.seconds:.0f} a second")
    synthesis.dropped.update(Counter(drop["reason"] for drop in before))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{out}: {synthesis.written} conversations; {tokens()} tokens written now")
    for what, counts in (("dropped", synthesis.dropped), ("cut short before a turn", synthesis.shortened)):
        if counts:
            console.print(f"{what}: {', '.join(f'{reason} {number}' for reason, number in counts.most_common())}")
    if len(skipped):
        console.print(str(skipped), style="yellow")


def first_asked(record: dict[str, Any]) -> str:
    return next(message["content"] for message in record["messages"] if message["role"] == "user")


def engine_of(cfg: Any, tokenizer: Any) -> tuple[Any, dict[str, Any], Callable[[], int]]:
    """Who writes, what there is to say of it as provenance, and a count of the tokens it has written."""
    from paceline.data.conversations import known_ids, stop_ids

    stops = stop_ids(tokenizer)
    if cfg.engine == "server":
        from paceline.data.server import Server

        asked = cfg.server
        key = os.environ.get(asked.key_env) if asked.key_env else None
        if asked.key_env and key is None:
            raise Refusal(f"server.key_env: there is no {asked.key_env} in the environment; null: no key is sent")
        server = Server(
            asked.url,
            asked.model,
            tokenizer.convert_ids_to_tokens(sorted(stops)),
            key,
            asked.concurrency,
            asked.timeout,
            asked.retries,
            asked.backoff,
            asked.per_second,
        )
        return server.write, {"server": asked.url, "served_model": asked.model}, lambda: server.tokens

    from paceline.decode.writer import Writer
    from paceline.models.embedded import folder
    from paceline.models.target import Target, device_of

    asked = cfg.target
    device = device_of(asked.device)
    where = folder(asked.name, asked.path)
    target = Target.load(where, cfg.dtype, device, known_ids(tokenizer), asked.quantize, asked.trust_remote_code)
    if target.window is not None and cfg.max_length > target.window:
        raise Refusal(
            f"max_length: {cfg.max_length}, but this target's window is {target.window} tokens; "
            f"nearest: {target.window}"
        )
    writer = Writer(target, cfg.batch, stops, cfg.seed)
    about = {"target_fingerprint": target.fingerprint, "dtype": cfg.dtype}
    return local(writer, tokenizer), about, lambda: writer.tokens


def local(writer: Any, tokenizer: Any) -> Any:
    """The engine that is our own decoder."""
    from paceline.data.synthesis import Ask, Written
    from paceline.decode.writer import Job

    def engine(more: Callable[[], Ask | None]) -> Iterator[tuple[Ask, Written]]:
        asks: dict[int, Ask] = {}

        def job() -> Job | None:
            ask = more()
            if ask is None:
                return None
            asks[ask.key] = ask
            return Job(ask.key, ask.ids, ask.sampling.max_tokens, ask.sampling.temperature, ask.sampling.top_p)

        for done, new in writer.write(job):
            ended = new[-1] in writer.eos
            # its own words: some tokenizers would move full stops to the word before
            text = tokenizer.decode(new[:-1] if ended else new, clean_up_tokenization_spaces=False)
            yield asks.pop(done.key), Written(text, ended)

    return engine


def _starts(cfg: Any, skipped: Any) -> tuple[Any, str | None]:
    """The conversations to be made, and a hash of what they are made of."""
    from paceline.data.conversations import Source, asked, read
    from paceline.data.synthesis import beginnings, from_nothing, from_records

    given = cfg.given
    if given.source == "none":
        return from_nothing(beginnings(cfg.begin), cfg.turns or 1), None
    split = given.split if given.source == "hub" else None
    source = Source(given.source, given.path, split, given.streaming)
    records, content = read([source], skipped, given.strict, asked)
    return from_records((record for _, record in records), cfg.turns), content


def mix_of(asked: Any) -> Any:
    from paceline.data.synthesis import Mix

    def many(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    return Mix(many(asked.temperature), asked.top_p, many(asked.max_tokens))


def _language() -> Callable[[str], str]:
    if importlib.util.find_spec("py3langid") is None:
        raise Refusal("language=true needs py3langid: pip install py3langid, or language=false")
    classify = importlib.import_module("py3langid").classify
    return lambda text: classify(text)[0]


def _provenance(cfg: Any, tokenizer: Any, content: str | None) -> dict[str, Any]:
    """All that decides what is written, beside who writes."""
    from paceline.data.conversations import template_hash

    settings = ("begin", "turns", "given", "prompt", "answer", "filter", "max_length", "held_out", "seed", "shard")
    plain = cfg.plain()
    return {
        "made by": "scripts/synthesize.py",
        "target": cfg.target.path or cfg.target.name,
        "template_sha256": template_hash(tokenizer),
        "given_sha256": content,
        "engine": cfg.engine,
        **{name: plain[name] for name in settings},
    }


def _same(out: Path, file: Path, about: dict[str, Any]) -> None:
    """Refuses to go on in a folder that was begun otherwise; else notes how it is made."""
    if file.exists():
        before = json.loads(file.read_text())
        for name, value in about.items():
            if before.get(name) != value:
                was = before.get(name)
                raise Refusal(f"out={out} was begun with {name}={was}, not {value}: take another out")
    elif any(out.glob("conversations-*.jsonl")):
        missing = file.relative_to(out)
        raise Refusal(f"out={out} holds conversations, and no {missing} of who wrote them: take another out")
    file.parent.mkdir(parents=True, exist_ok=True)
    work = file.with_suffix(".tmp")
    work.write_text(json.dumps(about, indent=2) + "\n")
    work.replace(file)


main = entry("synthesize", run)

if __name__ == "__main__":
    main()
