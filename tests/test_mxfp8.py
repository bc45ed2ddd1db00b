"""MXFP8 blocks against a slow reference that is written from the specification."""

from __future__ import annotations

import struct

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_owner.mxfp8 import (
    MXFP8Tensor,
    check_shape,
    dequantize_columnwise,
    dequantize_rowwise,
    quantize_columnwise,
    quantize_rowwise,
)
from tests import mxfp8_reference as reference


def codes(pair):
    data, scale = pair
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    return data.view(torch.uint8), scale.view(torch.uint8)


def assert_as_reference(x):
    data, scale = codes(quantize_rowwise(x))
    wanted_data, wanted_scale = reference.quantize_rowwise(x)
    assert torch.equal(scale, wanted_scale), f"scales {scale} instead of {wanted_scale}"
    wrong = data != wanted_data
    assert not wrong.any(), f"{x[wrong]}: {data[wrong]} instead of {wanted_data[wrong]}"


def block(*values, fill=0.0):
    """One block that starts with these values."""
    x = torch.full((1, 32), fill)
    x[0, : len(values)] = torch.tensor(values)
    return x


BLOCKS = {
    "zeros": block(),
    "negative zeros": block(fill=-0.0),
    "all equal": block(fill=-3.7),
    "one element": block(5.3),
    "saturated from 448 on": block(256.0, 447.9, 448.0, 449.0, 464.0, 480.0, -511.9),
    "largest is a power of two": block(512.0, 511.0, -448.0, 17.0),
    "ties to even": block(448.0, 17.0, 19.0, 21.0, -17.0, 272.0, 304.0, 2**-6 + 2**-10),
    "E4M3 subnormals and their ties": block(256.0, *(k * 2.0**-10 for k in range(-16, 15))),
    "fp32 subnormals": block(1e-40, -1e-45, 3e-39, 1e-38),
    "only the smallest fp32": block(2.0**-149),
    "scale kept at 2**-127": block(2.0**-118, 2.0**-119, 2.0**-130, 2.0**-137),
    "scale just above": block(2.0**-117, 2.0**-119, 2.0**-127, 2.0**-128, 1e-45),
    "largest fp32": block(torch.finfo(torch.float32).max, -1e38, 1.0),
    "infinity": block(1.0, float("inf"), -2.0),
    "negative infinity": block(1.0, float("-inf")),
    "NaN": block(1.0, float("nan"), -2.0),
    "negative NaN": block(-float("nan"), 1.0),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_special_block(name):
    assert_as_reference(BLOCKS[name])


def fp32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


# Any bit pattern of fp32, so that subnormals, infinities and NaN are as likely as their bits.
any_fp32 = st.integers(0, 2**32 - 1).map(fp32)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(any_fp32, min_size=1, max_size=8), st.integers(-149, 120))
def test_random_blocks(values, exponent):
    assert_as_reference(block(*values))
    finite = [v for v in values if abs(v) < 3e38]
    mantissas = [struct.unpack("<I", struct.pack("<f", v))[0] % 2**24 for v in finite]
    assert_as_reference(block(*(m * 2.0 ** (exponent - 24) for m in mantissas)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_random_matrices(dtype, size):
    torch.manual_seed(0)
    x = (torch.randn(8, 96) * size).to(dtype)
    assert_as_reference(x)
    data, scale = quantize_rowwise(x)
    relative = (dequantize_rowwise(data, scale) - x.float()).abs() / x.float().abs()
    # Control: the values are rounded, by up to 1/16 or, where saturated, 1/8; not kept as they are.
    # E4M3 subnormals may lose all.
    normal = x.float().abs() >= 2.0**-6 * scale.float().repeat_interleave(32, 1)
    assert 0.03 < relative[normal].max() <= 1 / 8


def test_columnwise_is_rowwise_of_the_transposed():
    x = torch.randn(64, 96) * torch.logspace(-20, 20, 96)
    data, scale = codes(quantize_columnwise(x))
    data_t, scale_t = codes(quantize_rowwise(x.t()))
    assert torch.equal(data.t(), data_t) and torch.equal(scale.t(), scale_t)
    assert scale.shape == (2, 96)
    assert not torch.equal(data, codes(quantize_rowwise(x))[0])  # control: directions differ


def test_every_code_under_many_scales():
    data = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for scale_code in (0, 1, 7, 63, 126, 127, 128, 200, 246, 255):
        wanted = torch.tensor([reference.dequantize(c, scale_code) for c in range(256)])
        scale = torch.full((8, 1), scale_code, dtype=torch.uint8)
        values = dequantize_rowwise(data, scale)
        assert torch.equal(values.flatten().nan_to_num(7.5), wanted.float().nan_to_num(7.5))
        columns = dequantize_columnwise(data.t(), scale.t())
        assert torch.equal(columns.nan_to_num(7.5), values.t().nan_to_num(7.5))


def test_quantizing_again_changes_nothing():
    x = torch.cat([x for name, x in BLOCKS.items() if "inf" not in name and "NaN" not in name])
    first = quantize_rowwise(torch.cat([x, torch.randn(15, 32) * 1e-3]))
    again = quantize_rowwise(dequantize_rowwise(*first))
    assert all(map(torch.equal, codes(first), codes(again)))


def test_bf16_result_is_exact():
    x = torch.randn(32, 64) * torch.logspace(-30, 30, 64)
    exact = dequantize_rowwise(*quantize_rowwise(x))
    assert torch.equal(dequantize_rowwise(*quantize_rowwise(x), dtype=torch.bfloat16), exact)
    exact = dequantize_columnwise(*quantize_columnwise(x))
    assert torch.equal(dequantize_columnwise(*quantize_columnwise(x), dtype=torch.bfloat16), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_strides_and_input_unchanged(dtype):
    base = torch.randn(128, 128).to(dtype)
    for x in (base.t(), base[:, ::2], base[::4], base[:1].expand(64, 128), base[1:97, 3:67]):
        before = x.clone()
        for quantize in (quantize_rowwise, quantize_columnwise):
            if x.shape[0] % 32 and quantize is quantize_columnwise:
                continue
            wanted = codes(quantize(x.contiguous()))
            assert all(map(torch.equal, codes(quantize(x)), wanted))
        assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_nothing_to_quantize(shape):
    for quantize in (quantize_rowwise, quantize_columnwise):
        data, scale = quantize(torch.empty(shape))
        assert data.shape == shape and scale.numel() == 0


class Tensors(expecttest.TestCase):
    def test_both_directions(self):
        x = torch.randn(64, 96)
        q = MXFP8Tensor.quantize(x)
        self.assertEqual(q.shape, x.shape)
        self.assertEqual(q.directions, ("rowwise", "columnwise"))
        for direction, quantize, dequantize in (
            ("rowwise", quantize_rowwise, dequantize_rowwise),
            ("columnwise", quantize_columnwise, dequantize_columnwise),
        ):
            assert torch.equal(q.dequantize(direction), dequantize(*quantize(x)))
        assert torch.equal(q.dequantize(), q.dequantize("rowwise"))
        self.assertEqual(q.dequantize(dtype=torch.bfloat16).dtype, torch.bfloat16)
        self.assertEqual(q.scale("columnwise").shape, (2, 96))

    def test_one_direction(self):
        q = MXFP8Tensor(None, None, *quantize_columnwise(torch.randn(32, 32)))
        self.assertEqual(q.directions, ("columnwise",))
        assert torch.equal(q.dequantize(), q.dequantize("columnwise"))
        self.assertExpectedInline(
            text_of(ValueError, lambda: q.data("rowwise")),
            """This MXFP8Tensor holds only columnwise blocks, not rowwise ones: gather that direction too.""",  # noqa: E501
        )

    def test_halves_are_refused(self):
        with self.assertRaisesRegex(ValueError, "got neither"):
            MXFP8Tensor()
        with self.assertRaisesRegex(ValueError, "rowwise data and scale"):
            MXFP8Tensor(torch.empty(32, 32).to(torch.float8_e4m3fn))

    def test_errors(self):
        self.assertExpectedInline(
            text_of(ValueError, lambda: quantize_rowwise(torch.ones(32, 33))),
            """The tensor has shape (32, 33), but MXFP8 needs 2 dims, with dim 1 a multiple of 32: pad it, or keep it in another dtype.""",  # noqa: E501
        )
        self.assertExpectedInline(
            text_of(ValueError, lambda: MXFP8Tensor.quantize(torch.ones(33, 32))),
            """The tensor has shape (33, 32), but MXFP8 needs 2 dims, with dim 0 and dim 1 a multiple of 32: pad it, or keep it in another dtype.""",  # noqa: E501
        )
        self.assertExpectedInline(
            text_of(ValueError, lambda: check_shape((32, 32, 32), "experts.weight")),
            """experts.weight has shape (32, 32, 32), but MXFP8 needs 2 dims, with dim 0 and dim 1 a multiple of 32: pad it, or keep it in another dtype.""",  # noqa: E501
        )
        self.assertExpectedInline(
            text_of(TypeError, lambda: quantize_rowwise(torch.ones(32, 32, dtype=torch.float64))),
            """MXFP8 is quantized from fp32, bf16 or fp16, got torch.float64: cast to fp32 first.""",  # noqa: E501
        )


def text_of(error, function):
    with pytest.raises(error) as caught:
        function()
    return str(caught.value)


def test_compiles_in_one_graph():
    x = torch.randn(64, 64)
    for function in (quantize_rowwise, quantize_columnwise):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert all(map(torch.equal, codes(compiled(x)), codes(function(x))))
