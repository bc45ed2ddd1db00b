"""Newton-Schulz against the exact polynomial on singular values, and against torch's Muon."""

from __future__ import annotations

import math
import unittest.mock
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dtensor_owner.newton_schulz import newton_schulz
from dtensor_owner.ns_schedule import QUINTIC, gram_runs, multiply_adds, uses_gram
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


def conditioned(rows, cols, condition):
    """A matrix whose singular values fall evenly, in logarithms, from 1 to ``1 / condition``."""
    U, V = (torch.linalg.qr(random((n, rows), n, torch.float64)).Q for n in (rows, cols))
    falling = torch.logspace(0, -math.log10(condition), rows, dtype=torch.float64)
    return ((U * falling) @ V.mT).float()


def relative_error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


def by_torch_muon(G):
    """The orthogonalized matrix as ``torch.optim.Muon`` applies it: one step of size 1 from 0."""
    weight = torch.nn.Parameter(torch.zeros(G.shape, dtype=torch.float32))
    weight.grad = G.clone()
    scale = max(1, G.shape[0] / G.shape[1]) ** 0.5
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -weight.detach() / scale


@pytest.mark.parametrize("method", ["plain", "gram", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_the_polynomial_of_the_singular_values(shape, method):
    G = random(shape)
    before = G.clone()
    result = newton_schulz(G, dtype=torch.float32, method=method)
    torch.testing.assert_close(result.double(), exact(G), atol=2e-5, rtol=0)
    assert result.shape == G.shape and torch.equal(G, before)


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_dtypes(shape, dtype, method):
    result = newton_schulz(random(shape), dtype=dtype, method=method)
    assert result.dtype == dtype
    error = (result.double() - exact(random(shape))).norm() / exact(random(shape)).norm()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float64: 1e-5}[dtype]


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_muon_in_bf16(shape, method):
    G = random(shape, seed=3)
    mine = newton_schulz(G, method=method).double()
    torch.testing.assert_close(mine, by_torch_muon(G).double(), atol=0.04, rtol=0)
    # Control: the tolerance tells an orthogonalized matrix from a merely normalized one.
    if min(shape) > 1:
        assert (mine - (G / G.norm()).double()).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(5, 12, 20), (3, 9, 4), (2, 3, 6, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["plain", "gram"])
def test_a_batch_is_its_matrices(shape, dtype, method):
    G = random(shape)
    flat = G.reshape(-1, *shape[-2:]) * torch.logspace(-20, 20, G[..., 0, 0].numel())[:, None, None]
    options = {"dtype": dtype, "method": method}
    batch = newton_schulz(flat.view(shape), **options).reshape(flat.shape)
    single = torch.stack([newton_schulz(matrix, **options) for matrix in flat])
    torch.testing.assert_close(batch, single, atol=5e-6 if dtype == torch.float32 else 0.05, rtol=0)


class TestScale:
    """FIELD_CASES 24: cast or squared before it is normalized, a matrix vanishes or overflows."""

    @pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e-5, 1e5, 1e10, 1e30])
    @pytest.mark.parametrize(
        ("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 0.05), (torch.float16, 5e-3)]
    )
    @pytest.mark.parametrize("method", ["plain", "gram"])
    def test_does_not_matter(self, scale, dtype, atol, method):
        G = random((16, 8))
        options = {"dtype": dtype, "method": method}
        reference = newton_schulz(G, **options)
        torch.testing.assert_close(
            newton_schulz(G * scale, **options), reference, atol=atol, rtol=0
        )
        powers = newton_schulz(G * 2.0 ** round(torch.tensor(scale).log2().item()), **options)
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
    @pytest.mark.parametrize("method", ["plain", "gram"])
    def test_zeros_give_zeros(self, method):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert not newton_schulz(torch.zeros(4, 6), dtype=dtype, method=method).any()
        batch = torch.stack([torch.zeros(4, 6), random((4, 6))])
        result = newton_schulz(batch, dtype=torch.float32, method=method)
        assert not result[0].any()
        single = newton_schulz(batch[1], dtype=torch.float32, method=method)
        torch.testing.assert_close(result[1], single)

    @pytest.mark.parametrize("method", ["plain", "gram"])
    def test_rank_one(self, method):
        G = torch.outer(random((9,)), random((5,), seed=1))
        result = newton_schulz(G, dtype=torch.float32, method=method)
        singular = torch.linalg.svdvals(result)
        assert 0.6 < singular[0] < 1.3 and singular[1] < 1e-3

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("method", ["plain", "gram"])
    def test_not_finite_stays_in_its_matrix(self, bad, dtype, method):
        batch = random((2, 4, 6))
        batch[0, 1, 2] = bad
        result = newton_schulz(batch, dtype=dtype, method=method)
        assert result[0].isnan().all() and result[1].isfinite().all()

    @pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (0, 3, 4), (2, 0, 4)])
    def test_empty(self, shape):
        result = newton_schulz(torch.empty(shape), method="gram")
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
        with pytest.raises(ValueError, match="got 'other'"):
            newton_schulz(G, method="other")
        with pytest.raises(ValueError, match="must be finite, got"):
            newton_schulz(G, coefficients=(1.0, float("nan"), 2.0))
        for eps in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="eps must be >= 0"):
                newton_schulz(G, eps=eps)


