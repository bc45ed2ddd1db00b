"""Saves and loads that cannot work: one error on all ranks, naming the key, and nothing changed."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dtensor_owner.checkpoint import (
    CheckpointError,
    is_complete,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tests.checkpoint_helpers import build, differing, full, snapshot, step
from tests.ranks import run_ranks


def _save(folder: str, other: str | None = None) -> None:
    model, optimizers = build("unpadded")
    step(model, optimizers, 0)
    save_checkpoint(folder, model, optimizers, extra={"step": 1, "text": "a"})
    if other is not None:
        step(model, optimizers, 1)
        save_checkpoint(other, model, optimizers, extra={"step": 2, "text": "a"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    run_ranks(3, _save, str(folder), str(folder.with_name("other")))
    return folder


# --------------------------------------------------------------------------- damaged folders


def _load(folder: str, change: str = "") -> tuple[str, list[str]]:
    """The error of a load, and what it has changed."""
    model, optimizers = build("unpadded", seed=1)
    if change == "shape":
        model.register_parameter("a", nn.Parameter(torch.zeros(3, 3, dtype=torch.float64)))
        optimizers = []
    if change == "dtype":
        model.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    if change == "fewer":
        del model.f
        optimizers = []
    if change == "more":
        model.register_parameter("new", nn.Parameter(torch.zeros(2)))
    torch.manual_seed(dist.get_rank())
    before = snapshot(model, optimizers) | {"rng": torch.get_rng_state()}
    options = repr([group["lr"] for o in optimizers for group in o.param_groups])
    with pytest.raises(CheckpointError) as fault:
        load_checkpoint(folder, model, optimizers)
    after = snapshot(model, optimizers) | {"rng": torch.get_rng_state()}
    assert repr([group["lr"] for o in optimizers for group in o.param_groups]) == options
    return str(fault.value), differing(before, after)


def _flip_a_bit(folder: Path) -> None:
    """Of the first value of the largest tensor in the last rank's file."""
    path = folder / "__2_0.distcp"
    metadata = FileSystemReader(folder).read_metadata()
    infos = [
        info
        for index, info in metadata.storage_data.items()
        if info.relative_path == path.name and index.offset is not None
    ]
    record = max(infos, key=lambda info: info.length)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(
        io.BytesIO(data[record.offset : record.offset + record.length])
    ) as archive:
        (values,) = (i for i in archive.infolist() if i.filename.endswith("/data/0"))
    header = record.offset + values.header_offset  # its last two numbers are lengths
    data[header + 30 + sum(struct.unpack_from("<HH", data, header + 26))] ^= 4
    path.write_bytes(data)


def _cut_off(folder: Path) -> None:
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[: len(data) // 2])


def _remove_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def _remove_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _garble_metadata(folder: Path) -> None:
    (folder / ".checksums").unlink()  # as in what dcp.save writes: no checksum of the metadata
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: len(data) // 2])


def _forget_a_shard(folder: Path) -> None:
    (folder / ".checksums").unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["optimizer.state.a.momentum_buffer"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _flip_a_bit_of_the_metadata(folder: Path) -> None:
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / ".metadata").write_bytes(data)


def _file_of_another_step(folder: Path) -> None:
    """Whole in itself, of the same size, with every record at the same place."""
    shutil.copy(folder.parent / "other" / "__1_0.distcp", folder)


def _files_that_were_exchanged(folder: Path) -> None:
    (folder / "__1_0.distcp").rename(folder / "kept")
    (folder / "__2_0.distcp").rename(folder / "__1_0.distcp")
    (folder / "kept").rename(folder / "__2_0.distcp")


def _garble_checksums(folder: Path) -> None:
    (folder / ".checksums").write_bytes((folder / ".checksums").read_bytes()[:-9])


def _newer_format(folder: Path) -> None:
    text = (folder / ".checksums").read_text()
    (folder / ".checksums").write_text(text.replace('"format": 1', '"format": 2'))


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_flip_a_bit, r"__2_0\.distcp: (model|optimizer)\.\S+ is damaged"),
    (_cut_off, r"__1_0\.distcp: \S+ is damaged"),
    (_remove_file, r"__0_0\.distcp, which holds \(a part of\) \S+, cannot be read: No such file"),
    (_remove_metadata, r"is not a complete checkpoint: it has no \.metadata"),
    (_garble_metadata, r"\.metadata is damaged or cannot be read"),
    (_forget_a_shard, r"optimizer\.state\.a\.momentum_buffer is incomplete: a shard of it"),
    (_flip_a_bit_of_the_metadata, r"\.metadata is damaged: it is not the one that \.checksums"),
    (_file_of_another_step, r"__1_0\.distcp: \S+ is not what was saved there: the file is of"),
    (_files_that_were_exchanged, r"__\d_0\.distcp: \S+ is (not what was saved there|damaged)"),
    (_garble_checksums, r"\.checksums is damaged \(JSONDecodeError\)"),
    (_newer_format, r"\.checksums is of format 2, and this version reads format 1"),
    (_a_file, r"is a file, and a checkpoint is a folder"),
    (shutil.rmtree, r"is not a complete checkpoint: there is no such folder"),
]


