"""Owner planning: which rank orthogonalizes which matrix. Integers only, no communication.

Ranks are coordinates on the data-parallel mesh dimension, never global ranks. Names and
meanings follow the owner-compute planning of Megatron-FSDP v2 (NVIDIA/Megatron-LM pull
request 6597), whose groups work here unchanged; ``plan_owners`` plans all groups together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Literal, Protocol

from dtensor_owner.ns_schedule import QUINTIC, Method, multiply_adds, uses_gram
from dtensor_owner.owner_balance import balance
from dtensor_owner.owner_work import Work, fill_buckets, lower_bound

Cost = int | float
CostFn = Callable[["ParameterLayout"], Cost]
EligibleFn = Callable[[Any], bool]


class _GroupLayout(Protocol):
    """What is read of a ``GlobalLayout``: offsets and sizes in elements of the group's buffer."""

    size: int
    tensor_shapes: Sequence[tuple[int, ...]]
    tensor_to_offset: Sequence[int]


class PlannableGroup(Protocol):
    """What is read of a parameter group.

    ``main_weight.layout`` is the layout of its buffer; ``fsdp_parameters[i].sharded`` is the
    parameter whose tensor index is ``i``.
    """

    mesh: Any
    main_weight: Any
    fsdp_parameters: Sequence[Any]


def select_ge_2d_params(param: Any) -> bool:
    """Whether a parameter has two or more dims, so that it can be orthogonalized."""
    return param.ndim >= 2


