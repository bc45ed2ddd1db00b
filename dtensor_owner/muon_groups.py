"""Which parameters of a model are Muon's, and which AdamW's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dtensor_owner.tables import table

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# What heads are called that do not map onto an embedding's vocabulary.
_HEADS = frozenset({"lm_head", "head", "embed_out", "unembed", "unembedding", "classifier"})


@dataclass(frozen=True)
class Choice:
    """One parameter's way.

    Args:
        name: Its first name.
        shape: Its whole shape.
        algorithm: ``"muon"``, ``"adamw"`` or ``"none"``.
        why: Why.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    why: str


class MuonParamGroups(list[dict[str, Any]]):
    """Parameter groups for ``Muon``; printed, a table of what each parameter is and why.

    Attributes:
        choices: One per parameter, in the model's order.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], choices: Sequence[Choice]) -> None:
        super().__init__(groups)
        self.choices = tuple(choices)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "by", "why")]
        for choice in self.choices:
            shape = " x ".join(map(str, choice.shape)) or "scalar"
            rows.append((choice.name, shape, choice.algorithm, choice.why))
        return "\n".join(table(rows, left=4))


def muon_param_groups(
    model: nn.Module,
    *,
    adamw_names: Sequence[str] = (),
    muon_names: Sequence[str] = (),
    stacks: bool = True,
    convolutions: bool = False,
    split_rows: Mapping[str, Sequence[int]] | None = None,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> MuonParamGroups:
    """Route a model's parameters: matrices to Muon, the rest to AdamW.

    AdamW gets what has fewer than two dims, weights of embeddings, heads (the one linear layer of
    an embedding's shape, or one called ``lm_head``, ``head``, ...), and parameters that have
    several names (tied ones). Shapes are those of the whole parameters, before
    or after sharding. Frozen parameters are in no group.

    Args:
        model: The model, sharded or not.
        adamw_names: Patterns (``*`` matches anything) of parameter names that AdamW takes.
        muon_names: The same for Muon; they win over all rules but the number of dims.
        stacks: Whether Muon takes 3-D parameters, as stacks of matrices (experts).
        convolutions: Whether Muon takes convolution weights, as ``(shape[0], rest)``.
        split_rows: By pattern of names, rows of several matrices that are fused along dim 0.
        muon, adamw: Options of the groups.

    Returns:
        Groups for ``Muon(groups, ...)`` with named parameters; ``print`` shows the table.

    Raises:
        ValueError: Nothing is left for Muon, or a pattern matches no parameter.
    """
    found = _found_in(model)
    split_rows = split_rows or {}
    every_name = [name for each in found for name in each.names]
    _check_patterns([*adamw_names, *muon_names, *split_rows], every_name)
    head_shapes = _head_shapes(model)
    choices = []
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in found:
        why = _why_not(each, head_shapes, stacks, convolutions)
        if each.param.ndim >= 2 and each.is_called(muon_names):
            why = ""
        elif each.is_called(adamw_names):
            why = "by adamw_names"
        options = {"algorithm": "adamw"} if why else _muon_options(each, split_rows)
        algorithm, why = options["algorithm"], why or _described(each.param, options)
        if each.param.requires_grad:
            entry = groups.setdefault(tuple(options.items()), {"params": [], **options})
            entry["params"].append((each.names[0], each.param))
        else:
            algorithm, why = "none", "frozen"
        choices.append(Choice(each.names[0], tuple(each.param.shape), algorithm, why))
    ordered = [
        {**group, **((muon if group["algorithm"] == "muon" else adamw) or {})}
        for group in sorted(groups.values(), key=lambda group: group["algorithm"] == "adamw")
    ]
    chosen = MuonParamGroups(ordered, choices)
    if not any(group["algorithm"] == "muon" for group in ordered):
        raise ValueError(f"No parameter of this {type(model).__name__} is Muon's:\n{chosen}")
    return chosen


@dataclass(frozen=True)
class _Found:
    """A parameter with all its names, and the modules that have it, with their paths."""

    param: nn.Parameter
    names: list[str]
    owners: list[tuple[str, nn.Module]]

    def is_called(self, patterns: Sequence[str]) -> bool:
        return _matches(self.names, patterns)

    def is_in(self, types: tuple[type, ...]) -> bool:
        return any(isinstance(module, types) for _, module in self.owners)


def _found_in(model: nn.Module) -> list[_Found]:
    found: dict[int, _Found] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            each = found.setdefault(id(param), _Found(param, [], []))
            each.names.append(f"{path}.{name}" if path else name)
            each.owners.append((path, module))
    return list(found.values())


def _why_not(
    each: _Found, head_shapes: set[tuple[int, int]], stacks: bool, convolutions: bool
) -> str:
    """Why a parameter is not Muon's; empty if it is."""
    ndim = each.param.ndim
    if ndim < 2:
        return f"{ndim}-D"
    if each.is_in(_EMBEDDINGS):
        return "embedding, tied" if len(each.names) > 1 else "embedding"
    for path, module in each.owners:
        called_so = path.rpartition(".")[2] in _HEADS
        if called_so or (isinstance(module, nn.Linear) and _shape_of(module) in head_shapes):
            return "head"
    if len(each.names) > 1:
        return f"tied: also {', '.join(each.names[1:])}"
    if each.is_in(_CONVOLUTIONS):
        return "" if convolutions else "convolution"
    if ndim == 3:
        return "" if stacks else "3-D"
    return "" if ndim == 2 else f"{ndim}-D"


def _muon_options(each: _Found, split_rows: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    options: dict[str, Any] = {"algorithm": "muon"}
    if each.param.ndim == 3 and not each.is_in(_CONVOLUTIONS):
        options["matrices"] = "stack"
    for pattern, rows in split_rows.items():
        if each.is_called([pattern]):
            options["split_rows"] = tuple(rows)
    return options


def _head_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """Shapes that an embedding has and one linear layer.

    Several linear layers of such a shape are no heads: positions may be as many as a model is wide.
    """
    linear = Counter(_shape_of(m) for m in model.modules() if isinstance(m, nn.Linear))
    embeddings = (m for m in model.modules() if isinstance(m, _EMBEDDINGS))
    return {s for m in embeddings if linear[s := (m.num_embeddings, m.embedding_dim)] == 1}


def _shape_of(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _described(param: nn.Parameter, options: Mapping[str, Any]) -> str:
    if "split_rows" in options:
        return f"{len(options['split_rows'])} matrices fused along dim 0"
    if "matrices" in options:
        return f"stack of {param.shape[0]} matrices"
    return "matrix" if param.ndim == 2 else "matrix (shape[0], rest)"


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not _matches(names, [pattern]):
            raise ValueError(
                f"{pattern!r} matches no parameter; there are {', '.join(names[:8])}, ..."
            )
