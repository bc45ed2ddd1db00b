"""``dtensor-owner train``: trains a small GPT on real text, on local ranks or torchrun's."""

from __future__ import annotations

import argparse

from dtensor_owner.train.config import TrainConfig, add_arguments

__all__ = ["TrainConfig", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments and return its exit code."""
    config = TrainConfig.from_args(args)
    from dtensor_owner.train.launch import launch

    return launch(config)
