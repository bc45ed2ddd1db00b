"""Ranks that differ: told so at construction or in the next step, the same words on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_owner.muon import Muon
from placements import RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, weights_of
from tests.ranks import run_ranks
from tests.test_muon import set_grads
from tests.test_muon_faults import (
    IN_FP32,
    SHAPES,
    error_of,
    mesh,
    parameters,
    snapshot,
    unchanged,
)

ODD = 1  # the rank that differs


def odd():
    return dist.get_rank() == ODD


def same_error(function, *args):
    """What all of three ranks raise; they change nothing, and none waits for a timeout (300 s)."""
    answers = run_ranks(3, function, *args, timeout=90)
    texts = {text for text, _ in answers}
    assert len(texts) == 1 and None not in texts, answers
    assert all(intact for _, intact in answers)
    return texts.pop()


def _disagree(what):
    odd = dist.get_rank() == 2
    shapes, placements = list(SHAPES), [Shard(0), Shard(0), Shard(0)]
    options = {}
    if odd and what == "shape":
        shapes[1] = (10, 6)
    if odd and what == "placement":
        placements[1] = RowAtomic((4, 1, 1))
    params = parameters(placements, shapes)
    if odd and what == "order":
        params = [params[1], params[0], params[2]]
    if odd and what == "number":
        params = params[:2]
    if odd and what == "groups":
        return error_of(Muon, [{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    if odd and what == "option":
        options["momentum"] = 0.5
    return error_of(Muon, params, lr=0.1, **options)


@pytest.mark.parametrize("what", ["shape", "placement", "order", "number", "groups", "option"])
def test_ranks_that_differ_are_told_so_at_construction(what):
    texts = run_ranks(3, _disagree, what)
    assert len(set(texts)) == 1
    assert "Ranks disagree on the optimizer's parameters" in texts[0]
    assert "rank 0: " in texts[0] and "rank 2: " in texts[0]


def _fault_on_one_rank(what):
    params = parameters()
    options = {}
    if dist.get_rank() == 1:
        if what == "option":
            options["nonfinite"] = "ignore"
        else:
            params.append(torch.nn.Parameter(torch.zeros(3)))
    return error_of(Muon, params, lr=0.1, **options)


@pytest.mark.parametrize(
    ("what", "message"), [("option", "nonfinite must be"), ("parameter", "0-D and 1-D")]
)
def test_a_fault_on_one_rank_is_raised_on_all(what, message):
    texts = run_ranks(3, _fault_on_one_rank, what)
    assert all(message in text for text in texts)
    assert "found on rank 1" in texts[0] and "found on rank 1" in texts[2]


def _option_changed_on_one_rank():
    params = parameters()
    optimizer = Muon(params, **IN_FP32)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["ns_steps"] = 3
    return error_of(optimizer.step)


def test_an_option_changed_on_one_rank_is_an_error_on_all():
    texts = run_ranks(3, _option_changed_on_one_rank)
    assert len(set(texts)) == 1 and "ns_steps=3 in group 0" in texts[0]


# ------------------------------------------------------------------ at construction


def _number_of_parameters():
    params = parameters()
    return error_of(Muon, params[: 2 if odd() else 3], lr=0.1)


def test_a_parameter_that_one_rank_lacks_is_said_in_numbers():
    texts = set(run_ranks(3, _number_of_parameters))
    assert len(texts) == 1
    assert "rank 0: 3 parameters on this mesh, 1 groups" in (text := texts.pop())
    assert "rank 1: 2 parameters on this mesh, 1 groups" in text
    assert "momentum" not in text


def _bad_argument(what):
    params = parameters()
    bad = {
        "lr": {"lr": "high"},
        "dtype": {"ns_dtype": "bf16"},
        "coefficients": {"ns_coefficients": (1.0, 2.0)},
        "method": {"ns_method": "fast"},
        "split": {"split_rows": (1, 1)},
        "adamw": {"adamw": {"beta": 0.9}},
    }
    options = bad.get(what, {}) if odd() else {}
    if odd() and what == "set":
        params = set(params)
    if odd() and what == "group":
        params = [{"weights": params, "params": params[:1], "algorithm": "sgd"}]
    if odd() and what == "placement":
        params[0] = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh(), [Partial()]))
    return error_of(Muon, params, **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    "what",
    ["lr", "dtype", "coefficients", "method", "split", "adamw", "set", "group", "placement"],
)
def test_a_bad_argument_on_one_rank_is_raised_on_all(what):
    texts = run_ranks(3, _bad_argument, what, timeout=60)
    assert None not in texts and texts[0] == texts[2]
    assert f"found on rank {ODD}" in texts[0]
    assert texts[ODD] in texts[0]


def _plain_and_sharded(what):
    """FIELD_CASES 52: what is not sharded is compared too, beside something that is."""
    weight = torch.zeros((4, 3) if odd() and what == "shape" else (3, 3))
    params = [*parameters(), torch.nn.Parameter(weight)]
    if odd() and what == "plain":
        params[0] = torch.nn.Parameter(torch.zeros(8, 8))
    text = error_of(Muon, params, **IN_FP32)
    if what != "gradient":
        return text, True
    optimizer = Muon(params, **IN_FP32)
    before = snapshot(params[:3], optimizer)
    set_grads(params, grads_of([*SHAPES, (3, 3)], 0))
    if odd():
        params[3].grad = None
    return error_of(optimizer.step), unchanged(before, params[:3], optimizer)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "parameter 0 that is not sharded: (4, 3) torch.float32"),
        ("plain", "rank 1: 2 parameters on this mesh"),
        ("gradient", "parameter 3 of group 0: no gradient on ranks [1]"),
    ],
)
def test_plain_parameters_are_compared(what, words):
    assert words in same_error(_plain_and_sharded, what)


def _another_mesh(what):
    """A smaller mesh beside the wide one; its ranks hold one parameter more."""
    small = DeviceMesh("cpu", [0, 1])
    params = parameters()
    if dist.get_rank() in (0, 1):
        weight = distribute_tensor(weights_of([(4, 4)])[0], small, [Shard(0)], src_data_rank=None)
        extra = torch.nn.Parameter(weight)
        if not (odd() and what == "construction"):
            params.insert(0 if odd() else 3, extra)  # meshes are met in another order
    if what == "construction":
        return error_of(Muon, params, **IN_FP32), True
    optimizer = Muon(params, **IN_FP32)
    shapes = [tuple(p.shape) for p in params]
    set_grads(params, grads_of(shapes, 0))
    optimizer.step()
    before = snapshot(params, optimizer)
    if odd() and what == "gradient":
        extra.grad = None
    if odd() and what == "inf":
        extra.grad.to_local()[0, 0] = float("inf")
    return error_of(optimizer.step), unchanged(before, params, optimizer)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("construction", "rank 0: parameters on mesh [0, 1]\n  rank 1: none on that mesh"),
        ("gradient", "no gradient on ranks [1]"),
        ("inf", "inf or nan"),
    ],
)
def test_what_is_wrong_on_a_smaller_mesh_is_told_to_all(what, words):
    assert words in same_error(_another_mesh, what)


# ------------------------------------------------------------------ between steps


def _changed_later(what):
    params = parameters()
    options = {"compile": True, "backend": "aot_eager"} if what == "compiled lr" else {}
    optimizer = Muon(params, **IN_FP32, **options)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    before = snapshot(params, optimizer)
    group = optimizer.param_groups[0]
    if odd():
        if what in ("lr", "compiled lr"):
            group["lr"] = 0.2
        elif what == "lr tensor":
            group["lr"] = torch.tensor(0.3)
        elif what in ("momentum", "weight_decay", "nesterov", "ns_steps"):
            group[what] = {"nesterov": False, "ns_steps": 3}.get(what, 0.5)
        elif what == "useless option":
            group["ns_dtype"] = "bf16"
        elif what == "loaded":
            state = copy.deepcopy(optimizer.state_dict())
            state["param_groups"][0]["weight_decay"] = 0.7
            optimizer.load_state_dict(state)
        elif what == "add_param_group":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4, 4))]})
        elif what == "dtype":
            params[2].data = params[2].data.to(torch.float64)
            params[2].grad = None
        else:
            name, value = {
                "nonfinite": ("_nonfinite", "propagate"),
                "owners": ("_owners", "any"),
                "bucket_numel": ("_bucket_numel", 20),
                "compile": ("_compile", True),
            }[what]
            setattr(optimizer, name, value)
    plans = len(optimizer.plans)  # looking at the plan on one rank must not need the others
    text = error_of(optimizer.step)
    intact = unchanged(before, params, optimizer) or what == "dtype"
    again = error_of(optimizer.step)  # and so again, until it is put right
    return text, intact and plans and again == text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", "rank 0: lr=0.1 in group 0\n  rank 1: lr=0.2 in group 0"),
        ("compiled lr", "rank 1: lr=0.2 in group 0"),
        ("lr tensor", "rank 1: lr=0.3"),
        ("momentum", "momentum=0.5"),
        ("weight_decay", "weight_decay=0.5"),
        ("nesterov", "nesterov=False"),
        ("ns_steps", "ns_steps=3"),
        ("useless option", "ns_dtype='bf16'"),
        ("loaded", "weight_decay=0.7"),
        ("add_param_group", "3 parameters on this mesh, 2 groups"),
        ("dtype", "torch.float64"),
        ("nonfinite", "nonfinite='propagate'"),
        ("owners", "owners='any'"),
        ("bucket_numel", "bucket_numel=20"),
        ("compile", "compile=True"),
    ],
)
def test_what_one_rank_changes_between_steps_is_told_to_all(what, words):
    assert words in same_error(_changed_later, what)


def _loaded_on_one_rank():
    params = parameters()
    optimizer = Muon(params, **IN_FP32)
    for step in range(3):
        set_grads(params, grads_of(SHAPES, step))
        if odd() and step:  # nothing differs, but this rank has to plan anew
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    twins = parameters()
    other = Muon(twins, **IN_FP32)
    for step in range(3):
        set_grads(twins, grads_of(SHAPES, step))
        other.step()
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, twins))


def test_one_rank_that_plans_anew_takes_the_others_along():
    assert run_ranks(3, _loaded_on_one_rank, timeout=60) == [True] * 3


def _odd_gradient(what):
    params = parameters()
    optimizer = Muon(params, **IN_FP32)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    before = snapshot(params, optimizer)
    whole = grads_of(SHAPES, 1)[1]
    if odd():
        if what == "replicated":
            params[1].grad = DTensor.from_local(whole, mesh(), [Replicate()])
        elif what == "sparse":
            params[1].grad = DTensor.from_local(whole.to_sparse(), mesh(), [Replicate()])
        elif what == "other mesh":
            other = init_device_mesh("cpu", (3,), mesh_dim_names=("other",))
            params[1].grad = distribute_tensor(whole, other, params[1].placements)
    elif what == "partial or not":
        params[1].grad = DTensor.from_local(whole, mesh(), [Partial()])
    if odd() and what == "partial or not":
        params[1].grad = DTensor.from_local(whole, mesh(), [Replicate()])
    return error_of(optimizer.step), unchanged(before, params, optimizer)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("replicated", "a torch.float32 gradient placed (Replicate(),) on ranks [1]"),
        ("partial or not", "a torch.float32 gradient placed (Partial(sum),) on ranks [0, 2]"),
    ],
)
def test_a_gradient_placed_otherwise_on_one_rank(what, words):
    assert words in same_error(_odd_gradient, what)


def _sparse_plain_gradient():
    params = [*parameters(), torch.nn.Parameter(torch.zeros(3, 3))]
    optimizer = Muon(params, **IN_FP32)
    set_grads(params, grads_of([*SHAPES, (3, 3)], 0))
    if odd():
        params[3].grad = torch.eye(3).to_sparse()
    return error_of(optimizer.step), not params[3].any()


def test_a_sparse_gradient_on_one_rank():
    assert "is sparse" in same_error(_sparse_plain_gradient)


def _good_step_after_a_bad_one():
    """Control: what is put right is stepped as if nothing had been."""
    params, twins = parameters(), parameters()
    optimizer, other = Muon(params, **IN_FP32), Muon(twins, **IN_FP32)
    for some in (params, twins):
        set_grads(some, grads_of(SHAPES, 0))
    if odd():
        optimizer.param_groups[0]["lr"] = 5.0
    text = error_of(optimizer.step)
    optimizer.param_groups[0]["lr"] = IN_FP32["lr"]
    optimizer.step()
    other.step()
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, twins))
    return text, same


def test_put_right_it_goes_on():
    assert "lr=5.0" in same_error(_good_step_after_a_bad_one)


def _state_taken_away():
    params = parameters()
    optimizer = Muon(params, **IN_FP32)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    if odd():
        optimizer.state.clear()
    optimizer.step()
    return all("momentum_buffer" in optimizer.state[param] for param in params)


def test_state_that_one_rank_has_lost_is_made_anew():
    assert all(run_ranks(3, _state_taken_away, timeout=60))
