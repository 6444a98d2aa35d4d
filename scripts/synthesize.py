"""Write conversations a drafter can learn from, from nothing: the target asks and answers.

    python scripts/synthesize.py target=smollm2 count=512 out=outputs/self

Writes out/conversations.jsonl (an input of data=jsonl) and out/provenance.json. Run again, it goes on where it stopped.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import load_tokenizer, stop_ids, template_hash
    from paceline.data.synthesis import Written, beginnings, conversations, folded
    from paceline.decode import Decoder, Sampler
    from paceline.models.target import Target, device_of, folder
    from paceline.scripts.terminal import progress

    begin = beginnings(cfg.begin)
    where = folder(cfg.target.name, cfg.target.path)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    asked = cfg.target
    target = Target.load(
        where, cfg.dtype, device_of(asked.device), len(tokenizer), asked.quantize, asked.trust_remote_code
    )
    stops = stop_ids(tokenizer)
    decoder = Decoder(target)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "conversations.jsonl"
    provenance = {
        "made by": "scripts/synthesize.py",
        "target": cfg.target.path or cfg.target.name,
        "target_fingerprint": target.fingerprint,
        "template_sha256": template_hash(tokenizer),
        "begin": cfg.begin,
        "prompt": cfg.prompt.plain(),
        "answer": cfg.answer.plain(),
        "seed": cfg.seed,
        "dtype": cfg.dtype,
    }
    done = _continued(file, provenance)
    known = {folded(record["messages"][0]["content"]) for record in done}
    tokens, keys = 0, len(done) * 1_000_000  # noise is keyed by row: no row of an earlier run may come again

    def writer(sampling: Any):
        def generate(prompts: list[str]) -> list[Written]:
            nonlocal tokens, keys
            ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
            sampler = Sampler(sampling.temperature, top_p=sampling.top_p, seed=cfg.seed)
            rows = range(keys, keys + len(ids))
            keys += len(ids)
            generation = decoder.generate(ids, sampling.max_tokens, sampler=sampler, eos=stops, rows=rows)
            tokens += sum(map(len, generation.tokens))
            return [
                Written(tokenizer.decode(new[:-1] if new[-1] in stops else new), new[-1] in stops)
                for new in generation.tokens
            ]

        return generate

    dropped: Counter[str] = Counter()
    console = Console()
    with file.open("a") as sink, progress("conversations", cfg.count, done=len(done)) as bar:
        for record in conversations(
            tokenizer, writer(cfg.prompt), writer(cfg.answer), cfg.count - len(done), cfg.batch, known, dropped, begin
        ):
            sink.write(json.dumps(record, ensure_ascii=False) + "\n")
            bar.advance(f"{tokens} tokens, {tokens / bar.seconds:.0f} a second")
            if bar.count % cfg.batch == 0:
                sink.flush()
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "none"
    console.print(f"{file}: {cfg.count} conversations; {tokens} tokens written now; user turns dropped: {reasons}")


def _continued(file: Path, provenance: dict[str, Any]) -> list[dict[str, Any]]:
    """The records that `file` holds whole, a torn last line cut off; refused where they were made otherwise."""
    beside = file.with_name("provenance.json")
    if beside.exists():
        before = json.loads(beside.read_text())
        for name, value in provenance.items():
            if before.get(name) != value:
                was = before.get(name)
                raise Refusal(f"out={file.parent} was begun with {name}={was}, not {value}: take another out")
    beside.write_text(json.dumps(provenance, indent=2) + "\n")
    text = file.read_text() if file.exists() else ""
    whole, _, torn = text.rpartition("\n")  # not splitlines: text may hold other line ends
    if torn:
        file.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.split("\n") if line]


main = entry("synthesize", run)

if __name__ == "__main__":
    main()
