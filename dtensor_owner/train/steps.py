"""Training steps and the validation loss: the same on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_owner.train import data
from dtensor_owner.train.config import TrainConfig
from dtensor_owner.train.data import Corpus
from dtensor_owner.train.model import summed_loss
from dtensor_owner.train.setup import Trainee

WARMUP_STEPS = 10
FINAL_LR = 0.1  # of the peak, reached linearly


@dataclass(frozen=True)
class Ranks:
    """Which of the ranks this process is, and where its tensors live."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar over all ranks."""
        value = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(value)
        return value


@dataclass(frozen=True)
class StepRecord:
    """What one step measured; ``loss`` is over the global batch, in nats per byte."""

    step: int
    loss: float
    lr_factor: float
    seconds: float
    optimizer_seconds: float

    def to_dict(self, tokens: int) -> dict[str, float]:
        """One line of metrics.jsonl, for a step of ``tokens`` bytes."""
        return {**asdict(self), "tokens_per_second": tokens / self.seconds}


def lr_factor(step: int, steps: int) -> float:
    """The learning rate of a step as a part of its peak: a short warm-up, then linearly down."""
    warmup = min(WARMUP_STEPS, max(1, steps // 5))
    return min(1.0, (step + 1) / warmup) * (1.0 - (1.0 - FINAL_LR) * step / steps)


def train_steps(
    trainee: Trainee,
    corpus: Corpus,
    config: TrainConfig,
    ranks: Ranks,
    *,
    done: int = 0,
) -> Iterator[StepRecord]:
    """Train step by step, from the one after ``done``; yields after each one.

    The batch of a step depends on the seed and the step alone, and the gradient is that of the
    mean over the global batch, so that any number of ranks computes the same step.
    """
    peaks = [[float(g["lr"]) for g in optimizer.param_groups] for optimizer in trainee.optimizers]
    for step in range(done, config.steps):
        start = time.perf_counter()
        factor = lr_factor(step, config.steps)
        _set_lr(trainee, peaks, factor)
        loss = _backward(trainee, corpus, config, ranks, step)
        before_optimizer = time.perf_counter()
        for optimizer in trainee.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = ranks.total(loss).item() / (config.batch * config.context)
        end = time.perf_counter()
        yield StepRecord(step + 1, mean, factor, end - start, end - before_optimizer)


def _backward(
    trainee: Trainee, corpus: Corpus, config: TrainConfig, ranks: Ranks, step: int
) -> Tensor:
    """Leave the gradient of the global mean loss behind; returns this rank's summed loss."""
    starts = data.batch_starts(
        seed=config.seed,
        step=step,
        batch=config.batch,
        length=len(corpus.train),
        context=config.context,
    )
    mine = data.share(config.batch, ranks.rank, ranks.world_size)
    inputs, targets = data.sequences(corpus.train, starts[mine.start : mine.stop], config.context)
    loss = summed_loss(trainee.model(inputs.to(ranks.device)), targets.to(ranks.device))
    # Gradients are averaged over ranks, whose shares of the batch may differ by one sequence:
    # the sum, scaled so, averages to the mean over the global batch.
    (loss * (ranks.world_size / (config.batch * config.context))).backward()
    return loss


def _set_lr(trainee: Trainee, peaks: list[list[float]], factor: float) -> None:
    for optimizer, optimizer_peaks in zip(trainee.optimizers, peaks):
        for group, peak in zip(optimizer.param_groups, optimizer_peaks):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor


@torch.no_grad()
def validation_loss(trainee: Trainee, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> float:
    """Nats per byte over sequences spread evenly over the held-out text; the same on every rank."""
    count = config.eval_sequences
    starts = data.even_starts(count=count, length=len(corpus.held_out), context=config.context)
    mine = data.share(count, ranks.rank, ranks.world_size)
    inputs, targets = data.sequences(
        corpus.held_out, starts[mine.start : mine.stop], config.context
    )
    # One forward on every rank, with an empty batch too: each forward gathers the weights.
    loss = summed_loss(trainee.model(inputs.to(ranks.device)), targets.to(ranks.device))
    return ranks.total(loss).item() / (count * config.context)
