"""`fit(cfg)`: build, prepare, step, log, evaluate, save. Each sentence is a function below or a file beside.

Owns the run: its folder, its order of steps, what is kept. Knows no method: a drafter is whatever `models.build` makes,
and the trunk whatever `trunk_of` makes.
"""

import atexit
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Dataset, draft_vocabulary, load, load_tokenizer, stop_ids
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.errors import Refusal
from paceline.models.target import Target, device_of, folder
from paceline.models.warm import warm_start
from paceline.train import checkpoint
from paceline.train.pace import Pace
from paceline.train.record import Record
from paceline.train.step import TrainStep
from paceline.train.trunk import Trunk, trunk_of, waits
from paceline.train.yardstick import Yardstick


def fit(cfg: Any) -> None:
    """Train one drafter as `cfg` (a validated TrainConfig) says, and leave its best export in `cfg.out`."""
    accelerator = _accelerator(cfg)
    set_seed(cfg.seed)
    record = Record(cfg, accelerator)
    where = folder(cfg.target.name, cfg.target.path)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    cfg.method.check_tokenizer(tokenizer)
    data = load(tokenizer, **cfg.data.keywords())
    record.show_data(data, tokenizer)

    target = Target.load(
        where, cfg.dtype, str(accelerator.device), len(tokenizer), cfg.target.quantize, cfg.target.trust_remote_code
    )
    place = record.resume_from()
    drafter = _drafter(cfg, target, data, tokenizer, record, afresh=place is None)
    loader = Loader(
        data.train,
        cfg.train.batch_tokens,
        cfg.train.accumulate,
        accelerator.num_processes,
        accelerator.process_index,
        cfg.seed,
    )
    trunk = trunk_of(cfg, target, drafter, loader)
    learners = trunk.learners(drafter)
    optimizer = _optimizer(cfg, trunk.groups(drafter))
    total = _total(cfg, loader)
    begun = _resumed(place, record, learners, optimizer, accelerator) if place is not None else 0
    pace = Pace(total, cfg.train.minutes, begun, record.seconds)
    drafter.to(accelerator.device).borrow(trunk.live)
    step = trunk.step(drafter, cfg.train.chunk, target.vocab)
    if _compiles(cfg, accelerator.device):
        step.fuse(loss_alone=cfg.train.compile == "loss")
    trained, optimizer = accelerator.prepare(step, optimizer)
    yardstick = Yardstick(cfg, tokenizer, data) if accelerator.is_main_process else None
    with record.running(begun, total, drafter, trunk, data):
        for number, parts in _steps(loader, total if record.ended else begun, total):
            at, last = _agreed(cfg, pace.at(number, record.seconds))
            trunk.turn(at, total)
            _set_rates(cfg, optimizer, at, total)
            news = _update(cfg, accelerator, trained, step, trunk, optimizer, parts)
            record.step(number, news, optimizer.param_groups[0]["lr"], last)

            # once in a while: decode held-out prompts with the weights as exported, and keep the best
            if last or (cfg.eval.every and number % cfg.eval.every == 0):
                if yardstick is not None:
                    record.measured(number, yardstick.measure(drafter, trunk), drafter, trunk, data)
                accelerator.wait_for_everyone()
            # once in a while: save everything an exact resume needs
            if last or number % cfg.train.save_every == 0:
                _save(cfg, record, number, learners, optimizer, accelerator)
            if last:
                break
    # not at once: processes that have parted do not meet again, and --multirun may have another run for them
    atexit.register(PartialState().destroy_process_group)


# ---------------------------------------------------------------- build


