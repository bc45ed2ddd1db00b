"""A second opinion on MXFP8: torchao's cast, where it is installed (`pip install torchao`)."""

from __future__ import annotations

import pytest
import torch

from dtensor_owner.mxfp8 import quantize_columnwise, quantize_rowwise

pytestmark = pytest.mark.slow  # torchao takes long to import


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bytes_as_torchao(dtype):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    torch.manual_seed(0)
    compared = 0
    for exponent in range(-145, 120, 7):
        spread = torch.exp2(torch.randint(-12, 3, (64, 128)).double())
        x = (torch.randn(64, 128, dtype=torch.float64) * spread * 2.0**exponent).to(dtype)
        x = torch.where(x.isfinite(), x, torch.ones_like(x))
        x[0] = 0
        x[1] = x[1, 0]
        for quantize, along_rows in ((quantize_rowwise, x), (quantize_columnwise, x.t())):
            scale, data = mx_tensor.to_mx(along_rows.contiguous(), torch.float8_e4m3fn, 32)
            our_data, our_scale = quantize(x)
            if quantize is quantize_columnwise:
                our_data, our_scale = our_data.t(), our_scale.t()
            ours = our_scale.contiguous().view(torch.uint8)
            assert torch.equal(ours, scale.view(torch.uint8))
            # Under the smallest scale torchao divides by 2**-126 and stores 2**-127.
            other = (ours != 0).repeat_interleave(32, 1)
            same = our_data.contiguous().view(torch.uint8) == data.view(torch.uint8)
            assert same[other].all()
            compared += int(other.sum())
    assert compared > 500_000
