"""`fit(cfg)`: build, prepare, step, log, evaluate, save. Each sentence is a function below or a file beside.

Owns the run: its folder, its order of steps, what is kept. Knows no method: a drafter is whatever `models.build` makes,
and the trunk whatever `trunk_of` makes.
"""

import atexit
import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from torch.distributed.tensor import DTensor

from paceline.data.batch import Batch, Loader
from paceline.data.conversations import Dataset, draft_vocabulary, known_ids, load, load_tokenizer, stop_ids
from paceline.data.rows import highest, lengths
from paceline.decode.progress import progress
from paceline.models.drafter import Drafter, Shape, build
from paceline.models.embedded import folder
from paceline.models.errors import Refusal
from paceline.models.kernels import kernels
from paceline.models.target import Target, device_of
from paceline.models.warm import warm_start
from paceline.train import checkpoint
from paceline.train.pace import Pace
from paceline.train.record import Record
from paceline.train.step import TrainStep
from paceline.train.trunk import Trunk, trunk_of, waits
from paceline.train.yardstick import Yardstick, decodable

# How long processes wait for each other. The first alone decodes and writes, which may take longer than the 10 minutes
# that NCCL grants; one that died is noticed by who started it, not by this.
PATIENCE = timedelta(hours=6)


def fit(cfg: Any) -> None:
    """Train one drafter as `cfg` (a validated TrainConfig) says, and leave its best export in `cfg.out`."""
    accelerator = _accelerator(cfg)
    set_seed(cfg.seed)
    record = Record(cfg, accelerator)
    where = folder(cfg.target.name, cfg.target.path)
    tokenizer = load_tokenizer(where, cfg.target.trust_remote_code)
    cfg.method.check_tokenizer(tokenizer)
    with progress("conversations", cfg.data.limit, console=record.console) as bar:
        data = load(tokenizer, **cfg.data.keywords(), watch=bar.over)
    record.show_data(data, tokenizer)

    device, ids = str(accelerator.device), known_ids(tokenizer)
    target = Target.load(where, cfg.dtype, device, ids, cfg.target.quantize, cfg.target.trust_remote_code)
    record.begun_with = {"data.path": data.provenance["sha256"], "target.path": target.fingerprint}
    for texts in (data.train, data.held_out):
        target.check_texts(max(lengths(texts), default=0), highest(texts))
    place = record.resume_from()
    drafter = _drafter(cfg, target, data, tokenizer, record, afresh=place is None)
    if drafter.window is not None and cfg.data.max_length > drafter.window:
        raise Refusal(
            f"data.max_length: {cfg.data.max_length}, but this draft model's window is {drafter.window} tokens; "
            f"nearest: {drafter.window}"
        )
    # its prompts are looked over before anything is computed
    window = decodable(target, drafter, cfg.decode)
    yardstick = Yardstick(cfg, tokenizer, data, window) if accelerator.is_main_process else None
    loader = Loader(
        data.train,
        cfg.train.batch_tokens,
        cfg.train.accumulate,
        accelerator.num_processes,
        accelerator.process_index,
        cfg.seed,
    )
    trunk = trunk_of(cfg, target, drafter, loader, data, record.show_features)
    learners = trunk.learners(drafter)
    optimizer = _optimizer(cfg, trunk.groups(drafter))
    total = _total(cfg, loader)
    begun, moments = _resumed(place, record, learners, accelerator, total) if place is not None else (0, {})
    pace = Pace(total, cfg.train.minutes, begun, record.seconds)
    drafter.to(accelerator.device).borrow(trunk.live)
    step = trunk.step(drafter, cfg.train.chunk, target.vocab)
    if _compiles(cfg, accelerator.device):
        step.fuse(loss_alone=cfg.train.compile == "loss")
    trained, optimizer = accelerator.prepare(step, optimizer)
    checkpoint.give(moments, learners, optimizer.optimizer)
    # not at once: processes that have parted do not meet again, and --multirun may have another run for them
    atexit.register(PartialState().destroy_process_group)
    with record.alone(), record.running(begun, total, drafter, trunk, data), _signals() as signals:
        for number, parts in _steps(loader, total if record.ended else begun, total):
            at, last = _agreed(cfg, pace.at(number, record.seconds))
            trunk.turn(at, total)
            _set_rates(cfg, optimizer, at, total)
            news = _update(cfg, accelerator, trained, step, trunk, optimizer, parts, bool(signals))
            record.step(number, news, optimizer.param_groups[0]["lr"], last)

            # once in a while: decode held-out prompts with the weights as exported, and keep the best
            if last or (cfg.eval.every and number % cfg.eval.every == 0):
                whole = _whole(drafter, trunk)
                if yardstick is not None:
                    record.measured(number, yardstick.measure(whole, trunk), whole, trunk, data)
                accelerator.wait_for_everyone()
            # once in a while: save everything an exact resume needs
            if last or number % cfg.train.save_every == 0 or news["stop"]:
                _save(cfg, record, number, learners, optimizer, accelerator)
            if last:
                break
            if news["stop"]:
                record.console.print(f"stopped after step {number}, which is saved: resume=true goes on")
                raise SystemExit(128 + signal.SIGTERM)


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
    waiting = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=[waiting])
    if accelerator.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        if cfg.trunk.kind != "frozen":
            raise Refusal(f"trunk: {cfg.trunk.kind} cannot be sharded yet; nearest: conf/accelerate/ddp.yaml")
        _shard(accelerator.state)
    return accelerator


