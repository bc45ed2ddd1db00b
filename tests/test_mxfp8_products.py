"""Block-scaled products: their numbers, the kernel's order of scales, and training by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dtensor_owner import mxfp8_products
from dtensor_owner.fully_shard import fully_shard
from dtensor_owner.mxfp8 import (
    dequantize_columnwise,
    dequantize_rowwise,
    quantize_columnwise,
    quantize_rowwise,
)
from dtensor_owner.mxfp8_products import (
    block_scaled_mm,
    has_block_scaled_kernel,
    kernel_scales,
    passes_trial,
    use_block_scaled_products,
)
from dtensor_owner.mxfp8_weights import MXFP8Policy
from tests.fully_shard_helpers import full, mesh_1d, mine
from tests.ranks import run_ranks


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (32, 9)])
def test_kernels_find_each_scale_where_they_look_for_it(shape):
    rows, blocks = shape
    scale = torch.randint(1, 255, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ordered = kernel_scales(scale).view(torch.uint8)
    tiles_in_a_row = -(-blocks // 4)
    assert ordered.numel() == -(-rows // 128) * tiles_in_a_row * 512
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * tiles_in_a_row + block // 4
            place = row % 128 % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert ordered[tile * 512 + place] == scale.view(torch.uint8)[row, block]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-120, 100))
def test_quantizing_what_was_dequantized_gives_the_same_blocks(seed, exponent):
    blocks = quantize_rowwise(random(16, 64, seed=seed) * 2.0**exponent)
    for first, second in zip(blocks, quantize_rowwise(dequantize_rowwise(*blocks))):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_product_of_quantized_matrices():
    a, b = quantize_rowwise(random(5, 64)), quantize_rowwise(random(3, 64, seed=1))
    expected = dequantize_rowwise(*a) @ dequantize_rowwise(*b).mT
    assert torch.equal(block_scaled_mm(a, b, torch.float32), expected)
    nothing = quantize_rowwise(random(0, 64))
    assert block_scaled_mm(nothing, b, torch.bfloat16).shape == (0, 3)


class Reference(torch.autograd.Function):
    """A linear layer on values rounded to MXFP8, written out."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return dequantize_rowwise(*quantize_rowwise(x)) @ weight.mT

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        columns = dequantize_columnwise(*quantize_columnwise(weight))
        rounded = dequantize_rowwise(*quantize_rowwise(gradient))
        return rounded @ columns, gradient.mT @ x


def rounded(weight: Tensor) -> Tensor:
    return dequantize_rowwise(*quantize_rowwise(weight))


def test_a_linear_layer_and_its_gradients():
    linear = nn.Linear(64, 96)
    linear.weight.data = rounded(linear.weight.data)
    weight = linear.weight.detach().clone().requires_grad_()
    inputs = [random(2, 7, 64).requires_grad_() for _ in range(2)]
    assert use_block_scaled_products(linear)
    got = linear(inputs[0])
    expected = Reference.apply(inputs[1].view(-1, 64), weight).view(2, 7, 96) + linear.bias.detach()
    torch.testing.assert_close(got, expected)
    plain = inputs[1] @ weight.mT + linear.bias
    assert (got - plain).abs().max() > 1e-3  # control: inputs are rounded
    for output in (got, expected):
        (output * random(2, 7, 96, seed=2)).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(linear.weight.grad, weight.grad)
    torch.testing.assert_close(linear.bias.grad, random(2, 7, 96, seed=2).sum((0, 1)))


def test_layers_with_a_forward_of_their_own_stay():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert not use_block_scaled_products(Doubled(32, 32))
    assert not use_block_scaled_products(nn.Embedding(32, 32))


def test_a_kernel_is_used_only_after_a_right_trial(monkeypatch):
    cpu = torch.device("cpu")
    assert not has_block_scaled_kernel(cpu)
    right = mxfp8_products.block_scaled_mm
    monkeypatch.setattr(mxfp8_products, "_kernel", lambda a, b, dtype: right(a, b, dtype))
    assert passes_trial(cpu)

    def scales_in_another_order(a, b, dtype):
        return right((a[0], a[1].view(torch.uint8).flip(0).view(a[1].dtype)), b, dtype)

    monkeypatch.setattr(mxfp8_products, "_kernel", scales_in_another_order)
    with pytest.warns(UserWarning, match="a trial failed"):
        assert not passes_trial(cpu)


def test_policy_values():
    with pytest.raises(ValueError, match="products is one of"):
        MXFP8Policy(products="fp8")  # type: ignore[arg-type]
    assert not MXFP8Policy().block_scaled("cpu")
    assert MXFP8Policy(products="block-scaled").block_scaled("cpu")


def make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def train(model: nn.Module, inputs: list[Tensor], lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in inputs:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class RoundedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + (rounded(self.weight) - self.weight).detach()
        return Reference.apply(x, weight) + self.bias


def training_case(mesh_shape: tuple[int, ...], **options) -> list[float]:
    """How far trained weights are from one process's, by products that round and that do not."""
    mesh = mesh_1d() if len(mesh_shape) == 1 else init_device_mesh("cpu", mesh_shape)
    batches = [random(12, 32, seed=step) for step in range(3)]
    reference = make_mlp()
    for layer in (reference[0], reference[2]):
        layer.__class__ = RoundedLinear
    # Not the mean over all samples: gradients rounded to MXFP8 would be scaled by another number.
    train(reference, batches, lr=1e-3 / mesh.size())
    distances = []
    for products in ("block-scaled", "dequantized"):
        model = make_mlp()
        policy = MXFP8Policy(products=products)
        fully_shard(model, mesh=mesh, block_size=32, mxfp8=policy, **options)
        train(model, [mine(batch) for batch in batches], lr=1e-3)
        pairs = zip(model.parameters(), reference.parameters())
        distances.append(max(float((full(p) - r).detach().abs().max()) for p, r in pairs))
    return distances


@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [((1,), {}), ((4,), {}), ((3,), {"reshard_after_forward": False}), ((2, 2), {})],
    ids=str,
)
def test_training_by_block_scaled_products(mesh_shape, options):
    world_size = torch.Size(mesh_shape).numel()
    for same, other in run_ranks(world_size, training_case, mesh_shape, **options):
        assert same < 1e-6
        assert other > 1e-4  # control


def gradients(*, wrap: str | None) -> list[Tensor]:
    block, last = make_mlp(), nn.Linear(32, 1)
    if wrap == "compile":
        block.compile(backend="aot_eager")
    elif wrap == "reentrant":
        forward = block.forward
        block.forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    policy = MXFP8Policy(products="block-scaled")
    fully_shard(block, mesh=mesh_1d(), block_size=32, mxfp8=policy)
    model = fully_shard(nn.Sequential(block, last), mesh=mesh_1d())
    x = mine(random(8, 32)).requires_grad_()
    model(x).square().mean().backward()
    return [full(p.grad) for p in model.parameters()] + [x.grad]


def wrapped_blocks_case(wrap: str) -> float:
    pairs = zip(gradients(wrap=None), gradients(wrap=wrap))
    return max(float((first - second).abs().max()) for first, second in pairs)


@pytest.mark.parametrize("wrap", ["compile", "reentrant"])
def test_compiled_and_checkpointed_blocks(wrap):
    assert max(run_ranks(2, wrapped_blocks_case, wrap)) < 1e-7
