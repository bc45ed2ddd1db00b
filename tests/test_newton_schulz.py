"""Newton-Schulz against the exact polynomial on singular values, and against torch's Muon."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dtensor_owner.newton_schulz import QUINTIC, newton_schulz
from dtensor_owner.owners import ParameterLayout, ns_flops_cost_fn

# The package's attribute of this name is the function.
module = import_module("dtensor_owner.newton_schulz")

SHAPES = [(1, 1), (1, 7), (7, 1), (8, 8), (12, 33), (40, 9)]


def random(shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact(G, steps=5, coefficients=QUINTIC):
    """The iteration's map applied to the singular values, in float64."""
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / S.norm()
    for _ in range(steps):
        a, b, c = coefficients
        S = a * S + b * S**3 + c * S**5
    return U @ torch.diag_embed(S) @ V


def by_torch_muon(G):
    """The orthogonalized matrix as ``torch.optim.Muon`` applies it: one step of size 1 from 0."""
    weight = torch.nn.Parameter(torch.zeros(G.shape, dtype=torch.float32))
    weight.grad = G.clone()
    scale = max(1, G.shape[0] / G.shape[1]) ** 0.5
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -weight.detach() / scale


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_the_polynomial_of_the_singular_values(shape):
    G = random(shape)
    before = G.clone()
    result = newton_schulz(G, dtype=torch.float32)
    torch.testing.assert_close(result.double(), exact(G), atol=2e-5, rtol=0)
    assert result.shape == G.shape and torch.equal(G, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_dtypes(shape, dtype):
    result = newton_schulz(random(shape), dtype=dtype)
    assert result.dtype == dtype
    error = (result.double() - exact(random(shape))).norm() / exact(random(shape)).norm()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float64: 1e-5}[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_muon_in_bf16(shape):
    G = random(shape, seed=3)
    mine = newton_schulz(G).double()
    torch.testing.assert_close(mine, by_torch_muon(G).double(), atol=0.04, rtol=0)
    # Control: the tolerance tells an orthogonalized matrix from a merely normalized one.
    if min(shape) > 1:
        assert (mine - (G / G.norm()).double()).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(5, 12, 20), (3, 9, 4), (2, 3, 6, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_its_matrices(shape, dtype):
    G = random(shape)
    flat = G.reshape(-1, *shape[-2:]) * torch.logspace(-20, 20, G[..., 0, 0].numel())[:, None, None]
    batch = newton_schulz(flat.view(shape), dtype=dtype).reshape(flat.shape)
    single = torch.stack([newton_schulz(matrix, dtype=dtype) for matrix in flat])
    torch.testing.assert_close(batch, single, atol=5e-6 if dtype == torch.float32 else 0.05, rtol=0)


class TestScale:
    """FIELD_CASES 24: cast or squared before it is normalized, a matrix vanishes or overflows."""

    @pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e-5, 1e5, 1e10, 1e30])
    @pytest.mark.parametrize(
        ("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 0.05), (torch.float16, 5e-3)]
    )
    def test_does_not_matter(self, scale, dtype, atol):
        G = random((16, 8))
        reference = newton_schulz(G, dtype=dtype)
        torch.testing.assert_close(
            newton_schulz(G * scale, dtype=dtype), reference, atol=atol, rtol=0
        )
        powers = newton_schulz(G * 2.0 ** round(torch.tensor(scale).log2().item()), dtype=dtype)
        torch.testing.assert_close(powers, reference, atol=atol, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_of_fp64(self, dtype):
        G = random((16, 8), dtype=torch.float64)
        for scale in (1e-200, 1e200):
            result = newton_schulz(G * scale, dtype=dtype)
            torch.testing.assert_close(result, newton_schulz(G, dtype=dtype), atol=5e-3, rtol=0)

    def test_control(self):
        G = random((16, 8)) * 1e10
        assert not (G.half() / G.half().norm()).isfinite().all()
        assert (random((16, 8)) * 1e-30).norm() == 0 or (
            random((16, 8)) * 1e-30
        ).square().sum() == 0


class TestEdges:
    def test_zeros_give_zeros(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert not newton_schulz(torch.zeros(4, 6), dtype=dtype).any()
        batch = torch.stack([torch.zeros(4, 6), random((4, 6))])
        result = newton_schulz(batch, dtype=torch.float32)
        assert not result[0].any()
        torch.testing.assert_close(result[1], newton_schulz(batch[1], dtype=torch.float32))

    def test_rank_one(self):
        G = torch.outer(random((9,)), random((5,), seed=1))
        result = newton_schulz(G, dtype=torch.float32)
        singular = torch.linalg.svdvals(result)
        assert 0.6 < singular[0] < 1.3 and singular[1] < 1e-3

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_not_finite_stays_in_its_matrix(self, bad, dtype):
        batch = random((2, 4, 6))
        batch[0, 1, 2] = bad
        result = newton_schulz(batch, dtype=dtype)
        assert result[0].isnan().all() and result[1].isfinite().all()

    @pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (0, 3, 4), (2, 0, 4)])
    def test_empty(self, shape):
        result = newton_schulz(torch.empty(shape))
        assert result.shape == shape and result.dtype == torch.bfloat16

    def test_not_contiguous(self):
        G = random((8, 12))
        expected = newton_schulz(G, dtype=torch.float32)
        torch.testing.assert_close(
            newton_schulz(G.t().contiguous().t(), dtype=torch.float32), expected
        )
        torch.testing.assert_close(newton_schulz(G.t(), dtype=torch.float32), expected.t())

    def test_sent_in_bf16_or_in_fp32_is_the_same_bits(self):
        G = random((24, 40)) * 1e-7
        assert torch.equal(newton_schulz(G), newton_schulz(G.to(torch.bfloat16)))


class TestArguments:
    def test_coefficients_per_step(self):
        G = random((6, 10))
        same = newton_schulz(G, 3, [QUINTIC] * 3, dtype=torch.float32)
        assert torch.equal(same, newton_schulz(G, 3, dtype=torch.float32))
        other = newton_schulz(G, 2, [QUINTIC, (1.5, -0.5, 0.0)], dtype=torch.float32)
        S = torch.linalg.svdvals(G.double())
        S = S / S.norm()
        for a, b, c in (QUINTIC, (1.5, -0.5, 0.0)):
            S = a * S + b * S**3 + c * S**5
        torch.testing.assert_close(
            torch.linalg.svdvals(other.double()), S.sort(descending=True).values, atol=1e-5, rtol=0
        )

    def test_what_is_refused(self):
        G = random((4, 6))
        with pytest.raises(ValueError, match=r"needs matrices, got shape \(4,\)"):
            newton_schulz(G[:, 0])
        with pytest.raises(ValueError, match="from 0 to 99, got 100"):
            newton_schulz(G, steps=100)
        with pytest.raises(ValueError, match="three numbers"):
            newton_schulz(G, coefficients=(1.0, 2.0))
        with pytest.raises(ValueError, match="2 coefficient triples for 5 steps"):
            newton_schulz(G, coefficients=[QUINTIC] * 2)
        with pytest.raises(ValueError, match="real floating dtypes"):
            newton_schulz(G.long())
        with pytest.raises(ValueError, match="real floating dtypes"):
            newton_schulz(G, dtype=torch.complex64)


def test_the_flop_count_is_that_of_the_products():
    with FlopCounterMode(display=False) as counter:
        newton_schulz(random((24, 10)), dtype=torch.float32)
    # torch counts a multiply-add as two operations.
    assert counter.get_total_flops() == 2 * ns_flops_cost_fn(5)(ParameterLayout((24, 10), (240,)))


@pytest.mark.parametrize("shape", [(12, 20), (3, 20, 12)])
def test_emulated_half_precision_is_the_real_one(shape, monkeypatch):
    G = random(shape)
    results = []
    for slow in (frozenset(), frozenset({torch.bfloat16})):
        monkeypatch.setattr(module, "_SLOW_ON_THIS_CPU", slow)
        results.append(newton_schulz(G).float())
    # Products are summed in another order, so single values may round the other way.
    torch.testing.assert_close(*results, atol=0.02, rtol=0)
    assert (results[0] == results[1]).float().mean() > 0.5


def test_compiled_equals_eager():
    G = random((3, 9, 4))
    compiled = torch.compile(newton_schulz, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(G, dtype=torch.float32), newton_schulz(G, dtype=torch.float32)
    )
