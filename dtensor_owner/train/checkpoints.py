"""Checkpoints of a training run: when, where, how many, and going on from one."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dtensor_owner.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    load_extra,
    save_checkpoint,
)
from dtensor_owner.checkpoint_files import REMOVED, is_complete, remove
from dtensor_owner.train.config import CHECKPOINTS, TrainConfig, flag
from dtensor_owner.train.data import Corpus
from dtensor_owner.train.setup import Trainee
from dtensor_owner.usage import UsageError

# What a resumed run must share with the one before, and what it may change with a note.
SAME = ("layers", "dim", "heads", "hidden", "context", "optimizer")
NOTED = ("steps", "seed", "batch", "lr", "adamw_lr", "weight_decay")
PRECISION = ("ns_dtype", "param_dtype", "mxfp8")


@dataclass
class Progress:
    """How far a run has come; saved with each checkpoint.

    Args:
        done: Optimizer steps done. Data and learning rate follow from it.
        first_loss: Training loss of the first step, of the last one below.
        validation: (steps done, loss) so far.
    """

    done: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    validation: list[tuple[int, float]] = field(default_factory=list)


def find(config: TrainConfig) -> Path | None:
    """The checkpoint to go on from; None for a new run.

    Raises:
        UsageError: There is none where ``--resume`` says, or the folder for checkpoints holds
            some that a later ``--resume`` would take for this run's.
    """
    found = _named(config.resume) if config.resume is not None else None
    if config.checkpoint_every:
        newest = latest_checkpoint(config.checkpoints)
        if newest is not None and (found is None or newest.resolve() != found.resolve()):
            _refuse(newest, found, config)
    return found


def _named(resume: Path) -> Path:
    """The checkpoint that ``--resume`` names: itself, the newest in it, or in a run's folder."""
    found = latest_checkpoint(resume) or latest_checkpoint(resume / CHECKPOINTS)
    if found is None:
        where = "there" if resume.is_dir() else "there, and no such folder"
        raise UsageError(
            f"--resume {resume}: no complete checkpoint {where}; leave the option out to start "
            "from the beginning"
        )
    return found


def _refuse(newest: Path, found: Path | None, config: TrainConfig) -> NoReturn:
    """Say why a run cannot save beside the newest checkpoint, which it does not go on from."""
    if found is not None and found.resolve().parent == newest.resolve().parent:
        raise UsageError(
            f"--resume {config.resume}: {config.checkpoints} also holds {newest.name}, from which "
            f"a later --resume would go on; go on from {newest.name}, move what is newer than "
            f"{found.name} away, or choose another --checkpoint-dir"
        )
    advice = "go on from it with --resume, remove it" if found is None else "remove it"
    raise UsageError(
        f"--checkpoint-dir {config.checkpoints}: holds {newest.name} of another run; "
        f"{advice}, or choose another folder"
    )


def load(path: Path, trainee: Trainee, corpus: Corpus, config: TrainConfig) -> tuple[Progress, str]:
    """Go on from a checkpoint; returns how far it is, and a line to show.

    Raises:
        UsageError: The checkpoint is damaged or of another model; it names options or keys.
    """
    try:
        extra = load_extra(path)
        if "progress" not in extra:
            raise UsageError(f"--resume {path}: was not saved by dtensor-owner train")
        _check_options(path, extra["options"], extra["progress"]["done"], config)
        load_checkpoint(path, trainee.model, trainee.optimizers, options="keep")
    except CheckpointError as fault:
        raise UsageError(f"--resume {fault}") from None
    progress = Progress(**{**extra["progress"], "validation": []})
    progress.validation = [(step, loss) for step, loss in extra["progress"]["validation"]]
    notes = _notes(extra, corpus, config)
    return progress, f"Going on after step {progress.done}, from {path}{notes}"


def save(trainee: Trainee, corpus: Corpus, config: TrainConfig, progress: Progress) -> Path:
    """Save after a step; every rank calls this."""
    path = config.checkpoints / f"step-{progress.done:08d}"
    extra = {
        "progress": vars(progress),
        "options": config.to_dict(),
        "text": _fingerprint(corpus),
    }
    save_checkpoint(path, trainee.model, trainee.optimizers, extra=extra)
    return path


def prune(config: TrainConfig) -> None:
    """Remove all but the newest checkpoints; the first rank calls this after a save.

    What a kill has left of a removal goes too. An interrupted save is left alone until a save of
    that name replaces it.
    """
    complete = sorted(path for path in config.checkpoints.glob("step-*") if is_complete(path))
    for path in complete[: -config.keep_checkpoints]:
        remove(path)
    for path in config.checkpoints.glob(f"step-*{REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)


def _check_options(path: Path, options: dict[str, Any], done: int, config: TrainConfig) -> None:
    """Compare the options that decide the model with those of the run that saved.

    Raises:
        UsageError: They differ.
    """
    mine = config.to_dict()
    differing = [name for name in SAME if name in options and options[name] != mine[name]]
    if differing:
        was = ", ".join(f"{flag(name)} {options[name]}" for name in differing)
        here = ", ".join(f"{flag(name)} {mine[name]}" for name in differing)
        raise UsageError(f"--resume {path}: was saved with {was}, here {here}")
    if done > config.steps:
        raise UsageError(f"--steps {config.steps}: {path} is at step {done} already")


def _fingerprint(corpus: Corpus) -> dict[str, int]:
    text = corpus.train.numpy()
    return {"bytes": len(text), "checksum": zlib.crc32(text.data)}


def _notes(extra: dict[str, Any], corpus: Corpus, config: TrainConfig) -> str:
    mine = config.to_dict()
    notes = [
        f"{flag(name)} {mine[name]} instead of {extra['options'][name]}"
        for name in NOTED + PRECISION
        if extra["options"].get(name) != mine[name]
    ]
    if extra["text"] != _fingerprint(corpus):
        notes.append("other text to train on")
    return f" (with {', '.join(notes)})" if notes else ""
