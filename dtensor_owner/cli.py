"""The command line: a table of subcommands, each a module that is imported when it is needed.

A subcommand's module has ``add_arguments(parser)`` and ``run(args) -> int``, and imports whatever
is slow to import (torch, rich, matplotlib) inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from dtensor_owner.usage import UsageError

# Name -> (module, one line for the overview).
COMMANDS = {
    "train": (
        "dtensor_owner.train",
        "train a small GPT on unpadded shards, each matrix orthogonalized by its owner",
    ),
    "plan": (
        "dtensor_owner.plan_command",
        "print layouts, padding, owners, bytes and balance of a model, before a run",
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` (default: the process's arguments) names.

    Returns:
        The exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="dtensor-owner",
        description="Shards without padding, and a Muon whose matrices have one owner each.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, (module, help_line) in COMMANDS.items():
        subparser = commands[name] = subparsers.add_parser(
            name, help=help_line, description=_sentence(help_line)
        )
        if arguments[:1] == [name]:  # the other commands' modules are not even imported
            importlib.import_module(module).add_arguments(subparser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except UsageError as error:
        print(f"dtensor-owner {args.command}: error: {error}", file=sys.stderr)
        return 2


def _sentence(line: str) -> str:
    return line[0].upper() + line[1:] + "."