@pytest.mark.parametrize("steps", [1, 5, 12])
@pytest.mark.parametrize("method", ["plain", "gram", "auto"])
def test_the_flop_count_is_that_of_the_products(steps, method):
    with FlopCounterMode(display=False) as counter:
        newton_schulz(random((24, 10)), steps, dtype=torch.float32, method=method)
    # torch counts a multiply-add as two operations.
    count = ns_flops_cost_fn(steps, method=method)(ParameterLayout((24, 10), (240,)))
    assert counter.get_total_flops() == 2 * count


class TestGramForm:
    """Fewer products for matrices far from square, and no worse than the plain form in bf16."""

    def test_auto_is_the_form_with_fewer_products(self):
        for steps in (2, 5):
            schedule = [QUINTIC] * steps
            for shape in [(10, 10), (10, 14), (16, 10), (10, 30), (50, 10)]:
                plain, gram = (multiply_adds(shape, schedule, gram=gram) for gram in (0, 1))
                assert uses_gram("auto", shape, itemsize=2) == (gram < plain)
        assert multiply_adds((2, 6), [QUINTIC] * 5, gram=True) == 2 * 24 + 17 * 8
        assert not uses_gram("auto", (2, 6), itemsize=2, device_type="cuda")
        assert uses_gram("auto", (2, 6), itemsize=4, device_type="cuda")

    @pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
    def test_error_beside_the_plain_form(self, condition):
        G = conditioned(24, 80, condition)
        for dtype, bound in ((torch.bfloat16, None), (torch.float16, None), (torch.float32, 1e-3)):
            plain, gram = (
                relative_error(newton_schulz(G, dtype=dtype, method=method), exact(G))
                for method in ("plain", "gram")
            )
            assert gram < (bound or 1.05 * plain)

    def test_the_small_matrices_must_not_be_rounded_to_bf16(self):
        X = module._normalized(
            torch.outer(random((16,)), random((40,), seed=1)), 1e-7, torch.float32
        )

        def highest(rounded):
            A, Q = rounded(X @ X.mT), torch.eye(16)
            for a, b, c in [QUINTIC] * 5:
                P = a * torch.eye(16) + b * A + c * A @ A
                A, Q = rounded(P @ A @ P), rounded(P @ Q)
            return torch.linalg.svdvals((Q @ X).nan_to_num(1e9)).max()

        assert highest(lambda A: A) < 1.3
        assert not highest(lambda A: A.bfloat16().float()) < 1.3

    @pytest.mark.parametrize("steps", [6, 10, 20])
    def test_many_steps_return_to_the_matrix(self, steps):
        assert len(gram_runs([QUINTIC] * 5)) == 1 < len(gram_runs([QUINTIC] * steps))
        assert sum(gram_runs([QUINTIC] * steps), ()) == (QUINTIC,) * steps
        G = torch.outer(random((16,)), random((40,), seed=1))
        result = newton_schulz(G, steps, dtype=torch.float32, method="gram")
        assert torch.linalg.svdvals(result).max() < 1.3
        # Control: in one run, the rounding errors of the zero eigenvalues win.
        X = module._normalized(G, 1e-7, torch.float32)
        with unittest.mock.patch.object(module, "gram_runs", lambda schedule: [tuple(schedule)]):
            result = module._gram_form(X, [QUINTIC] * 20)
        assert not torch.linalg.svdvals(result.nan_to_num(1e9)).max() < 1.3


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
