"""The options of a training run: one frozen value, and the command line made from it."""

from __future__ import annotations

import argparse
import os
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dtensor_owner.usage import UsageError

DEFAULT_WORLD_SIZE = 4
MAX_LOCAL_RANKS = 256
CHECKPOINTS = "checkpoints"  # their folder in --out


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes.

    Raises:
        UsageError: A value is out of range or two values do not go together.
    """

    world_size: int | None = _option(
        None,
        f"ranks to start on this machine (default: {DEFAULT_WORLD_SIZE}; "
        "under torchrun: the ranks it started)",
        type=int,
    )
    steps: int = _option(150, "optimizer steps")
    optimizer: str = _option(
        "muon",
        "muon: owner Muon for the matrices and AdamW for the rest; adamw: AdamW for all",
        choices=("muon", "adamw"),
    )
    shard_layout: str = _option(
        "unpadded",
        "unpadded: uneven shards without padding; padded: equal shards, padded to whole rows",
        choices=("unpadded", "padded"),
    )
    compile: bool = _option(True, "compile Muon's step into one graph")
    ns_dtype: str = _option(
        "auto",
        "dtype of Newton-Schulz and of what travels to the owners and back; "
        "auto: float32 on cpu, bfloat16 on cuda",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = _option(
        "float32",
        "dtype that weights are gathered in and computed with; masters, reductions and the loss "
        "stay float32",
        choices=("float32", "bfloat16"),
    )
    mxfp8: bool = _option(
        False,
        "gather the blocks' matrices in MXFP8, where both dims are multiples of 32 (so choose "
        "--hidden); they are computed with in --param-dtype",
    )
    seed: int = _option(0, "seed of the weights and of the choice of batches")
    out: Path = _option(
        Path("runs/train"),
        "folder for metrics.jsonl, summary.json and loss.png; older ones are replaced",
        type=Path,
    )
    checkpoint_every: int = _option(
        0, "steps between checkpoints, the last step has one too; 0: no checkpoints"
    )
    checkpoint_dir: Path | None = _option(
        None, "folder for checkpoints (default: checkpoints in --out)", type=Path
    )
    keep_checkpoints: int = _option(2, "newest checkpoints to keep; older ones are removed")
    resume: Path | None = _option(
        None,
        "go on from this checkpoint, or from the newest complete one in this folder (an --out "
        "folder: in its checkpoints); ranks and layout may differ from before",
        type=Path,
    )
    data: Path | None = _option(
        None,
        "text to train on, a file or a folder (default: the Python standard library's sources)",
        type=Path,
    )
    device: str = _option(
        "cpu", "cpu: ranks talk through gloo; cuda: through NCCL", choices=("cpu", "cuda")
    )
    layers: int = _option(2, "transformer blocks")
    dim: int = _option(128, "width of the model")
    heads: int = _option(4, "attention heads; divides --dim")
    hidden: int = _option(341, "width of the gated MLP; odd, so that its rows do not divide")
    context: int = _option(128, "bytes the model sees at once")
    batch: int = _option(32, "sequences a step, over all ranks together")
    lr: float = _option(0.02, "peak learning rate of Muon")
    adamw_lr: float = _option(0.005, "peak learning rate of AdamW")
    weight_decay: float = _option(0.01, "weight decay of the matrices")
    eval_sequences: int = _option(64, "held-out sequences the validation loss is taken over")

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "dim", "heads", "hidden", "context", "batch"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.eval_sequences >= 1, "eval_sequences", self.eval_sequences, "at least 1")
        _require(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, "0 or more")
        _require(
            self.keep_checkpoints >= 1, "keep_checkpoints", self.keep_checkpoints, "at least 1"
        )
        _require(0 <= self.seed < 2**31, "seed", self.seed, "between 0 and 2147483647")
        for name in ("lr", "adamw_lr"):
            _require(0 < getattr(self, name) < 10, name, getattr(self, name), "in (0, 10)")
        _require(0 <= self.weight_decay < 1, "weight_decay", self.weight_decay, "in [0, 1)")
        _require(
            self.dim % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of --dim {self.dim}",
        )
        _require(
            not self.mxfp8 or self.dim % 32 == 0, "dim", self.dim, "a multiple of 32 with --mxfp8"
        )
        if self.world_size is not None:
            _require(
                1 <= self.world_size <= MAX_LOCAL_RANKS,
                "world_size",
                self.world_size,
                f"between 1 and {MAX_LOCAL_RANKS}",
            )
            _require(
                self.batch >= self.world_size,
                "batch",
                self.batch,
                f"at least one sequence for each of {self.world_size} ranks",
            )
        if self.data is not None and not self.data.exists():
            raise UsageError(f"--data {self.data}: no such file or folder")
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out}: exists and is not a folder")

    @property
    def checkpoints(self) -> Path:
        """The folder that checkpoints go to."""
        return self.checkpoint_dir or self.out / CHECKPOINTS

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainConfig:
        """Take the options from what :func:`add_arguments` made argparse parse."""
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON can hold them."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser one option for each field of :class:`TrainConfig`."""
    for option in fields(TrainConfig):
        parser.add_argument(flag(option.name), **_argument(option))


def torchrun_world_size() -> int | None:
    """The number of ranks torchrun (or another launcher) started, ``None`` without one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not (rank.isdigit() and world_size.isdigit() and int(rank) < int(world_size)):
            raise UsageError(
                f"RANK={rank} and WORLD_SIZE={world_size} are set, but are no rank of a torchrun "
                "job: start through torchrun, or unset both to start local ranks"
            )
        return int(world_size)
    return None


def flag(name: str) -> str:
    """The option that sets a field."""
    return "--" + name.replace("_", "-")


def _argument(option: Field[Any]) -> dict[str, Any]:
    assert option.default is not MISSING
    keywords = dict(option.metadata)
    if option.default is not None:
        keywords.setdefault("type", type(option.default))
        keywords["help"] += " (default: %(default)s)"
    if keywords["type"] is bool:
        del keywords["type"]
        keywords["action"] = argparse.BooleanOptionalAction
        # BooleanOptionalAction would otherwise be the only one to print True or False.
        keywords["help"] = option.metadata["help"] + f" (default: {_yes_no(option.default)})"
    elif "choices" not in keywords:
        keywords["metavar"] = {int: "N", float: "X", Path: "PATH"}[keywords["type"]]
    return {"default": option.default, **keywords}


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{flag(name)} {value}: must be {wanted}")
