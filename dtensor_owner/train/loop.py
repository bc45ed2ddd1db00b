"""One rank of a training run: join, build, show the plan, train, measure, write the results."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_owner.train import outputs
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


def run_rank(config: TrainConfig, *, init_method: str | None = None) -> None:
    """Train as the rank that the environment names (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``).

    Rank 0 shows the plan and the progress and writes the files to ``config.out``.

    Args:
        config: The options, the same on every rank.
        init_method: Where the ranks meet; default: where the environment says (torchrun).
    """
    phases = Phases()
    with phases("start"):
        ranks, mesh = _join(config, init_method)
        display = Terminal() if ranks.rank == 0 else Silent()
    with phases("read text"):
        corpus = load_corpus(config.data, config.context)
    backend, how = None, "Muon's step runs eagerly."
    if config.compile and config.optimizer == "muon":
        with phases("compile"):
            backend, how = choose_backend(ranks)
    with phases("build"):
        trainee = build_sharded(config, mesh, backend)
    display.line(_opening(corpus, trainee))
    if config.optimizer == "muon":
        display.line(how)
    records, validation = _train(trainee, corpus, config, ranks, display, phases)
    phases.add_steps(records, compiled=backend is not None)
    dist.destroy_process_group()  # only where all went well: a failed rank must not wait here
    if ranks.rank == 0:
        summary = _summary(config, corpus, trainee, backend, records, validation, phases)
        outputs.write_summary(config.out, summary)
        losses = [(record.step, record.loss) for record in records]
        outputs.plot_losses(config.out, losses, validation, _title(config))
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


def _train(
    trainee: Trainee,
    corpus: Corpus,
    config: TrainConfig,
    ranks: Ranks,
    display: Silent,
    phases: Phases,
) -> tuple[list[StepRecord], list[tuple[int, float]]]:
    """Run all steps; returns what each measured and (step, validation loss) pairs."""
    records: list[StepRecord] = []
    validation: list[tuple[int, float]] = []
    tokens = config.batch * config.context
    metrics = outputs.Metrics(config.out) if ranks.rank == 0 else outputs.NoMetrics()

    def validate(after: int) -> None:
        with phases("validation"):
            loss = validation_loss(trainee, corpus, config, ranks)
        validation.append((after, loss))
        metrics.write({"step": after, "validation_loss": loss})

    with metrics:
        validate(0)
        display.line(f"Validation loss before: {validation[0][1]:.4f} nats per byte")
        every = max(1, config.steps // VALIDATIONS)
        with display.progress(config.steps) as show:
            for record in train_steps(trainee, corpus, config, ranks):
                records.append(record)
                show(record.loss, tokens / record.seconds)
                metrics.write(record.to_dict(tokens))
                if record.step == config.steps or record.step % every == 0:
                    validate(record.step)
    return records, validation


def _opening(corpus: Corpus, trainee: Trainee) -> str:
    count = sum(parameter.numel() for parameter in trainee.model.parameters())
    return (
        f"{count:,} parameters, {len(corpus.train):,} bytes of text to train on and "
        f"{len(corpus.held_out):,} held out, from {corpus.source}\n\n{trainee.plan}\n"
    )


def _title(config: TrainConfig) -> str:
    return f"{config.optimizer}, {config.world_size} ranks, {config.shard_layout} shards"


def _summary(
    config: TrainConfig,
    corpus: Corpus,
    trainee: Trainee,
    backend: str | None,
    records: list[StepRecord],
    validation: list[tuple[int, float]],
    phases: Phases,
) -> dict[str, Any]:
    tokens = config.batch * config.context
    return {
        "options": config.to_dict(),
        "torch": str(torch.__version__),
        "parameters": sum(parameter.numel() for parameter in trainee.model.parameters()),
        "text": {
            "source": corpus.source,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
        },
        "validation_nats_per_byte": {"before": validation[0][1], "after": validation[-1][1]},
        "train_nats_per_byte": {"first": records[0].loss, "last": records[-1].loss},
        "seconds": phases.seconds,
        "compile_backend": backend,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / median(record.seconds for record in records),
        "plan": trainee.plan.to_dict(),
    }


def _closing(config: TrainConfig, summary: dict[str, Any], phases: Phases) -> str:
    losses = summary["validation_nats_per_byte"]
    return (
        f"\nValidation loss: {losses['before']:.4f} nats per byte before, "
        f"{losses['after']:.4f} after {config.steps} steps\n"
        f"Seconds: {phases}\n"
        f"{summary['tokens_per_second']:,.0f} tokens/s; {', '.join(outputs.FILES)} are in "
        f"{config.out}"
    )
