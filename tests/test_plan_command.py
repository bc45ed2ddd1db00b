"""``dtensor-owner plan``: the text for a model, its numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor_owner import cli
from dtensor_owner.model_plan import load_model, plan_model
from dtensor_owner.train.config import TrainConfig
from dtensor_owner.train.model import GPT
from dtensor_owner.train.setup import build_model, build_sharded
from tests.ranks import run_ranks

HERE = "tests.test_plan_command"


def small_gpt() -> nn.Module:
    return GPT(layers=3, dim=8, heads=2, hidden=11, context=4)


def experts() -> nn.Module:
    model = nn.Module()
    model.experts = nn.Parameter(torch.empty(3, 4, 2))
    model.scale = nn.Parameter(torch.empty(()))
    return model


def no_matrices() -> nn.Module:
    return nn.LayerNorm(4)


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


class PlanText(expecttest.TestCase):
    def test_equal_blocks_are_one_line(self):
        self.assertExpectedInline(
            str(plan_model(small_gpt(), 3, itemsize=4)),
            """\
Plan for 3 shards

parameter group             tensors  payload  padding  if padded    bytes a rank
blocks.0 to blocks.2, each        9    2,144        0      1,024      704 to 736
the rest                          3    8,352        0          0           2,784
all                              30   14,784        0      3,072  4,896 to 4,992

21 matrices in 4 groups on 3 ranks: max/mean load 1.032, max/bound 1.000, 5.6% of the elements move
rank    0      8 matrices  load  1.032 of mean
rank    1      7 matrices  load  1.000 of mean
rank    2      6 matrices  load  0.968 of mean

An optimizer step sends 704 bytes between ranks.""",
        )


def test_a_step_sends_what_owners_lack_and_all_replicas_get_results():
    plan = plan_model(small_gpt(), 3, replicas=2, itemsize=1)
    numels = {name: p.numel() for name, p in small_gpt().named_parameters()}
    total = sum(numels[name] for names in plan.matrices for name in names)
    assert plan.owners.total_numel == total
    assert plan.step_bytes == 2 * plan.owners.moved_numel + total
    assert len(plan.owners.loads) == 6


def _train_plan(config: TrainConfig) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return build_sharded(config, mesh).plan.to_dict()


def test_a_run_has_the_owners_and_bytes_of_the_plan():
    config = TrainConfig(layers=1)  # its gates are worth the Gram form of Newton-Schulz
    [run_plan, *_] = run_ranks(4, _train_plan, config)
    plan = plan_model(build_model(config), 4, itemsize=4).to_dict()
    assert plan["owners"] == run_plan["owners"]
    assert plan["loads"] == run_plan["newton_schulz_loads"]
    assert plan["step_bytes"] == run_plan["step_bytes"] > 0


def test_blocks_that_do_not_divide_the_rows():
    plan = plan_model(small_gpt(), 3, block_size=32, itemsize=1)
    [blocks, *_] = plan.groups
    assert blocks.padding_bytes == 0 < blocks.padded_padding_bytes
    assert "if padded" in str(plan)


def test_experts_of_a_stack_have_owners_of_their_own():
    plan = plan_model(experts(), 2)
    assert plan.to_dict()["owners"] == {"experts[0]": 0, "experts[1]": 0, "experts[2]": 1}
    assert plan.step_bytes == 0  # an expert is a row of its stack, and rows are not cut


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_prints_and_saves(tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ("--ranks", "3", "--dtype", "float32", "--choices", "--json", str(file))
    code, out, _ = run(capsys, f"{HERE}:small_gpt", *options)
    assert code == 0
    assert "embedding.weight" in out and out.endswith("sends 704 bytes between ranks.\n")
    saved = json.loads(file.read_text())
    assert saved["step_bytes"] == 704
    assert len(saved["owners"]) == 21


def test_headers_of_files_are_enough(tmp_path: Path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = small_gpt().state_dict()
    names = sorted(state)
    for part in (0, 1):
        chosen = {name: state[name] for name in names[part::2]}
        save_file(chosen, tmp_path / f"{part}.safetensors")
    model = load_model(str(tmp_path))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such file or folder, and not package.module:function"),
        ([f"{HERE}:missing"], "has no attribute 'missing'"),
        ([f"{HERE}:GPT"], "TypeError: GPT.__init__() missing 5 required"),
        ([f"{HERE}:run"], "TypeError"),
        ([f"{HERE}:no_matrices"], "No parameter of this LayerNorm is Muon's"),
        ([f"{HERE}:lazy"], "weight has no shape before a first forward"),
        (
            [f"{HERE}:small_gpt", "--json", "/nowhere/plan.json"],
            "--json /nowhere/plan.json: No such",
        ),
        ([f"{HERE}:small_gpt", "--replicas", "0"], "--replicas 0: must be at least 1"),
        (["tests"], "tests: no .safetensors files in this folder"),
        ([__file__], "Error while deserializing header"),
    ],
)
def test_wrong_input_is_a_message(arguments, message, capsys):
    code, out, err = run(capsys, *arguments, "--ranks", "2")
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("dtensor-owner plan: error: ")
