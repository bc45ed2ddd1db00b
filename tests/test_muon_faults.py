"""What goes wrong on one rank only, and what must be refused: the same on every rank, no hang."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_owner.muon import Muon
from placements import Owner, RowAtomic, distribute_tensor
from tests.muon_reference import grads_of, reference, weights_of
from tests.ranks import run_ranks
from tests.test_muon import full, set_grads

SHAPES = [(8, 8), (6, 10), (5, 4)]
PLACEMENTS = [Shard(0), RowAtomic((6, 0, 0)), Owner(1)]  # on three ranks
IN_FP32 = {"lr": 0.1, "ns_dtype": torch.float32}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parameters(placements=None, shapes=SHAPES, dtype=torch.float32):
    return [
        torch.nn.Parameter(distribute_tensor(w, mesh(), [p], src_data_rank=None))
        for w, p in zip(weights_of(shapes, dtype), placements or PLACEMENTS)
    ]


def error_of(call, *args, **kwargs):
    """The text of what a call raises; None where it raises nothing."""
    try:
        call(*args, **kwargs)
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return str(error)
    return None


def snapshot(params, optimizer):
    tensors = [p.detach().to_local() for p in params]
    tensors += [optimizer.state[p]["momentum_buffer"].to_local() for p in params]
    return [tensor.clone() for tensor in tensors]


def unchanged(before, params, optimizer):
    return all(map(torch.equal, before, snapshot(params, optimizer)))


# --------------------------------------------------------------------- missing gradients


def _missing(weight, where, compiled):
    """FIELD_CASES 17: no gradient on one rank only, then on all, then there again."""
    params = parameters()
    extra = {"compile": True, "backend": "aot_eager"} if compiled else {}
    optimizer = Muon(params, **IN_FP32, **extra)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    before = snapshot(params, optimizer)

    set_grads(params, grads_of(SHAPES, 1))
    if dist.get_rank() == where:
        params[weight].grad = None
    text = error_of(optimizer.step)
    intact = unchanged(before, params, optimizer)

    params[weight].grad = None
    optimizer.step()
    left_alone = torch.equal(params[weight].to_local(), before[weight])
    left_alone &= torch.equal(
        optimizer.state[params[weight]]["momentum_buffer"].to_local(),
        before[len(params) + weight],
    )
    set_grads(params, grads_of(SHAPES, 2))
    optimizer.step()
    return text, intact, left_alone, [full(p) for p in params]


@pytest.mark.parametrize(
    ("weight", "where", "compiled"),
    [(0, 2, False), (0, 0, True), (1, 0, False), (1, 2, False), (2, 1, False), (2, 0, False)],
)
def test_a_gradient_missing_on_one_rank_is_an_error_on_all(weight, where, compiled):
    answers = run_ranks(3, _missing, weight, where, compiled)
    assert len({text for text, *_ in answers}) == 1
    assert f"parameter {weight} of group 0" in answers[0][0]
    assert f"no gradient on ranks [{where}]" in answers[0][0]
    assert all(intact and left_alone for _, intact, left_alone, _ in answers)
    # The step without the weight was a step of the others: compare with torch's Muon.
    expected = [torch.nn.Parameter(w) for w in weights_of(SHAPES)]
    stock = torch.optim.Muon(expected, lr=0.1)
    for step in range(3):
        for index, (p, g) in enumerate(zip(expected, grads_of(SHAPES, step))):
            p.grad = None if step == 1 and index == weight else g
        stock.step()
    for mine, theirs in zip(answers[0][3], expected):
        torch.testing.assert_close(mine, theirs.detach(), atol=0.03, rtol=0)


def _never_any_gradient():
    params = parameters()
    optimizer = Muon(params, lr=0.1, weight_decay=0.5)
    before = snapshot(params, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return unchanged(before, params, optimizer)


def test_no_gradient_anywhere_changes_nothing():
    assert run_ranks(3, _never_any_gradient) == [True] * 3


def _adamw_member_missing():
    params = parameters()
    bias = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh(), [Replicate()]))
    optimizer = Muon([{"params": params}, {"params": [bias], "algorithm": "adamw"}], lr=0.1)
    set_grads(params, grads_of(SHAPES, 0))
    if dist.get_rank() != 1:
        bias.grad = torch.ones_like(bias)
    return error_of(optimizer.step)


def test_adamw_parameters_count_too():
    texts = run_ranks(3, _adamw_member_missing)
    assert len(set(texts)) == 1 and "parameter 0 of group 1" in texts[0]


# --------------------------------------------------------------------- not finite


def _not_finite(bad, mode):
    """FIELD_CASES 25: one inf on one rank only."""
    params = parameters()
    optimizer = Muon(params, **IN_FP32, nonfinite=mode)
    set_grads(params, grads_of(SHAPES, 0))
    optimizer.step()
    before = snapshot(params, optimizer)
    set_grads(params, grads_of(SHAPES, 1))
    if dist.get_rank() == 2:
        params[0].grad.to_local()[0, 0] = bad
    text = error_of(optimizer.step)
    intact = unchanged(before, params, optimizer)
    set_grads(params, grads_of(SHAPES, 2))
    optimizer.step()
    return text, intact, all(bool(full(p).isfinite().all()) for p in params)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_not_finite_gradients(bad):
    raised = run_ranks(3, _not_finite, bad, "raise")
    assert all("inf or nan" in text and intact and fine for text, intact, fine in raised)
    skipped = run_ranks(3, _not_finite, bad, "skip")
    assert skipped == [(None, True, True)] * 3
    passed_on = run_ranks(3, _not_finite, bad, "propagate")
    assert [(text, fine) for text, _, fine in passed_on] == [(None, False)] * 3


# --------------------------------------------------------------------- gradients


def _grads_are_only_read(options):
    params = parameters()
    optimizer = Muon(params, **IN_FP32, **options)
    set_grads(params, grads_of(SHAPES, 0))
    before = [(p.grad, p.grad.to_local().clone()) for p in params]
    optimizer.step()
    return all(p.grad is g and torch.equal(g.to_local(), v) for p, (g, v) in zip(params, before))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"compile": True, "backend": "aot_eager"}]
)
def test_step_never_changes_gradients(options):
    assert run_ranks(3, _grads_are_only_read, options) == [True] * 3


def _other_gradients(kind):
    """Gradients that are partial sums, replicated, or not contiguous."""
    params = parameters()
    optimizer = Muon(params, **IN_FP32)
    for param, grad in zip(params, grads_of(SHAPES, 0)):
        if kind == "partial":  # FIELD_CASES 21: to be summed first
            part = grad * (dist.get_rank() + 1) / 6
            param.grad = DTensor.from_local(part, param.device_mesh, [Partial()])
        elif kind == "replicated":
            param.grad = DTensor.from_local(grad, param.device_mesh, [Replicate()])
        else:
            placed = distribute_tensor(grad, mesh(), param.placements, src_data_rank=None)
            local = placed.to_local().t().contiguous().t()
            param.grad = DTensor.from_local(
                local, mesh(), param.placements, shape=grad.shape, stride=grad.stride()
            )
    optimizer.step()
    return [full(p) for p in params], [], 0


@pytest.mark.parametrize("kind", ["partial", "replicated", "strided"])
def test_gradients_placed_otherwise(kind):
    expected = reference(SHAPES, 1, lr=0.1)[0]
    for params, _, _ in run_ranks(3, _other_gradients, kind):
        for mine, theirs in zip(params, expected):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


# --------------------------------------------------------------------- refused at construction


def _tied_memory():
    placed = distribute_tensor(torch.randn(6, 4), mesh(), [Shard(0)], src_data_rank=None)
    again = DTensor.from_local(placed.to_local(), mesh(), [Shard(0)])
    return error_of(Muon, [torch.nn.Parameter(placed), torch.nn.Parameter(again)])


def test_two_wrappers_of_one_memory():
    texts = run_ranks(2, _tied_memory)
    assert texts[0] == texts[1] and "share their memory" in texts[0]


def parameter(*shape, **options):
    return torch.nn.Parameter(torch.zeros(shape, **options))


class TestRefused:
    @pytest.mark.parametrize("shape", [(), (1,), (7,)])
    def test_too_few_dims(self, shape):
        named = [("layer.weight", parameter(3, 3)), ("layer.bias", parameter(*shape))]
        with pytest.raises(ValueError, match=r"layer\.bias has shape"):
            Muon(named)
        with pytest.raises(ValueError, match="parameter 1 of group 0 has shape"):
            Muon([p for _, p in named])

    def test_dtypes(self):
        with pytest.raises(ValueError, match="complex64"):
            Muon([parameter(3, 3, dtype=torch.complex64)])
        with pytest.raises(ValueError, match="ns_dtype must be"):
            Muon([parameter(3, 3)], ns_dtype=torch.int32)

    def test_duplicates(self):
        p = parameter(3, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="contains a parameter twice"):
                Muon([p, p])
        with pytest.raises(ValueError, match="more than one parameter group"):
            Muon([{"params": [p]}, {"params": [p], "algorithm": "adamw"}])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -1.0}, "lr of group 0 must be >= 0"),
            ({"lr": torch.ones(2)}, "one element"),
            ({"weight_decay": -0.1}, "weight_decay of group 0"),
            ({"momentum": float("nan")}, "momentum of group 0"),
            ({"adjust_lr_fn": "other"}, "adjust_lr_fn must be"),
            ({"ns_steps": 100}, "from 0 to 99"),
            ({"ns_coefficients": (1.0,)}, "three numbers"),
            ({"matrices": "rows"}, "flatten"),
            ({"split_rows": (1, 1)}, "sums to 2"),
            ({"owners": "all"}, "owners must be"),
            ({"nonfinite": "ignore"}, "nonfinite must be"),
            ({"transport": "pigeon"}, "transport must be"),
            ({"transport": "point_to_point", "compile": True}, "needs transport="),
            ({"ranks_per_node": 0}, "ranks_per_node must be"),
            ({"bucket_numel": 0}, "bucket_numel must be"),
            ({"adamw": {"beta": 0.9}}, "unknown options"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            Muon([parameter(3, 3)], **options)

    def test_parameters_without_an_order(self):
        with pytest.raises(TypeError, match="got a set"):
            Muon({parameter(3, 3)})
        with pytest.raises(TypeError, match="got a Parameter"):
            Muon(parameter(3, 3))

    def test_unknown_algorithm(self):
        with pytest.raises(ValueError, match='"muon" or "adamw"'):
            Muon([{"params": [parameter(3, 3)], "algorithm": "sgd"}])

    def test_a_stack_of_more_than_three_dims(self):
        with pytest.raises(ValueError, match="takes 3-D parameters"):
            Muon([parameter(2, 3, 3, 3)], matrices="stack")

    def test_a_group_refused_leaves_the_optimizer_as_it_was(self):
        optimizer = Muon([parameter(3, 3)])
        with pytest.raises(ValueError, match="0-D and 1-D"):
            optimizer.add_param_group({"params": [parameter(3)]})
        assert len(optimizer.param_groups) == 1

    def test_gradients(self):
        p = parameter(3, 3)
        optimizer = Muon([p])
        p.grad = torch.eye(3).to_sparse()
        with pytest.raises(RuntimeError, match="is sparse"):
            optimizer.step()


def _foreign_placement():
    stock = distribute_tensor(torch.randn(6, 4), mesh(), [Shard(0)], src_data_rank=None)
    partial = DTensor.from_local(stock.to_local(), mesh(), [Partial()])
    return error_of(Muon, [torch.nn.Parameter(partial)])


def test_partial_parameters():
    assert "P(sum) on mesh dim 0" in run_ranks(2, _foreign_placement)[0]
