"""One rank of a training run: join, build, show the plan, train, measure, write the results."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_owner.train import checkpoints, outputs
from dtensor_owner.train.checkpoints import Progress
from dtensor_owner.train.compiling import choose_backend
from dtensor_owner.train.config import TrainConfig
from dtensor_owner.train.data import Corpus, load_corpus
from dtensor_owner.train.display import Silent, Terminal
from dtensor_owner.train.setup import Trainee, build_sharded
from dtensor_owner.train.steps import Ranks, StepRecord, train_steps, validation_loss
from dtensor_owner.usage import UsageError

GROUP_TIMEOUT = timedelta(minutes=5)
VALIDATIONS = 5  # spread over the run, after the one before the first step


class Phases:
    """Seconds by phase of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_steps(self, records: list[StepRecord], *, compiled: bool) -> None:
        """Split the steps' time; what the first took longer than usual is compilation."""
        optimizer = [record.optimizer_seconds for record in records]
        compile_seconds = 0.0
        if compiled and len(records) > 1:
            compile_seconds = max(0.0, optimizer[0] - median(optimizer[1:]))
            self.add("compile", compile_seconds)
        self.add("forward and backward", sum(r.seconds for r in records) - sum(optimizer))
        self.add("optimizer", sum(optimizer) - compile_seconds)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


@dataclass
class _Run:
    """What one rank's run carries along."""

    config: TrainConfig
    ranks: Ranks
    mesh: DeviceMesh
    display: Silent
    metrics: outputs.NoMetrics
    phases: Phases
    progress: Progress


def run_rank(config: TrainConfig, *, init_method: str | None = None) -> None:
    """Train as the rank that the environment names (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``).

    Rank 0 shows the plan and the progress and writes the files to ``config.out``.

    Args:
        config: The options, the same on every rank.
        init_method: Where the ranks meet; default: where the environment says (torchrun).
    """
    phases = Phases()
    with phases("start"):
        # A forked rank's environment is set after it has imported torch.
        threads, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))
        ranks, mesh = _join(config, init_method)
        is_first = ranks.rank == 0
        display = Terminal() if is_first else Silent()
        found = checkpoints.find(config)
        starts = is_first and found is None
        metrics = outputs.Metrics(config.out) if starts else outputs.NoMetrics()
    run = _Run(config, ranks, mesh, display, metrics, phases, Progress())
    with phases("read text"):
        corpus = load_corpus(config.data, config.context)
    backend, trainee = _build(run, corpus)
    if found is not None:
        with phases("load checkpoint"):
            run.progress, how = checkpoints.load(found, trainee, corpus, config)
        display.line(how)
        if is_first:  # older results are touched only now that the run can go on
            run.metrics = outputs.Metrics(config.out, run.progress.done)
    with run.metrics:
        records = _train(run, trainee, corpus)
    phases.add_steps(records, compiled=backend is not None)
    dist.destroy_process_group()  # only where all went well: a failed rank must not wait here
    if is_first:
        summary = _summary(run, corpus, trainee, backend, records)
        outputs.write_summary(config.out, summary)
        losses = [(line["step"], line["loss"]) for line in run.metrics.history if "loss" in line]
        losses += [(record.step, record.loss) for record in records]
        outputs.plot_losses(config.out, losses, run.progress.validation, _title(config))
        display.line(_closing(config, summary, phases))


def _join(config: TrainConfig, init_method: str | None) -> tuple[Ranks, DeviceMesh]:
    """Form the process group and its 1-D mesh."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if config.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"--device cuda: rank {rank} needs a GPU of its own, and this machine shows "
                f"{torch.cuda.device_count()}; lower --world-size or use --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if config.device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
    mesh = init_device_mesh(config.device, (world_size,), mesh_dim_names=("shard",))
    return Ranks(rank, world_size, device), mesh


def _build(run: _Run, corpus: Corpus) -> tuple[str | None, Trainee]:
    """Build model and optimizers and show the plan; returns what compiles Muon's step, too."""
    config = run.config
    backend, how = None, "Muon's step runs eagerly."
    if config.compile and config.optimizer == "muon":
        with run.phases("compile"):
            backend, how = choose_backend(run.ranks)
    with run.phases("build"):
        trainee = build_sharded(config, run.mesh, backend)
    run.display.line(_opening(corpus, trainee))
    if config.optimizer == "muon":
        run.display.line(how)
    return backend, trainee


