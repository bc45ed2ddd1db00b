"""Routing of parameters: which are Muon's, seen in tables and in counts of matrices."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dtensor_owner import Muon, fully_shard, muon_param_groups, muon_step
from dtensor_owner.train.model import GPT
from placements import Owner, distribute_tensor
from tests.ranks import run_ranks


class Toy(nn.Module):
    """Fragments that routing by dims or by usual names alone would get wrong."""

    def __init__(self, tied=False, name="tok_embeddings"):
        super().__init__()
        self.embedding_name = name
        setattr(self, name, nn.Embedding(20, 8))
        self.qkv = nn.Linear(8, 16)
        self.experts = nn.Parameter(torch.randn(3, 8, 6))
        self.patches = nn.Conv2d(3, 8, 2, bias=False)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(8, 20, bias=False)
        if tied:
            self.out.weight = getattr(self, name).weight

    def forward(self, tokens):
        x = getattr(self, self.embedding_name)(tokens) * self.scale
        x = self.norm(self.qkv(x)[..., :8]) + (x @ self.experts[0]).sum(-1, keepdim=True)
        x = x + self.experts.sum() + self.patches.weight.sum()
        return self.out(x)


def by_algorithm(groups):
    return {
        algorithm: {name for g in groups if g["algorithm"] == algorithm for name, _ in g["params"]}
        for algorithm in ("muon", "adamw")
    }


class Tables(expecttest.TestCase):
    def test_a_model_with_everything(self):
        model = Toy()
        model.norm.weight.requires_grad_(False)
        groups = muon_param_groups(model, split_rows={"qkv.weight": (8, 4, 4)}, convolutions=True)
        self.assertExpectedInline(
            str(groups),
            """\
parameter              shape          by     why
experts                3 x 8 x 6      muon   stack of 3 matrices
scale                  scalar         adamw  0-D
tok_embeddings.weight  20 x 8         adamw  embedding
qkv.weight             16 x 8         muon   3 matrices fused along dim 0
qkv.bias               16             adamw  1-D
patches.weight         8 x 3 x 2 x 2  muon   matrix (shape[0], rest)
norm.weight            8              none   frozen
norm.bias              8              adamw  1-D
out.weight             20 x 8         adamw  head""",
        )
        optimizer = Muon(groups, lr=0.1)
        assert len(optimizer.plans[0].matrices) == 3 + 3 + 1

    def test_no_matrix(self):
        model = nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2))
        with pytest.raises(ValueError) as caught:
            muon_param_groups(model)
        self.assertExpectedInline(
            str(caught.value),
            """\
No parameter of this Sequential is Muon's:
parameter  shape  by     why
0.weight   4 x 2  adamw  embedding
1.weight   2      adamw  1-D
1.bias     2      adamw  1-D""",
        )


@pytest.mark.parametrize("name", ["wte", "tok_embeddings", "embed"])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_heads_whatever_their_name(name, tied):
    groups = muon_param_groups(Toy(tied, name))
    assert by_algorithm(groups)["muon"] == {"qkv.weight", "experts"}
    named = [id(p) for g in groups for _, p in g["params"]]
    assert len(named) == len(set(named))
    # Control: by dims alone they would be Muon's.
    both = muon_param_groups(Toy(tied, name), muon_names=["out.*", f"{name}.*"])
    assert f"{name}.weight" in by_algorithm(both)["muon"]


def test_as_many_positions_as_the_model_is_wide():
    """Linear layers of the position embedding's shape are no heads."""
    model = GPT(layers=2, dim=16, heads=2, hidden=21, context=16)
    muon = by_algorithm(muon_param_groups(model))["muon"]
    assert len(muon) == 2 * 7
    assert "blocks.0.attention.q.weight" in muon


def test_options_choose():
    groups = muon_param_groups(
        Toy(), stacks=False, convolutions=True, adamw_names=["q*"], muon={"lr": 0.5}
    )
    assert by_algorithm(groups)["muon"] == {"patches.weight"}
    assert groups[0]["lr"] == 0.5 and "lr" not in groups[1]
    with pytest.raises(ValueError, match=r"'kv\*' matches no parameter"):
        muon_param_groups(Toy(), adamw_names=["kv*"])


def test_tied_linear_layers():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["c"] = nn.Linear(4, 4, bias=False)
    model["b"].weight = model["a"].weight
    groups = muon_param_groups(model)
    assert by_algorithm(groups) == {"muon": {"c.weight"}, "adamw": {"a.weight"}}
    assert groups.choices[0].why == "tied: also b.weight"


def _counted_steps(how):
    """FIELD_CASES 30, 31: a tied model, sharded before or after its groups are chosen."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    with torch.device("meta" if how == "meta" else "cpu"):
        model = Toy(tied=True)
        model.scale = nn.Parameter(torch.ones(1))  # fully_shard takes no 0-D parameters
    if how == "meta":
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().fill_(0.1)
    elif how == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        placement = Owner(1) if how == "owner" else Shard(0)
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if p.ndim > 1 and p is not model.out.weight:
                    placed = distribute_tensor(p.detach(), mesh, [placement])
                    setattr(module, name, nn.Parameter(placed))
    groups = muon_param_groups(model)
    optimizer = Muon(groups, lr=0.1, ns_dtype=torch.float32)
    number = 0
    inner = muon_step.newton_schulz

    def counting(batch, *args):
        nonlocal number
        number += batch.shape[0] if batch.ndim == 3 else 1
        return inner(batch, *args)

    muon_step.newton_schulz = counting
    try:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    finally:
        muon_step.newton_schulz = inner
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    return number, sizes, str(groups)


@pytest.mark.parametrize("how", ["fully_shard", "meta", "shard", "owner"])
def test_every_matrix_is_stepped_once_on_every_path(how):
    results = run_ranks(4, _counted_steps, how, timeout=90)
    assert sum(number for number, _, _ in results) == 1 + 3  # qkv and three experts
    assert len({(tuple(sizes), text) for _, sizes, text in results}) == 1
