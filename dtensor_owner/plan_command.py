"""``dtensor-owner plan``: layouts, owners, bytes and balance of a model, before a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dtensor_owner.usage import UsageError

_ITEMSIZES = {"bfloat16": 2, "float32": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the command's options."""
    parser.add_argument(
        "model",
        help="a .safetensors file, a folder of them (only headers are read), or "
        "package.module:function that returns an nn.Module, which is built on the meta device",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks to shard over")
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="copies of the shards (default: 1)"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=1,
        metavar="ROWS",
        help="rows that stay on one rank; 32 for MXFP8 (default: 1)",
    )
    parser.add_argument(
        "--shard-layout",
        choices=["unpadded", "padded"],
        default="unpadded",
        help="layout of the groups (default: unpadded)",
    )
    parser.add_argument(
        "--owners",
        choices=["holders", "any"],
        default="holders",
        help="who may own a matrix: a rank that holds some of it, or any (default: holders)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="N",
        help="prefer owners on the node that holds most of a matrix (default: 1, no nodes)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(_ITEMSIZES),
        default="bfloat16",
        help="of parameters and of what a step sends (default: bfloat16)",
    )
    parser.add_argument(
        "--adamw-names",
        nargs="+",
        metavar="PATTERN",
        help="parameters that Muon does not take, beside what is 1-D, an embedding or a head "
        "(default: for files, names that say embedding or head)",
    )
    parser.add_argument(
        "--choices", action="store_true", help="list which parameters Muon takes, and why"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan to a file too")


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments and return its exit code."""
    for name in ("ranks", "replicas", "block_size", "ranks_per_node"):
        if getattr(args, name) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1"
            )
    from dtensor_owner.layout import ShardLayout
    from dtensor_owner.model_plan import NOT_MATRICES, load_model, plan_model

    model = load_model(args.model)
    patterns = args.adamw_names or (NOT_MATRICES if Path(args.model).exists() else ())
    try:
        plan = plan_model(
            model,
            args.ranks,
            replicas=args.replicas,
            block_size=args.block_size,
            shard_layout=ShardLayout[args.shard_layout.upper()],
            eligible=args.owners,
            ranks_per_node=args.ranks_per_node,
            adamw_names=patterns,
            itemsize=_ITEMSIZES[args.dtype],
        )
    except ValueError as error:
        raise UsageError(f"{args.model}: {error}") from error
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--json {args.json}: {error.strerror}") from error
    if args.choices:
        print(plan.choices, end="\n\n")
    print(plan)
    return 0