@dataclass(frozen=True)
class ParameterLayout:
    """How the elements of one parameter, in row-major order, are split over the ranks.

    Args:
        full_shape: Shape of the whole parameter.
        flat_counts: Elements that each rank holds, in rank order; 0 where it holds nothing.

    Raises:
        ValueError: There are no ranks, or the counts do not sum to the parameter's elements.
    """

    full_shape: tuple[int, ...]
    flat_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.flat_counts:
            raise ValueError(
                f"ParameterLayout of shape {tuple(self.full_shape)} has no ranks: give one count "
                "per rank (0 for a rank that holds nothing)."
            )
        if min(self.flat_counts) < 0 or sum(self.flat_counts) != self.full_numel():
            raise ValueError(
                f"flat_counts sum to {sum(self.flat_counts)}, but shape "
                f"{tuple(self.full_shape)} has {self.full_numel()} elements: every element is "
                f"held by exactly one rank, got {_short(self.flat_counts)}."
            )

    @classmethod
    def from_group(
        cls, group: PlannableGroup, *, eligible_fn: EligibleFn | None = None
    ) -> dict[int, ParameterLayout]:
        """Layouts of a group's parameters by tensor index.

        Args:
            group: A parameter group on a 1-D mesh.
            eligible_fn: Chooses the parameters; those it refuses are left out. Default:
                ``select_ge_2d_params``.
        """
        eligible = select_ge_2d_params if eligible_fn is None else eligible_fn
        layout = group.main_weight.layout
        shards = _rank_ranges(layout, _mesh_size(group.mesh))
        layouts = {}
        for index, parameter in enumerate(group.fsdp_parameters):
            if eligible(parameter.sharded):
                start = layout.tensor_to_offset[index]
                shape = layout.tensor_shapes[index]
                stop = start + prod(shape)
                counts = tuple(max(0, min(b, stop) - max(a, start)) for a, b in shards)
                layouts[index] = cls(shape, counts)
        return layouts

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return len(self.flat_counts)

    def full_numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.full_shape)

    def rank_offset(self, rank: int) -> int:
        """First element of ``rank``'s shard, counted in the flattened parameter."""
        return sum(self.flat_counts[:rank])

    def rank_numel(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        return self.flat_counts[rank]

    def owner_candidates(self) -> tuple[int, ...]:
        """Ranks that hold at least one element, ascending."""
        return tuple(rank for rank, numel in enumerate(self.flat_counts) if numel)

    def is_boundary(self) -> bool:
        """Whether more than one rank holds elements, so that owning it needs an exchange."""
        return len(self.owner_candidates()) > 1


def _mesh_size(mesh: Any) -> int:
    if getattr(mesh, "ndim", 1) != 1:
        raise NotImplementedError(
            f"Owner layouts of a group are planned on 1-D meshes, got {mesh.ndim} mesh dims: "
            "pass plan_owners the layouts of one replica and replicas=..."
        )
    return mesh.size()


def _rank_ranges(layout: _GroupLayout, num_ranks: int) -> list[tuple[int, int]]:
    """Half-open range of the group's buffer that each rank holds."""
    starts = getattr(layout, "rank_to_offset", None)
    if starts is None:
        starts = [rank * (layout.size // num_ranks) for rank in range(num_ranks)]
    bounds = [*starts[:num_ranks], layout.size]
    if len(bounds) != num_ranks + 1:
        raise ValueError(
            f"The group's layout is for {len(starts)} ranks, its mesh has {num_ranks}: build the "
            "layout with dp_size equal to the size of the mesh."
        )
    return list(zip(bounds, bounds[1:]))


def matrix_view(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns under which a parameter counts as one matrix: ``(shape[0], rest)``."""
    return shape[0], prod(shape[1:])


def ns_cost_fn(num_ns_steps: int) -> Callable[[ParameterLayout], int]:
    """Estimate of Newton-Schulz work: ``numel * (min(rows, cols) * steps + 1)``.

    Counts one product of the small Gram matrix with the matrix per step, plus one pass.
    """

    def cost(layout: ParameterLayout) -> int:
        return layout.full_numel() * (min(matrix_view(layout.full_shape)) * num_ns_steps + 1)

    return cost


def ns_flops_cost_fn(
    num_ns_steps: int, *, method: Method = "plain"
) -> Callable[[ParameterLayout], int]:
    """Multiply-adds of the quintic iteration: ``steps * (2 r^2 c + r^3)`` with ``r <= c``.

    A step forms the Gram matrix (r^2 c), squares it (r^3) and multiplies the matrix (r^2 c).
    ``method`` counts another form of the iteration, see ``multiply_adds`` in ``ns_schedule``.
    """
    schedule = [QUINTIC] * num_ns_steps

    def cost(layout: ParameterLayout) -> int:
        shape = matrix_view(layout.full_shape)
        gram = uses_gram(method, shape, itemsize=4)
        return multiply_adds(shape, schedule, gram=gram)

    return cost


def assign_owner_work(
    layouts: Mapping[int, ParameterLayout], cost_fn: CostFn | None = None
) -> dict[int, int]:
    """Choose an owner for each parameter of one group.

    A parameter with one holder stays there and its cost counts toward that rank. The others
    go, in order of descending cost (equal costs in the order given), to the holder with the
    least running total, the first one on ties.

    Args:
        layouts: Layouts by tensor index, all with the same number of ranks.
        cost_fn: Cost of owning a parameter. Default: ``ns_cost_fn(5)``.

    Returns:
        Owner rank by tensor index, in the order of ``layouts``. A parameter without elements
        goes to rank 0.
    """
    cost_fn = ns_cost_fn(5) if cost_fn is None else cost_fn
    loads: list[Cost] = [0] * _common_dp_size([layouts])
    candidates = {index: layout.owner_candidates() or (0,) for index, layout in layouts.items()}
    costs = {index: cost_fn(layout) for index, layout in layouts.items()}
    owners: dict[int, int] = {}
    for index in sorted(layouts, key=lambda i: (len(candidates[i]) > 1, -costs[i])):
        owner = min(candidates[index], key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += costs[index]
    return {index: owners[index] for index in layouts}


def _common_dp_size(groups: Iterable[Mapping[int, ParameterLayout]]) -> int:
    sizes = sorted({layout.dp_size for group in groups for layout in group.values()})
    if len(sizes) > 1:
        raise ValueError(
            f"Layouts for {sizes} ranks were given together: parameters that are planned "
            "together must share one DP mesh size."
        )
    return sizes[0] if sizes else 1


@dataclass(frozen=True)
class OwnerPlan:
    """Owners of the parameters of all groups, with what the choice costs.

    Args:
        owners: Per group, the owner by tensor index. With replicas, coordinate ``c`` of
            replica ``i`` is rank ``i * dp_size + c``.
        loads: Cost that each rank owns.
        lower_bound: No choice of owners has a highest load below this.
        moved_numel: Elements that go to their owner once per step (as many come back, times
            the number of replicas).
        total_numel: Elements of all parameters.
        buckets: Which parameters travel together, as (number of the group, tensor index); empty
            if no ``bucket_numel`` was given.
    """

    owners: tuple[dict[int, int], ...]
    loads: tuple[Cost, ...]
    lower_bound: Cost
    moved_numel: int
    total_numel: int
    buckets: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def imbalance(self) -> float:
        """Highest load over mean load; 1.0 where there is no work."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def __str__(self) -> str:
        """A table with one line per rank."""
        mean = sum(self.loads) / len(self.loads) or 1
        number = [0] * len(self.loads)
        for group in self.owners:
            for owner in group.values():
                number[owner] += 1
        lines = [
            f"{sum(number)} matrices in {len(self.owners)} groups on {len(self.loads)} ranks: "
            f"max/mean load {self.imbalance:.3f}, max/bound "
            f"{max(self.loads) / (self.lower_bound or 1):.3f}, "
            f"{self.moved_numel / (self.total_numel or 1):.1%} of the elements move"
        ]
        if self.buckets:
            sizes = ", ".join(str(len(bucket)) for bucket in self.buckets[:16])
            more = ", ..." if len(self.buckets) > 16 else ""
            lines.append(f"{len(self.buckets)} buckets of {sizes}{more} matrices")
        lines += [
            f"rank {rank:>4}  {count:>5} matrices  load {load / mean:6.3f} of mean"
            for rank, (count, load) in enumerate(zip(number, self.loads))
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON, for ``from_json``."""
        fields = {**vars(self), "owners": [sorted(group.items()) for group in self.owners]}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> OwnerPlan:
        fields = json.loads(text)
        fields["owners"] = tuple(dict(map(tuple, group)) for group in fields["owners"])
        fields["buckets"] = tuple(tuple(map(tuple, bucket)) for bucket in fields["buckets"])
        return cls(**{**fields, "loads": tuple(fields["loads"])})


def plan_owners(
    groups: Sequence[Mapping[int, ParameterLayout]],
    *,
    cost_fn: CostFn | None = None,
    eligible: Literal["holders", "any"] = "holders",
    replicas: int = 1,
    ranks_per_node: int = 1,
    tolerance: float = 0.02,
    bucket_numel: int | None = None,
) -> OwnerPlan:
    """Choose the owners of all parameters of all groups together.

    Planned one group at a time, groups pile their work onto the same ranks (32 Llama-3-8B
    layers at 8 ranks: highest load 2.2 times the mean); together they come close to the
    lower bound. Among equally good choices those that move fewer elements are preferred.

    Args:
        groups: Per group, layouts by tensor index; all with the same number of ranks.
        cost_fn: Cost of owning a parameter. Default: ``ns_cost_fn(5)``.
        eligible: ``"holders"``: an owner holds some of the matrix, one with a single holder
            stays there. ``"any"``: every rank may own, which balances better and moves more.
        replicas: Ranks that hold the same shard (HSDP). Owners are spread over all
            ``replicas * dp_size`` ranks; a matrix still has one owner in all.
        ranks_per_node: Consecutive ranks that share a node; transfers inside a node are
            preferred. 1: all transfers count the same.
        tolerance: With ``eligible="any"``, how far above the lower bound, as a part of it, the
            highest load may be where that saves a tenth of the elements moved or more.
        bucket_numel: Cut the work into buckets, of which one owner collects at most so many
            elements each (a larger matrix is alone with its owner in a bucket).

    Raises:
        ValueError: Layouts for different numbers of ranks, or a bad option.
    """
    if eligible not in ("holders", "any"):
        raise ValueError(f'eligible must be "holders" or "any", got {eligible!r}.')
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"bucket_numel must be >= 1, got {bucket_numel}.")
    if replicas < 1 or ranks_per_node < 1:
        raise ValueError(
            f"replicas and ranks_per_node must be >= 1, got {replicas} and {ranks_per_node}."
        )
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must be in [0, 1], got {tolerance}: 0.02 allows 2 %.")
    cost_fn = ns_cost_fn(5) if cost_fn is None else cost_fn
    num_ranks = _common_dp_size(groups) * replicas
    layouts = [layout for group in groups for layout in group.values()]
    costs = [cost_fn(layout) for layout in layouts]
    works = _works(_as_ints(costs), layouts, replicas)
    anywhere = eligible == "any"
    chosen = balance(
        works,
        num_ranks,
        anywhere=anywhere,
        ranks_per_node=ranks_per_node,
        tolerance=tolerance,
    )
    loads: list[Cost] = [0] * num_ranks
    for cost, owner in zip(costs, chosen):
        loads[owner] += cost
    ends = list(accumulate(map(len, groups)))
    bound = lower_bound(works, num_ranks, anywhere=anywhere)
    names = [(number, index) for number, group in enumerate(groups) for index in group]
    numels, order = [work.numel for work in works], [-work.cost for work in works]
    filled = fill_buckets(chosen, numels, order, bucket_numel) if bucket_numel else []
    return OwnerPlan(
        owners=tuple(
            dict(zip(group, chosen[end - len(group) : end])) for group, end in zip(groups, ends)
        ),
        loads=tuple(loads),
        lower_bound=bound if _are_ints(costs) else bound * max(costs) / _FLOAT_COST_RANGE,
        moved_numel=sum(work.numel - work.held_by(owner) for work, owner in zip(works, chosen)),
        total_numel=sum(work.numel for work in works),
        buckets=tuple(tuple(names[item] for item in bucket) for bucket in filled),
    )


def _works(costs: Sequence[int], layouts: Sequence[ParameterLayout], replicas: int) -> list[Work]:
    """One ``Work`` per layout; layers of one kind share their counts, read once each."""
    known: dict[tuple[int, int], Work] = {}
    for cost, layout in zip(costs, layouts):
        key = (cost, id(layout.flat_counts))
        if key not in known:
            known[key] = Work.from_counts(cost, layout.flat_counts, replicas=replicas)
    return [known[cost, id(layout.flat_counts)] for cost, layout in zip(costs, layouts)]


_FLOAT_COST_RANGE = 1 << 40


def _are_ints(costs: Sequence[Cost]) -> bool:
    return all(isinstance(cost, int) for cost in costs)


def _as_ints(costs: Sequence[Cost]) -> list[int]:
    """Costs as ints, so that sums are exact and equal on every rank whatever their order."""
    if _are_ints(costs):
        return list(costs)  # type: ignore[arg-type]
    largest = max(costs) or 1
    return [round(cost / largest * _FLOAT_COST_RANGE) for cost in costs]


@dataclass(frozen=True)
class GroupOwnerLayout:
    """Layouts and owners of one parameter group; the same for every step, so cache it.

    Args:
        group: The parameter group.
        layouts: Layouts of the parameters that take part, by tensor index.
        owners: Owner rank of each of them, by tensor index.
    """

    group: Any
    layouts: dict[int, ParameterLayout]
    owners: dict[int, int]

    @classmethod
    def from_group(
        cls,
        group: PlannableGroup,
        *,
        cost_fn: CostFn | None = None,
        eligible_fn: EligibleFn | None = None,
    ) -> GroupOwnerLayout:
        """Plan one group by ``assign_owner_work``; see there for ``cost_fn``."""
        layouts = ParameterLayout.from_group(group, eligible_fn=eligible_fn)
        return cls(group, layouts, assign_owner_work(layouts, cost_fn))

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[PlannableGroup],
        *,
        cost_fn: CostFn | None = None,
        eligible_fn: EligibleFn | None = None,
        eligible: Literal["holders", "any"] = "holders",
        ranks_per_node: int = 1,
    ) -> list[GroupOwnerLayout]:
        """Plan groups on one mesh together by ``plan_owners``.

        Raises:
            ValueError: The groups are not on the same mesh.
        """
        meshes = [group.mesh for group in groups]
        if any(mesh is not meshes[0] and mesh != meshes[0] for mesh in meshes):
            raise ValueError(
                "Groups that are planned together must be on the same DP mesh: ranks are "
                f"coordinates on it. Got {meshes}."
            )
        layouts = [ParameterLayout.from_group(group, eligible_fn=eligible_fn) for group in groups]
        plan = plan_owners(
            layouts, cost_fn=cost_fn, eligible=eligible, ranks_per_node=ranks_per_node
        )
        return [cls(*fields) for fields in zip(groups, layouts, plan.owners)]

    @property
    def mesh(self) -> Any:
        """The group's mesh."""
        return self.group.mesh


def _short(values: Sequence[int], limit: int = 16) -> str:
    text = ", ".join(map(str, values[:limit]))
    return f"({text}, ... {len(values)} in all)" if len(values) > limit else f"({text})"
