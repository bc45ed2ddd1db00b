"""fully_shard with MXFP8 weights, compared with one process that quantizes its full weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dtensor_owner.buffer import DBuffer, PendingBuffer
from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.layout import ShardLayout
from dtensor_owner.mxfp8 import dequantize_rowwise, quantize_rowwise
from dtensor_owner.mxfp8_weights import MXFP8Policy
from dtensor_owner.train.config import TrainConfig
from dtensor_owner.train.model import GPT
from dtensor_owner.train.setup import build_sharded
from dtensor_owner.usage import UsageError
from placements.block_atomic import BlockAtomic
from placements.row_atomic import RowAtomic
from tests.fully_shard_helpers import full, gpt_loss, mesh_1d, mine
from tests.ranks import run_ranks

# The MLP's 45 rows are no multiple of 32; everything of attention is.
SIZES: dict[str, int] = dict(layers=2, dim=96, heads=2, hidden=45, context=6)
MXFP8 = MXFP8Policy()


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES)


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 256, (4, SIZES["context"] + 1), generator=generator)


def shard(model: GPT, mesh_shape: tuple[int, ...] | None = None, **options: Any) -> GPT:
    """Blocks in MXFP8, the embeddings and the last norm as they are."""
    mesh = mesh_1d() if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, block_size=32, mxfp8=MXFP8, **options)
    return fully_shard(model, mesh=mesh, **options)


def is_quantized(name: str) -> bool:
    return ".attention." in name


class _Rounded(torch.autograd.Function):
    """The value after MXFP8; its gradient goes to the parameter unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_rowwise(*quantize_rowwise(weight)).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


def reference_loss(model: GPT, tokens: Tensor, dtype: torch.dtype, quantize: bool) -> Tensor:
    weights = {}
    for name, parameter in model.named_parameters():
        if quantize and is_quantized(name):
            weights[name] = _Rounded.apply(parameter, dtype)
        else:
            weights[name] = parameter.to(dtype)

    class Rounded:
        def __call__(self, inputs: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (inputs,))

    return gpt_loss(Rounded(), tokens)  # type: ignore[arg-type]


