"""Run every listed op on every placement, compare with the plain tensor, and print docs/ops.md.

    python -m benchmarks.ops_table            # prints the page
    python -m benchmarks.ops_table --write    # rewrites docs/ops.md

Runs on 4 gloo ranks of this machine. A wrong value ends it with an error: the page knows works,
gathers and refuses only.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from placements import BlockAtomic, Owner, RowAtomic, distribute_tensor

Op = Callable[[Any], Any]
PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
RANKS = 4
SHAPE = (5, 4)
PLACEMENTS: dict[str, Placement] = {
    "RowAtomic": RowAtomic((0, 3, 2, 0)),
    "BlockAtomic": BlockAtomic(2),
    "Owner": Owner(1),
}


def other(x: Any, values: Tensor) -> Any:
    """A second argument, replicated where the first is a DTensor."""
    if not isinstance(x, DTensor):
        return values
    return distribute_tensor(values, x.device_mesh, [Replicate()])


def written(x: Any, write: Callable[[Any], Any]) -> Any:
    """A copy of ``x`` after ``write`` has changed it."""
    copied = x.clone()
    write(copied)
    return copied


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def index(*rows: int) -> Tensor:
    return torch.tensor(rows)


SECTIONS: dict[str, dict[str, Op]] = {
    "Pointwise": {
        "x * 2 + x": lambda x: x * 2 + x,
        "x + vector, x * matrix": lambda x: x * other(x, values(1, 4)) + other(x, values(4)),
        "neg, abs, exp, sqrt": lambda x: (-x).abs().exp().sqrt(),
        "relu, gelu, silu, sigmoid": lambda x: F.gelu(x).relu() + F.silu(x).sigmoid(),
        "pow, clamp, maximum": lambda x: torch.maximum(x**2, x.clamp(-1, 1)),
        "lerp, addcmul, addcdiv": lambda x: torch.addcmul(torch.lerp(x, -x, 0.3), x, x),
        "comparison, logical": lambda x: (x > 0) & ~(x < 1),
        "where, masked_fill": lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 2.0),
        "isfinite, isnan, nan_to_num": lambda x: x.nan_to_num().isfinite(),
        "casts": lambda x: x.to(torch.bfloat16).double().int(),
        "dropout (as the full tensor)": lambda x: F.dropout(x, 0.0),
        "add, mul, clamp in place": lambda x: written(x, lambda y: y.add_(y).mul_(2).clamp_(-1, 1)),
        "copy_ from Replicate": lambda x: written(x, lambda y: y.copy_(other(y, values(5, 4)))),
        "fill_, zero_": lambda x: written(x, lambda y: y.fill_(3.0)),
        "add(out=)": lambda x: torch.add(x, x, out=torch.empty_like(x)),
        "broadcast against more dims": lambda x: x + other(x, values(2, 5, 4)),
    },
    "Reductions": {
        "sum, mean": lambda x: x.sum() + x.mean(),
        "sum over rows": lambda x: x.sum(0),
        "sum over columns": lambda x: x.sum(1, keepdim=True),
        "max, min": lambda x: x.max() + x.min(),
        "amax over rows": lambda x: x.amax(0),
        "max over rows with indices": lambda x: x.max(0)[0],
        "max over columns with indices": lambda x: x.max(1)[0],
        "prod": lambda x: x.prod(),
        "norm 1, 2, inf": lambda x: sum(torch.linalg.vector_norm(x, p) for p in (1, 2, torch.inf)),
        "norm of rows": lambda x: x / x.norm(dim=1, keepdim=True),
        "norm of columns": lambda x: x / x.norm(dim=0, keepdim=True),
        "norm 0, -inf": lambda x: torch.linalg.vector_norm(x, 0),
        "var, std": lambda x: x.var(),
        "var, std over columns": lambda x: x.std(1),
        "any, all": lambda x: (x > 0).any(),
        "argmax, argmin": lambda x: x.argmax(1),
        "logsumexp over columns": lambda x: x.logsumexp(1),
        "median": lambda x: x.median(),
        "count_nonzero": lambda x: torch.count_nonzero(x > 0),
        "equal, allclose": lambda x: torch.tensor(torch.equal(x, x) and torch.allclose(x, x)),
        "item()": lambda x: torch.tensor(x.sum().item()),
        "quantile": lambda x: x.quantile(0.5),
    },
    "Along a dim": {
        "softmax, log_softmax over columns": lambda x: x.softmax(-1) + x.log_softmax(-1),
        "softmax over rows": lambda x: x.softmax(0),
        "cumsum over columns": lambda x: x.cumsum(1),
        "cumsum over rows": lambda x: x.cumsum(0),
        "sort, topk over columns": lambda x: x.sort(1)[0][:, :2] + x.topk(2, 1)[0],
        "layer_norm, rms_norm": lambda x: F.layer_norm(x, (4,)) + F.rms_norm(x, (4,)),
        "normalize, cosine_similarity": lambda x: F.normalize(x, dim=1),
        "flip, roll over columns": lambda x: x.flip(1).roll(1, 1),
        "flip, roll over rows": lambda x: x.flip(0).roll(1, 0),
        "pad columns": lambda x: F.pad(x, (1, 1)),
        "cross_entropy": lambda x: F.cross_entropy(x, other(x, index(0, 1, 2, 3, 0))),
        "mse_loss": lambda x: F.mse_loss(x, x * 2),
    },
    "Matrices": {
        "x @ w": lambda x: x @ other(x, values(4, 6)),
        "w @ x": lambda x: other(x, values(6, 5)) @ x,
        "x @ v": lambda x: x @ other(x, values(4)),
        "v @ w of a column v": lambda x: x[:, 1] @ x,
        "addmm": lambda x: torch.addmm(other(x, values(6)), x, other(x, values(4, 6))),
        "linear(x, w, b)": lambda x: F.linear(x, other(x, values(3, 4)), other(x, values(3))),
        "linear(v, x): x is the weight": lambda x: F.linear(other(x, values(2, 4)), x),
        "bmm over rows": lambda x: torch.bmm(x.unsqueeze(1), other(x, values(5, 4, 2))),
        "x.mT @ x": lambda x: x.mT @ x,
        "embedding(i, x)": lambda x: F.embedding(other(x, index(2, 0, 1)), x),
        "qr, svd": lambda x: torch.linalg.svdvals(x),
        "tril, triu": lambda x: x.tril() + x.triu(),
        "tril_": lambda x: written(x, lambda y: y.tril_()),
        "trace": lambda x: x.trace(),
        "einsum": lambda x: torch.einsum("ij,jk->ik", x, other(x, values(4, 6))),
        "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
            *[x.view(5, 1, 2, 2)] * 3
        ),
    },
    "Views and indexing": {
        "reshape, view, flatten of trailing dims": lambda x: x.view(5, 2, 2).flatten(1),
        "view that keeps rows together": lambda x: x.view(10, 2),
        "view that cuts rows apart": lambda x: x.view(4, 5),
        "unsqueeze(1), squeeze": lambda x: x.unsqueeze(1).squeeze(1),
        "unsqueeze(0)": lambda x: x.unsqueeze(0),
        "t, transpose of dim 0": lambda x: x.t().clone(),
        "transpose of trailing dims": lambda x: x.view(5, 2, 2).transpose(1, 2),
        "x[1:3]": lambda x: x[1:3],
        "x[::2]": lambda x: x[::2],
        "x[0]": lambda x: x[0],
        "x[:, 1:3], x[:, 1]": lambda x: x[:, 1:3].sum(1) + x[:, 1],
        "x[rows]": lambda x: x[other(x, index(1, 3))],
        "x[:, columns]": lambda x: x[:, other(x, index(1, 3))],
        "x[mask]": lambda x: x[x > 0],
        "nonzero, unique": lambda x: x.nonzero(),
        "index_select of columns": lambda x: x.index_select(1, other(x, index(1, 3))),
        "gather, scatter over columns": lambda x: x.gather(1, other(x, index(*[0] * 5)[:, None])),
        "split, chunk of columns": lambda x: x.split(2, 1)[1] + x.chunk(2, 1)[0],
        "split, chunk of rows": lambda x: x.split([2, 3])[1],
        "unbind of columns": lambda x: x.unbind(1)[2],
        "expand, repeat of columns": lambda x: x.unsqueeze(2).expand(-1, -1, 3).repeat(1, 2, 1),
        "cat, stack beside rows": lambda x: torch.stack([torch.cat([x, x], 1)] * 2, -1),
        "cat of rows": lambda x: torch.cat([x, x], 0),
        "write through x[:, 1]": lambda x: written(x, lambda y: y[:, 1].mul_(0)),
        "write through x[1:3]": lambda x: written(x, lambda y: y[1:3].mul_(0)),
        "x[:, 1] = 5.": lambda x: written(x, lambda y: y.__setitem__((slice(None), 1), 5.0)),
        "squeeze_ of a trailing dim": lambda x: x[:, 1:2].clone().squeeze_(1),
        "t_, unsqueeze_ (shape in place)": lambda x: written(x, lambda y: y.t_()),
        "view(dtype)": lambda x: x.view(torch.int32),
    },
    "Lists": {
        "_foreach_add, mul, lerp, sqrt": lambda x: torch._foreach_lerp([x], [x * 2], 0.5)[0],
        "_foreach_norm": lambda x: torch._foreach_norm([x, x], 2)[1],
        "_foreach_copy_": lambda x: written(x, lambda y: torch._foreach_copy_([y], [x * 2])),
        "_foreach_max": lambda x: torch._foreach_max([x])[0],
    },
    "Factories": {
        "zeros_like, full_like": lambda x: torch.zeros_like(x) + torch.full_like(x, 3.0),
        "new_zeros of the same shape": lambda x: x.new_zeros(x.shape),
        "new_zeros of another shape": lambda x: x.new_zeros((3, 2)),
    },
}


class ReceivedElements(TorchDispatchMode):
    """Counts the elements of what functional collectives return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local ops come back here one by one
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.count += result.numel()
        return result


