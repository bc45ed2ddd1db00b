"""Groups, options per parameter, state and checkpoints of the Muon optimizer."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dtensor_owner.muon import Muon
from placements import Owner, RowAtomic, distribute_tensor
from tests.muon_reference import fp32_newton_schulz, grads_of, reference, weights_of
from tests.ranks import run_ranks
from tests.test_muon import full, set_grads

FP32 = {"lr": 0.1, "ns_dtype": torch.float32}


def plain(shapes):
    return [torch.nn.Parameter(w) for w in weights_of(shapes)]


def take_steps(optimizer, params, shapes, steps=3, first=0):
    for step in range(first, first + steps):
        set_grads(params, grads_of(shapes, step))
        optimizer.step()


def close(mine, theirs, atol=2e-5):
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(full(a), full(b), atol=atol, rtol=1e-5)


# ------------------------------------------------------------------- one process, plain tensors


def test_plain_tensors_need_no_process_group():
    shapes = [(4, 6), (7, 3), (8, 2, 3)]
    params = plain(shapes)
    optimizer = Muon(params, weight_decay=0.3, **FP32)
    take_steps(optimizer, params, shapes)
    close(params, reference(shapes, 3, lr=0.1, weight_decay=0.3)[0])
    assert optimizer.bytes_per_step == 0


def test_a_stack_is_its_matrices():
    shape = (5, 4, 7)
    stack = plain([shape])
    take_steps(Muon(stack, matrices="stack", **FP32), stack, [shape])
    flat = plain([shape])
    take_steps(Muon(flat, **FP32), flat, [shape])
    parts = [torch.nn.Parameter(w.clone()) for w in weights_of([shape])[0]]
    stock = torch.optim.Muon(parts, lr=0.1)
    with fp32_newton_schulz():
        for step in range(3):
            for part, grad in zip(parts, grads_of([shape], step)[0]):
                part.grad = grad
            stock.step()
    close(stack, [torch.stack([p.detach() for p in parts])])
    # Control: flattened, it is another matrix.
    assert (full(stack[0]) - full(flat[0])).abs().max() > 0.01


def test_fused_rows_are_orthogonalized_apart():
    shape, split = (12, 6), (6, 4, 2)
    fused = plain([shape])
    take_steps(Muon(fused, split_rows=split, **FP32), fused, [shape])
    parts = [torch.nn.Parameter(w.clone()) for w in weights_of([shape])[0].split(split)]
    stock = torch.optim.Muon(parts, lr=0.1)
    with fp32_newton_schulz():
        for step in range(3):
            for part, grad in zip(parts, grads_of([shape], step)[0].split(split)):
                part.grad = grad.clone()
            stock.step()
    close(fused, [torch.cat([p.detach() for p in parts])])


def test_adamw_groups_are_torchs_adamw():
    shapes = [(4, 6), (5,), (), (3, 3)]
    params = plain(shapes[:1]) + [torch.nn.Parameter(w) for w in weights_of(shapes)[1:]]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    options = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    optimizer = Muon(
        [
            {"params": params[:1]},
            {"params": params[1:3], "algorithm": "adamw", **options},
            {"params": params[3:], "algorithm": "adamw", "amsgrad": True},
        ],
        adamw={"lr": 0.05},
        **FP32,
    )
    assert optimizer.param_groups[2]["lr"] == 0.05
    assert "momentum" not in optimizer.param_groups[1]
    take_steps(optimizer, params, shapes)
    stock = torch.optim.AdamW(
        [{"params": twins[1:3], **options}, {"params": twins[3:], "lr": 0.05, "amsgrad": True}]
    )
    for step in range(3):
        set_grads(twins, grads_of(shapes, step))
        stock.step()
    for mine, theirs in zip(params[1:], twins[1:]):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("compiled", [False, True])
def test_lr_as_float_tensor_and_schedule(compiled):
    shapes = [(4, 6)]
    extra = {"compile": True, "backend": "aot_eager"} if compiled else {}
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        params = plain(shapes)
        optimizer = Muon(params, lr=lr, ns_dtype=torch.float32, **extra)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for step in range(3):
            take_steps(optimizer, params, shapes, 1, step)
            scheduler.step()
        results.append(params[0].detach())
    torch.testing.assert_close(*results)
    expected = reference(shapes, 3, lr=0.1, schedule=lambda step: 0.1 / (step + 1))[0]
    torch.testing.assert_close(results[0], expected[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lr_zero_changes_no_bit(compiled, dtype):
    extra = {"compile": True, "backend": "aot_eager"} if compiled else {}
    params = [torch.nn.Parameter(w) for w in weights_of([(4, 6), (6, 3)], dtype)]
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params, lr=0.0, weight_decay=0.5, **extra)
    set_grads(params, grads_of([(4, 6), (6, 3)], 0, dtype))
    optimizer.step()
    set_grads(params, [torch.zeros_like(p) for p in params])
    optimizer.step()
    assert all(map(torch.equal, params, before))


def test_zero_gradients_only_decay():
    params = plain([(4, 6)])
    before = params[0].detach().clone()
    optimizer = Muon(params, lr=0.1, weight_decay=0.5)
    params[0].grad = torch.zeros(4, 6)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before * 0.95)


def test_mixed_dtypes_do_not_meet():
    """FIELD_CASES 13: weights of three dtypes, one gradient narrower than its weight."""
    shapes = [(8, 16), (6, 10), (6, 10), (5, 5)]
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float32]
    params = [torch.nn.Parameter(w.to(d)) for w, d in zip(weights_of(shapes), dtypes)]
    optimizer = Muon(params, **FP32)
    alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
    singles = [Muon([p], **FP32) for p in alone]
    for step in range(2):
        for several in (params, alone):
            for p, g in zip(several, grads_of(shapes, step)):
                p.grad = g.to(p.dtype)
        optimizer.step()
        for single in singles:
            single.step()
    close(params, alone, atol=1e-6)
    assert [p.dtype for p in params] == dtypes
    close(params[1:2], reference(shapes[:2], 2, lr=0.1)[0][1:])


def test_a_gradient_wider_than_its_weight_is_refused():
    param = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    param.grad_dtype = None
    optimizer = Muon([param])
    param.grad = torch.ones(4, 4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"Keep the parameter in torch\.float32"):
        optimizer.step()


def test_accumulated_gradients_count_once():
    """FIELD_CASES 26: four backward passes and one step are one step."""
    weight = torch.nn.Parameter(weights_of([(4, 6)])[0])
    twin = torch.nn.Parameter(weight.detach().clone())
    data = torch.randn(8, 6)
    one, four = Muon([weight], **FP32), Muon([twin], **FP32)
    for _ in range(3):
        one.zero_grad()
        (data @ weight.t()).square().sum().backward()
        one.step()
        four.zero_grad(set_to_none=False)
        for part in data.split(2):
            (part @ twin.t()).square().sum().backward()
        four.step()
    torch.testing.assert_close(weight, twin, atol=1e-4, rtol=1e-4)


def test_closure():
    param = torch.nn.Parameter(torch.eye(3))
    optimizer = Muon([param], **FP32)

    def closure():
        optimizer.zero_grad()
        loss = (param * torch.arange(9.0).view(3, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 12.0
    assert not torch.equal(param.detach(), torch.eye(3))


def test_add_param_group():
    shapes = [(4, 6), (3, 3)]
    params = plain(shapes)
    optimizer = Muon(params[:1], **FP32)
    take_steps(optimizer, params[:1], shapes[:1], 1)
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    take_steps(optimizer, params, shapes, 2, 1)
    assert len(optimizer.plans[0].matrices) == 2
    close(params[:1], reference(shapes[:1], 1, lr=0.1)[0], atol=1.0)
    twin = plain(shapes)[1:]
    alone = Muon(twin, lr=0.5, ns_dtype=torch.float32)
    for step in (1, 2):
        twin[0].grad = grads_of(shapes, step)[1]
        alone.step()
    close(params[1:], twin)


def test_options_changed_between_steps_are_used():
    params, twins = plain([(4, 6)]), plain([(4, 6)])
    optimizer, other = Muon(params, **FP32), Muon(twins, **FP32)
    take_steps(optimizer, params, [(4, 6)], 1)
    take_steps(other, twins, [(4, 6)], 1)
    optimizer.param_groups[0].update(ns_steps=1, nesterov=False, momentum=0.5)
    take_steps(optimizer, params, [(4, 6)], 1, 1)
    take_steps(other, twins, [(4, 6)], 1, 1)
    assert (params[0] - twins[0]).abs().max() > 0.01


# ------------------------------------------------------------------- state


def test_state_is_there_before_the_first_step():
    params = plain([(4, 6)])
    bias = torch.nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": params}, {"params": [bias], "algorithm": "adamw"}])
    state = optimizer.state_dict()["state"]
    assert {index: set(values) for index, values in state.items()} == {
        0: {"momentum_buffer"},
        1: {"step", "exp_avg", "exp_avg_sq"},
    }
    assert not state[0]["momentum_buffer"].any() and state[1]["step"] == 0


@pytest.mark.parametrize("copied_by", ["state_dict", "deepcopy", "pickle"])
def test_state_survives(copied_by):
    shapes = [(4, 6), (5,)]
    params = [*plain(shapes[:1]), torch.nn.Parameter(torch.ones(5))]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    optimizer = Muon(groups, **FP32)
    take_steps(optimizer, params, shapes, 2)
    if copied_by == "state_dict":
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = Muon([{"params": twins[:1]}, {"params": twins[1:], "algorithm": "adamw"}], **FP32)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        copier = copy.deepcopy if copied_by == "deepcopy" else _pickled
        twins, other = copier((params, optimizer))
    take_steps(optimizer, params, shapes, 2, 2)
    take_steps(other, twins, shapes, 2, 2)
    assert all(map(torch.equal, params, twins))
    assert not torch.equal(params[0], weights_of(shapes)[0])


def _pickled(value):
    return pickle.loads(pickle.dumps(value))


def test_state_of_torch_muon_can_be_loaded():
    params, twins = plain([(4, 6)]), plain([(4, 6)])
    stock = torch.optim.Muon(params, lr=0.1)
    take_steps(stock, params, [(4, 6)], 2)
    optimizer = Muon(twins, ns_dtype=torch.float32)
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    buffer = optimizer.state[twins[0]]["momentum_buffer"]
    assert torch.equal(buffer, stock.state[params[0]]["momentum_buffer"])
    take_steps(optimizer, twins, [(4, 6)], 1)


# ------------------------------------------------------------------- on several ranks


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(weight, placement):
    return torch.nn.Parameter(distribute_tensor(weight, mesh(), [placement], src_data_rank=None))


def _stack_and_split(placements, options, shape):
    param = placed(weights_of([shape])[0], placements)
    optimizer = Muon([param], **FP32, **options)
    take_steps(optimizer, [param], [shape], 2)
    return full(param), optimizer.bytes_per_step


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"matrices": "stack"}, (6, 4, 5)), ({"split_rows": (5, 1, 6)}, (12, 4))],
)
def test_sharded_stacks_and_fused_rows(options, shape):
    alone = plain([shape])
    take_steps(Muon(alone, **FP32, **options), alone, [shape], 2)
    for placement in (Shard(0), Shard(1), RowAtomic((shape[0] - 1, 0, 1)), Owner(2), Replicate()):
        results = run_ranks(3, _stack_and_split, placement, options, shape)
        for param, num_bytes in results:
            torch.testing.assert_close(param, full(alone[0]), atol=2e-5, rtol=1e-5)
            if options.get("matrices") and placement == Shard(0):
                assert num_bytes == 0  # every expert is whole on one rank


def _all_at_once():
    """Plain, sharded and AdamW parameters in one optimizer; weights below and after."""
    shapes = [(6, 8), (8, 4), (7, 3), (9,), (5, 4)]
    weights = weights_of(shapes)
    params = [
        torch.nn.Parameter(weights[0]),
        placed(weights[1], Shard(0)),
        placed(weights[2], RowAtomic((0, 7))),
        placed(weights[3], RowAtomic((4, 5))),
        placed(weights[4], Replicate()),
    ]
    groups = [
        {"params": params[:2]},
        {"params": params[2:3], "lr": 0.2, "ns_steps": 4},
        {"params": params[3:], "algorithm": "adamw", "lr": 0.01},
    ]
    optimizer = Muon(groups, **FP32)
    keys = [sorted(optimizer.state[p]) for p in params]
    take_steps(optimizer, params, shapes, 3)
    return [full(p) for p in params], keys, len(optimizer.plans)


def test_plain_sharded_and_adamw_in_one_optimizer():
    shapes = [(6, 8), (8, 4), (7, 3), (9,), (5, 4)]
    twins = [torch.nn.Parameter(w) for w in weights_of(shapes)]
    groups = [
        {"params": twins[:2]},
        {"params": twins[2:3], "lr": 0.2, "ns_steps": 4},
        {"params": twins[3:], "algorithm": "adamw", "lr": 0.01},
    ]
    take_steps(Muon(groups, **FP32), twins, shapes, 3)
    results = run_ranks(2, _all_at_once)
    for params, keys, number_of_plans in results:
        close(params, twins)
        assert number_of_plans == 2 and keys == results[0][1]


def _sharded_after_construction():
    module = torch.nn.Linear(8, 6, bias=False)
    optimizer = Muon(module.parameters(), **FP32)
    module.weight = placed(module.weight.detach(), Shard(0))
    set_grads([module.weight], grads_of([(6, 8)], 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


def test_parameters_replaced_after_the_optimizer_was_built():
    """FIELD_CASES 30: the optimizer must not quietly do nothing."""
    for messages in run_ranks(2, _sharded_after_construction):
        assert any("build the optimizer anew" in message for message in messages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": "fast"}, "lr of group 0 must be a number"),
        ({"weight_decay": None}, "weight_decay of group 0 must be a number"),
        ({"ns_coefficients": None}, "coefficients must be a tuple"),
        ({"split_rows": 3}, "split_rows must be rows of each matrix"),
        ({"split_rows": (1.5, 1.5)}, "split_rows must be rows of each matrix"),
        ({"bucket_numel": 2.5}, "bucket_numel must be an int"),
        ({"ranks_per_node": None}, "ranks_per_node must be an int"),
        ({"algorithm": "adamw", "betas": (1.5, 0.9)}, "betas of group 0 must be in"),
        ({"algorithm": "adamw", "betas": 0.9}, "betas of group 0 must be two numbers"),
        ({"algorithm": "adamw", "foreach": True, "fused": True}, "choose one"),
    ],
)
def test_options_that_cannot_be_used_are_named(options, words):
    in_group = {
        key: options[key] for key in ("algorithm", "betas", "foreach", "fused") if key in options
    }
    rest = {key: value for key, value in options.items() if key not in in_group}
    with pytest.raises((ValueError, TypeError), match=words):
        Muon([{"params": plain([(3, 4)]), **in_group}], **rest)