def _train(run: _Run, trainee: Trainee, corpus: Corpus) -> list[StepRecord]:
    """Run the steps that are left; returns what each measured."""
    config, progress = run.config, run.progress
    records: list[StepRecord] = []
    tokens = config.batch * config.context

    def validate() -> None:
        with run.phases("validation"):
            loss = validation_loss(trainee, corpus, config, run.ranks)
        progress.validation.append((progress.done, loss))
        run.metrics.write({"step": progress.done, "validation_loss": loss})

    if not progress.validation:
        validate()
    before = progress.validation[0][1]
    run.display.line(f"Validation loss before: {before:.4f} nats per byte")
    every = max(1, config.steps // VALIDATIONS)
    with run.display.progress(config.steps, progress.done) as show:
        for record in train_steps(trainee, corpus, config, run.ranks, done=progress.done):
            records.append(record)
            progress.done, progress.last_loss = record.step, record.loss
            if progress.first_loss is None:
                progress.first_loss = record.loss
            show(record.loss, tokens / record.seconds)
            run.metrics.write(record.to_dict(tokens))
            if record.step == config.steps or record.step % every == 0:
                validate()
            if config.checkpoint_every and (
                record.step == config.steps or record.step % config.checkpoint_every == 0
            ):
                _save(run, trainee, corpus)
    return records


def _save(run: _Run, trainee: Trainee, corpus: Corpus) -> None:
    with run.phases("save checkpoints"):
        run.metrics.sync()
        checkpoints.save(trainee, corpus, run.config, run.progress)
        if run.ranks.rank == 0:
            checkpoints.prune(run.config)


def _opening(corpus: Corpus, trainee: Trainee) -> str:
    count = sum(parameter.numel() for parameter in trainee.model.parameters())
    return (
        f"{count:,} parameters, {len(corpus.train):,} bytes of text to train on and "
        f"{len(corpus.held_out):,} held out, from {corpus.source}\n\n{trainee.plan}\n"
    )


def _title(config: TrainConfig) -> str:
    return f"{config.optimizer}, {config.world_size} ranks, {config.shard_layout} shards"


def _summary(
    run: _Run,
    corpus: Corpus,
    trainee: Trainee,
    backend: str | None,
    records: list[StepRecord],
) -> dict[str, Any]:
    tokens, progress = run.config.batch * run.config.context, run.progress
    validation = progress.validation
    seconds = median(record.seconds for record in records) if records else None
    return {
        "options": run.config.to_dict(),
        "torch": str(torch.__version__),
        "parameters": sum(parameter.numel() for parameter in trainee.model.parameters()),
        "text": {
            "source": corpus.source,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
        },
        "validation_nats_per_byte": {"before": validation[0][1], "after": validation[-1][1]},
        "train_nats_per_byte": {"first": progress.first_loss, "last": progress.last_loss},
        "seconds": run.phases.seconds,
        "compile_backend": backend,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "plan": trainee.plan.to_dict(),
    }


def _closing(config: TrainConfig, summary: dict[str, Any], phases: Phases) -> str:
    losses, speed = summary["validation_nats_per_byte"], summary["tokens_per_second"]
    return (
        f"\nValidation loss: {losses['before']:.4f} nats per byte before, "
        f"{losses['after']:.4f} after {config.steps} steps\n"
        f"Seconds: {phases}\n"
        f"{f'{speed:,.0f} tokens/s; ' if speed else ''}{', '.join(outputs.FILES)} are in "
        f"{config.out}"
    )
