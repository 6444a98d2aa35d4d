"""Compute the target's hidden states of training text once, and keep them for every training that reads them.

    python scripts/cache_features.py method=eagle3 target=smollm2 data.features_in=outputs/features
    torchrun --nproc-per-node 8 scripts/cache_features.py ...        # shared out over eight GPUs
    accelerate launch train/eagle.py method=eagle3 target=smollm2 data.features=cached data.features_in=outputs/features

Takes the options of a training. Run again, it makes anew what is spoiled and goes on where it stopped.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from paceline.conf.entry import entry
from paceline.models.errors import Refusal


def run(cfg: Any) -> None:
    from rich.console import Console

    from paceline.data.batch import Batch, Loader
    from paceline.data.conversations import known_ids, load, load_tokenizer
    from paceline.data.features import Features, Shards, bytes_a_token, description
    from paceline.data.rows import highest, lengths
    from paceline.decode.progress import progress
    from paceline.models.embedded import folder
    from paceline.models.target import Target, device_of
    from paceline.models.warm import warm_start

    # processes that share the work need not speak to each other: each has its part of the data
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    beside = Console(stderr=True, quiet=rank > 0)  # where progress is shown
    device = device_of(cfg.target.device)
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device
    asked, place = cfg.target, Path(cfg.data.features_in)
    where = folder(asked.name, asked.path)
    tokenizer = load_tokenizer(where, asked.trust_remote_code)
    with progress("conversations", cfg.data.limit, console=beside) as bar:
        data = load(tokenizer, **cfg.data.keywords(), watch=bar.over)
    target = Target.load(where, cfg.dtype, device, known_ids(tokenizer), asked.quantize, asked.trust_remote_code)
    target.check_texts(max(lengths(data.train)), highest(data.train))
    taps = (warm_start(cfg.method, target)[0] if cfg.method.init_from else cfg.method.fitted(target)).taps
    train = cfg.train
    loader = Loader(data.train, train.batch_tokens, train.accumulate * cfg.processes, seed=cfg.seed)
    parts = list(loader.parts())[rank::world]
    template = data.provenance["template_sha256"]
    about = description(target.fingerprint, asked.quantize, cfg.dtype, taps, template, data.train, loader.packing)
    shards = Shards(place, about, begin=True)
    console = Console(quiet=rank > 0, soft_wrap=True, highlight=False)
    spoiled = shards.spoiled()  # of all: another process's shard may hold what is asked for here
    if rank == 0 and spoiled:
        console.print(f"computed again, since they are not as they were written: {', '.join(sorted(spoiled))}")
        shards.forget(spoiled)
    missing = shards.open((i for part in parts for i in part), without=spoiled)
    todo = [part for part in parts if not missing.isdisjoint(part)]
    sizes = lengths(data.train)
    tokens = sum(sizes[i] for part in todo for i in part)
    price, free = bytes_a_token(taps, target.hidden, target.dtype.itemsize), shutil.disk_usage(place).free
    console.print(
        f"{place}: {sum(sizes)} tokens, {price} bytes each, {sum(sizes) * price / 1e9:.2f} GB; "
        f"{tokens} tokens to go here, {free / 1e9:.1f} GB free"
    )
    if tokens * price * world > free:
        raise Refusal(f"data.features_in: {place} has not that much room; nearest: data.limit, or another folder")

    def say(batch: Batch) -> Any:
        return target(batch.ids, taps, documents=batch.document, positions=batch.positions)

    features = Features(say, taps, shards)
    with progress("tokens", tokens, console=beside) as bar:
        for part in todo:
            features.of(loader.packed(part).to(target.device))
            bar.advance(by=sum(sizes[i] for i in part))
    shards.flush()
    console.print(f"done: {bar.count} tokens in {bar.seconds:.0f} s")


main = entry("cache_features", run)

if __name__ == "__main__":
    main()