def compare_training(**options: Any) -> tuple[float, float]:
    """Three steps of SGD; returns how far the weights are from MXFP8's and from fp32's."""
    model = shard(make_gpt(), **options)
    references = {quantize: make_gpt() for quantize in (True, False)}
    models: list[nn.Module] = [model, *references.values()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(3):
        tokens = tokens_of(step)
        loss = gpt_loss(model, mine(tokens))
        loss.backward()
        for quantize, reference in references.items():
            expected = reference_loss(reference, tokens, torch.float32, quantize)
            expected.backward()
            if quantize:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return distance(model, references[True]), distance(model, references[False])


def distance(model: nn.Module, reference: nn.Module) -> float:
    expected = dict(reference.named_parameters())
    differences = [
        (full(p.detach()) - expected[name].detach()).abs().max()
        for name, p in model.named_parameters()
    ]
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", list(ShardLayout))
def test_training_equals_one_process_with_rounded_weights(world_size, kind):
    for from_mxfp8, from_fp32 in run_ranks(world_size, compare_training, shard_layout=kind):
        assert from_mxfp8 < 2e-6
        assert from_fp32 > 1e-4  # control: the rounding matters


@pytest.mark.parametrize("reshard", [False, 2])
def test_weights_may_be_kept_for_backward(reshard):
    for from_mxfp8, _ in run_ranks(4, compare_training, reshard_after_forward=reshard):
        assert from_mxfp8 < 2e-6


@pytest.mark.parametrize("shard_dims", [1, (0, 1)], ids=["HSDP", "HFSDP"])
def test_two_mesh_dims(shard_dims):
    options: dict[str, Any] = {"mesh_shape": (2, 2), "shard_dims": shard_dims}
    for from_mxfp8, from_fp32 in run_ranks(4, compare_training, **options):
        assert from_mxfp8 < 2e-6
        assert from_fp32 > 1e-4


def more_ranks_than_blocks() -> list[int]:
    """96 rows are 3 blocks: two of five ranks hold nothing of the layer, and still train it."""
    mesh = mesh_1d()
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    x = torch.randn(5, 64)
    rounded = _Rounded.apply(layer.weight, torch.float32)
    expected = nn.functional.linear(x, rounded, layer.bias)
    (wanted,) = torch.autograd.grad(expected.square().sum() / 5, layer.weight)
    fully_shard(layer, mesh=mesh, block_size=32, mxfp8=MXFP8)
    output = layer(x[dist.get_rank()])
    torch.testing.assert_close(output, expected[dist.get_rank()].detach())
    output.square().sum().backward()
    torch.testing.assert_close(full(layer.weight.grad), wanted)
    return [layer.weight.to_local().shape[0], layer.bias.to_local().shape[0]]


def test_more_ranks_than_blocks():
    rows = run_ranks(5, more_ranks_than_blocks)
    assert sorted(weight for weight, _ in rows) == [0, 0, 32, 32, 32]
    assert sum(bias for _, bias in rows) == 96


def groups_of_a_block() -> tuple[list[tuple[list[str], bool, int]], dict[str, str]]:
    model = shard(make_gpt())
    block = model.blocks[0]
    for group in block.parameter_groups:
        for parameter in group.parameters:
            assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
            kind = BlockAtomic if group.mxfp8 is not None else RowAtomic
            assert type(parameter.placements[0]) is kind
    groups = [(g.names, g.mxfp8 is not None, g.layout.block_size) for g in block.parameter_groups]
    assert not model.not_quantized  # it was not asked for
    return groups, dict(block.not_quantized)


def test_unfit_parameters_get_an_ordinary_group():
    for groups, reasons in run_ranks(2, groups_of_a_block):
        quantized, ordinary = sorted(groups, key=lambda group: not group[1])
        assert quantized == ([f"attention.{n}.weight" for n in "qkvo"], True, 32)
        assert ordinary[1:] == (False, 1)
        odd, norm = "its dims are not multiples of 32", "it has 1 dims, not 2"
        assert reasons == {
            "attention_norm.weight": norm,
            "mlp_norm.weight": norm,
            "mlp.gate.weight": odd,
            "mlp.up.weight": odd,
            "mlp.down.weight": odd,
        }
        assert ordinary[0] == list(reasons)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.second = nn.Linear(64, 32, bias=False)
        self.low = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.high = nn.Linear(32, 32, bias=False, dtype=torch.float64)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(self.second(self.first(x)).bfloat16())
        return self.high(x.double()).float()


def dtypes_frozen_and_chosen() -> None:
    mesh = mesh_1d()
    torch.manual_seed(0)
    model = _Mixed()
    x = torch.randn(3, 32)

    def rounded(name: str) -> Tensor:
        weight = dict(model.named_parameters())[name].detach()
        return dequantize_rowwise(*quantize_rowwise(weight)).to(weight.dtype)

    # "first" is left as it is by choice, "high" by its dtype.
    weights = {name: rounded(name) for name in ("second.weight", "low.weight")}
    expected = torch.func.functional_call(model, weights, (x,)).detach()
    policy = MXFP8Policy(eligible_fn=lambda name, parameter: name != "first.weight")
    fully_shard(model, mesh=mesh, block_size=32, mxfp8=policy)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model(x).sum().backward()
    assert model.second.weight.grad is None and model.low.weight.grad is not None
    assert dict(model.not_quantized) == {
        "first.weight": "eligible_fn says so",
        "high.weight": "its dtype is torch.float64",
    }


def test_dtypes_frozen_and_chosen_parameters():
    run_ranks(3, dtypes_frozen_and_chosen)


def bf16_compute() -> float:
    """bf16 holds the rounded weights exactly, so products see the same as in fp32."""
    model, reference = make_gpt(), make_gpt()
    shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    tokens = tokens_of(0)
    loss = gpt_loss(model, tokens)
    torch.testing.assert_close(
        loss.float(), reference_loss(reference, tokens, torch.bfloat16, True).float()
    )
    loss.backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
    return float(loss)


def test_bf16_compute():
    one, other = run_ranks(2, bf16_compute)
    assert one == other


def checkpointed_block() -> None:
    """Forward parts that run again in backward see the weights of the first time."""
    gradients = []
    for checkpointed in (False, True):
        model = make_gpt()
        if checkpointed:
            for block in model.blocks:
                forward = block.attention.forward
                block.attention.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
        shard(model)
        gpt_loss(model, mine(tokens_of(0))).backward()
        gradients.append([full(p.grad) for p in model.parameters()])
    for first, second in zip(*gradients):
        assert torch.equal(first, second)


def test_activation_checkpointing():
    run_ranks(2, checkpointed_block)


def gathered_bytes() -> dict[str, int]:
    """What a forward sends through the collectives, counted at the buffers that gather."""
    sent: dict[str, int] = {}
    redistribute = DBuffer.redistribute_async

    def counted(self: DBuffer, placements: Any) -> PendingBuffer:
        pending = redistribute(self, placements)
        key = str(self.dtype).removeprefix("torch.")
        sent[key] = sent.get(key, 0) + pending.wait().local_buffer.nbytes
        return pending

    layer = nn.Linear(64, 96, bias=False)
    fully_shard(layer, mesh=mesh_1d(), block_size=32, mxfp8=MXFP8)
    DBuffer.redistribute_async = counted  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            layer(torch.randn(2, 64))
    finally:
        DBuffer.redistribute_async = redistribute  # type: ignore[method-assign]
    return sent


def test_only_planes_are_sent():
    assert run_ranks(2, gathered_bytes) == [{"uint8": 96 * 64 + 96 * 2}] * 2


def wrong_block_size() -> str:
    with pytest.raises(ValueError) as caught:
        fully_shard(nn.Linear(32, 32), mesh=mesh_1d(), mxfp8=MXFP8)
    return str(caught.value)


def test_block_size_is_demanded():
    (text,) = run_ranks(1, wrong_block_size)
    assert text == (
        "mxfp8 needs blocks of 32 rows to stay on one rank, got block_size=1: pass block_size=32."
    )


def train_command() -> tuple[str, dict[str, Any], set[str]]:
    config = TrainConfig(
        mxfp8=True, param_dtype="bfloat16", layers=2, dim=32, heads=2, hidden=33, compile=False
    )
    trainee = build_sharded(config, mesh_1d())
    tokens = tokens_of(0)[dist.get_rank() : dist.get_rank() + 1]
    logits = trainee.model(tokens)
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    for optimizer in trainee.optimizers:
        optimizer.step()
    assert all(p.dtype == torch.float32 for p in trainee.model.parameters())
    quantized = {
        name
        for module in trainee.model.blocks
        for group in module.parameter_groups
        if group.mxfp8 is not None
        for name in group.names
    }
    return str(trainee.plan), trainee.plan.to_dict(), quantized


def test_train_command_and_its_plan():
    text, plan, quantized = run_ranks(2, train_command)[0]
    assert quantized == {f"attention.{n}.weight" for n in "qkvo"}
    assert "columnwise scales" in text
    assert "Not quantized, as its dims are not multiples of 32: mlp.gate.weight in 2 groups" in text
    assert [group["name"] for group in plan["mxfp8"]] == ["blocks.0", "blocks.1"]
    assert plan["mxfp8"][0]["planes"]["rowwise data"]["payload"] == 4 * 32 * 32


def test_train_command_refuses_a_width_without_blocks():
    with pytest.raises(UsageError, match="--dim 100: must be a multiple of 32 with --mxfp8"):
        TrainConfig(mxfp8=True, dim=100)
