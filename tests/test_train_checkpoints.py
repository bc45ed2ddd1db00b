"""Which checkpoint a training run goes on from, which it refuses, and what it removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtensor_owner.train import TrainConfig
from dtensor_owner.train.checkpoints import find, prune
from dtensor_owner.usage import UsageError


def _config(out: Path, **options: Any) -> TrainConfig:
    return TrainConfig(out=out, checkpoint_every=5, **options)


def _checkpoints(out: Path, *names: str) -> Path:
    """Folders as a save leaves them; an interrupted one may have everything, but not its name."""
    for name in names:
        folder = out / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    return out / "checkpoints"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two complete checkpoints, two interrupted ones."""
    found = _checkpoints(tmp_path, "step-00000005", "step-00000010", "step-00000015.incomplete")
    _checkpoints(tmp_path, "step-00000030.removed")
    (found / "step-00000020").mkdir()  # has no metadata
    return found


def test_a_run_goes_on_from_the_newest_complete_checkpoint(folder, tmp_path):
    newest = folder / "step-00000010"
    for named in (folder, newest, tmp_path):  # the last one is the run's folder
        assert find(_config(tmp_path, resume=named)) == newest
    assert find(_config(tmp_path / "new")) is None


def test_checkpoints_of_another_run_are_not_taken_over(folder, tmp_path):
    """A later --resume would take them for this run's."""
    with pytest.raises(UsageError, match="holds step-00000010 of another run; go on from it with"):
        find(_config(tmp_path))
    _checkpoints(tmp_path / "other", "step-00000005")
    with pytest.raises(UsageError, match="holds step-00000010 of another run; remove it"):
        find(_config(tmp_path, resume=tmp_path / "other"))


def test_an_older_step_of_the_same_run_needs_room(folder, tmp_path):
    older = folder / "step-00000005"
    with pytest.raises(UsageError) as fault:
        find(_config(tmp_path, resume=older))
    assert "also holds step-00000010, from which a later --resume would go on" in str(fault.value)
    assert "another run" not in str(fault.value)
    assert find(_config(tmp_path, resume=older, checkpoint_dir=tmp_path / "elsewhere")) == older
    (folder / "step-00000010").rename(tmp_path / "away")
    assert find(_config(tmp_path, resume=older)) == older


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("checkpoints/step-00000020", "no complete checkpoint there;"),
        ("checkpoints/step-00000015.incomplete", "no complete checkpoint there;"),
        ("nowhere", "no complete checkpoint there, and no such folder;"),
    ],
)
def test_there_must_be_a_complete_checkpoint(name, error, folder, tmp_path):
    with pytest.raises(UsageError, match=error):
        find(_config(tmp_path, resume=tmp_path / name))


def test_what_a_kill_has_left_of_a_removal_goes_with_the_next_save(tmp_path):
    """What it has left of a save is left alone."""
    folder = _checkpoints(
        tmp_path,
        *(f"step-{number:08d}" for number in (10, 15, 20)),
        "step-00000005.removed",
        "step-00000012.incomplete",
        "notes.removed",
    )
    prune(_config(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == [
        "notes.removed",
        "step-00000012.incomplete",
        "step-00000015",
        "step-00000020",
    ]