@pytest.mark.parametrize(("damage", "error"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_a_damaged_checkpoint_changes_nothing(damage, error, saved, tmp_path):
    folder = tmp_path / "step-1"
    shutil.copytree(saved, folder)
    shutil.copytree(saved.with_name("other"), tmp_path / "other")
    damage(folder)
    for told, changed in run_ranks(2, _load, str(folder)):
        assert re.search(error, told), told
        assert changed == []


def _load_with_torch(folder: str) -> list[str]:
    model, _ = build("unpadded", seed=1)
    before = {name: full(value) for name, value in model.state_dict().items()}
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return differing(before, {name: full(value) for name, value in model.state_dict().items()})


def test_torchs_own_load_takes_a_flipped_bit_for_a_weight(saved, tmp_path):
    """Which is why ours compares checksums."""
    folder = tmp_path / "step-1"
    shutil.copytree(saved, folder)
    _flip_a_bit(folder)
    assert len(run_ranks(2, _load_with_torch, str(folder))[0]) > 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("shape", r"model\.a was saved with shape \(10, 6\), here \(3, 3\)"),
        ("dtype", r"model\.table was saved as torch\.float32, here torch\.float64"),
        ("fewer", r"model\.f is in the checkpoint, and nothing here takes it"),
        ("more", r"model\.new is missing in the checkpoint"),
    ],
)
def test_another_model_changes_nothing(change, error, saved):
    for told, changed in run_ranks(2, _load, str(saved), change):
        assert re.search(error, told), told
        assert changed == []


# --------------------------------------------------------------------- one rank that cannot


def _one_rank_fails(folder: str, where: str) -> str:
    model, optimizers = build("unpadded")
    fails = dist.get_rank() == 1
    patches = {
        "write": mock.patch("torch.save", side_effect=OSError(28, "No space left on device")),
        "state": mock.patch.object(model, "state_dict", side_effect=RuntimeError("no state")),
    }
    with pytest.raises(CheckpointError) as fault:
        if fails:
            with patches[where]:
                save_checkpoint(folder, model, optimizers)
        else:
            save_checkpoint(folder, model, optimizers)
    dist.barrier()
    assert not is_complete(folder)
    assert latest_checkpoint(Path(folder).parent) is None
    save_checkpoint(folder, model, optimizers)  # over what the failed one has left
    assert is_complete(folder)
    return str(fault.value)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("write", r"could not be saved: OSError: \[Errno 28\] No space left on device \(rank 1\)"),
        ("state", r"could not be saved: RuntimeError: no state \(rank 1\)"),
    ],
)
def test_a_rank_that_cannot_save_leaves_nobody_waiting(where, error, tmp_path):
    for told in run_ranks(3, _one_rank_fails, str(tmp_path / "step-5"), where, timeout=60):
        assert re.search(error, told), told


def _save_again(folder: str) -> str:
    with pytest.raises(CheckpointError) as fault:
        _save(folder)
    return str(fault.value)


def test_an_existing_checkpoint_is_not_overwritten(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert ".checksums" in before
    assert "exists already: save to a new folder" in run_ranks(2, _save_again, str(saved))[0]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def _unsafe_extra(folder: str) -> list[str]:
    model, optimizers = build("unpadded")
    told = []
    for bad in (Path("x"), [{"weight": model.a}]):
        with pytest.raises(CheckpointError) as fault:
            save_checkpoint(folder, model, optimizers, extra={"good": 1, "bad": bad})
        told.append(str(fault.value))
    assert not Path(folder).exists()
    return told


def test_extra_values_that_could_not_be_loaded_are_not_saved(tmp_path):
    for told in run_ranks(2, _unsafe_extra, str(tmp_path / "new")):
        assert "extra['bad'] of type PosixPath cannot be saved" in told[0]
        assert "extra['bad'] has a DTensor in it" in told[1]


# ------------------------------------------------------------------------------------ size


def _sizes(folder: str, layout: str) -> dict[str, int]:
    model, optimizers = build(layout)
    step(model, optimizers, 0)
    save_checkpoint(folder, model, optimizers)
    return {
        key: value.numel() * value.itemsize for key, value in snapshot(model, optimizers).items()
    }


def _written(folder: Path) -> int:
    """Bytes of values in the files: of every record of a tensor, what torch.save wrapped."""
    metadata = FileSystemReader(folder).read_metadata()
    total = 0
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                record = file.read(info.length)
            total += _value_bytes(record)
    return total


def _value_bytes(record: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        return sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)


@pytest.mark.parametrize("layout", ["unpadded", "padded", "hsdp", "hfsdp", "whole", "replicate"])
def test_every_value_is_written_once(layout, tmp_path):
    sizes: dict[str, int] = run_ranks(4, _sizes, str(tmp_path / "step-1"), layout)[0]
    assert _written(tmp_path / "step-1") == sum(sizes.values())
    assert not [name for name in os.listdir(tmp_path) if name != "step-1"]


def _tied(folder: str) -> tuple[float, Tensor]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    save_checkpoint(folder, model)
    before = model[1].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    load_checkpoint(folder, model)
    assert model[0].weight is model[1].weight
    return float((model[1].weight - before).abs().max()), before


def test_a_tied_weight_is_written_once(tmp_path):
    assert run_ranks(2, _tied, str(tmp_path / "step-1"))[0][0] == 0
    assert _written(tmp_path / "step-1") == 4 * 4 * 4