def _accelerator(cfg: Any) -> Accelerator:
    """On the device asked for. Without a GPU it must be told so, or two processes would look for one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # in --multirun, the run before may have had another
    kind, _, index = device_of(cfg.target.device).partition(":")
    cpu = kind == "cpu"
    if cfg.dtype == "float16" and (cpu or kind == "mps"):
        raise Refusal("dtype=float16 needs a CUDA GPU to train on; nearest: dtype=bfloat16")
    if index:
        torch.cuda.set_device(int(index))
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[cfg.dtype]
    return Accelerator(cpu=cpu, mixed_precision=precision)


def _compiles(cfg: Any, device: torch.device) -> bool:
    """Whether anything is compiled. Refusal: it is to be, and there is nothing to compile with."""
    if not cfg.train.compile:
        return False
    names = (
        [os.environ.get("CXX"), "g++", "clang++"] if device.type == "cpu" else [os.environ.get("CC"), "gcc", "clang"]
    )
    able = any(shutil.which(name) for name in names if name)
    if cfg.train.compile != "auto" and not able:
        asked = f"train.compile={str(cfg.train.compile).lower()}"
        raise Refusal(f"{asked} needs a compiler, and there is no {names[1]}; nearest: train.compile=auto")
    return able


def _drafter(cfg: Any, target: Target, data: Dataset, tokenizer: Any, record: Record, afresh: bool) -> Drafter:
    """Float32 weights as the method starts them, or those of method.init_from.

    The draft vocabulary comes from the supervised tokens, once: with weights that go on (not `afresh`, or init_from)
    their own stays, whatever the data says now.
    """
    opts, vocab_map = cfg.method, None
    if opts.draft_vocab and opts.draft_vocab >= target.vocab:  # a small target needs no smaller vocabulary
        opts = opts.model_copy(update={"draft_vocab": None})
    if opts.init_from:
        drafter, record.coverage = warm_start(opts, target)
        return drafter
    if opts.draft_vocab and afresh:
        vocab_map, record.coverage = draft_vocabulary(data.train, opts.draft_vocab, keep=stop_ids(tokenizer))
    elif opts.draft_vocab:
        vocab_map = torch.arange(opts.draft_vocab)  # until the checkpoint's own is read
    drafter = build(opts.fitted(target), Shape.of(target), vocab_map)
    target(torch.zeros(1, 1, dtype=torch.long, device=target.device), drafter.taps)  # refuses taps that it has not
    if afresh:
        drafter.start(target)
    return drafter


def _total(cfg: Any, loader: Loader) -> int:
    """Optimiser steps that were asked for, in whichever unit."""
    if cfg.train.tokens:
        return loader.steps_of(cfg.train.tokens)
    return cfg.train.steps or math.ceil(cfg.train.epochs * loader.steps(0))


def _optimizer(cfg: Any, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=cfg.train.lr,
        betas=cfg.train.betas,
        weight_decay=cfg.train.weight_decay,
        fused=True,
    )


def _save(cfg: Any, record: Record, number: int, learners: Any, optimizer: Any, accelerator: Accelerator) -> None:
    """Write a checkpoint, and forget the oldest. All processes take part."""
    rng = gather_object([checkpoint.generators(accelerator.device)])
    if accelerator.is_main_process:
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler.state_dict()}
        checkpoint.save(record.checkpoints, number, learners, optimizer.optimizer, rng, record.state() | scaler)
        checkpoint.prune(record.checkpoints, cfg.train.keep)
    accelerator.wait_for_everyone()


def _resumed(
    place: Path, record: Record, learners: Any, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> int:
    """Steps already taken, with weights, moments and generators put back."""
    state = checkpoint.load(
        place, learners, optimizer, accelerator.process_index, accelerator.num_processes, accelerator.device
    )
    record.restore(state, place)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state["step"]


# ---------------------------------------------------------------- step


def _steps(loader: Loader, begun: int, total: int) -> Iterator[tuple[int, list[Batch]]]:
    """(step from 1, this rank's micro-batches), epoch after epoch, from step `begun` + 1 to `total`."""
    number, epoch = 0, 0
    while begun < total:
        steps = loader.steps(epoch)
        if number + steps > begun:
            for parts in loader.batches(epoch, start=max(0, begun - number)):
                begun += 1
                yield begun, parts
                if begun == total:
                    return
        number, epoch = number + steps, epoch + 1


def _agreed(cfg: Any, told: tuple[float, bool]) -> tuple[float, bool]:
    """What the first process concludes from its clock, where a clock has a say: all have to take the same steps."""
    return tuple(broadcast_object_list(list(told))) if cfg.train.minutes else told


def _update(
    cfg: Any,
    accelerator: Accelerator,
    trained: torch.nn.Module,
    step: TrainStep,
    trunk: Trunk,
    optimizer: Any,
    parts: list[Batch],
) -> dict[str, Any]:
    """One optimiser step: gradients of all parts, divided once by the counts of all parts of all processes.

    Returns sums and counts over all of them, per depth: `loss` over `learnt` rows, `right` of `asked`. Behind the
    depths stand the trunk's own terms, in `loss` and `learnt`.
    """
    parts = [part.to(accelerator.device) for part in parts]
    counts = [step.counts(part) for part in parts]
    learnt = accelerator.reduce(sum(count.learnt for count in counts), "sum")
    asked = accelerator.reduce(sum(count.asked for count in counts), "sum")
    tokens = accelerator.reduce(learnt.new_tensor(sum(part.tokens for part in parts)), "sum")
    depths = [step.drafter.options.decay**k for k in range(step.depths)]
    weight = torch.tensor(trunk.weights(depths), device=accelerator.device)
    # DDP averages over processes what has to be summed
    scale = weight / learnt.clamp(min=1) * accelerator.num_processes
    loss = torch.zeros_like(weight)
    right = torch.zeros_like(asked)
    for index, part in enumerate(parts):
        inputs = trunk.inputs(part)
        with accelerator.no_sync(trained) if index + 1 < len(parts) else nullcontext():
            sums = trained(part, *inputs, scale)
            accelerator.backward(sums.total)
        loss, right = loss + sums.loss, right + sums.right
    learning = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = accelerator.clip_grad_norm_(learning, cfg.train.clip)
    finite, empty = bool(torch.isfinite(norm)), not bool(learnt.any())
    # neither gradients that are not finite nor a step without any may move the moments, or the weights by their decay
    # (float16's scaler leaves out the former by itself, and has to see them)
    if not empty and (finite or accelerator.scaler is not None):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": accelerator.reduce(loss, "sum").tolist(),
        "learnt": learnt.tolist(),
        "right": accelerator.reduce(right, "sum").tolist(),
        "asked": asked.tolist(),
        "tokens": int(tokens),
        "grad_norm": float(norm),
        "skipped": not finite,
        "empty": empty,
    }


def _rate(cfg: Any, number: float, total: int) -> float:
    """Learning rate at place `number` (from 1) of the schedule, whatever the number of processes.

    It is highest at the last step of the warmup, and would be 0 at step `total` + 1.
    """
    warmup = max(1, round(cfg.train.warmup * total))
    if number <= warmup:
        return cfg.train.lr * number / warmup
    done = (number - warmup) / (total - warmup + 1)
    if cfg.train.schedule == "cosine":
        return cfg.train.lr * 0.5 * (1 + math.cos(math.pi * done))
    return cfg.train.lr * (1 - done if cfg.train.schedule == "linear" else 1)


def _set_rates(cfg: Any, optimizer: Any, number: float, total: int) -> None:
    """A group that waits for a share of the steps has a schedule of its own, with its own warmup, over the rest."""
    for group in optimizer.param_groups:
        waited = waits(group["after"], total)
        moving = number > waited
        group["lr"] = group["multiple"] * _rate(cfg, number - waited, total - waited) if moving else 0.0
