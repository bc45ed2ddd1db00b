"""Uneven DTensor placements: whole rows, whole blocks or a whole tensor per rank.

Importing this package teaches DTensor about ``RowAtomic``, ``BlockAtomic`` and ``Owner``.
"""

from placements.api import (
    distribute_module,
    distribute_tensor,
    explain,
    redistribute_group,
)
from placements.block_atomic import BlockAtomic
from placements.op_handlers import HANDLERS
from placements.op_rules import propagate
from placements.owner import Owner
from placements.plan import Plan, Step
from placements.row_atomic import RowAtomic
from placements.torch_hooks import install

install(propagate, HANDLERS)

__all__ = [
    "BlockAtomic",
    "Owner",
    "Plan",
    "RowAtomic",
    "Step",
    "distribute_module",
    "distribute_tensor",
    "explain",
    "redistribute_group",
]
