"""The arrows between the files, read from their source: who may import whom and touch what.

A new file in one of the packages must be given its place in ``LAYERS``; that is the moment to ask
whether it belongs there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("placements", "dtensor_owner")

# A module may import modules of its own line and of the lines above it, without a cycle.
LAYERS = [
    ["placements.geometry"],
    ["placements.base", "placements.row_atomic", "placements.block_atomic", "placements.owner"],
    ["placements.boxes"],
    ["placements.plan"],
    ["placements.collectives"],
    ["placements.redistribute"],
    [
        "placements.torch_hooks",
        "placements.op_call",
        "placements.op_handlers",
        "placements.op_lists",
        "placements.op_reductions",
        "placements.op_rules",
        "placements.op_views",
        "placements.api",
    ],
    ["placements"],
    ["dtensor_owner.usage", "dtensor_owner.nested", "dtensor_owner.ns_schedule"],
    [
        "dtensor_owner.mesh_ranges",
        "dtensor_owner.packing",
        "dtensor_owner.layout_types",
        "dtensor_owner.global_layout",
        "dtensor_owner.layout",
        "dtensor_owner.whole_tensors",
    ],
    [
        "dtensor_owner.owner_work",
        "dtensor_owner.owner_sweep",
        "dtensor_owner.owner_balance",
        "dtensor_owner.owners",
    ],
    ["dtensor_owner.newton_schulz", "dtensor_owner.mxfp8", "dtensor_owner.mxfp8_layout"],
    ["dtensor_owner.mxfp8_products"],
    ["dtensor_owner.buffer", "dtensor_owner.quantized_buffer", "dtensor_owner.mxfp8_weights"],
    ["dtensor_owner.exchange"],
    [
        "dtensor_owner.gradients",
        "dtensor_owner.neighbours",
        "dtensor_owner.parameter_group",
        "dtensor_owner.unsharded",
        "dtensor_owner.module_state",
        "dtensor_owner.fsdp_module",
        "dtensor_owner.managed_parameters",
    ],
    ["dtensor_owner.muon_matrices", "dtensor_owner.muon_plan", "dtensor_owner.muon_program"],
    [
        "dtensor_owner.muon_step",
        "dtensor_owner.muon_compile",
        "dtensor_owner.muon_prepare",
        "dtensor_owner.muon_state",
        "dtensor_owner.muon_agree",
        "dtensor_owner.muon_adamw",
        "dtensor_owner.muon_options",
        "dtensor_owner.muon_gradients",
    ],
    ["dtensor_owner.fully_shard", "dtensor_owner.muon"],
    ["dtensor_owner.checkpoint_checksums"],
    ["dtensor_owner.checkpoint_files", "dtensor_owner.checkpoint_state"],
    ["dtensor_owner.checkpoint_plan"],
    ["dtensor_owner.checkpoint_load"],
    ["dtensor_owner.checkpoint", "dtensor_owner.safetensors_io"],
    ["dtensor_owner.tables", "dtensor_owner.mxfp8_report"],
    ["dtensor_owner.muon_groups"],
    ["dtensor_owner.report"],
    ["dtensor_owner.model_plan"],
    ["dtensor_owner"],
    ["dtensor_owner.train.config"],
    ["dtensor_owner.train.model", "dtensor_owner.train.data"],
    ["dtensor_owner.train.display", "dtensor_owner.train.outputs"],
    ["dtensor_owner.train.setup", "dtensor_owner.train.steps", "dtensor_owner.train.compiling"],
    ["dtensor_owner.train.checkpoints"],
    ["dtensor_owner.train.loop"],
    ["dtensor_owner.train.launch"],
    ["dtensor_owner.train"],
    ["dtensor_owner.plan_command"],
    ["dtensor_owner.cli"],
    ["dtensor_owner.__main__"],
]
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}

# Modules that need nothing but the standard library.
STANDARD_LIBRARY_ONLY = {"placements.geometry", "dtensor_owner.ns_schedule"}

# Private torch names, by the module that may use them; an empty prefix allows all.
PRIVATE_TORCH = {
    "dtensor_owner.muon_gradients": ("torch._foreach_",),
    "dtensor_owner.muon_step": ("torch._foreach_",),
    "placements.torch_hooks": ("",),
    "placements.collectives": (
        "torch.distributed._functional_collectives",
        "torch.ops._c10d_functional",
    ),
}

# Modules that may call collectives themselves; all others hand a plan to one of them.
COMMUNICATES = {
    "placements.collectives",
    "dtensor_owner.exchange",
    "dtensor_owner.train.steps",
}
COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


def _sources() -> dict[str, Path]:
    """Every Python file of the packages, by module name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = _sources()


def imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """Full names of all imported modules, also those imported late or for type checking only.

    ``from a import b`` counts as ``a.b`` where that is one of the ``known`` modules.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute in this project"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules.add(name if name in known else node.module)
    return modules


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names of whatever the file imports from torch or reaches through those names."""
    bound: dict[str, str] = {}  # name in the file -> dotted name in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if alias.asname:
                    bound[alias.asname] = alias.name
                else:
                    bound[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            yield ".".join([bound[node.id], *reversed(parts)])


def private_torch_names(tree: ast.AST) -> set[str]:
    return {
        name
        for name in torch_names(tree)
        if name.split(".")[0] == "torch"
        and any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    }


def collective_calls(tree: ast.AST) -> set[str]:
    return {
        name
        for name in torch_names(tree)
        if name.startswith("torch.distributed.")
        and any(
            name.split(".")[2] in (collective, f"{collective}_object", f"{collective}_object_list")
            or name.split(".")[2].startswith(f"{collective}_")
            for collective in COLLECTIVES
        )
    }


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _ours(module: str) -> set[str]:
    names = imported_modules(_tree(module), set(LAYER_OF) | set(SOURCES))
    return {name for name in names if name.split(".")[0] in PACKAGES} - {module}


def test_every_file_has_its_place():
    unplaced = set(SOURCES) - set(LAYER_OF)
    assert not unplaced, f"give these modules a place in LAYERS: {sorted(unplaced)}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_point_one_way(module):
    wrong = {name for name in _ours(module) if LAYER_OF.get(name, -1) > LAYER_OF[module]}
    assert not wrong, f"{module} sits below {sorted(wrong)} and may not import them"


def test_no_import_cycles():
    # A package's own __init__ gathers its modules, so what its modules import does not lead to it.
    graph = {module: _ours(module) - set(PACKAGES) for module in SOURCES}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


@pytest.mark.parametrize("module", sorted(STANDARD_LIBRARY_ONLY & set(SOURCES)))
def test_integers_need_the_standard_library_only(module):
    tops = {name.split(".")[0] for name in imported_modules(_tree(module), set())}
    assert tops <= sys.stdlib_module_names


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_private_torch_api_stays_in_its_file(module):
    allowed = PRIVATE_TORCH.get(module, ())
    found = {name for name in private_torch_names(_tree(module)) if not name.startswith(allowed)}
    assert not found, f"{module} uses private torch names: {sorted(found)}"


@pytest.mark.parametrize("module", sorted(set(SOURCES) - COMMUNICATES))
def test_plans_are_carried_out_in_one_file(module):
    assert not collective_calls(_tree(module))


CONTROL = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random, DTensor
from dtensor_owner import layout
def f(x):
    from torch._dynamo import reset
    dist.all_reduce(x)
    return torch.ops._c10d_functional.wait_tensor(dist.get_rank.__name__)
"""


def test_the_reader_sees_what_it_should():
    tree = ast.parse(CONTROL)
    assert private_torch_names(tree) == {
        "torch.distributed.tensor._random",
        "torch._dynamo.reset",
        "torch.ops._c10d_functional",
        "torch.ops._c10d_functional.wait_tensor",
    }
    assert collective_calls(tree) == {"torch.distributed.all_reduce"}
    assert "dtensor_owner.layout" in imported_modules(tree, set(LAYER_OF))
