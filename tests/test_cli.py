"""The command line: help for everything, one line and exit code 2 for what cannot work."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from dtensor_owner import cli
from dtensor_owner.train import TrainConfig, add_arguments
from dtensor_owner.train.config import flag
from dtensor_owner.train.launch import launch
from dtensor_owner.usage import UsageError


def _fail(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = cli.main(argv)
    except SystemExit as exit:  # argparse leaves this way
        code = exit.code
    assert code == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--world-size 0", "--world-size 0: must be between 1 and 256"),
        ("--world-size 8 --batch 4", "--batch 4: must be at least one sequence for each of 8"),
        ("--batch 3", "--batch 3: must be at least one sequence for each of 4 ranks"),
        ("--heads 3", "--heads 3: must be a divisor of --dim 128"),
        ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
        ("--shard-layout even", "argument --shard-layout: invalid choice: 'even'"),
        ("--seed -1", "--seed -1: must be between 0 and 2147483647"),
        ("--lr nan", "--lr nan: must be in (0, 10)"),
        ("--lr 0", "--lr 0.0: must be in (0, 10)"),
        ("--weight-decay 1", "--weight-decay 1.0: must be in [0, 1)"),
        ("--data /no/such/text", "--data /no/such/text: no such file or folder"),
        (f"--out {__file__}", "exists and is not a folder"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_values_end_in_one_line(options, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    error = _fail(["train", *options.split()], capsys)
    assert error.count("\n") == 1
    assert error.startswith("dtensor-owner train: error: ")
    assert message in error


def test_unknown_and_missing_commands(capsys):
    assert "invalid choice: 'tran'" in _fail(["tran"], capsys)
    assert "required: COMMAND" in _fail([], capsys)


def test_world_size_may_not_contradict_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one of 2 ranks that were started already"):
        launch(TrainConfig(world_size=4))


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", "--help"])
    assert exit.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option in dataclasses.fields(TrainConfig):
        assert flag(option.name) in text
        assert re.sub(r"\s+", " ", option.metadata["help"]) in text


def test_options_become_a_config():
    config = TrainConfig(
        world_size=3, steps=7, compile=False, out=Path("a b/=c"), data=Path(__file__), lr=0.125
    )
    options = ["--world-size=3", "--steps=7", "--no-compile", "--out=a b/=c", "--lr=0.125"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert TrainConfig.from_args(parser.parse_args([*options, f"--data={__file__}"])) == config
    assert TrainConfig.from_args(parser.parse_args([])) == TrainConfig()