def _shard(state: AcceleratorState) -> None:
    """Have weights, gradients and moments sharded over the processes, also without GPUs, where Accelerate would not.

    Weights stay float32: what computes in another dtype does so by autocast, as where nothing is sharded.
    """
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise Refusal("fsdp_version: 1 is not available; nearest: 2, as in conf/accelerate/fsdp2.yaml")
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


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
    if cfg.train.compile == "auto" and device.type == "cpu" and cfg.dtype == "bfloat16":
        return able and kernels() is None  # which are quicker than what would be compiled, and there already
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
    return cfg.train.steps or math.ceil(cfg.train.epochs * loader.steps())


def _optimizer(cfg: Any, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=cfg.train.lr,
        betas=cfg.train.betas,
        weight_decay=cfg.train.weight_decay,
        fused=True,
    )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGTERM, by which a machine announces that it will be taken away: the step is finished and saved."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield caught
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        signal.signal(signal.SIGTERM, before)


def _save(cfg: Any, record: Record, number: int, learners: Any, optimizer: Any, accelerator: Accelerator) -> None:
    """Write a checkpoint, and forget the oldest. All processes take part."""
    rng = gather_object([checkpoint.generators(accelerator.device)])
    weights, moments = checkpoint.held(learners, optimizer.optimizer)
    if accelerator.is_main_process:
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler.state_dict()}
        checkpoint.save(record.checkpoints, number, weights, moments, rng, record.state() | scaler)
        checkpoint.prune(record.checkpoints, cfg.train.keep)
    accelerator.wait_for_everyone()


def _resumed(
    place: Path, record: Record, learners: Any, accelerator: Accelerator, total: int
) -> tuple[int, dict[str, Any]]:
    """Steps already taken, with weights and generators put back, and the moments that the optimiser is to be given.

    Raises Refusal where another run's are as many as this one has in `total`: it would end without an export.
    """
    state, moments = checkpoint.load(
        place, learners, accelerator.process_index, accelerator.num_processes, accelerator.device
    )
    record.restore(state, place)
    if state["step"] >= total and not record.ended:
        raise Refusal(
            f"resume={place}: it has taken {state['step']} steps, and this run is to end after {total}; "
            "nearest: more of train.steps, train.epochs or train.tokens",
            common=True,
        )
    if accelerator.scaler is not None and "scaler" in state:  # another run may have been of another dtype
        accelerator.scaler.load_state_dict(state["scaler"])
    return state["step"], moments


def _whole(drafter: Drafter, trunk: Trunk) -> Drafter:
    """The drafter, or where its weights are sharded over the processes, of which all take part, a copy of the whole."""
    weights = drafter.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in weights.values()):
        return drafter
    copy = build(drafter.options, drafter.shape, drafter.vocab_map).to(trunk.live.device)
    copy.load_state_dict({name: checkpoint.whole(tensor) for name, tensor in weights.items()})
    copy.borrow(trunk.live)
    return copy


# ---------------------------------------------------------------- step


def _steps(loader: Loader, begun: int, total: int) -> Iterator[tuple[int, list[Batch]]]:
    """(step from 1, this rank's micro-batches), epoch after epoch, from step `begun` + 1 to `total`."""
    steps = loader.steps()
    while begun < total:
        epoch, start = divmod(begun, steps)
        for parts in loader.batches(epoch, start):
            begun += 1
            yield begun, parts
            if begun == total:
                return


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
    stop: bool = False,
) -> dict[str, Any]:
    """One optimiser step: gradients of all parts, divided once by the counts of all parts of all processes.

    Returns sums and counts over all of them, per depth: `loss` over `learnt` rows, `right` of `asked`. Behind the
    depths stand the trunk's own terms, in `loss` and `learnt`. `stop`: whether any process was asked to.
    """
    parts = [part.to(accelerator.device) for part in parts]
    counts = [step.counts(part) for part in parts]
    learnt = accelerator.reduce(sum(count.learnt for count in counts), "sum")
    asked = accelerator.reduce(sum(count.asked for count in counts), "sum")
    said = accelerator.reduce(learnt.new_tensor([sum(part.tokens for part in parts), stop]), "sum")
    depths = [step.drafter.options.decay**k for k in range(step.depths)]
    weight = torch.tensor(trunk.weights(depths), device=accelerator.device)
    # DDP averages over processes what has to be summed
    scale = weight / learnt.clamp(min=1) * accelerator.num_processes
    loss = torch.zeros_like(weight)
    right = torch.zeros_like(asked)
    losses = []
    for index, part in enumerate(parts):
        inputs = trunk.inputs(part)
        with accelerator.no_sync(trained) if index + 1 < len(parts) else nullcontext():
            with accelerator.autocast():
                sums = trained(part, *inputs, scale)
            accelerator.backward(sums.total)
        losses.append(sums.loss.detach())
        loss, right = loss + losses[-1], right + sums.right
    learning = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = checkpoint.whole(accelerator.clip_grad_norm_(learning, cfg.train.clip))
    finite, empty = bool(torch.isfinite(norm)), not bool(learnt.any())
    faults = (
        [] if finite else [part.members for part, own in zip(parts, losses, strict=True) if not own.isfinite().all()]
    )
    # neither gradients that are not finite nor a step without any may move the moments, or the weights by their decay
    # (float16's scaler leaves out the former by itself, and has to see them)
    if not empty and (finite or accelerator.scaler is not None):
        optimizer.step()
    elif accelerator.scaler is not None:  # as the step does: gradients are unscaled once between two updates
        accelerator.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    tokens, stops = said.tolist()
    return {
        "loss": accelerator.reduce(loss, "sum").tolist(),
        "learnt": learnt.tolist(),
        "right": accelerator.reduce(right, "sum").tolist(),
        "asked": asked.tolist(),
        "tokens": tokens,
        "stop": stops > 0,
        "examples": [] if finite else sorted(i for members in gather_object(faults) for i in members),
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
