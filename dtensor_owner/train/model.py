"""A small GPT over bytes, in plain ``nn.Module``; nothing in it knows about sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one symbol for each byte


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, dim = x.shape
        q, k, v = (
            project(x).view(batch, context, self.heads, dim // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, context, dim))


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Next-byte logits ``(batch, context, 256)`` from bytes ``(batch, context)``.

    The output layer is the embedding itself (one parameter, used twice).
    """

    def __init__(self, *, layers: int, dim: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self._initialize(dim, layers)

    def _initialize(self, dim: int, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith(("embedding", "position")):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                std = parameter.shape[1] ** -0.5
                if name.endswith(("o.weight", "down.weight")):  # they write to the residual stream
                    std *= (2 * layers) ** -0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.embedding(inputs) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all bytes; zero for an empty batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