def run_op(op: Op, x: DTensor, full: Tensor) -> str:
    """``works``, ``gathers`` (right, from whole tensors), ``refuses`` or a complaint."""
    received = ReceivedElements()
    try:
        with received:
            result = op(x)
    except NotImplementedError as error:
        return "refuses" if "redistribute" in str(error) else f"unclear refusal: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    got, want = result.full_tensor() if isinstance(result, DTensor) else result, op(full)
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        return f"WRONG: {error}"
    return "gathers" if received.count >= full.numel() // 2 else "works"


def outcomes(placement: Placement) -> dict[str, str]:
    """What becomes of every op on this rank; collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = values(*SHAPE)
    found = {}
    for ops in SECTIONS.values():
        for name, op in ops.items():
            x = distribute_tensor(full, mesh, [placement])
            found[name] = run_op(op, x, full)
            if not torch.equal(x.full_tensor(), full):
                found[name] = "WRONG: changed its input"
    return found


def page(columns: dict[str, dict[str, str]]) -> str:
    """The page for outcomes by placement name."""
    lines = [
        "# Which ops run on these placements?",
        "",
        "Every op below has been run on a tensor of shape (5, 4) on 4 ranks and compared with the",
        "plain tensor (`python -m benchmarks.ops_table --write` rewrites this page, on torch 2.13;",
        "later versions have rules for a few more ops).",
        "",
        "- **works**: on the local parts, or with the few bytes that the op itself needs.",
        "- **gathers**: right, but every rank first receives the whole tensor.",
        "- **refuses**: `NotImplementedError` on every rank, saying what to call; nothing is sent.",
        "",
        "Nothing is computed as if a part were the whole. Two tensors with different row splits",
        "are brought to one split first; tensors of different owners, or of an owner and a row",
        "split, are refused. Second arguments are replicated here.",
    ]
    for section, ops in SECTIONS.items():
        lines += ["", f"## {section}", "", "| op | " + " | ".join(columns) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        for name in ops:
            cells = " | ".join(found[name] for found in columns.values())
            lines.append(f"| `{name}` | {cells} |")
    lines += [
        "",
        "## Why an op refuses",
        "",
        "- A view of a gathered copy would be no view: what is written into it would be lost. So",
        "  views that move rows (`t`, `x[0]`, `x[::2]`, `chunk` of rows) refuse where ordinary ops",
        "  gather. `linear(v, x)` takes `x.t()`, so a row-split weight is gathered by hand:",
        "  `x.redistribute(placements=[Replicate()])`.",
        "- An op that writes into a tensor never moves it.",
        "- The shape of `nonzero`, `unique` and `x[mask]` depends on values that one rank may have",
        "  alone.",
        "- Random ops draw the full tensor's values on every rank; those without a rule refuse.",
        "",
    ]
    return "\n".join(lines)


def _rank(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", dict(enumerate(_loopback())).get(0, ""))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.save({n: outcomes(p) for n, p in PLACEMENTS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _loopback() -> list[str]:
    return [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]


def check(results: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """The outcomes that all ranks agree on.

    Raises:
        AssertionError: Ranks differ, or an op is wrong or fails in an unclear way.
    """
    for result in results[1:]:
        assert result == results[0], "ranks differ"
    bad = {
        f"{name} on {placement}": text
        for placement, found in results[0].items()
        for name, text in found.items()
        if text not in ("works", "gathers", "refuses")
    }
    assert not bad, "\n".join(f"{name}: {text}" for name, text in bad.items())
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=RANKS)
        results = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    text = page(check(results))
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
