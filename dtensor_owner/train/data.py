"""Text as bytes: the corpus, its held-out part, and the batch of every step.

Nothing here depends on the number of ranks: step ``s`` of a run has the same global batch on one
rank and on eight, and a rank takes its contiguous share of it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtensor_owner.usage import UsageError

MAX_CORPUS_BYTES = 256 * 1024 * 1024
STRETCHES = 100  # of each hundredth of the text, the last tenth is held out
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both 1-D ``uint8``, and where they come from."""

    train: Tensor
    held_out: Tensor
    source: str


def load_corpus(data: Path | None, context: int) -> Corpus:
    """Read the text and split off a held-out part, the same way on every rank.

    Args:
        data: A file, or a folder whose files are read in the order of their paths, hidden ones
            and ones with zero bytes left out; ``None`` for the Python standard library's sources.
        context: Bytes of one training sequence; each part must hold at least one and its target.

    Raises:
        UsageError: There is no text, too little, or it cannot be read.
    """
    source = "the Python standard library" if data is None else str(data)
    try:
        text = _standard_library() if data is None else _read(_files(data))
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error}") from None
    if len(text) < 10 * (context + 1):
        raise UsageError(
            f"{source} holds {len(text)} bytes of text; with --context {context} at least "
            f"{10 * (context + 1)} are needed to hold a tenth out. Give more text or a smaller "
            "--context."
        )
    return Corpus(*split(torch.frombuffer(bytearray(text), dtype=torch.uint8), context), source)


def split(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Hold out the last tenth of every stretch of the text; returns (train, held out)."""
    stretches = max(1, min(STRETCHES, len(text) // (10 * (context + 1))))
    edges = [len(text) * i // stretches for i in range(stretches + 1)]
    cuts = [start + (stop - start) * 9 // 10 for start, stop in zip(edges, edges[1:])]
    train = torch.cat([text[start:cut] for start, cut in zip(edges, cuts)])
    held_out = torch.cat([text[cut:stop] for cut, stop in zip(cuts, edges[1:])])
    return train, held_out


def batch_starts(*, seed: int, step: int, batch: int, length: int, context: int) -> Tensor:
    """Where the sequences of one step's global batch start in a text of ``length`` bytes."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(length - context, (batch,), generator=generator)


def even_starts(*, count: int, length: int, context: int) -> Tensor:
    """``count`` starts spread evenly over a text, for the validation loss."""
    return torch.arange(count) * (length - context - 1) // max(1, count - 1)


def share(total: int, rank: int, world_size: int) -> range:
    """This rank's contiguous share of ``total`` sequences; shares differ by at most one."""
    return range(total * rank // world_size, total * (rank + 1) // world_size)


def sequences(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, both ``int64`` of shape ``(len(starts), context)``."""
    index = starts[:, None] + torch.arange(context + 1)
    window = text[index].long()
    return window[:, :-1], window[:, 1:]


def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    return _read(path for path in _files(root, SKIPPED_FOLDERS) if path.suffix == ".py")


def _files(root: Path, skipped: Container[str] = ()) -> list[Path]:
    """All files below ``root``, in the order of their paths and without hidden ones, or itself."""
    if root.is_file():
        return [root]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(found)


def _read(files: Iterable[Path]) -> bytes:
    parts, total = [], 0
    for path in files:
        with path.open("rb") as file:
            part = file.read(MAX_CORPUS_BYTES)
        if b"\0" in part:
            continue
        parts.append(part)
        total += len(part)
        if total >= MAX_CORPUS_BYTES:
            break
    return b"\n".join(parts)[:MAX_CORPUS_BYTES]
