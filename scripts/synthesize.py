"""Write conversations a drafter can learn from, from nothing: the target asks and answers.

    python scripts/synthesize.py target=smollm2 count=512 out=outputs/self

Writes out/conversations.jsonl (an input of data=jsonl) and out/provenance.json. Run again, it goes on where it stopped.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.conversations import load_tokenizer, stop_ids, template_hash
    from paceline.data.synthesis import Written, conversations
    from paceline.decode import Decoder, Sampler
    from paceline.models.target import Target, folder
    from paceline.scripts.terminal import device_of, progress

    where = folder(cfg.target.name, cfg.target.path)
    tokenizer = load_tokenizer(where)
    target = Target.load(where, cfg.dtype, device_of(cfg.target.device), len(tokenizer), cfg.target.quantize)
    stops = stop_ids(tokenizer)
    decoder = Decoder(target)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "conversations.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {" ".join(record["messages"][0]["content"].lower().split()) for record in done}
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

    provenance = {
        "made by": "scripts/synthesize.py",
        "target": cfg.target.path or cfg.target.name,
        "target_fingerprint": target.fingerprint,
        "template_sha256": template_hash(tokenizer),
        "prompt": cfg.prompt.plain(),
        "answer": cfg.answer.plain(),
        "seed": cfg.seed,
        "dtype": cfg.dtype,
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    dropped: Counter[str] = Counter()
    console = Console()
    with file.open("a") as sink, progress("conversations", cfg.count, done=len(done)) as bar:
        for record in conversations(
            tokenizer, writer(cfg.prompt), writer(cfg.answer), cfg.count - len(done), cfg.batch, known, dropped
        ):
            sink.write(json.dumps(record, ensure_ascii=False) + "\n")
            bar.advance(f"{tokens} tokens, {tokens / bar.seconds:.0f} a second")
            if bar.count % cfg.batch == 0:
                sink.flush()
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "none"
    console.print(f"{file}: {cfg.count} conversations; {tokens} tokens written now; user turns dropped: {reasons}")


main = entry("synthesize", run)

if __name__ == "__main__":
    main()
