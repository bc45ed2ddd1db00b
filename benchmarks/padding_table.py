"""Padding of one transformer layer's weights, padded and unpadded layout, as a Markdown table.

    python benchmarks/padding_table.py

Prints the tables of docs/layouts.md. Integers only: it needs no ranks and no GPU.
"""

from __future__ import annotations

from dtensor_owner.layout import PaddingReport, ShardLayout, build_row_atomic_layout


def experts(count: int, hidden: int, mlp: int) -> dict[str, tuple[int, int]]:
    """Weights of gated experts, each a matrix of its own."""
    shapes = {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}
    return {f"expert{e}.{name}": shape for e in range(count) for name, shape in shapes.items()}


# 2-D weights as nn.Linear stores them, (out, in); sizes from the models' published configs.
# DeepSeek-V3 (hidden 7168, 128 heads of 128 + 64 rope, q rank 1536, kv rank 512, MLP 18432):
DEEPSEEK_V3_DENSE = {
    "q_a": (1536, 7168),
    "q_b": (128 * (128 + 64), 1536),
    "kv_a": (512 + 64, 7168),
    "kv_b": (128 * (128 + 128), 512),
    "o": (7168, 128 * 128),
    "gate": (18432, 7168),
    "up": (18432, 7168),
    "down": (7168, 18432),
}
# Its MoE layers: 256 routed experts and a shared one of MLP 2048, and the router.
DEEPSEEK_V3_ATTENTION = {
    name: DEEPSEEK_V3_DENSE[name] for name in ("q_a", "q_b", "kv_a", "kv_b", "o")
}
DEEPSEEK_V3_MOE = {**DEEPSEEK_V3_ATTENTION, "router": (256, 7168), **experts(257, 7168, 2048)}
# Kimi-K2 (as DeepSeek-V3, with 64 heads and 384 routed experts):
KIMI_K2_ATTENTION = {
    "q_a": (1536, 7168),
    "q_b": (64 * (128 + 64), 1536),
    "kv_a": (512 + 64, 7168),
    "kv_b": (64 * (128 + 128), 512),
    "o": (7168, 64 * 128),
}
KIMI_K2_DENSE = {
    **KIMI_K2_ATTENTION,
    "gate": (18432, 7168),
    "up": (18432, 7168),
    "down": (7168, 18432),
}
KIMI_K2_MOE = {**KIMI_K2_ATTENTION, "router": (384, 7168), **experts(385, 7168, 2048)}
# Llama-3-8B (hidden 4096, 32 heads of 128, 8 key/value heads, MLP 14336):
LLAMA_3_8B = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
}
# GPT-OSS-20b's attention (hidden 2880, 64 heads of 64, 8 key/value heads) with its biases:
GPT_OSS_20B_ATTENTION = {
    "q": (4096, 2880),
    "k": (512, 2880),
    "v": (512, 2880),
    "o": (2880, 4096),
    "q_bias": (4096,),
    "k_bias": (512,),
    "v_bias": (512,),
    "o_bias": (2880,),
}
# Its MoE: a router and 32 experts of MLP 2880, gate and up in one matrix, with biases.
GPT_OSS_20B_LAYER = {
    **GPT_OSS_20B_ATTENTION,
    "router": (32, 2880),
    "router_bias": (32,),
    **{f"expert{e}.gate_up": (2 * 2880, 2880) for e in range(32)},
    **{f"expert{e}.down": (2880, 2880) for e in range(32)},
    **{f"expert{e}.gate_up_bias": (2 * 2880,) for e in range(32)},
    **{f"expert{e}.down_bias": (2880,) for e in range(32)},
}
LAYERS = {
    "DeepSeek-V3, dense layer": (DEEPSEEK_V3_DENSE, 32),
    "DeepSeek-V3, MoE layer": (DEEPSEEK_V3_MOE, 32),
    "Kimi-K2, dense layer": (KIMI_K2_DENSE, 32),
    "Kimi-K2, MoE layer": (KIMI_K2_MOE, 32),
    "GPT-OSS-20b attention": (GPT_OSS_20B_ATTENTION, 1),
    "GPT-OSS-20b layer": (GPT_OSS_20B_LAYER, 1),
    "Llama-3-8B layer": (LLAMA_3_8B, 32),
}
DP_SIZES = (4, 16, 64, 256, 1024)
BYTES_PER_ELEMENT = 2  # bf16


def report(name: str, dp_size: int, shard_layout: ShardLayout) -> PaddingReport:
    shapes, block_size = LAYERS[name]
    layout = build_row_atomic_layout(
        shapes.values(), dp_size, block_size=block_size, shard_layout=shard_layout
    )
    return layout.padding_report(itemsize=BYTES_PER_ELEMENT)


def table(name: str) -> str:
    """One row per DP size: padding, the largest shard, and ranks without any payload."""
    shapes, block_size = LAYERS[name]
    payload = report(name, 1, ShardLayout.UNPADDED).payload
    lines = [
        f"**{name}**: {len(shapes)} tensors, {payload:,} elements, block {block_size}",
        "",
        "| DP | padded: padding | MiB per rank | ranks without payload "
        "| unpadded: padding | MiB per rank (largest) | ranks without payload |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for dp_size in DP_SIZES:
        cells = [str(dp_size)]
        for shard_layout in (ShardLayout.PADDED, ShardLayout.UNPADDED):
            r = report(name, dp_size, shard_layout)
            cells += [
                f"{r.percent:,.1f} %",
                f"{max(r.rank_bytes) / 2**20:,.2f}",
                str(len(r.empty_ranks)),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    return "\n\n".join(table(name) for name in LAYERS)


if __name__ == "__main__":
    print(tables())
