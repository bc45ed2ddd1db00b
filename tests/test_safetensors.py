"""One safetensors file from any layout and back onto any other, without gathering a tensor."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_owner import fully_shard
from dtensor_owner.checkpoint import CheckpointError
from dtensor_owner.safetensors_io import DTYPES, export_safetensors, import_safetensors, runs
from placements import RowAtomic, distribute_tensor
from tests.checkpoint_helpers import build, differing, full
from tests.ranks import run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _export(path: str, layout: str) -> dict[str, Tensor]:
    model, _ = build(layout)
    export_safetensors(path, model, metadata={"made": "here"})
    return _values(model)


def _import(path: str, layout: str) -> dict[str, Tensor]:
    model, _ = build(layout, seed=1)
    import_safetensors(path, model)
    return _values(model)


@pytest.mark.parametrize(
    ("source", "ranks", "target", "others"),
    [
        ("unpadded", 4, "whole", 2),
        ("hsdp", 4, "unpadded", 1),
        ("whole", 2, "hfsdp", 4),
        ("fsdp2", 2, "plain", 1),
        ("plain", 1, "padded", 4),
    ],
)
def test_a_file_from_any_layout_onto_any_other(source, ranks, target, others, tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    expected = run_ranks(ranks, _export, str(path), source)[0]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert differing(safetensors.load_file(path), expected) == []  # for everyone else
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "made": "here"}
    for found in run_ranks(others, _import, str(path), target):
        assert differing(found, expected) == []


def test_a_file_that_others_wrote(tmp_path):
    expected = run_ranks(1, _values_of_plain)[0]
    half = {name: value for name, value in expected.items() if name < "c"}
    safetensors.save_file(half, tmp_path / "1.safetensors")
    rest = {name: value for name, value in expected.items() if name not in half}
    safetensors.save_file(rest, tmp_path / "2.safetensors")
    for found in run_ranks(4, _import, str(tmp_path), "unpadded"):
        assert differing(found, expected) == []


def _values_of_plain() -> dict[str, Tensor]:
    return _values(build("plain")[0])


class Odd(nn.Module):
    """Every dtype, columns split, nothing at all, one number; a tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        generator = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(DTYPES.values()):
            values = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
            self.register_buffer(f"dtype{number}", values)
        columns = torch.randn(4, 3, 5, generator=generator)
        self.columns = nn.Parameter(distribute_tensor(columns, mesh, [Shard(1)]))
        rows = torch.randn(5, 3, generator=generator)
        self.rows = nn.Parameter(distribute_tensor(rows, mesh, [RowAtomic((0, 5, 0)[:ranks])]))
        self.tied = self.rows
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("number", torch.rand((), generator=generator))


def _odd(path: str) -> None:
    model, other = Odd(0), Odd(1)
    export_safetensors(path, model)
    import_safetensors(path, other)
    expected, found = _values(model), _values(other)
    assert differing(expected, found) == []
    in_file = safetensors.load_file(path)
    assert "tied" not in in_file
    assert differing(in_file, {k: v for k, v in expected.items() if k != "tied"}) == []


def test_every_dtype_columns_empty_and_tied_tensors(tmp_path):
    run_ranks(3, _odd, str(tmp_path / "odd.safetensors"))


def test_runs_of_a_box_cover_its_elements():
    shape = (3, 4, 5)
    numbers = torch.arange(60).reshape(shape)
    cuts = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for box in itertools.product(*cuts):
        part = numbers[tuple(slice(*cut) for cut in box)].flatten()
        offsets, sizes = [a for a, _ in box], [b - a for a, b in box]
        places = list(runs(shape, offsets, sizes))
        length = part.numel() // len(places)
        found = [element for place in places for element in range(place, place + length)]
        assert found == part.tolist()
        assert len(places) == 1 or sizes[-1] < 5 or sizes[1] < 4


# ---------------------------------------------------------------------------------- memory


class _Census(TorchDispatchMode):
    """The most bytes that any single op returned in storage that did not exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage(tensor) not in known | {0}:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def _storage(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, DTensor) else tensor.untyped_storage()._cdata


def _watched(path: str) -> tuple[int, int, int, int]:
    """Largest new tensor while writing, while reading and in a gather; the largest shard; bytes."""
    model = nn.Linear(64, 500, bias=False)
    model.more = nn.Linear(64, 300, bias=False)
    model = fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
    with _Census() as writing:
        export_safetensors(path, model)
    with _Census() as reading:
        import_safetensors(path, model)
    with _Census() as gathering:
        model.weight.full_tensor()
    shard = max(parameter.to_local().numel() * 4 for parameter in model.parameters())
    return writing.largest, reading.largest, gathering.largest, shard


def test_no_rank_holds_more_than_a_tensor_beside_its_shards(tmp_path):
    plans = 16384  # bytes that DCP sends to agree on who writes what
    for writing, reading, gathering, shard in run_ranks(4, _watched, str(tmp_path / "m")):
        assert shard <= 200 * 64 * 4
        assert writing <= max(shard, plans)
        # The file is mapped, not read: of a tensor's mapping only the rank's rows are touched.
        assert reading <= 500 * 64 * 4
        assert gathering >= 500 * 64 * 4  # the census sees a gather


# ---------------------------------------------------------------------------------- faults


def _fault(path: str, change: str) -> tuple[str, bool]:
    model, _ = build("unpadded", seed=1)
    if change == "shape":
        model.register_parameter("a", nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)))
    if change == "name":
        model.register_parameter("more", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    if change == "dtype":
        model.register_parameter("a", nn.Parameter(torch.zeros(10, 6)))
    before = _values(model)
    with pytest.raises(CheckpointError) as fault:
        import_safetensors(path, model)
    if change == "dtype":
        import_safetensors(path, model, cast=True)
        assert model.a.dtype == torch.float32 and float(model.a.abs().sum()) > 0
        return str(fault.value), True
    return str(fault.value), differing(before, _values(model)) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("shape", r"a was saved with shape \(10, 6\), here \(2, 2\)"),
        ("name", r"more is missing in the checkpoint"),
        ("dtype", r"a was saved as torch.float64, here torch.float32"),
        ("cut", r"model.safetensors cannot be read as safetensors"),
        ("none", r"cannot be read as safetensors"),
        ("twice", r"b\.safetensors cannot be read as safetensors: \w+ is in a\.safetensors too"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, error, tmp_path):
    path = tmp_path / "model.safetensors"
    run_ranks(2, _export, str(path), "unpadded")
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    if change == "none":
        path = Path(tmp_path / "other.safetensors")
    if change == "twice":
        path.rename(tmp_path / "a.safetensors")
        shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        path = tmp_path
    for told, unchanged in run_ranks(2, _fault, str(path), change):
        assert re.search(error, told), told
        assert unchanged
